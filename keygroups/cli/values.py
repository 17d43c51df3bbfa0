"""Values of Arrow columns as JSON and as text, for all types that state can have.

======================== ================================================================
Arrow                    JSON
======================== ================================================================
integers, bool, string   number, ``true`` or ``false``, string
float                    number, or ``"NaN"``, ``"Infinity"``, ``"-Infinity"``
decimal                  string of its digits
date, time, timestamp    ISO 8601 string; with a time zone in UTC, ending in ``Z``
duration                 number in the unit of its type
binary                   string of lower-case hexadecimal digits
uuid                     string
list, struct, map        array, object, array of ``[key, value]``
======================== ================================================================
"""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from keygroups.cli.output import printable

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def json_values(column: pa.Array) -> list[Any]:
    """Returns the values of a column as JSON can hold them."""
    t, data_type = pa.types, column.type
    if isinstance(data_type, pa.BaseExtensionType) or t.is_decimal(data_type):
        return [None if v is None else _exact(v) for v in column.to_pylist()]
    if t.is_floating(data_type):
        return _floats(column)
    if t.is_binary(data_type) or t.is_large_binary(data_type) or t.is_fixed_size_binary(data_type):
        return [None if v is None else v.hex() for v in column.to_pylist()]
    if t.is_duration(data_type):
        return list(column.cast(pa.int64()).to_pylist())
    if t.is_temporal(data_type):
        return _iso(column)
    if t.is_struct(data_type):
        return _structs(column)
    if t.is_map(data_type):
        entry = pa.struct([data_type.key_field, data_type.item_field])
        pairs = column.cast(pa.list_(entry))
        columns = [json_values(child) for child in pairs.flatten().flatten()]
        return _lists(pairs, [list(pair) for pair in zip(*columns, strict=True)])
    if t.is_list(data_type):
        return _lists(column, json_values(column.flatten()))
    return list(column.to_pylist())


def text_values(column: pa.Array) -> list[str]:
    """Returns the values of a column as a person reads them, each on one line."""
    if pa.types.is_integer(column.type):
        return ["null" if value is None else str(value) for value in column.to_pylist()]
    return [value_text(value) for value in json_values(column)]


def value_text(value: Any) -> str:
    """A value of :func:`json_values` as text on one line; the empty string is ``""``."""
    if isinstance(value, str):
        return printable(value) or '""'
    return printable(json_text(value))


def json_text(value: Any) -> str:
    """The JSON of a value on one line, not restricted to ASCII."""
    return _encode(value)


def shortest_doubles(column: pa.Array) -> pa.Array:
    """Returns floats as doubles with as few digits as tell them apart: 0.1, not 0.100000001."""
    return column if column.type == pa.float64() else column.cast(pa.string()).cast(pa.float64())


def _exact(value: Any) -> str:
    """A decimal without an exponent, or a UUID."""
    return str(value) if hasattr(value, "hex") else format(value, "f")


def _floats(column: pa.Array) -> list[Any]:
    doubles = shortest_doubles(column)
    values = list(doubles.to_pylist())
    if pc.all(pc.is_finite(doubles)).as_py() is not False:
        return values
    return [_named(value) if value is not None else None for value in values]


def _named(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    return value if math.isfinite(value) else ("Infinity" if value > 0 else "-Infinity")


def _iso(column: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        zone = None if column.type.tz is None else "UTC"
        texts = column.cast(pa.timestamp(column.type.unit, zone)).cast(pa.string()).to_pylist()
        return [None if text is None else text.replace(" ", "T") for text in texts]
    return list(column.cast(pa.string()).to_pylist())


def _structs(column: pa.StructArray) -> list[Any]:
    names = [field.name for field in column.type]
    children = [json_values(child) for child in column.flatten()]
    rows = zip(*children, strict=True) if children else [()] * len(column)
    valid = column.is_valid().to_pylist()
    return [
        dict(zip(names, row, strict=True)) if ok else None
        for row, ok in zip(rows, valid, strict=True)
    ]


def _lists(column: pa.ListArray, items: list[Any]) -> list[Any]:
    """Deals out the items of all lists to the lists."""
    lists: list[Any] = []
    start = 0
    for length in pc.list_value_length(column).to_pylist():
        lists.append(None if length is None else items[start : start + length])
        start += length or 0
    return lists
