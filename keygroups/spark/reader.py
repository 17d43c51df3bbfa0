"""Reading a snapshot in Spark: one partition for each range of a cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition
from pyspark.sql.types import StructType

from keygroups.assignment import KeyGroupRange, check_parallelism, key_group_ranges
from keygroups.errors import IncompatibleSnapshot, InvalidArgument
from keygroups.snapshot.backend import RowSchema
from keygroups.snapshot.reader import Snapshot
from keygroups.spark.options import ReadOptions
from keygroups.spark.pushdown import KEY_GROUP, matching_key_groups, matching_keys, ranges_where
from keygroups.spark.types import arrow_schema, cast_columns, spark_field

_BATCH_ROWS = 1 << 16
_BATCH_BYTES = 16 << 20


@dataclass
class RangePartition(InputPartition):
    """One partition: the key groups that it reads, of the range of the same number."""

    key_groups: tuple[KeyGroupRange, ...]


def readable_schema(snapshot: Snapshot, options: ReadOptions) -> StructType:
    """Returns the Spark columns of a state: the ones asked for, or all and ``key_group``.

    Raises:
        InvalidArgument: If a column is not there or has no Spark type.
    """
    schema = snapshot.schema(options.state, options.uid)
    names = options.columns or (*schema.user.names, KEY_GROUP)
    return StructType([spark_field(_stored_field(schema, name)) for name in names])


class SnapshotReader(DataSourceReader):
    """Plans the partitions of a read and reads each of them.

    Spark pickles it to every task, so it keeps plain data and opens the snapshot anew.

    Args:
        options: What to read.
        schema: The columns that Spark expects, the snapshot's or the ones the user declared.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        snapshot = Snapshot.open(options.path)
        operator = snapshot.operator(options.uid)
        self._root = str(snapshot.storage.root)
        self._snapshot_id = snapshot.manifest.snapshot_id
        self._max_parallelism = operator.max_parallelism
        self._uid = operator.uid
        self._state = snapshot.state(options.state, options.uid).name
        self._ranges = _cut(operator.ranges, operator.max_parallelism, options.parallelism)
        self._row_schema = snapshot.schema(self._state, self._uid)
        self._columns = schema.fieldNames()
        self._arrow_schema = arrow_schema(schema)
        self._keys: pa.Array | None = None
        if options.key_groups is not None:
            self._keep(_mask(options.key_groups, operator.max_parallelism))
        _check_declared(schema, self._row_schema, options)

    def partitions(self) -> Sequence[InputPartition]:
        """Returns one partition for each range, also for those in which nothing can match."""
        return [RangePartition(pieces) for pieces in self._ranges]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yields the rows of a partition in snapshot order."""
        if not isinstance(partition, RangePartition):
            raise TypeError(f"{partition!r} is none of the partitions of this reader")
        snapshot = Snapshot.open(self._root)
        if snapshot.manifest.snapshot_id != self._snapshot_id:
            raise IncompatibleSnapshot(
                f"the snapshot at {self._root} was replaced since the query was planned; run the "
                f"query again"
            )
        for key_groups in partition.key_groups:
            for batch in snapshot.to_batches(
                key_groups, self._state, self._columns, uid=self._uid, keys=self._keys
            ):
                columns = cast_columns(batch.columns, self._arrow_schema)
                yield from _bounded(pa.record_batch(columns, schema=self._arrow_schema))

    def _keep(self, passes: npt.NDArray[np.bool_]) -> None:
        """Reads only key groups that pass; the number of partitions stays."""
        self._ranges = [
            tuple(part for piece in pieces for part in ranges_where(passes, piece))
            for pieces in self._ranges
        ]


class FilteringReader(SnapshotReader):
    """A reader that skips segments which cannot match; see :mod:`keygroups.spark.pushdown`.

    A class of its own, because Spark refuses any reader with this method unless
    ``spark.sql.python.filterPushdown.enabled`` is set.
    """

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 - Spark's name
        """Takes what it can use to skip segments; leaves every filter to Spark as well."""
        self._keys = matching_keys(filters, self._row_schema)
        passes = matching_key_groups(filters, self._max_parallelism)
        if passes is not None:
            self._keep(passes)
        return filters


def _mask(ranges: Sequence[KeyGroupRange], max_parallelism: int) -> npt.NDArray[np.bool_]:
    passes = np.zeros(max_parallelism, np.bool_)
    for key_groups in ranges:
        if key_groups.end >= max_parallelism:
            raise InvalidArgument(
                f"option 'keyGroups': {key_groups} is not within [0, {max_parallelism - 1}]"
            )
        passes[key_groups.start : key_groups.end + 1] = True
    return passes


def _bounded(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Slices a batch, so that what the JVM holds at once is bounded."""
    rows = batch.num_rows
    step = max(1, min(_BATCH_ROWS, rows * _BATCH_BYTES // max(1, batch.nbytes)))
    return (batch.slice(start, step) for start in range(0, rows, step))


def _cut(
    own: Sequence[KeyGroupRange], max_parallelism: int, parallelism: int | None
) -> list[tuple[KeyGroupRange, ...]]:
    if parallelism is None or parallelism == len(own):
        return [(key_groups,) for key_groups in own]
    try:
        check_parallelism(max_parallelism, parallelism)
    except InvalidArgument as error:
        raise InvalidArgument(f"option 'parallelism': {error}") from None
    return [(key_groups,) for key_groups in key_group_ranges(max_parallelism, parallelism)]


def _stored_field(schema: RowSchema, name: str) -> pa.Field:
    if name not in schema.stored.names:
        raise InvalidArgument(
            f"there is no column {name!r}; the snapshot has {', '.join(schema.stored.names)}"
        )
    return schema.stored.field(name)


def _check_declared(declared: StructType, schema: RowSchema, options: ReadOptions) -> None:
    """Checks the columns that a user declared by ``.schema(…)`` against the snapshot."""
    if options.columns is not None and list(options.columns) != declared.fieldNames():
        raise InvalidArgument(
            f"option 'columns' names {', '.join(options.columns)}, the declared schema "
            f"{', '.join(declared.fieldNames())}; give one of the two"
        )
    for field in declared.fields:
        expected = spark_field(_stored_field(schema, field.name))
        if field.dataType.simpleString() != expected.dataType.simpleString():
            raise InvalidArgument(
                f"column {field.name!r} is declared as {field.dataType.simpleString()}, the "
                f"snapshot has {expected.dataType.simpleString()}; cast it after the read"
            )
        if expected.nullable and not field.nullable:
            raise InvalidArgument(
                f"column {field.name!r} is declared not null, in the snapshot it can be null"
            )
