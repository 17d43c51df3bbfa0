"""The schemes, which key types each one takes, and what to cast the others to."""

from __future__ import annotations

import pyarrow as pa

from keygroups.errors import InvalidArgument
from keygroups.keys import KINDS, kind_of

SCHEMES = ("flink", "murmur3", "spark")

_NEEDS = {
    "flink": KINDS - {"binary", "fixed"},
    "murmur3": KINDS,
    "spark": KINDS - {"time", "uuid"},
}


def check_scheme(scheme: str) -> None:
    """Raises :class:`InvalidArgument` unless ``scheme`` is one of :data:`SCHEMES`."""
    if scheme not in SCHEMES:
        raise InvalidArgument(f"unknown scheme {scheme!r}; the schemes are {', '.join(SCHEMES)}")


def check_key_type(type: pa.DataType, scheme: str) -> None:
    """Checks that keys of a type can be hashed.

    Raises:
        InvalidArgument: If the scheme does not exist or does not take the type; the message
            tells the type, the reason, and what to cast to.
    """
    check_scheme(scheme)
    if not isinstance(type, pa.DataType):
        raise InvalidArgument(f"expected a pyarrow type, got {type!r}")
    _check(type, scheme, "")


def _check(type_: pa.DataType, scheme: str, field: str) -> None:
    kind = kind_of(type_)
    if kind == "struct" and len(type_):
        for child in type_:
            _check(child.type, scheme, f"{field}.{child.name}" if field else child.name)
    elif kind not in _NEEDS[scheme] or kind == "struct" or (kind == "null" and not field):
        where = f" in field {field!r}" if field else ""
        raise InvalidArgument(
            f"scheme {scheme} takes no keys of type {type_}{where}: {_why(type_, kind)}"
        )


def _why(type_: pa.DataType, kind: str) -> str:
    t = pa.types
    value = type_.value_type if isinstance(type_, pa.DictionaryType) else type_
    reasons = (
        (
            kind in ("binary", "fixed"),
            "a Java byte[] hashes by identity; cast it to string or use scheme murmur3 or spark",
        ),
        (kind == "time", "this scheme does not cover times; cast it to int64"),
        (kind == "uuid", "Spark has no such type; cast it to string"),
        (kind == "null", "every key would be null; cast it to the type of its values"),
        (
            t.is_unsigned_integer(value),
            "the JVM has no unsigned integers; cast it to a wider signed integer",
        ),
        (t.is_float16(value), "the JVM has no 16-bit floats; cast it to float32"),
        (
            t.is_decimal(value),
            "only decimals of 128 bits have a defined hash; cast it to decimal128",
        ),
        (t.is_date64(value), "it may hold a time of day; cast it to date32 or timestamp"),
        (t.is_duration(value), "its hash is not defined; cast it to int64"),
        (
            t.is_nested(value),
            "only a struct of at least one field is composite; make it one, or cast to string",
        ),
    )
    default = "its hash is not defined; cast it to string or an integer"
    return next((reason for applies, reason in reasons if applies), default)
