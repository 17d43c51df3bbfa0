"""One Python value as a key: an Arrow array of one row, with an inferred or a given type."""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from keygroups.errors import InvalidArgument
from keygroups.keys import kind_of

_MAX_DIGITS = 38
_SHORT = 64
_WORD = 0xFFFFFFFF


def java_hash_code(key: object) -> int | None:
    """Java's ``hashCode``, as unsigned, of the commonest keys; ``None`` for any other key.

    A shortcut: a column of one row costs fifty times as much.
    """
    if type(key) is int and -1 << 63 <= key < 1 << 63:
        return (key ^ key >> 32) & _WORD
    if type(key) is str and len(key) <= _SHORT:
        code = 0
        if key.isascii():
            for unit in key.encode():
                code = 31 * code + unit
        else:
            for unit in memoryview(key.encode("utf-16-le", "surrogatepass")).cast("H"):
                code = 31 * code + unit
        return code & _WORD
    return None


def key_array(key: object, type_: pa.DataType | None) -> pa.Array:
    """Returns the key as a column of one row.

    Args:
        key: The value. Without a type: bool, int (as int64), float (double), str, bytes,
            decimal (of its own scale), date, datetime, time, UUID, a NumPy scalar (of its own
            dtype), or a tuple of those and ``None``, which is a struct.
        type_: What the column is to be, if not that.

    Raises:
        InvalidArgument: If the key is null, has no type or is no value of the type.
    """
    if type_ is None:
        type_ = _inferred(key)
    array = _array(key, type_)
    if array.null_count:
        raise InvalidArgument(f"the key {key!r} is null; drop or replace null keys first")
    return array


def _inferred(key: Any) -> pa.DataType:
    if key is None:
        raise InvalidArgument("the key is null; drop or replace null keys first")
    if isinstance(key, tuple):
        return pa.struct(
            [
                (f"f{i}", pa.null() if part is None else _inferred(part))
                for i, part in enumerate(key)
            ]
        )
    if isinstance(key, decimal.Decimal):
        _, digits, exponent = key.as_tuple()
        if isinstance(exponent, int) and len(digits) <= _MAX_DIGITS:
            return pa.decimal128(len(digits), -exponent)
        raise InvalidArgument(f"the key {key} is no decimal of at most {_MAX_DIGITS} digits")
    if isinstance(key, dt.datetime):
        # pandas has a subclass with nanoseconds.
        unit = "ns" if getattr(key, "nanosecond", 0) else "us"
        return pa.timestamp(unit, None if key.tzinfo is None else "UTC")
    if isinstance(key, np.generic) and not isinstance(key, (np.character, np.float64)):
        return _inferred_from_numpy(key)
    types: dict[type, pa.DataType] = {
        bool: pa.bool_(),
        int: pa.int64(),
        float: pa.float64(),
        str: pa.string(),
        bytes: pa.binary(),
        dt.date: pa.date32(),
        dt.time: pa.time64("us"),
        uuid.UUID: pa.uuid(),
    }
    for python_type, arrow_type in types.items():
        if isinstance(key, python_type):
            return arrow_type
    raise InvalidArgument(
        f"a key of type {type(key).__name__} has no Arrow type; give one as type="
    )


def _inferred_from_numpy(key: np.generic) -> pa.DataType:
    try:
        return pa.date32() if key.dtype == "M8[D]" else pa.from_numpy_dtype(key.dtype)
    except (pa.ArrowException, NotImplementedError) as error:
        raise InvalidArgument(f"a key of NumPy type {key.dtype} has no Arrow type") from error


def _array(key: Any, type_: pa.DataType) -> pa.Array:
    kind = kind_of(type_)
    if key is None:
        return pa.nulls(1, type_)
    if isinstance(type_, pa.DictionaryType):
        return _array(key, type_.value_type)
    if kind == "struct":
        return _struct_array(key, type_)
    if isinstance(key, np.generic) and (not isinstance(key, np.datetime64) or kind == "date"):
        key = key.item()
    if kind == "string" and isinstance(key, str):
        # Not pa.array: it refuses the lone surrogates that a Java string may hold.
        data = key.encode("utf-8", "surrogatepass")
        return pa.array([data], pa.large_binary()).view(pa.large_string())
    if kind == "uuid" and isinstance(key, uuid.UUID):
        return pa.ExtensionArray.from_storage(type_, pa.array([key.bytes], type_.storage_type))
    if kind == "decimal" and isinstance(key, decimal.Decimal):
        return _decimal_array(key, type_)
    if _would_be_cut(key, type_, kind):
        raise InvalidArgument(f"the key {key!r} is not of type {type_}: it would be cut")
    try:
        return pa.array([key], type_)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument(f"the key {key!r} is not of type {type_}: {error}") from error


def _would_be_cut(key: Any, type_: pa.DataType, kind: str) -> bool:
    """Whether Arrow would quietly drop a fraction, and so take one key for another."""
    if isinstance(key, float):
        return kind == "int" and not key.is_integer()
    if kind == "date":
        return isinstance(key, dt.datetime)
    if kind in ("time", "timestamp") and isinstance(key, dt.datetime | dt.time):
        per_tick = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[type_.unit]
        return (key.microsecond * 1000 + getattr(key, "nanosecond", 0)) % per_tick != 0
    return False


def _struct_array(key: Any, type_: pa.StructType) -> pa.StructArray:
    if isinstance(key, Mapping):
        unknown = set(key) - {field.name for field in type_}
        if unknown:
            raise InvalidArgument(f"the key {key!r} has fields that {type_} has not: {unknown}")
        key = tuple(key.get(field.name) for field in type_)
    if not isinstance(key, Sequence) or isinstance(key, (str, bytes)) or len(key) != len(type_):
        raise InvalidArgument(f"the key {key!r} is no tuple of the {len(type_)} fields of {type_}")
    children = [_array(part, field.type) for part, field in zip(key, type_, strict=True)]
    names = [field.name for field in type_]
    return pa.StructArray.from_arrays(children, names) if children else pa.array([{}], type_)


def _decimal_array(key: decimal.Decimal, type_: pa.Decimal128Type) -> pa.Array:
    # Not pa.array: it infers and checks scales in ways of its own, also negative ones.
    sign, digits, exponent = key.as_tuple()
    if not isinstance(exponent, int):
        raise InvalidArgument(f"the key {key} is no finite decimal")
    unscaled, shift = int("".join(map(str, digits))), type_.scale + exponent
    quotient, rest = (unscaled * 10**shift, 0) if shift >= 0 else divmod(unscaled, 10**-shift)
    if rest or quotient >= 10**type_.precision:
        raise InvalidArgument(f"the key {key} is not of type {type_}")
    value = -quotient if sign else quotient
    data = pa.py_buffer(value.to_bytes(16, "little", signed=True))
    return pa.Array.from_buffers(type_, 1, [None, data])
