"""Values as bytes: one row of Arrow columns as one byte string, and back, a table at a time.

The layout is FORMAT.md, "Row encoding": a bitmap of the null columns, then one block a
column. A block holds the values of *n* elements (one, at the top) one after another:
fixed-width values as Arrow holds them, variable ones as all lengths and then all bytes,
nested ones as the blocks of their children. So both directions are a handful of Arrow and
NumPy calls a column, whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from keygroups.buffers import (
    Bools,
    Bytes,
    Int64s,
    binary_array,
    byte_spans,
    fixed_width_binary,
    fixed_width_values,
    gather,
    is_fixed_width,
    is_null,
    is_string,
    is_variable_width,
    value_offsets,
)
from keygroups.errors import SnapshotCorrupted


def encode_rows(columns: Sequence[pa.Array], row_count: int) -> pa.LargeBinaryArray:
    """Returns each row of ``columns`` as its row encoding.

    Args:
        columns: Arrays of equal length, of any type that state can hold.
        row_count: That length; tells it where there are no columns.
    """
    offsets = np.arange(row_count + 1, dtype=np.int64)
    pieces = [fixed_width_binary(null_bitmap(columns, row_count))]
    for column in columns:
        pieces += _encode(column, offsets)
    return pc.binary_join_element_wise(*pieces, pa.scalar(b"", pa.large_binary()))


def decode_rows(rows: pa.LargeBinaryArray, types: Sequence[pa.DataType]) -> list[pa.Array]:
    """Returns the columns of encoded rows; the inverse of :func:`encode_rows`.

    Raises:
        SnapshotCorrupted: If a row is shorter or longer than its values say.
    """
    cursor = _Cursor.at_rows(rows)
    ones = np.ones(len(rows), np.int64)
    width = -(-len(types) // 8)
    bitmap = cursor.take_fixed(ones, width).reshape(len(rows), width)
    columns = []
    for index, data_type in enumerate(types):
        is_null = (bitmap[:, index // 8] >> (index % 8)) & 1
        columns.append(_decode(data_type, cursor, ones, is_null.astype(bool)))
    cursor.finish()
    return columns


def with_declared_nulls(column: pa.Array) -> pa.Array:
    """The same values; a field declared not null holds no null, not even one below a null.

    Raises:
        SnapshotCorrupted: If it holds one in a value that is not null.
    """
    if not _declares_not_null(column.type):
        return column
    return decode_rows(encode_rows([column], len(column)), [column.type])[0]


def _declares_not_null(data_type: pa.DataType) -> bool:
    """Whether a field inside the type is declared not null."""
    if pa.types.is_map(data_type):  # its key always is, and never is below a null
        parts = (data_type.key_field.with_nullable(True), data_type.item_field)
    else:
        parts = tuple(data_type.field(i) for i in range(data_type.num_fields))
    return any(not part.nullable or _declares_not_null(part.type) for part in parts)


def null_bitmap(columns: Sequence[pa.Array], row_count: int) -> Bytes:
    """Returns shape ``(rows, ceil(columns / 8))``: bit ``i % 8`` of byte ``i // 8`` = null."""
    bitmap = np.zeros((row_count, -(-len(columns) // 8)), np.uint8)
    for index, column in enumerate(columns):
        if column.null_count:
            bitmap[:, index // 8] |= is_null(column).view(np.uint8) << (index % 8)
    return bitmap


def _encode(array: pa.Array, offsets: Int64s) -> list[pa.LargeBinaryArray]:
    """The block of ``array`` as pieces to join; parent ``i`` owns elements ``offsets[i:i+2]``."""
    data_type = array.type
    if is_fixed_width(data_type):
        return [_elements(fixed_width_values(array), offsets)]
    if is_variable_width(data_type):
        data, starts = byte_spans(array)
        return [_counts_piece(starts, offsets), binary_array(data, starts[offsets])]
    if pa.types.is_struct(data_type):
        return [piece for child in array.flatten() for piece in _encode_nullable(child, offsets)]
    array = _without_hidden_elements(array)
    starts = value_offsets(array)
    pieces = [_counts_piece(starts, offsets)]
    for child in _children(array):
        window = child.slice(int(starts[0]), int(starts[-1] - starts[0]))
        pieces += _encode_nullable(window, starts[offsets] - starts[0])
    return pieces


def _encode_nullable(array: pa.Array, offsets: Int64s) -> list[pa.LargeBinaryArray]:
    is_valid = (~is_null(array)).view(np.uint8)
    return [_elements(is_valid.reshape(-1, 1), offsets), *_encode(array, offsets)]


def _decode(
    data_type: pa.DataType,
    cursor: _Cursor,
    counts: Int64s,
    nulls: Bools,
    absent: Bools | None = None,
) -> pa.Array:
    """The array of a block, of which parent ``i`` owns ``counts[i]`` elements.

    ``absent`` are those that are null or below a null, where that is more than ``nulls``.
    """
    size, mask = int(counts.sum()), _validity_buffer(nulls)
    if isinstance(data_type, pa.BaseExtensionType):
        storage = _decode(data_type.storage_type, cursor, counts, nulls)
        return pa.ExtensionArray.from_storage(data_type, storage)
    if pa.types.is_boolean(data_type):
        values = pa.array(_checked_flags(cursor.take_fixed(counts, 1)))
        return pa.Array.from_buffers(data_type, size, [mask, values.buffers()[1]])
    if is_fixed_width(data_type):
        values = cursor.take_fixed(counts, data_type.byte_width)
        return pa.Array.from_buffers(data_type, size, [mask, pa.py_buffer(values)])
    if pa.types.is_struct(data_type):
        absent = nulls if absent is None else absent
        children = [_decode_field(field, cursor, counts, absent) for field in data_type]
        return pa.Array.from_buffers(data_type, size, [mask], children=children)
    lengths = cursor.take_fixed(counts, 4).view("<u4").astype(np.int64)
    ends = np.concatenate(([0], np.cumsum(lengths)))
    per_parent = np.diff(ends[np.concatenate(([0], np.cumsum(counts)))])
    offsets = _offsets_buffer(ends, data_type)
    if is_variable_width(data_type):
        values = cursor.take_fixed(per_parent, 1)
        array = pa.Array.from_buffers(data_type, size, [mask, offsets, pa.py_buffer(values)])
        return _checked_utf8(array)
    if pa.types.is_list(data_type):
        child = _decode_field(data_type.value_field, cursor, per_parent)
        return pa.Array.from_buffers(data_type, size, [mask, offsets], children=[child])
    fields = [data_type.key_field, data_type.item_field]
    entries = pa.StructArray.from_arrays(
        [_decode_field(field, cursor, per_parent) for field in fields], fields=fields
    )
    return pa.Array.from_buffers(data_type, size, [mask, offsets], children=[entries])


def _decode_field(
    field: pa.Field, cursor: _Cursor, counts: Int64s, parent_absent: Bools | None = None
) -> pa.Array:
    """The array of a nullable block; below a null, a field declared not null has zeros."""
    nulls = ~_checked_flags(cursor.take_fixed(counts, 1))
    if field.nullable:
        return _decode(field.type, cursor, counts, nulls)
    if (nulls if parent_absent is None else nulls & ~parent_absent).any():
        raise SnapshotCorrupted(f"field {field.name!r} is null, and is declared not null")
    return _decode(field.type, cursor, counts, np.zeros_like(nulls), nulls)


@dataclass
class _Cursor:
    """Where decoding stands in each row: ``positions[i] <= ends[i]`` in ``data``."""

    data: Bytes
    positions: Int64s
    ends: Int64s

    @classmethod
    def at_rows(cls, rows: pa.LargeBinaryArray) -> _Cursor:
        offsets = value_offsets(rows)
        buffer = rows.buffers()[2]
        data = np.zeros(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
        return cls(data, offsets[:-1].copy(), offsets[1:])

    def take_fixed(self, counts: Int64s, width: int) -> Bytes:
        """Takes ``counts[i] * width`` bytes of row ``i``, of all rows, and moves on."""
        starts, self.positions = self.positions, self.positions + counts * width
        too_short = self.positions > self.ends
        if too_short.any():
            row = int(np.argmax(too_short))
            raise SnapshotCorrupted(
                f"encoded row {row} ends {int(self.positions[row] - self.ends[row])} bytes "
                f"before its values do"
            )
        return gather(self.data, starts, self.positions)

    def finish(self) -> None:
        too_long = self.positions < self.ends
        if too_long.any():
            row = int(np.argmax(too_long))
            raise SnapshotCorrupted(
                f"encoded row {row} has {int(self.ends[row] - self.positions[row])} bytes "
                f"after its last value"
            )


def _elements(values: Bytes, offsets: Int64s) -> pa.LargeBinaryArray:
    """The fixed-width elements that each parent owns."""
    return binary_array(np.ascontiguousarray(values).reshape(-1), offsets * values.shape[1])


def _counts_piece(starts: Int64s, offsets: Int64s) -> pa.LargeBinaryArray:
    counts = np.diff(starts).astype("<u4")
    return _elements(counts.view(np.uint8).reshape(-1, 4), offsets)


def _children(array: pa.Array) -> list[pa.Array]:
    return [array.keys, array.items] if pa.types.is_map(array.type) else [array.values]


def _without_hidden_elements(array: pa.Array) -> pa.Array:
    """The same lists, but a null one has no elements (Arrow allows it to hide some)."""
    hidden = array.null_count and np.diff(value_offsets(array))[is_null(array)].any()
    return array.take(pa.array(np.arange(len(array)))) if hidden else array


def _offsets_buffer(ends: Int64s, data_type: pa.DataType) -> pa.Buffer:
    wide = pa.types.is_large_binary(data_type) or pa.types.is_large_string(data_type)
    if not wide and ends[-1] >= 1 << 31:
        raise SnapshotCorrupted(f"{ends[-1]} bytes or elements do not fit one {data_type} array")
    return pa.py_buffer(ends if wide else ends.astype(np.int32))


def _validity_buffer(nulls: Bools) -> pa.Buffer | None:
    return pa.array(~nulls).buffers()[1] if nulls.any() else None


def _checked_flags(flags: Bytes) -> Bools:
    if (flags > 1).any():
        raise SnapshotCorrupted(f"a flag of {flags.max()} in an encoded row is neither 0 nor 1")
    return flags.view(np.bool_)


def _checked_utf8(array: pa.Array) -> pa.Array:
    if is_string(array.type):
        try:
            array.validate(full=True)
        except pa.ArrowInvalid as error:
            raise SnapshotCorrupted(f"a stored string is not valid: {error}") from error
    return array
