"""Hypothesis strategies: any storable type, any value of it, any table with distinct keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from keygroups.errors import InvalidArgument
from keygroups.hashing import SCHEMES, check_key_type
from keygroups.snapshot.backend import RowSchema
from keygroups.testing.model import Model, PlainRow, table_of

FLAT_TYPES: tuple[pa.DataType, ...] = (
    pa.bool_(),
    pa.int8(),
    pa.int16(),
    pa.int32(),
    pa.int64(),
    pa.uint8(),
    pa.uint16(),
    pa.uint32(),
    pa.uint64(),
    pa.float16(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.large_string(),
    pa.binary(),
    pa.large_binary(),
    pa.binary(1),
    pa.binary(9),
    pa.uuid(),
    pa.date32(),
    pa.decimal128(1, 0),
    pa.decimal128(12, 3),
    pa.decimal128(38, 38),
    *(pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")),
    pa.timestamp("s", "UTC"),
    pa.timestamp("us", "America/New_York"),
    *(pa.duration(unit) for unit in ("s", "ms", "us", "ns")),
    pa.time32("s"),
    pa.time32("ms"),
    pa.time64("us"),
    pa.time64("ns"),
)
"""Every storable type that is not nested, with some parameters."""

_UNITS_A_DAY = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_TIME_LIMIT = {"s": 1 << 33, "ms": 1 << 43, "us": 1 << 53, "ns": (1 << 63) - 1}


@dataclass(frozen=True)
class KeyedTable:
    """Rows with distinct keys, and how they are keyed.

    Attributes:
        table: The rows, in any order.
        key: The key columns.
        scheme: A scheme that takes them.
        rows: The same rows, plain, key columns first.
        schema: Key and value columns as they are stored.
    """

    table: pa.Table
    key: tuple[str, ...]
    scheme: str
    rows: tuple[PlainRow, ...]
    schema: RowSchema

    def model(self, max_parallelism: int, parallelism: int = 1) -> Model:
        """Returns the model of these rows."""
        return Model(
            self.schema,
            self.rows,
            scheme=self.scheme,
            max_parallelism=max_parallelism,
            parallelism=parallelism,
        )


def value_types(max_depth: int = 2) -> st.SearchStrategy[pa.DataType]:
    """Strategy for any type that state can hold."""
    flat = st.sampled_from(FLAT_TYPES)
    if max_depth == 0:
        return flat
    inner = value_types(max_depth - 1)
    field = st.builds(pa.field, st.just("item"), inner, st.booleans())
    return st.one_of(
        flat,
        st.builds(pa.list_, field),
        st.lists(st.tuples(inner, st.booleans()), min_size=1, max_size=3).map(_struct_type),
        st.builds(pa.map_, flat, st.builds(pa.field, st.just("value"), inner, st.booleans())),
    )


def key_types(scheme: str) -> st.SearchStrategy[pa.DataType]:
    """Strategy for any type of a key column that ``scheme`` takes."""
    flat = [data_type for data_type in FLAT_TYPES if _is_key_type(data_type, scheme)]
    parts = st.lists(st.tuples(st.sampled_from(flat), st.booleans()), min_size=1, max_size=3)
    return st.one_of(st.sampled_from(flat), parts.map(_struct_type))


def values(data_type: pa.DataType, *, nullable: bool = False) -> st.SearchStrategy[Any]:
    """Strategy for plain values (see :mod:`keygroups.testing.model`) of a type."""
    strategy = _values(data_type)
    return st.one_of(st.none(), strategy) if nullable else strategy


@st.composite
def tables(
    draw: st.DrawFn,
    *,
    min_rows: int = 0,
    max_rows: int = 30,
    schemes: tuple[str, ...] = SCHEMES,
    max_depth: int = 2,
) -> KeyedTable:
    """Strategy for tables of any key and value types, with distinct keys."""
    scheme = draw(st.sampled_from(schemes))
    types = draw(st.lists(key_types(scheme), min_size=1, max_size=3))
    is_composite = len(types) > 1
    key = tuple(pa.field(f"k{i}", t, nullable=is_composite) for i, t in enumerate(types))
    value = tuple(
        pa.field(f"v{i}", t, draw(st.booleans()))
        for i, t in enumerate(draw(st.lists(value_types(max_depth), max_size=3)))
    )
    schema = RowSchema(key, value)
    row = st.tuples(*(values(field.type, nullable=field.nullable) for field in schema.user))
    stored = Model(schema)._key  # noqa: SLF001 - the one definition of equal keys
    rows = draw(
        st.lists(
            row,
            min_size=min_rows,
            max_size=max_rows,
            unique_by=lambda row: stored(row[: len(key)]),
        )
    )
    return KeyedTable(
        table_of(rows, schema.user), tuple(f.name for f in key), scheme, tuple(rows), schema
    )


def _struct_type(fields: list[tuple[pa.DataType, bool]]) -> pa.DataType:
    return pa.struct([pa.field(f"f{i}", t, nullable) for i, (t, nullable) in enumerate(fields)])


def _is_key_type(data_type: pa.DataType, scheme: str) -> bool:
    if scheme == "spark" and data_type == pa.timestamp("ns"):
        return False  # it takes whole microseconds only
    try:
        check_key_type(data_type, scheme)
    except InvalidArgument:
        return False
    return True


def _values(data_type: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(data_type):
        return st.tuples(*(values(field.type, nullable=field.nullable) for field in data_type))
    if pa.types.is_list(data_type):
        item = data_type.value_field
        return st.lists(values(item.type, nullable=item.nullable), max_size=3).map(tuple)
    if pa.types.is_map(data_type):
        item = data_type.item_field
        pair = st.tuples(values(data_type.key_type), values(item.type, nullable=item.nullable))
        return st.lists(pair, max_size=3, unique_by=lambda pair: pair[0]).map(tuple)
    if isinstance(data_type, pa.UuidType):
        return st.binary(min_size=16, max_size=16)
    if pa.types.is_boolean(data_type):
        return st.booleans()
    if pa.types.is_integer(data_type):
        bits = data_type.bit_width
        low = -(1 << (bits - 1)) if pa.types.is_signed_integer(data_type) else 0
        return _integers(low, low + (1 << bits) - 1)
    if pa.types.is_floating(data_type):
        return _float_bits(data_type.bit_width)
    if pa.types.is_decimal128(data_type):
        largest = 10**data_type.precision - 1
        return _integers(-largest, largest)
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        return st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
    if pa.types.is_fixed_size_binary(data_type):
        return st.binary(min_size=data_type.byte_width, max_size=data_type.byte_width)
    if pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type):
        return st.binary(max_size=12)
    return _temporal(data_type)


def _temporal(data_type: pa.DataType) -> st.SearchStrategy[int]:
    if pa.types.is_date(data_type):
        return _integers(-700_000, 2_900_000)
    if pa.types.is_time(data_type):
        return _integers(0, _UNITS_A_DAY[data_type.unit] - 1)
    limit = _TIME_LIMIT[data_type.unit] if pa.types.is_timestamp(data_type) else (1 << 63) - 1
    return _integers(-limit, limit)


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    """Integers, with 0, -1 and the bounds far more often than by chance."""
    corners = [n for n in (0, 1, -1, low, high) if low <= n <= high]
    return st.one_of(st.sampled_from(corners), st.integers(low, high))


def _float_bits(bits: int) -> st.SearchStrategy[int]:
    """Bits of floats: zeros of both signs, infinities, NaNs of several payloads, and any."""
    exponent = {16: 0x7C00, 32: 0x7F80_0000, 64: 0x7FF0_0000_0000_0000}[bits]
    sign = 1 << (bits - 1)
    corners = [0, sign, exponent, exponent | sign, exponent | exponent >> 1 | 1, exponent + 1]
    quiet = (exponent << 1 | exponent) & (sign - 1)
    return st.one_of(st.sampled_from([*corners, quiet, sign | quiet]), st.integers(0, sign * 2 - 1))
