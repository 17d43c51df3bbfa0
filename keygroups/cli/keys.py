"""Types and keys as a person writes them on a command line.

A type is written as Arrow prints it (``int64``, ``string``, ``decimal128(10, 2)``,
``timestamp[us, tz=UTC]``), or ``uuid``; several joined by commas are a composite key. A key is
written as ``keygroups cat`` prints it; a composite one is a JSON array: ``["a", 1]``.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from keygroups.errors import InvalidArgument

_COMMA_OUTSIDE_BRACKETS = re.compile(r",(?![^(\[]*[)\]])")
_DECIMAL = re.compile(r"decimal(?:128)?\(\s*(\d+)\s*,\s*(-?\d+)\s*\)")
_ZONED = re.compile(r"timestamp\[(s|ms|us|ns),\s*tz=([^\]]+)\]")
_FIXED = re.compile(r"fixed_size_binary\[(\d+)\]")
_ALIASES = {"date": pa.date32(), "uuid": pa.uuid()}
_EXAMPLES = (
    "int32, int64, string, bool, double, date, timestamp[us], timestamp[us, tz=UTC], "
    "decimal128(10, 2), uuid, binary"
)


def parse_type(text: str) -> pa.DataType:
    """Returns the type that ``text`` names; a struct, if it names several.

    Raises:
        InvalidArgument: If there is none of that name.
    """
    names = [name.strip() for name in _COMMA_OUTSIDE_BRACKETS.split(text)]
    if len(names) > 1:
        return pa.struct([(f"f{place}", _type(name)) for place, name in enumerate(names)])
    return _type(names[0])


def type_name(data_type: pa.DataType) -> str:
    """Returns what :func:`parse_type` takes."""
    if pa.types.is_struct(data_type):
        return ",".join(type_name(field.type) for field in data_type)
    return "uuid" if data_type == pa.uuid() else str(data_type)


def parse_keys(texts: Sequence[str], data_type: pa.DataType) -> pa.Array:
    """Returns the keys that the texts are, as a column of ``data_type``.

    Raises:
        InvalidArgument: If a text is no key of that type; the message names it.
    """
    try:
        return _column(texts, data_type)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        failed: Exception = error
    for text in texts:  # only now the slow way, to name the one that is wrong
        try:
            _column([text], data_type)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            reason = " ".join(str(error).split())
            raise InvalidArgument(
                f"key {text!r:.200} is not of type {type_name(data_type)}: {reason}"
            ) from None
    raise failed


def _type(name: str) -> pa.DataType:
    if name in _ALIASES:
        return _ALIASES[name]
    try:
        if found := _DECIMAL.fullmatch(name):
            return pa.decimal128(int(found[1]), int(found[2]))
        if found := _ZONED.fullmatch(name):
            return pa.timestamp(found[1], found[2])
        if found := _FIXED.fullmatch(name):
            return pa.binary(int(found[1]))
        return pa.type_for_alias(name)
    except (ValueError, pa.ArrowException, OverflowError) as error:
        raise InvalidArgument(f"unknown type {name!r:.100} ({error}); try {_EXAMPLES}") from None


def _column(texts: Sequence[str | None], data_type: pa.DataType) -> pa.Array:
    t = pa.types
    if t.is_struct(data_type):
        return _composites(texts, data_type)
    if data_type == pa.uuid():
        storage = [None if text is None else uuid.UUID(text).bytes for text in texts]
        return pa.ExtensionArray.from_storage(data_type, pa.array(storage, pa.binary(16)))
    if t.is_binary(data_type) or t.is_large_binary(data_type) or t.is_fixed_size_binary(data_type):
        return pa.array(
            [None if text is None else bytes.fromhex(text) for text in texts], data_type
        )
    strings = pa.array(texts, pa.string())
    if t.is_string(data_type) or t.is_large_string(data_type):
        return strings.cast(data_type)
    if t.is_time(data_type):  # Arrow parses no times, but timestamps
        dated = [None if text is None else f"1970-01-01T{text}" for text in texts]
        moments = pa.array(dated, pa.string()).cast(pa.timestamp(data_type.unit))
        return moments.cast(data_type)
    return strings.cast(data_type)


def _composites(texts: Sequence[str | None], data_type: pa.StructType) -> pa.StructArray:
    fields = list(data_type)
    rows = [None if text is None else _parts(text, len(fields)) for text in texts]
    columns = [
        _column([None if row is None else row[place] for row in rows], field.type)
        for place, field in enumerate(fields)
    ]
    mask = pa.array([row is None for row in rows], pa.bool_())
    return pa.StructArray.from_arrays(columns, fields=fields, mask=mask)


def _parts(text: str, part_count: int) -> list[str | None]:
    """The parts of a composite key as texts again: numbers keep every digit that way."""
    try:
        parts = json.loads(text, parse_int=str, parse_float=str, parse_constant=str)
    except ValueError:
        parts = None
    if not isinstance(parts, list) or len(parts) != part_count:
        raise ValueError(f'write it as a JSON array of its {part_count} parts, such as ["a", 1]')
    return [_part(part) for part in parts]


def _part(part: Any) -> str | None:
    if part is None or isinstance(part, str):
        return part
    return json.dumps(part)  # a nested part, or true, or false
