"""Canonical key bytes: one byte string a key, whose unsigned order is the order of the keys.

They are the sort order of a snapshot, the keys of SST files and the input of the scheme
``murmur3``. The encoding of a key is the concatenation of its components' encodings:

========================= =====================================================================
int8 … int64              big-endian, sign bit flipped
date32, time, timestamp   as the int32 or int64 that stores them
bool                      one byte, 0 or 1
float32, float64          big-endian IEEE bits, every NaN the canonical one; if the sign bit is
                          set all bits are inverted, else the sign bit is flipped
decimal128                16 bytes big-endian two's complement, sign bit flipped
uuid, fixed_size_binary   the bytes
string, binary            the bytes, if nothing follows in the key; else each 00 becomes 00 FF
                          and 00 00 ends it
struct                    a byte a field, 00 null or 01 present, and its encoding if present
========================= =====================================================================

A dictionary is encoded as its values; a ``null``-typed field is always absent. Strings are
UTF-8, a lone surrogate in its three-byte generalised form (ED A0…BF xx), as Java holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from keygroups.buffers import (
    Bools,
    Bytes,
    Int64s,
    binary_array,
    byte_spans,
    fixed_values,
    gather,
    is_null,
    one_chunk,
    plain,
    struct_array,
)
from keygroups.errors import InvalidArgument, SnapshotCorrupted


class _Ragged(NamedTuple):
    data: Bytes
    offsets: Int64s  # one more than rows


_Part: TypeAlias = "Bytes | _Ragged"  # a matrix of rows x bytes, or rows of unequal length

_KINDS = {
    "bool": pa.types.is_boolean,
    "int": pa.types.is_signed_integer,
    "float": lambda t: pa.types.is_float32(t) or pa.types.is_float64(t),
    "decimal": pa.types.is_decimal128,
    "date": pa.types.is_date32,
    "time": pa.types.is_time,
    "timestamp": pa.types.is_timestamp,
    "string": lambda t: t in (pa.string(), pa.large_string(), pa.string_view()),
    "binary": lambda t: t in (pa.binary(), pa.large_binary(), pa.binary_view()),
    "fixed": pa.types.is_fixed_size_binary,
    "uuid": lambda t: isinstance(t, pa.UuidType),
    "struct": pa.types.is_struct,
    "null": pa.types.is_null,
}
KINDS = frozenset(_KINDS)


class RowError(Exception):
    """A row's value has no encoding or hash; the public functions say what and where."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(f"row {row}: {why}")
        self.row, self.why = row, why


def encode_keys(columns: Sequence[pa.Array]) -> pa.LargeBinaryArray:
    """Encodes a key column, or the component columns of a composite key, row by row.

    Args:
        columns: Arrays (or chunked arrays) of one length, without a null at top level.

    Raises:
        InvalidArgument: For no columns, unequal lengths, a null at top level, a type that has
            no encoding, or a string that is not UTF-8.
    """
    arrays = [_checked_array(column) for column in columns]
    if not arrays:
        raise InvalidArgument("a key has at least one component column, got none")
    if len({len(array) for array in arrays}) > 1:
        raise InvalidArgument(f"key columns differ in length: {[len(array) for array in arrays]}")
    parts: list[_Part] = []
    for index, array in enumerate(arrays):
        what = "the key" if len(arrays) == 1 else f"component {index} of the key"
        check_encodable(array.type)
        array = plain(array)
        check_no_nulls(array, what)
        try:
            parts += _parts(array, last=index == len(arrays) - 1)
        except RowError as bad:
            raise InvalidArgument(f"{what} in {bad}") from None
    return _join(parts)


