"""Types on both sides: what a Spark column is in a snapshot, and what comes back.

Both directions are written out here and not taken from PySpark, whose converters are internal
and change. Spark's types all have an Arrow type; some Arrow types have no Spark type and are
read as the next one that holds every value: unsigned integers wider, ``float16`` as ``float``,
UUIDs as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa
from pyspark.sql import types as spark

from keygroups.errors import InvalidArgument

_MAX_DIGITS = 38
_UTC = "UTC"

_FROM_SPARK: dict[type[spark.DataType], Callable[[], pa.DataType]] = {
    spark.BooleanType: pa.bool_,
    spark.ByteType: pa.int8,
    spark.ShortType: pa.int16,
    spark.IntegerType: pa.int32,
    spark.LongType: pa.int64,
    spark.FloatType: pa.float32,
    spark.DoubleType: pa.float64,
    spark.StringType: pa.string,
    spark.CharType: pa.string,
    spark.VarcharType: pa.string,
    spark.BinaryType: pa.binary,
    spark.DateType: pa.date32,
    spark.TimestampType: lambda: pa.timestamp("us", _UTC),
    spark.TimestampNTZType: lambda: pa.timestamp("us"),
    spark.TimeType: lambda: pa.time64("ns"),
    spark.DayTimeIntervalType: lambda: pa.duration("us"),
}

_TO_SPARK: dict[pa.DataType, Callable[[], spark.DataType]] = {
    pa.bool_(): spark.BooleanType,
    pa.int8(): spark.ByteType,
    pa.int16(): spark.ShortType,
    pa.int32(): spark.IntegerType,
    pa.int64(): spark.LongType,
    pa.uint8(): spark.ShortType,
    pa.uint16(): spark.IntegerType,
    pa.uint32(): spark.LongType,
    pa.uint64(): lambda: spark.DecimalType(20, 0),
    pa.float16(): spark.FloatType,
    pa.float32(): spark.FloatType,
    pa.float64(): spark.DoubleType,
    pa.string(): spark.StringType,
    pa.large_string(): spark.StringType,
    pa.binary(): spark.BinaryType,
    pa.large_binary(): spark.BinaryType,
    pa.date32(): spark.DateType,
}


def arrow_schema(schema: spark.StructType) -> pa.Schema:
    """Returns the Arrow schema of a Spark schema; its timestamps are in UTC.

    Raises:
        InvalidArgument: If a column has a type that state cannot hold; the message names it.
    """
    fields = []
    for field in schema.fields:
        try:
            fields.append(pa.field(field.name, arrow_type(field.dataType), field.nullable))
        except InvalidArgument as error:
            raise InvalidArgument(f"column {field.name!r}: {error}") from None
    return pa.schema(fields)


def arrow_type(data_type: spark.DataType) -> pa.DataType:
    """Returns the Arrow type of a Spark type.

    Raises:
        InvalidArgument: If state cannot hold it.
    """
    if type(data_type) in _FROM_SPARK:
        return _FROM_SPARK[type(data_type)]()
    if isinstance(data_type, spark.DecimalType):
        return pa.decimal128(data_type.precision, data_type.scale)
    if isinstance(data_type, spark.ArrayType):
        item = arrow_type(data_type.elementType)
        return pa.list_(pa.field("element", item, data_type.containsNull))
    if isinstance(data_type, spark.MapType):
        key, value = arrow_type(data_type.keyType), arrow_type(data_type.valueType)
        return pa.map_(
            pa.field("key", key, nullable=False),
            pa.field("value", value, data_type.valueContainsNull),
        )
    if isinstance(data_type, spark.StructType):
        return pa.struct(
            [pa.field(f.name, arrow_type(f.dataType), f.nullable) for f in data_type.fields]
        )
    raise InvalidArgument(
        f"state cannot hold Spark's type {data_type.simpleString()}; cast or drop the column"
    )


def spark_field(field: pa.Field) -> spark.StructField:
    """Returns the Spark column in which a column of a snapshot is read.

    Raises:
        InvalidArgument: If Spark has no type for it; the message names the column.
    """
    try:
        is_uuid = isinstance(field.type, pa.UuidType)
        data_type = spark.StringType() if is_uuid else spark_type(field.type)
    except InvalidArgument as error:
        raise InvalidArgument(f"column {field.name!r}: {error}") from None
    return spark.StructField(field.name, data_type, field.nullable)


def spark_type(data_type: pa.DataType) -> spark.DataType:
    """Returns the Spark type in which an Arrow type is read.

    Raises:
        InvalidArgument: If Spark has none.
    """
    t = pa.types
    if data_type in _TO_SPARK:
        return _TO_SPARK[data_type]()
    if t.is_fixed_size_binary(data_type) and not isinstance(data_type, pa.BaseExtensionType):
        return spark.BinaryType()
    if t.is_decimal128(data_type) and 0 <= data_type.scale <= data_type.precision <= _MAX_DIGITS:
        return spark.DecimalType(data_type.precision, data_type.scale)
    if t.is_timestamp(data_type):
        return spark.TimestampNTZType() if data_type.tz is None else spark.TimestampType()
    if t.is_time(data_type):
        return spark.TimeType()
    if t.is_duration(data_type):
        return spark.DayTimeIntervalType()
    if t.is_list(data_type):
        item = data_type.value_field
        return spark.ArrayType(spark_type(item.type), item.nullable)
    if t.is_map(data_type):
        key, item = data_type.key_type, data_type.item_field
        return spark.MapType(spark_type(key), spark_type(item.type), item.nullable)
    if t.is_struct(data_type):
        fields = [data_type.field(i) for i in range(data_type.num_fields)]
        return spark.StructType(
            [spark.StructField(f.name, spark_type(f.type), f.nullable) for f in fields]
        )
    raise InvalidArgument(
        f"Spark has no type for Arrow's {data_type}; leave it out: name the other columns in "
        f"option 'columns'"
    )


def cast_columns(columns: Sequence[pa.Array], schema: pa.Schema) -> list[pa.Array]:
    """Returns ``columns`` in the types of ``schema``, without a copy where they are alike.

    Raises:
        InvalidArgument: If a value does not fit; the message names the column.
    """
    return [_cast(column, field) for column, field in zip(columns, schema, strict=True)]


def _cast(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.type == field.type:
        return column
    try:
        if isinstance(column.type, pa.UuidType):
            column = _uuid_text(column)
        return column.cast(field.type)
    except pa.ArrowException as error:
        raise InvalidArgument(
            f"column {field.name!r} has a value that is no {field.type}: {error}"
        ) from None


def _uuid_text(column: pa.Array) -> pa.StringArray:
    """UUIDs in their canonical form: 36 characters, lower case."""
    rows = len(column)
    storage = column.storage.fill_null(bytes(16)) if column.null_count else column.storage
    raw = np.frombuffer(storage.buffers()[1], np.uint8, 16 * rows, 16 * storage.offset)
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    nibbles = digits[np.stack((raw >> 4, raw & 15), axis=1)].reshape(rows, 32)
    text = np.insert(nibbles, (8, 12, 16, 20), ord("-"), axis=1)
    offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int32) * 36)
    valid = pa.array(column.is_valid()).buffers()[1] if column.null_count else None
    data = pa.py_buffer(np.ascontiguousarray(text))
    return pa.Array.from_buffers(pa.string(), rows, [valid, offsets, data])
