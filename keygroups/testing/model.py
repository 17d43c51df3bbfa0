"""The oracle: a snapshot as a plain dictionary from key to row, one key at a time.

Values are *plain*: hashable Python, equal exactly when the stored bits are. Floats are their IEEE
bits (so NaN equals itself and -0.0 is not 0.0), times and dates the integers that store them,
decimals their unscaled integers, UUIDs their bytes, nested values tuples.
"""

from __future__ import annotations

import decimal
import itertools
import uuid
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from keygroups.assignment import KeyGroupRange
from keygroups.hashing import assign_to_key_group, hash_keys
from keygroups.keys import encode_keys
from keygroups.snapshot.backend import RowSchema
from keygroups.snapshot.reader import Snapshot

Plain: TypeAlias = Any
PlainRow: TypeAlias = tuple[Plain, ...]

_CANONICAL_NAN = {16: 0x7E00, 32: 0x7FC0_0000, 64: 0x7FF8_0000_0000_0000}
_EXPONENTS = {16: 0x7C00, 32: 0x7F80_0000, 64: 0x7FF0_0000_0000_0000}


class Model:
    """What a snapshot of these rows must hold, found out the slow way.

    Attributes:
        schema: Key and value columns.
        scheme: How keys are hashed.
        max_parallelism: How many key groups there are.
        parallelism: How many ranges.
        rows: From plain key to plain value columns.
    """

    def __init__(
        self,
        schema: RowSchema,
        rows: Iterable[PlainRow] = (),
        *,
        scheme: str = "flink",
        max_parallelism: int = 128,
        parallelism: int = 1,
    ) -> None:
        self.schema = schema
        self.scheme = scheme
        self.max_parallelism = max_parallelism
        self.parallelism = parallelism
        self.rows: dict[PlainRow, PlainRow] = {}
        self._facts: dict[PlainRow, tuple[Any, int, bytes]] = {}
        for row in rows:
            width = len(schema.key)
            self.rows[self._key(row[:width])] = row[width:]

    @property
    def ranges(self) -> list[KeyGroupRange]:
        """Flink's cut, by asking for each key group to whom it belongs."""
        owned: list[list[int]] = [[] for _ in range(self.parallelism)]
        for group in range(self.max_parallelism):
            owned[group * self.parallelism // self.max_parallelism].append(group)
        return [KeyGroupRange(groups[0], groups[-1]) for groups in owned]

    def key_group(self, key: PlainRow) -> int:
        """Returns the key group of a plain key."""
        value = self._facts_of(key)[0]
        return assign_to_key_group(value, self.max_parallelism, self.scheme, self.schema.key_type)

    def stored_rows(self, key_groups: KeyGroupRange | None = None) -> list[PlainRow]:
        """Returns the rows of a range in snapshot order: key group, key hash, key, value."""
        found = []
        for key, value in self.rows.items():
            group = self.key_group(key)
            if key_groups is None or group in key_groups:
                _, key_hash, key_bytes = self._facts_of(key)
                found.append(((group, key_hash, key_bytes), (group, key_hash, *key, *value)))
        return [row for _, row in sorted(found, key=lambda pair: pair[0])]

    def expect(self, snapshot: Snapshot, ranges: Sequence[KeyGroupRange] | None = None) -> None:
        """Asserts that a snapshot holds exactly this, range by range.

        Args:
            snapshot: The snapshot.
            ranges: Its cut; Flink's if ``None``.
        """
        expected = self.ranges if ranges is None else list(ranges)
        assert snapshot.ranges == expected
        assert snapshot.max_parallelism == self.max_parallelism
        names = self.schema.stored.names
        rows = self.stored_rows()
        for key_groups in expected:
            found = rows_of(snapshot.to_table(key_groups, columns=names))
            assert found == [row for row in rows if row[0] in key_groups], key_groups
        counts = np.bincount([row[0] for row in rows], minlength=self.max_parallelism)
        assert snapshot.key_group_sizes().column("rows").to_pylist() == counts.tolist()

    def _key(self, key: PlainRow) -> PlainRow:
        """A plain key as it is stored: with the one NaN."""
        fields = zip(key, self.schema.key, strict=True)
        return tuple(_with_one_nan(part, field.type) for part, field in fields)

    def _facts_of(self, key: PlainRow) -> tuple[Any, int, bytes]:
        """A key as a Python value, its hash and its bytes, each computed for it alone."""
        if key not in self._facts:
            columns = [
                array_of([part], field.type)
                for part, field in zip(key, self.schema.key, strict=True)
            ]
            table = pa.table(columns, schema=pa.schema(self.schema.key))
            array = self.schema.key_array(table)
            parts = zip(key, self.schema.key, strict=True)
            value = tuple(_python_value(part, field.type) for part, field in parts)
            self._facts[key] = (
                value[0] if len(value) == 1 else value,
                hash_keys(array, self.scheme)[0].as_py(),
                encode_keys([array])[0].as_py(),
            )
        return self._facts[key]


def rows_of(table: pa.Table) -> list[PlainRow]:
    """Returns the rows of a table as tuples of plain values."""
    columns = [
        [value for chunk in column.chunks for value in plain(chunk)] for column in table.columns
    ]
    return list(zip(*columns, strict=True)) if columns else [()] * table.num_rows


def table_of(rows: Sequence[PlainRow], schema: pa.Schema) -> pa.Table:
    """Returns plain rows as a table."""
    columns = [array_of([row[i] for row in rows], field.type) for i, field in enumerate(schema)]
    return pa.table(columns, schema=schema)


def plain(array: pa.Array) -> list[Plain]:
    """Returns the plain values of an array."""
    data_type = array.type
    if isinstance(array, pa.ExtensionArray):
        return plain(array.storage)
    if pa.types.is_struct(data_type):
        children = [plain(child) for child in array.flatten()]
        values: list[Plain] = list(zip(*children, strict=True))
    elif pa.types.is_map(data_type) or pa.types.is_list(data_type):
        if pa.types.is_map(data_type):
            items: list[Plain] = list(zip(plain(array.keys), plain(array.items), strict=True))
        else:
            items = plain(array.values)
        borders = itertools.pairwise(array.offsets.to_pylist())
        values = [tuple(items[start:end]) for start, end in borders]
    elif pa.types.is_decimal128(data_type):
        values = [None if v is None else _unscaled(v, data_type.scale) for v in array.to_pylist()]
    elif integers := _integer_type(data_type):
        values = array.view(integers).to_pylist()
    else:
        values = array.to_pylist()
    valid = array.is_valid().to_pylist()
    return [value if ok else None for value, ok in zip(values, valid, strict=True)]


def array_of(values: Sequence[Plain], data_type: pa.DataType) -> pa.Array:
    """Returns the array of plain values: the inverse of :func:`plain`."""
    if isinstance(data_type, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(data_type, array_of(values, data_type.storage_type))
    mask = pa.array([value is None for value in values], pa.bool_())
    if pa.types.is_struct(data_type):
        children = [
            array_of([_part(value, i, field) for value in values], field.type)
            for i, field in enumerate(data_type)
        ]
        return pa.StructArray.from_arrays(children, fields=list(data_type), mask=mask)
    if pa.types.is_map(data_type) or pa.types.is_list(data_type):
        lengths = [0 if value is None else len(value) for value in values]
        offsets = pa.array(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))
        items = [item for value in values if value is not None for item in value]
        if pa.types.is_list(data_type):
            child = array_of(items, data_type.value_type)
            return pa.ListArray.from_arrays(offsets, child, type=data_type, mask=mask)
        keys = array_of([key for key, _ in items], data_type.key_type)
        mapped = array_of([item for _, item in items], data_type.item_type)
        return pa.MapArray.from_arrays(offsets, keys, mapped, type=data_type, mask=mask)
    if pa.types.is_decimal128(data_type):
        return pa.array([_python_value(v, data_type) for v in values], data_type)
    if integers := _integer_type(data_type):
        return pa.array(values, integers).view(data_type)
    return pa.array(values, data_type)


def _part(value: Plain, index: int, field: pa.Field) -> Plain:
    """A field of a struct; under a null struct, a null or else anything."""
    if value is not None:
        return value[index]
    return None if field.nullable else _anything(field.type)


def _anything(data_type: pa.DataType) -> Plain:
    """Some value of the type."""
    if isinstance(data_type, pa.BaseExtensionType):
        return _anything(data_type.storage_type)
    if pa.types.is_struct(data_type):
        return tuple(_part(None, i, field) for i, field in enumerate(data_type))
    if pa.types.is_fixed_size_binary(data_type) and not pa.types.is_decimal(data_type):
        return b"x" * data_type.byte_width
    if pa.types.is_list(data_type) or pa.types.is_map(data_type):
        return ()
    if pa.types.is_string(data_type) or pa.types.is_large_string(data_type):
        return "x"
    if pa.types.is_binary(data_type) or pa.types.is_large_binary(data_type):
        return b"x"
    return True if pa.types.is_boolean(data_type) else 1


def _integer_type(data_type: pa.DataType) -> pa.DataType | None:
    """The integer type with the bits of a float or temporal type."""
    if pa.types.is_floating(data_type):
        return {16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()}[data_type.bit_width]
    if pa.types.is_temporal(data_type):
        return {32: pa.int32(), 64: pa.int64()}[data_type.bit_width]
    return None


def _with_one_nan(value: Plain, data_type: pa.DataType) -> Plain:
    if value is None:
        return None
    if pa.types.is_struct(data_type):
        parts = zip(value, data_type, strict=True)
        return tuple(_with_one_nan(part, field.type) for part, field in parts)
    if pa.types.is_floating(data_type):
        bits = data_type.bit_width
        magnitude = value & ((1 << (bits - 1)) - 1)
        return _CANONICAL_NAN[bits] if magnitude > _EXPONENTS[bits] else value
    return value


def _unscaled(value: decimal.Decimal, scale: int) -> int:
    sign, digits, exponent = value.as_tuple()
    assert exponent == -scale
    unscaled = int("".join(map(str, digits)))
    return -unscaled if sign else unscaled


def _python_value(value: Plain, data_type: pa.DataType) -> Any:
    """A plain value as a Python value that Arrow and the hashes take."""
    if value is None:
        return None
    if pa.types.is_struct(data_type):
        parts = zip(value, data_type, strict=True)
        return tuple(_python_value(part, field.type) for part, field in parts)
    if pa.types.is_decimal128(data_type):
        digits = tuple(map(int, str(abs(value))))
        return decimal.Decimal((int(value < 0), digits, -data_type.scale))
    if pa.types.is_floating(data_type):
        width = data_type.bit_width
        return float(np.array([value], f"u{width // 8}").view(f"f{width // 8}")[0])
    if isinstance(data_type, pa.UuidType):
        return uuid.UUID(bytes=value)
    return value