def decode_keys(
    encoded: pa.LargeBinaryArray | pa.BinaryArray, types: Sequence[pa.DataType]
) -> list[pa.Array]:
    """Decodes what :func:`encode_keys` made of columns of these types: its exact inverse.

    Raises:
        InvalidArgument: For no types, a type that has no encoding, or an input not binary.
        SnapshotCorrupted: If a row is not the encoding of any key of these types; the message
            names the row and the offset in it.
    """
    if not types:
        raise InvalidArgument("a key has at least one component type, got none")
    for type_ in types:
        check_encodable(type_)
    encoded = _checked_array(encoded)
    if kind_of(encoded.type) not in ("binary", "fixed"):
        raise InvalidArgument(f"encoded keys are binary, got {encoded.type}")
    encoded = plain(encoded)
    data, offsets = byte_spans(encoded)
    rows = _Rows(data, offsets, np.arange(len(encoded)), offsets[:-1].copy())
    rows.expect(~is_null(encoded), "it is null")
    columns = [_decode(type_, rows, i == len(types) - 1) for i, type_ in enumerate(types)]
    rows.expect(rows.position == rows.end, "bytes follow the end of the key")
    return [_of_type(array, type_) for array, type_ in zip(columns, types, strict=True)]


# --- Types ---------------------------------------------------------------------------------


def kind_of(type_: pa.DataType) -> str:
    """Returns the member of :data:`KINDS` that ``type_`` is encoded as, ``""`` if none."""
    if isinstance(type_, pa.DictionaryType):
        kind = kind_of(type_.value_type)
        return "" if kind in ("struct", "null") else kind
    return next((kind for kind, matches in _KINDS.items() if matches(type_)), "")


def check_encodable(type_: pa.DataType, kinds: frozenset[str] = KINDS, top: bool = True) -> None:
    """Raises unless ``type_`` and its fields are of ``kinds``; ``null`` only below the top."""
    kind = kind_of(type_)
    if kind not in kinds or (kind == "null" and top) or (kind == "struct" and not len(type_)):
        raise InvalidArgument(f"a key{'' if top else ' field'} of type {type_} is not supported")
    for field in type_ if kind == "struct" else ():
        check_encodable(field.type, kinds, top=False)


def check_no_nulls(array: pa.Array, what: str, first_row: int = 0) -> None:
    """Raises :class:`InvalidArgument` naming the first null row, if there is a null."""
    if array.null_count:
        row = first_row + int(is_null(array).argmax())
        raise InvalidArgument(f"{what} is null in row {row}; drop or replace null keys first")


def present_fields(array: pa.StructArray) -> Iterator[tuple[pa.DataType, Bools, pa.Array]]:
    """Yields for each field its type, which rows are present, and the present values."""
    for declared, field in zip(array.type, array.flatten(), strict=True):
        field = plain(field)
        yield declared.type, ~is_null(field), field.drop_null() if field.null_count else field


def magnitude(
    low_high: npt.NDArray[np.uint64],
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64], Bools]:
    """Returns the low and high half of the absolute of 128-bit integers, and which are < 0."""
    low, high = low_high[:, 0], low_high[:, 1]
    negative: Bools = high >> np.uint64(63) != 0
    flip = np.where(negative, np.uint64((1 << 64) - 1), np.uint64(0))
    low, high = (low ^ flip) + negative, high ^ flip
    return low, high + (negative & (low == 0)), negative


def decode_utf8(data: Bytes, offsets: Int64s) -> str:
    """Decodes all rows at once, lone surrogates included; every row is UTF-8 by itself.

    Raises:
        RowError: For the first row that is not.
    """
    try:
        text = data.tobytes().decode("utf-8", "surrogatepass")
        starts = offsets[:-1][offsets[:-1] < offsets[1:]]
        split = starts[(data[starts] & 0xC0) == 0x80]  # a character that began a row before
        position = int(split[0]) - 1 if split.size else -1
    except UnicodeDecodeError as error:
        text, position = "", error.start
    if position >= 0:
        row = int(np.searchsorted(offsets, position, "right")) - 1
        raise RowError(row, "it is not UTF-8")
    return text


def _checked_array(column: pa.Array | pa.ChunkedArray) -> pa.Array:
    if not isinstance(column, pa.Array | pa.ChunkedArray):
        raise InvalidArgument(f"expected a pyarrow array, got {type(column).__name__}")
    return one_chunk(column)


# --- Encoding ------------------------------------------------------------------------------


