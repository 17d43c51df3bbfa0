"""Arrow arrays as NumPy views of their buffers, and back: what every bulk path is made of.

All of it is zero-copy where Arrow's layout allows it, right for sliced arrays, and free of
per-row Python.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Bytes: TypeAlias = npt.NDArray[np.uint8]
Int64s: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


def is_fixed_width(data_type: pa.DataType) -> bool:
    """Tells whether every value of the type takes the same number of bytes."""
    if isinstance(data_type, pa.BaseExtensionType):
        data_type = data_type.storage_type
    return bool(
        pa.types.is_primitive(data_type)
        or pa.types.is_decimal128(data_type)
        or pa.types.is_fixed_size_binary(data_type)
    )


def is_variable_width(data_type: pa.DataType) -> bool:
    """Tells whether a value of the type is one string of bytes."""
    return is_string(data_type) or bool(
        pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type)
    )


def fixed_values(array: pa.Array, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Returns the values of a fixed-width array (not bool) as ``dtype``, without a copy."""
    width, buffer = array.type.bit_width // 8, array.buffers()[1]
    if buffer is None or not len(array):
        return np.empty(0, dtype)
    count = len(array) * width // np.dtype(dtype).itemsize
    return np.frombuffer(buffer, dtype, count, array.offset * width)


def fixed_width_values(array: pa.Array) -> Bytes:
    """Returns shape ``(rows, width)``: the bytes of a fixed-width column, zero where null."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())
    values = fixed_values(array, np.uint8).reshape(len(array), array.type.byte_width)
    if array.null_count:
        values = values.copy()
        values[is_null(array)] = 0
    return values


def byte_spans(array: pa.Array) -> tuple[Bytes, Int64s]:
    """Returns the bytes of a string or binary column and the ``rows + 1`` offsets into them.

    A null has no bytes.
    """
    if pa.types.is_fixed_size_binary(array.type):
        offsets = np.arange(len(array) + 1, dtype=np.int64) * array.type.byte_width
        return fixed_values(array, np.uint8), offsets
    if array.null_count:
        array = pc.fill_null(array, "" if is_string(array.type) else b"")
    offsets, values = value_offsets(array), array.buffers()[2]
    start, size_bytes = int(offsets[0]), int(offsets[-1] - offsets[0])
    if values is None or not size_bytes:
        return np.zeros(0, np.uint8), offsets - start
    return np.frombuffer(values, np.uint8, size_bytes, start), offsets - start if start else offsets


def gather(data: Bytes, starts: Int64s, ends: Int64s) -> Bytes:
    """Returns ``data[starts[i]:ends[i]]`` of all rows, joined; the slices ascend, apart."""
    rows = len(starts)
    if rows == 0 or int(ends[-1]) == int(starts[0]):
        return np.zeros(0, np.uint8)
    width, stride = int(ends[0] - starts[0]), int(starts[1] - starts[0]) if rows > 1 else 1
    if np.all(ends - starts == width) and np.all(np.diff(starts) == stride):
        window = np.ndarray((rows, width), np.uint8, data, int(starts[0]), (stride, 1))
        return np.ascontiguousarray(window).reshape(-1)
    # Rows and the gaps between them, alternately, as one array; of which Arrow takes the rows.
    borders = np.empty(2 * rows, np.int64)
    borders[0::2], borders[1::2] = starts, ends
    alternating = binary_array(data, borders)
    taken = alternating.take(pa.array(np.arange(0, 2 * rows - 1, 2)))
    return byte_spans(taken)[0]


def binary_array(data: Bytes, offsets: Int64s) -> pa.LargeBinaryArray:
    """Returns the binary array whose value ``i`` is ``data[offsets[i]:offsets[i + 1]]``."""
    buffers = [None, pa.py_buffer(np.ascontiguousarray(offsets)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.large_binary(), len(offsets) - 1, buffers)


def fixed_width_binary(values: Bytes) -> pa.LargeBinaryArray:
    """Returns each row of ``values``, of shape ``(rows, width)``, as a binary value."""
    rows, width = values.shape
    offsets = np.arange(rows + 1, dtype=np.int64) * width
    return binary_array(np.ascontiguousarray(values).reshape(-1), offsets)


def value_offsets(array: pa.Array) -> Int64s:
    """Returns the ``rows + 1`` absolute offsets of a string, binary, list or map array."""
    wide = pa.types.is_large_binary(array.type) or pa.types.is_large_string(array.type)
    buffer = array.buffers()[1]
    if buffer is None or len(buffer) == 0:
        return np.zeros(len(array) + 1, np.int64)
    offsets = np.frombuffer(buffer, np.int64 if wide else np.int32)
    return offsets[array.offset : array.offset + len(array) + 1].astype(np.int64, copy=False)


def is_string(data_type: pa.DataType) -> bool:
    """Tells whether the type is a string type with offsets."""
    return bool(pa.types.is_string(data_type) or pa.types.is_large_string(data_type))


def is_null(array: pa.Array) -> Bools:
    """Returns for each row whether it is null."""
    if not array.null_count:
        return np.zeros(len(array), np.bool_)
    nulls: Bools = array.is_null().to_numpy(zero_copy_only=False)
    return nulls


def plain(array: pa.Array) -> pa.Array:
    """Returns the same values without dictionary, view layout or extension type, at any depth.

    Arrow has no take or filter for some of those.
    """
    if isinstance(array.type, pa.DictionaryType):
        values = plain(array.dictionary)
        return pa.DictionaryArray.from_arrays(array.indices, values).dictionary_decode()
    if isinstance(array.type, pa.BaseExtensionType):
        return array.storage
    if array.type == pa.string_view():  # not by a cast of strings: it may refuse surrogates
        return array.view(pa.binary_view()).cast(pa.large_binary()).view(pa.large_string())
    if array.type == pa.binary_view():
        return array.cast(pa.large_binary())
    if pa.types.is_struct(array.type):
        children = [array.field(i) for i in range(len(array.type))]
        plain_fields = [plain(child) for child in children]
        if any(new is not old for new, old in zip(plain_fields, children, strict=True)):
            return struct_array(plain_fields, array.type.names, is_null(array))
    return array


def struct_array(children: list[pa.Array], names: list[str], null: Bools) -> pa.StructArray:
    """Returns the struct of these fields, null where ``null`` says so."""
    mask = pa.array(null) if null.any() else None
    return pa.StructArray.from_arrays(children, names, mask=mask)


def one_chunk(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    """Returns a column as one array: Arrow's own way has none for no chunks of nested UUIDs."""
    if not isinstance(column, pa.ChunkedArray):
        return column
    chunks = column.chunks
    if len(chunks) == 1:
        return chunks[0]
    return pa.concat_arrays(chunks or [pa.nulls(0, column.type)])
