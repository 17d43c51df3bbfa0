"""Segments as Parquet files: typed columns that any reader of Parquet understands.

A file has the stored columns in snapshot order, whole key groups to a row group (small ones
packed together, a huge one split), the range of key groups in each row group's statistics,
and a CRC on each page. Settings follow measurements: dictionaries and statistics on values
cost twice the time of writing and help no read of state.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from keygroups.assignment import KeyGroupRange
from keygroups.errors import InvalidArgument, KeyGroupsError, SnapshotCorrupted
from keygroups.snapshot.backend import ReadableSegment, RowSchema, slice_key_groups
from keygroups.snapshot.rows import with_declared_nulls
from keygroups.snapshot.storage import WritableFile

ROW_GROUP_ROWS = 1 << 17
_THRIFT_LIMIT = 100_000_000


class ParquetBackend:
    """See :class:`keygroups.snapshot.backend.Backend`."""

    name: ClassVar[str] = "parquet"
    suffix: ClassVar[str] = "parquet"
    segment_size_bytes: ClassVar[int] = 8 << 20

    def write_segment(
        self,
        sink: WritableFile,
        schema: RowSchema,  # noqa: ARG002 - protocol
        rows: pa.Table,
    ) -> None:
        """Writes the rows as one Parquet file, row groups cut between key groups."""
        rows = _without_seconds(_with_declared_nulls(rows))
        with pq.ParquetWriter(
            pa.PythonFile(sink, "w"),
            rows.schema,
            compression="none",
            use_dictionary=False,
            write_statistics=["key_group"],
            write_page_checksum=True,
            store_schema=True,
            sorting_columns=[pq.SortingColumn(0), pq.SortingColumn(1)],
        ) as writer:
            for start, end in _row_groups(rows.column("key_group").to_numpy()):
                writer.write_table(rows.slice(start, end - start), row_group_size=end - start)

    def footer_size_bytes(self, source: ReadableSegment) -> int:
        """Pages have a CRC; the footer has none, and a damaged one can abort Arrow's reader."""
        (size_bytes,) = struct.unpack("<I", source.read_at(source.size_bytes - 8, 4))
        return int(size_bytes) + 8

    def read_segment(
        self,
        source: ReadableSegment,
        schema: RowSchema,
        key_groups: KeyGroupRange,
        columns: Sequence[str],
    ) -> pa.Table:
        """Reads the row groups that hold key groups of the range, of the columns only."""
        try:
            file = pq.ParquetFile(
                source.as_arrow(),
                page_checksum_verification=not source.is_verified,
                thrift_string_size_limit=_THRIFT_LIMIT,
                thrift_container_size_limit=_THRIFT_LIMIT,
            )
            wanted = [i for i in range(file.num_row_groups) if _overlaps(file, i, key_groups)]
            names = [n for n in schema.stored.names if n in {"key_group", *columns}]
            table = file.read_row_groups(wanted, names, use_threads=False)
            table = _with_seconds(table, schema)
            return slice_key_groups(table, schema, key_groups, columns)
        except KeyGroupsError:  # ours already, or of the storage below
            raise
        except (pa.ArrowException, OSError, ValueError, KeyError, IndexError) as error:
            raise SnapshotCorrupted(f"it is no readable Parquet file: {error}") from error


def _with_declared_nulls(rows: pa.Table) -> pa.Table:
    """The rows without nulls below nulls, where a field is declared not null: Parquet has none."""
    columns = [
        pa.chunked_array([with_declared_nulls(chunk) for chunk in column.chunks], column.type)
        for column in rows.columns
    ]
    return pa.table(columns, schema=rows.schema)


def _without_seconds(rows: pa.Table) -> pa.Table:
    """The rows as Parquet can hold them: it has no times in seconds, but in milliseconds."""
    schema = pa.schema([field.with_type(_in_milliseconds(field.type)) for field in rows.schema])
    if schema == rows.schema:
        return rows
    try:
        columns = [
            column.cast(field.type) if field.type != column.type else column
            for field, column in zip(schema, rows.columns, strict=True)
        ]
        return pa.table(columns, schema=schema)
    except pa.ArrowInvalid as error:
        raise InvalidArgument(
            f"Parquet holds times in milliseconds, and a time in seconds is too far away: {error}"
        ) from None


def _with_seconds(table: pa.Table, schema: RowSchema) -> pa.Table:
    """The inverse of :func:`_without_seconds`."""
    expected = pa.schema([schema.stored.field(name) for name in table.column_names])
    in_file = [_in_milliseconds(field.type) for field in expected]
    if in_file == expected.types or in_file != table.schema.types:
        return table
    columns = [
        column.cast(field.type) if field.type != column.type else column
        for field, column in zip(expected, table.columns, strict=True)
    ]
    return pa.table(columns, schema=expected)


def _in_milliseconds(data_type: pa.DataType) -> pa.DataType:
    """The type, with milliseconds in place of seconds in all times in it."""
    if pa.types.is_timestamp(data_type) and data_type.unit == "s":
        return pa.timestamp("ms", data_type.tz)
    if pa.types.is_time32(data_type):
        return pa.time32("ms")
    if pa.types.is_map(data_type):
        parts = (data_type.key_field, data_type.item_field)
        return pa.map_(*(part.with_type(_in_milliseconds(part.type)) for part in parts))
    parts = tuple(data_type.field(i) for i in range(data_type.num_fields))
    parts = tuple(part.with_type(_in_milliseconds(part.type)) for part in parts)
    if pa.types.is_list(data_type):
        return pa.list_(parts[0])
    return pa.struct(parts) if pa.types.is_struct(data_type) else data_type


def _row_groups(
    key_group: np.ndarray[tuple[int], np.dtype[np.uint16]],
) -> Iterator[tuple[int, int]]:
    """Rows ``[start, end)`` of each row group: whole key groups where they fit."""
    borders = np.append(np.flatnonzero(np.diff(key_group)) + 1, len(key_group))
    start = 0
    while start < len(key_group):
        fitting = int(np.searchsorted(borders, start + ROW_GROUP_ROWS, side="right")) - 1
        whole_groups_end = int(borders[fitting]) if fitting >= 0 else 0
        end = whole_groups_end if whole_groups_end > start else start + ROW_GROUP_ROWS
        yield start, end
        start = end


def _overlaps(file: pq.ParquetFile, row_group: int, key_groups: KeyGroupRange) -> bool:
    statistics = file.metadata.row_group(row_group).column(0).statistics
    if statistics is None or not statistics.has_min_max:
        return True
    return bool(statistics.min <= key_groups.end and statistics.max >= key_groups.start)