def _parts(array: pa.Array, last: bool) -> list[_Part]:
    """The encoding of a plain array without nulls, as pieces to be joined row by row."""
    if pa.types.is_struct(array.type):
        return _struct_parts(array, last)
    kind = kind_of(array.type)
    if kind == "fixed":
        return [fixed_values(array, np.uint8).reshape(len(array), array.type.byte_width)]
    if kind not in ("string", "binary"):
        return [_fixed_bytes(array, kind)]
    data, offsets = byte_spans(array)
    if kind == "string" and int(data.max(initial=0)) >= 0x80:
        decode_utf8(data, offsets)
    return [_Ragged(data, offsets)] if last else _terminated(data, offsets)


def _struct_parts(array: pa.StructArray, last: bool) -> list[_Part]:
    parts: list[_Part] = []
    for index, (type_, valid, values) in enumerate(present_fields(array)):
        parts.append(valid.view(np.uint8)[:, None])
        if kind_of(type_) == "null":
            continue
        try:
            pieces = _parts(values, last and index == len(array.type) - 1)
        except RowError as bad:
            raise RowError(int(np.flatnonzero(valid)[bad.row]), bad.why) from None
        parts += pieces if valid.all() else [_spread(piece, valid) for piece in pieces]
    return parts


def _terminated(data: Bytes, offsets: Int64s) -> list[_Part]:
    end = np.zeros((len(offsets) - 1, 2), np.uint8)
    zeros = np.flatnonzero(data == 0)
    if zeros.size:
        escaped = data.tobytes().replace(b"\0", b"\0\xff")
        data = np.frombuffer(escaped, np.uint8)
        offsets = offsets + np.searchsorted(zeros, offsets)
    return [_Ragged(data, offsets), end]


def _fixed_bytes(array: pa.Array, kind: str) -> Bytes:
    n = len(array)
    if kind == "bool":
        flags: Bools = array.to_numpy(zero_copy_only=False)
        return flags.view(np.uint8)[:, None]
    if kind == "decimal":
        low_high = fixed_values(array, np.uint64).reshape(n, 2)
        big_endian = low_high[:, ::-1].astype(">u8")
        big_endian[:, 0] ^= np.uint64(1 << 63)
        return big_endian.view(np.uint8)
    width = array.type.bit_width // 8
    bits = fixed_values(array, f"u{width}")
    sign = bits.dtype.type(1 << (8 * width - 1))
    if kind == "float":
        values = bits.view(f"f{width}")
        bits = np.where(np.isnan(values), _canonical_nan(values), bits)
        negative = (bits.view(f"i{width}") >> (8 * width - 1)).view(f"u{width}")
        bits = bits ^ (negative | sign)
    else:
        bits = bits ^ sign
    matrix: Bytes = bits.byteswap().view(np.uint8).reshape(n, width)
    return matrix


def _canonical_nan(values: npt.NDArray[Any]) -> np.unsignedinteger[Any]:
    return np.uint64(0x7FF8 << 48) if values.itemsize == 8 else np.uint32(0x7FC0 << 16)


def _ragged(part: _Part) -> _Ragged:
    if isinstance(part, _Ragged):
        return part
    n, width = part.shape
    return _Ragged(part.reshape(-1), np.arange(n + 1, dtype=np.int64) * width)


def _spread(part: _Part, valid: Bools) -> _Ragged:
    """Rows of ``part`` at the valid rows, nothing at the others: the bytes stay in place."""
    data, offsets = _ragged(part)
    return _Ragged(data, offsets[np.concatenate(([0], np.cumsum(valid)))])


def _join(parts: list[_Part]) -> pa.LargeBinaryArray:
    merged: list[_Part] = []
    for part in parts:
        if merged and isinstance(part, np.ndarray) and isinstance(merged[-1], np.ndarray):
            merged[-1] = np.hstack((merged[-1], part))
        else:
            merged.append(part)
    arrays = [binary_array(*_ragged(part)) for part in merged]
    if len(arrays) == 1:
        return arrays[0]
    return pc.binary_join_element_wise(*arrays, pa.scalar(b"", pa.large_binary()))


