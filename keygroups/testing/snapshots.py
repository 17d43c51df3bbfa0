"""Snapshots that no single call makes: of several writers, whose runs overlap."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from keygroups.assignment import KeyGroupRange, key_group_ranges
from keygroups.snapshot.backend import get_backend
from keygroups.snapshot.commit import Attempt
from keygroups.snapshot.manifest import Operator, State
from keygroups.snapshot.reader import Snapshot
from keygroups.snapshot.sort import Sorter, add_key_groups
from keygroups.snapshot.storage import LocalStorage
from keygroups.snapshot.writer import WrittenRun, commit_operator, write_runs
from keygroups.testing.strategies import KeyedTable


def write_as_several(
    path: Path,
    rows: KeyedTable,
    writer_of_row: Sequence[int],
    *,
    max_parallelism: int,
    parallelism: int,
    backend: str,
) -> Snapshot:
    """Writes rows as tasks do that were not given rows by range: a run a task and range.

    Args:
        path: Where to.
        rows: The rows.
        writer_of_row: Which task has each row.
        max_parallelism: How many key groups.
        parallelism: How many ranges.
        backend: The name of the backend.
    """
    ranges = key_group_ranges(max_parallelism, parallelism)
    schema, written = rows.schema, list[WrittenRun]()
    with Attempt.begin(LocalStorage(path)) as attempt:
        for writer in sorted(set(writer_of_row)):
            mask = pa.array([w == writer for w in writer_of_row], pa.bool_())
            user_rows = rows.table.filter(mask)
            with Sorter(schema, max_parallelism, attempt.spill_folder) as sorter:
                sorter.add(add_key_groups(user_rows, schema, rows.scheme, max_parallelism))
                tables = sorter.sorted_tables()
                written += write_runs(attempt, tables, ranges, schema, get_backend(backend))
        state = State("state", "value", backend, schema.value, ())
        operator = Operator(
            uid="operator",
            max_parallelism=max_parallelism,
            scheme=rows.scheme,
            ranges=tuple(ranges),
            key=schema.key,
            epoch=0,
            watermark_ms=None,
            states=(state,),
        )
        commit_operator(attempt, operator, [written])
    return Snapshot.open(path)


def tiles(ranges: Sequence[KeyGroupRange], max_parallelism: int) -> bool:
    """Tells whether ranges are none of them empty and together every key group once, in order."""
    groups = [group for key_groups in ranges for group in key_groups]
    return all(ranges) and groups == list(range(max_parallelism))
