"""Diffing: two snapshots compared by key group digest, and only where that differs by key."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from os import PathLike

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from keygroups.assignment import KeyGroupRange
from keygroups.buffers import one_chunk
from keygroups.errors import IncompatibleSnapshot
from keygroups.keys import encode_keys
from keygroups.snapshot.backend import RowSchema
from keygroups.snapshot.digest import digest_rows
from keygroups.snapshot.manifest import Operator, State
from keygroups.snapshot.reader import Snapshot

ONLY_IN_A, ONLY_IN_B, CHANGED = "only in a", "only in b", "changed"
DEFAULT_ROW_LIMIT = 1000


@dataclass(frozen=True, slots=True)
class StateDiff:
    """How one state differs.

    Attributes:
        uid: The operator uid.
        state: The state's name.
        compared: How many key groups were compared by digest; where the max parallelisms
            differ, groups are folded to their greatest common divisor.
        different: Which of them differ.
        only_in_a: How many keys are only in the first snapshot.
        only_in_b: How many keys are only in the second.
        changed: How many keys have another value.
        rows: The first of those keys: ``change`` string, ``key_group`` uint16 (as compared), key
            columns.
    """

    uid: str
    state: str
    compared: int
    different: tuple[int, ...]
    only_in_a: int
    only_in_b: int
    changed: int
    rows: pa.Table

    @property
    def is_equal(self) -> bool:
        """Whether the state is the same."""
        return not self.different


@dataclass(frozen=True, slots=True)
class SnapshotDiff:
    """The result of :func:`diff`.

    Attributes:
        states: One entry for each state that is in both snapshots.
        only_in_a: ``(uid, state)`` of states that are only in the first.
        only_in_b: ``(uid, state)`` of states that are only in the second.
    """

    states: tuple[StateDiff, ...]
    only_in_a: tuple[tuple[str, str], ...]
    only_in_b: tuple[tuple[str, str], ...]

    @property
    def is_equal(self) -> bool:
        """Whether the two hold the same keys and values."""
        return not (self.only_in_a or self.only_in_b) and all(s.is_equal for s in self.states)


def diff(
    a: str | PathLike[str], b: str | PathLike[str], *, row_limit: int = DEFAULT_ROW_LIMIT
) -> SnapshotDiff:
    """Compares the keys and values of two snapshots, whatever their ranges and backends.

    Key groups of equal digest are not read.

    Args:
        a: The first snapshot.
        b: The second.
        row_limit: How many different keys to name for each state; all are counted.

    Raises:
        SnapshotNotFound, SnapshotCorrupted: If one is not there, or damaged.
        IncompatibleSnapshot: If a state is hashed by another scheme or has other columns in the
            two: then digests cannot be compared.
    """
    first, second = Snapshot.open(a), Snapshot.open(b)
    in_a, in_b = _states(first), _states(second)
    return SnapshotDiff(
        states=tuple(
            _diff_state(first, second, in_a[name], in_b[name], row_limit)
            for name in in_a
            if name in in_b
        ),
        only_in_a=tuple(name for name in in_a if name not in in_b),
        only_in_b=tuple(name for name in in_b if name not in in_a),
    )


def _states(snapshot: Snapshot) -> dict[tuple[str, str], tuple[Operator, State]]:
    return {
        (operator.uid, state.name): (operator, state)
        for operator in snapshot.manifest.operators
        for state in operator.states
    }


def _diff_state(
    first: Snapshot,
    second: Snapshot,
    in_a: tuple[Operator, State],
    in_b: tuple[Operator, State],
    row_limit: int,
) -> StateDiff:
    (operator_a, state), (operator_b, state_b) = in_a, in_b
    _check_comparable(operator_a, state, operator_b, state_b)
    schema = RowSchema(operator_a.key, state.fields)
    compared = math.gcd(operator_a.max_parallelism, operator_b.max_parallelism)
    different = np.flatnonzero(
        (
            _folded(first, operator_a, state, compared)
            != _folded(second, operator_b, state, compared)
        ).any(axis=0)
    ).tolist()
    counts = dict.fromkeys((ONLY_IN_A, ONLY_IN_B, CHANGED), 0)
    tables = [_named_rows(schema, "", 0, pa.Table.from_batches([], schema.stored))]
    for group in different:
        rows_a = _rows(first, operator_a, state, schema, group, compared)
        rows_b = _rows(second, operator_b, state_b, schema, group, compared)
        for change, rows in _changes(schema, rows_a, rows_b):
            room = row_limit - sum(counts.values())
            counts[change] += rows.num_rows
            tables.append(_named_rows(schema, change, group, rows.slice(0, max(0, room))))
    return StateDiff(
        uid=operator_a.uid,
        state=state.name,
        compared=compared,
        different=tuple(different),
        only_in_a=counts[ONLY_IN_A],
        only_in_b=counts[ONLY_IN_B],
        changed=counts[CHANGED],
        rows=pa.concat_tables(tables),
    )


def _check_comparable(
    operator_a: Operator, state_a: State, operator_b: Operator, state_b: State
) -> None:
    for what, x, y in (
        ("scheme", operator_a.scheme, operator_b.scheme),
        ("key", pa.schema(operator_a.key), pa.schema(operator_b.key)),
        ("value", pa.schema(state_a.fields), pa.schema(state_b.fields)),
    ):
        if x != y:
            raise IncompatibleSnapshot(
                f"operator {operator_a.uid!r}, state {state_a.name!r}: {what} is "
                f"{str(x)!r:.300} in a and {str(y)!r:.300} in b; cast one of them first"
            )


def _folded(
    snapshot: Snapshot, operator: Operator, state: State, group_count: int
) -> npt.NDArray[np.uint64]:
    """Shape ``(2, group_count)``: rows and digests of key groups modulo ``group_count``."""
    sizes = snapshot.key_group_sizes(state.name, operator.uid)
    columns = [sizes.column(name).to_numpy().astype(np.uint64) for name in ("rows", "digest")]
    folded: npt.NDArray[np.uint64] = np.stack(columns).reshape(2, -1, group_count).sum(axis=1)
    return folded


def _rows(
    snapshot: Snapshot,
    operator: Operator,
    state: State,
    schema: RowSchema,
    group: int,
    group_count: int,
) -> pa.Table:
    """The rows of all key groups that fold to ``group``."""
    tables = [
        table
        for key_group in range(group, operator.max_parallelism, group_count)
        for table in snapshot.read_runs(
            state.runs,
            state.backend,
            schema,
            KeyGroupRange(key_group, key_group),
            schema.stored.names,
        )
    ]
    return pa.concat_tables([pa.Table.from_batches([], schema.stored), *tables]).combine_chunks()


def _changes(
    schema: RowSchema, rows_a: pa.Table, rows_b: pa.Table
) -> Iterator[tuple[str, pa.Table]]:
    keys_a, keys_b = (encode_keys([schema.key_array(rows)]) for rows in (rows_a, rows_b))
    place_in_b = pc.index_in(keys_a, value_set=keys_b)
    yield ONLY_IN_A, rows_a.filter(place_in_b.is_null())
    yield ONLY_IN_B, rows_b.filter(pc.invert(pc.is_in(keys_b, value_set=keys_a)))
    both = place_in_b.is_valid()
    rows_a, rows_b = rows_a.filter(both), rows_b.take(place_in_b.drop_null())
    yield CHANGED, rows_a.filter(pa.array(_digests(schema, rows_a) != _digests(schema, rows_b)))


def _digests(schema: RowSchema, rows: pa.Table) -> npt.NDArray[np.uint64]:
    columns = [one_chunk(rows.column(field.name)) for field in schema.user]
    return digest_rows(columns, rows.num_rows)


def _named_rows(schema: RowSchema, change: str, group: int, rows: pa.Table) -> pa.Table:
    names = [field.name for field in schema.key]
    changes = pa.array([change] * rows.num_rows, pa.string())
    groups = pa.array(np.full(rows.num_rows, group, np.uint16))
    return pa.table(
        [changes, groups, *(rows.column(name) for name in names)],
        names=["change", "key_group", *names],
    )