# --- Decoding ------------------------------------------------------------------------------


@dataclass
class _Rows:
    """How far each row is read. ``row`` numbers rows as the caller does, also in subsets."""

    data: Bytes
    offsets: Int64s  # of all rows
    row: Int64s
    position: Int64s

    @property
    def end(self) -> Int64s:
        return self.offsets[self.row + 1]

    def subset(self, chosen: Bools) -> _Rows:
        return _Rows(self.data, self.offsets, self.row[chosen], self.position[chosen])

    def expect(self, good: Bools, why: str, at: Int64s | None = None) -> None:
        if not good.all():
            bad = int(good.argmin())
            row, position = int(self.row[bad]), int((self.position if at is None else at)[bad])
            offset = position - int(self.offsets[row])
            raise SnapshotCorrupted(f"encoded key in row {row}, offset {offset}: {why}")

    def read(self, width: int, what: str) -> Bytes:
        """Reads ``width`` bytes of each row into a matrix."""
        after = self.position + width
        self.expect(after <= self.end, f"{what} needs {width} bytes, beyond the end")
        start, n = self.position, len(self.row)
        self.position = after
        if n == 0 or width == 0:
            return np.empty((n, width), np.uint8)
        first = int(start[0])
        if n == 1 or (start[1:] - start[:-1] == width).all():
            return self.data[first : first + n * width].reshape(n, width)
        windows = np.ndarray((len(self.data) - width + 1,), f"V{width}", self.data, 0, (1,))
        return windows[start].view(np.uint8).reshape(n, width)


