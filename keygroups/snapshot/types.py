"""Arrow types as JSON, so that a manifest names types as data a person can read.

A type without parameters is its Arrow name (``"int64"``); one with parameters is an object
whose ``"type"`` is that name. The table of both is in FORMAT.md, "Types".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pyarrow as pa

from keygroups.errors import IncompatibleSnapshot, InvalidArgument

Json: TypeAlias = Any

NESTING_LIMIT = 32

PLAIN: dict[str, pa.DataType] = {
    "bool": pa.bool_(),
    "int8": pa.int8(),
    "int16": pa.int16(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "uint8": pa.uint8(),
    "uint16": pa.uint16(),
    "uint32": pa.uint32(),
    "uint64": pa.uint64(),
    "float16": pa.float16(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "string": pa.string(),
    "large_string": pa.large_string(),
    "binary": pa.binary(),
    "large_binary": pa.large_binary(),
    "date32": pa.date32(),
    "uuid": pa.uuid(),
}
_PLAIN_NAMES = {data_type: name for name, data_type in PLAIN.items()}


def field_to_json(field: pa.Field) -> Json:
    """Returns ``{"name": …, "type": …, "nullable": …}``."""
    return {"name": field.name, "type": type_to_json(field.type), "nullable": field.nullable}


def field_from_json(json: Json) -> pa.Field:
    """Returns the field that :func:`field_to_json` wrote.

    Raises:
        IncompatibleSnapshot: If the type is none that this version knows.
    """
    return _field_from_json(json, NESTING_LIMIT)


def type_to_json(data_type: pa.DataType) -> Json:
    """Returns the JSON form of an Arrow type.

    Raises:
        InvalidArgument: If state cannot have this type; the message says what can.
    """
    if data_type in _PLAIN_NAMES:
        return _PLAIN_NAMES[data_type]
    for name, (matches, describe) in PARAMETRIC.items():
        if matches(data_type):
            json = {"type": name, **describe(data_type)}
            _check_readable(data_type, json)
            return json
    raise InvalidArgument(
        f"state cannot hold the Arrow type {data_type}; cast it to one of "
        f"{', '.join([*PLAIN, *PARAMETRIC])}"
    )


def type_from_json(json: Json) -> pa.DataType:
    """Returns the Arrow type that :func:`type_to_json` wrote.

    Raises:
        IncompatibleSnapshot: If it is none that this version knows.
    """
    return _type_from_json(json, NESTING_LIMIT)


def _check_readable(data_type: pa.DataType, json: Json) -> None:
    """Refuses to write what could not be read."""
    try:
        type_from_json(json)
    except IncompatibleSnapshot as error:
        raise InvalidArgument(
            f"state cannot hold the Arrow type {data_type!s:.200}: {error}"
        ) from None


def _field_from_json(json: Json, depth: int) -> pa.Field:
    try:
        name, data_type, nullable = json["name"], json["type"], json["nullable"]
    except (KeyError, TypeError):
        raise IncompatibleSnapshot(f"{json!r:.200} does not describe a field") from None
    if not isinstance(name, str) or not isinstance(nullable, bool):
        raise IncompatibleSnapshot(f"{json!r:.200} does not describe a field")
    arrow_type = _type_from_json(data_type, depth)
    try:
        return pa.field(name, arrow_type, nullable)
    except UnicodeEncodeError as error:
        raise IncompatibleSnapshot(f"the name {name!r:.200} is not valid: {error}") from None


def _type_from_json(json: Json, depth: int) -> pa.DataType:
    if depth == 0:
        raise IncompatibleSnapshot(f"a type is nested more than {NESTING_LIMIT} deep")
    if isinstance(json, str) and json in PLAIN:
        return PLAIN[json]
    name = json.get("type") if isinstance(json, Mapping) else None
    if isinstance(name, str) and name in _READERS:
        try:
            return _READERS[name](json, depth - 1)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise IncompatibleSnapshot(
                f"{json!r:.200} is not a valid {name} type: {error}"
            ) from error
    raise IncompatibleSnapshot(f"unknown type {json!r:.200}; a newer keygroups may know it")


def _fields(data_type: pa.DataType) -> list[pa.Field]:
    return [data_type.field(i) for i in range(data_type.num_fields)]


_Writer: TypeAlias = tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], dict[str, Json]]]

PARAMETRIC: dict[str, _Writer] = {
    "decimal128": (
        pa.types.is_decimal128,
        lambda t: {"precision": t.precision, "scale": t.scale},
    ),
    "timestamp": (pa.types.is_timestamp, lambda t: {"unit": t.unit, "tz": t.tz}),
    "duration": (pa.types.is_duration, lambda t: {"unit": t.unit}),
    "time32": (pa.types.is_time32, lambda t: {"unit": t.unit}),
    "time64": (pa.types.is_time64, lambda t: {"unit": t.unit}),
    "fixed_size_binary": (
        lambda t: pa.types.is_fixed_size_binary(t) and not isinstance(t, pa.BaseExtensionType),
        lambda t: {"width_bytes": t.byte_width},
    ),
    "list": (pa.types.is_list, lambda t: {"item": field_to_json(t.value_field)}),
    "struct": (pa.types.is_struct, lambda t: {"fields": [field_to_json(f) for f in _fields(t)]}),
    "map": (
        pa.types.is_map,
        lambda t: {"key": field_to_json(t.key_field), "item": field_to_json(t.item_field)},
    ),
}

_READERS: dict[str, Callable[[Mapping[str, Json], int], pa.DataType]] = {
    "decimal128": lambda json, _: _decimal(json["precision"], json["scale"]),
    "timestamp": lambda json, _: pa.timestamp(json["unit"], json["tz"]),
    "duration": lambda json, _: pa.duration(json["unit"]),
    "time32": lambda json, _: pa.time32(json["unit"]),
    "time64": lambda json, _: pa.time64(json["unit"]),
    "fixed_size_binary": lambda json, _: pa.binary(_width_bytes(json["width_bytes"])),
    "list": lambda json, depth: pa.list_(_field_from_json(json["item"], depth)),
    "struct": lambda json, depth: _struct([_field_from_json(f, depth) for f in json["fields"]]),
    "map": lambda json, depth: pa.map_(
        _field_from_json(json["key"], depth), _field_from_json(json["item"], depth)
    ),
}


def _decimal(precision: int, scale: int) -> pa.DataType:
    if not 0 <= scale <= precision:
        raise ValueError(f"a scale of {scale} is not within [0, {precision}], the precision")
    return pa.decimal128(precision, scale)


def _struct(fields: list[pa.Field]) -> pa.DataType:
    if not fields:
        raise ValueError("a struct has at least one field")
    return pa.struct(fields)


def _width_bytes(width_bytes: int) -> int:
    if not 0 < width_bytes <= 1 << 20:
        raise ValueError(f"a width of {width_bytes} bytes is not within [1, 2^20]")
    return width_bytes
