"""Java's ``hashCode`` of a Spark column as an expression: computed in the JVM, without Python.

Integers, booleans, dates and timestamps are plain SQL. Strings, floats and doubles call
``java.util.Objects.hashCode`` by ``java_method``, Spark's public door to reflection: Catalyst
takes that for non-deterministic, so project it before it is grouped by or aggregated. Every
expression is right with ANSI mode on and off: what could overflow is computed in ``bigint``.
"""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import Column
from pyspark.sql import functions as sf
from pyspark.sql import types as spark

# Spark's hash() takes the hash of one argument as the seed of the next. This is the integer
# whose hash is 0, so what follows it is hashed with seed 0, as Flink does.
SEED_ZERO = -1693959553

_REFLECTED = (spark.StringType, spark.FloatType, spark.DoubleType)


def java_hash_code(column: Column, data_type: spark.DataType, *, reflection: bool) -> Column | None:
    """Returns the ``hashCode`` (``int``) of a column without nulls; ``None`` if SQL has none.

    Args:
        column: The keys.
        data_type: Their type.
        reflection: Whether ``java_method`` may be used.
    """
    if isinstance(data_type, spark.StructType):
        return _struct(column, data_type, reflection=reflection)
    if isinstance(data_type, _REFLECTED):
        return _reflected(column) if reflection else None
    expression = _EXPRESSIONS.get(type(data_type))
    return None if expression is None else expression(column)


def flink_key_group(hash_code: Column, max_parallelism: int) -> Column:
    """Returns ``abs_(murmur(hash_code)) mod max_parallelism`` as an ``int``."""
    murmur = sf.hash(sf.lit(SEED_ZERO), hash_code).cast("bigint")
    # abs_(-2^31) is 0: that is the only value that the mask changes.
    absolute = sf.abs(murmur).bitwiseAND(sf.lit(0x7FFFFFFF))
    return (absolute % sf.lit(max_parallelism)).cast("int")


def _struct(column: Column, data_type: spark.StructType, *, reflection: bool) -> Column | None:
    """A Flink tuple: ``r = h0; r = 31 r + hi``; a null field counts 0."""
    folded: Column | None = None
    for field in data_type.fields:
        part = column.getField(field.name)
        code = java_hash_code(part, field.dataType, reflection=reflection)
        if code is None:
            return None
        code = sf.when(part.isNull(), sf.lit(0)).otherwise(code)
        folded = code if folded is None else _low_word(folded.cast("bigint") * 31 + code)
    return folded


def _reflected(column: Column) -> Column:
    class_name, method = sf.lit("java.util.Objects"), sf.lit("hashCode")
    return sf.java_method(class_name, method, column).cast("int")


def _int(column: Column) -> Column:
    return column.cast("int")


def _bool(column: Column) -> Column:
    return sf.when(column, sf.lit(1231)).otherwise(sf.lit(1237))


def _long(column: Column) -> Column:
    return _low_word(column.bitwiseXOR(sf.shiftrightunsigned(column, 32)))


def _date(column: Column) -> Column:
    """``LocalDate``: ``(y & 0xFFFFF800) ^ ((y << 11) + (m << 6) + d)``; the sum has no carries."""
    year, month, day = sf.year(column), sf.month(column), sf.day(column)
    packed = sf.shiftleft(year, 11).bitwiseOR(sf.shiftleft(month, 6)).bitwiseOR(day)
    return year.bitwiseAND(sf.lit(-2048)).bitwiseXOR(packed)


def _timestamp(column: Column) -> Column:
    """``Instant``: the hash of the seconds and 51 times the nanoseconds."""
    micros = sf.pmod(sf.unix_micros(column), sf.lit(1_000_000))
    return _low_word(_long(sf.unix_seconds(column)).cast("bigint") + micros * 51_000)


def _low_word(column: Column) -> Column:
    """The low 32 bits of a ``bigint`` as an ``int``; shifts, unlike casts, never overflow."""
    return sf.shiftright(sf.shiftleft(column, 32), 32).cast("int")


_EXPRESSIONS: dict[type[spark.DataType], Callable[[Column], Column]] = {
    spark.BooleanType: _bool,
    spark.ByteType: _int,
    spark.ShortType: _int,
    spark.IntegerType: _int,
    spark.LongType: _long,
    spark.DateType: _date,
    spark.TimestampType: _timestamp,
}