def _decode(type_: pa.DataType, rows: _Rows, last: bool) -> pa.Array:
    """Reads a component of each row, as a plain array."""
    kind = kind_of(type_)
    if isinstance(type_, pa.DictionaryType):
        return _decode(type_.value_type, rows, last)
    if kind == "struct":
        return _decode_struct(type_, rows, last)
    if kind in ("string", "binary"):
        return _decode_text(kind, rows, last)
    start = rows.position
    matrix = rows.read(1 if kind == "bool" else type_.bit_width // 8, str(type_))
    if kind == "bool":
        rows.expect(matrix[:, 0] <= 1, "a bool is neither 00 nor 01", start)
        return pa.array(matrix[:, 0] == 1)
    values: npt.NDArray[Any] = matrix
    if kind not in ("uuid", "fixed"):
        values = _fixed_values(matrix, kind)
    if kind == "float":
        odd = np.isnan(values) & (values.view(f"u{values.itemsize}") != _canonical_nan(values))
        rows.expect(~odd, "a NaN is not the canonical one", start)
    if kind == "decimal":
        rows.expect(_fits(values, type_.precision), f"it is beyond {type_}", start)
    buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
    storage = type_.storage_type if kind == "uuid" else type_
    return pa.Array.from_buffers(storage, len(matrix), buffers)


def _of_type(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """The plain array as the type that it was decoded for."""
    if isinstance(type_, pa.DictionaryType):
        return _dictionary(array.dictionary_encode(), type_)
    if isinstance(type_, pa.UuidType):
        return pa.ExtensionArray.from_storage(type_, array)
    if type_ in (pa.string(), pa.binary()):
        return array.cast(pa.binary()).view(type_)  # refuses more than 2 GiB
    if type_ in (pa.string_view(), pa.binary_view()):
        return array.cast(pa.binary_view()).view(type_)
    if type_ == pa.large_string():
        return array.view(type_)
    if pa.types.is_struct(type_):
        children = [_of_type(array.field(i), field.type) for i, field in enumerate(type_)]
        mask = pa.array(is_null(array)) if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=list(type_), mask=mask)
    return array


def _dictionary(array: pa.DictionaryArray, type_: pa.DictionaryType) -> pa.DictionaryArray:
    try:
        indices = array.indices.cast(type_.index_type)
    except pa.ArrowInvalid:
        raise InvalidArgument(
            f"{len(array.dictionary)} distinct keys do not fit into {type_}; "
            f"ask for wider indices or for {type_.value_type}"
        ) from None
    values = _of_type(array.dictionary, type_.value_type)
    return pa.DictionaryArray.from_arrays(indices, values, ordered=type_.ordered)


def _fixed_values(matrix: Bytes, kind: str) -> npt.NDArray[Any]:
    if kind == "decimal":
        high_low = matrix.view(">u8").astype(np.uint64)
        high_low[:, 0] ^= np.uint64(1 << 63)
        return high_low[:, ::-1]
    width = matrix.shape[1]
    bits = np.ascontiguousarray(matrix).view(f"u{width}")[:, 0].byteswap()
    sign = bits.dtype.type(1 << (8 * width - 1))
    if kind == "float":
        positive = (bits.view(f"i{width}") >> (8 * width - 1)).view(bits.dtype)
        sign = ~positive | sign
    values: npt.NDArray[Any] = bits ^ sign
    return values.view(f"f{width}") if kind == "float" else values


def _fits(low_high: npt.NDArray[np.uint64], precision: int) -> Bools:
    """Whether 128-bit integers have at most ``precision`` decimal digits."""
    low, high, _ = magnitude(low_high)
    most_high, most_low = divmod(10**precision - 1, 1 << 64)
    fits: Bools = (high < most_high) | ((high == most_high) & (low <= np.uint64(most_low)))
    return fits


def _decode_struct(type_: pa.StructType, rows: _Rows, last: bool) -> pa.StructArray:
    children = []
    for index, field in enumerate(type_):
        start = rows.position
        presence = rows.read(1, f"the presence of field {field.name!r}")[:, 0]
        rows.expect(presence <= 1, f"the presence of field {field.name!r} is no 00 or 01", start)
        valid = presence == 1
        absent_only = kind_of(field.type) == "null"
        rows.expect(~valid if absent_only else valid | field.nullable, "null is misplaced", start)
        if absent_only:
            children.append(pa.nulls(len(valid)))
            continue
        present = rows.subset(valid)
        child = _decode(field.type, present, last and index == len(type_) - 1)
        rows.position = rows.position.copy()
        rows.position[valid] = present.position
        children.append(child if valid.all() else _with_nulls(child, valid))
    return struct_array(children, type_.names, np.zeros(len(rows.row), bool))


def _with_nulls(child: pa.Array, valid: Bools) -> pa.Array:
    return child.take(pa.array(np.cumsum(valid) - 1, mask=~valid))


def _decode_text(kind: str, rows: _Rows, last: bool) -> pa.Array:
    start, end = rows.position, rows.end if last else _terminator(rows)
    data = gather(rows.data, start, end)
    offsets = np.concatenate(([0], np.cumsum(end - start)))
    rows.position = end if last else end + 2
    if not last:
        zeros = np.flatnonzero(data == 0)
        if zeros.size:
            data = np.frombuffer(data.tobytes().replace(b"\0\xff", b"\0"), np.uint8)
            offsets = offsets - np.searchsorted(zeros, offsets)
    if kind == "string" and int(data.max(initial=0)) >= 0x80:
        try:
            decode_utf8(data, offsets)
        except RowError as bad:
            rows.expect(np.arange(len(start)) != bad.row, bad.why, start)
    return binary_array(data, offsets)


def _terminator(rows: _Rows) -> Int64s:
    """Where each row's escaped text ends: the first 00 00 at or after its position."""
    zeros = np.flatnonzero(rows.data == 0)
    after = np.append(rows.data, 1)[zeros + 1]
    ends = np.append(zeros[after == 0], len(rows.data))
    end = ends[np.searchsorted(ends, rows.position)]
    rows.expect(end + 2 <= rows.end, "a string or binary has no end (00 00)")
    stray = np.append(zeros[(after != 0) & (after != 0xFF)], len(rows.data))
    first = stray[np.searchsorted(stray, rows.position)]
    rows.expect(first >= end, "a byte 00 is not escaped as 00 FF", first)
    return end
