"""Writing a snapshot from Spark: sorted runs from each task, one commit on the driver."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from keygroups.assignment import key_group_ranges
from keygroups.errors import StorageUnavailable
from keygroups.snapshot.backend import RowSchema, get_backend
from keygroups.snapshot.commit import Attempt
from keygroups.snapshot.manifest import Operator, State, check_operator
from keygroups.snapshot.sort import Sorter, add_key_groups
from keygroups.snapshot.storage import LocalStorage
from keygroups.snapshot.writer import WrittenRun, commit_operator, conform, row_schema, write_runs
from keygroups.spark.options import WriteOptions
from keygroups.spark.runs import announce, check_unique_keys, delete_unnamed, keep, unpacked
from keygroups.spark.types import arrow_schema, cast_columns

_ABORT_TRIES = 3


@dataclass
class TaskRuns(WriterCommitMessage):
    """The runs that one task wrote, as :func:`~keygroups.spark.runs.packed` gives them."""

    runs: list[tuple[str, bytes]]


class SnapshotWriter(DataSourceArrowWriter):
    """Writes the rows of a DataFrame as one state of one operator.

    Made on the driver, where wrong arguments and a snapshot in the way are found before any
    work; pickled to the tasks and, for the commit, back to the driver.

    Args:
        options: What to write.
        schema: The columns of the DataFrame.
        overwrite: Whether a snapshot that is there is replaced.
    """

    def __init__(self, options: WriteOptions, schema: StructType, *, overwrite: bool) -> None:
        self._arrow_schema = arrow_schema(schema)
        rows = row_schema(self._arrow_schema, options.key)
        self._operator = Operator(
            uid=options.uid,
            max_parallelism=options.max_parallelism,
            scheme=options.scheme,
            ranges=tuple(key_group_ranges(options.max_parallelism, options.parallelism)),
            key=rows.key,
            epoch=0,
            watermark_ms=None,
            states=(State(options.state, "value", options.backend, rows.value, ()),),
        )
        check_operator(self._operator)
        self._attempt = Attempt.begin(LocalStorage(options.path), overwrite=overwrite)
        announce(self._attempt)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskRuns:
        """Writes the rows of one task as at most one run a range; on an executor."""
        operator, state, attempt = self._operator, self._operator.states[0], self._attempt
        schema = RowSchema(operator.key, state.fields)
        with Sorter(schema, operator.max_parallelism, attempt.spill_folder) as sorter:
            for batch in iterator:
                columns = cast_columns(batch.columns, self._arrow_schema)
                rows = conform(pa.table(columns, schema=_nullable(self._arrow_schema)), schema)
                sorter.add(add_key_groups(rows, schema, operator.scheme, operator.max_parallelism))
            tables = sorter.sorted_tables()
            backend = get_backend(state.backend)
            written = write_runs(attempt, tables, operator.ranges, schema, backend)
        return TaskRuns(keep(attempt, written))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Publishes the runs of the tasks that count; on the driver.

        Raises:
            InvalidArgument: If two tasks had the same key.
            SnapshotExists: If another writer was first.
        """
        runs: list[WrittenRun] = [
            unpacked(run, self._operator.max_parallelism)
            for message in messages
            if isinstance(message, TaskRuns)
            for run in message.runs
        ]
        runs.sort(key=lambda written: written.run.key_groups)
        check_unique_keys(self._attempt.storage, self._operator, runs)
        delete_unnamed(self._attempt, runs)
        commit_operator(self._attempt, self._operator, [runs])

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:  # noqa: ARG002 - Spark's
        """Deletes what all tasks wrote; one that still runs will find the marker gone."""
        for _ in range(_ABORT_TRIES):
            with contextlib.suppress(StorageUnavailable):
                self._attempt.abort()
                return


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([field.with_nullable(True) for field in schema])
