"""The columns ``key_group`` and ``subtask``: where a row belongs, computed by Spark.

With them any DataFrame can be placed as a snapshot is, for instance
``df.repartitionById(P, subtask(key_group("id", M, type="bigint"), M, P))``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
from pyspark.sql import Column
from pyspark.sql import functions as sf
from pyspark.sql import types as spark

from keygroups.assignment import (
    KeyGroupRange,
    check_max_parallelism,
    check_parallelism,
    key_group_ranges,
    ranges_of_starts,
)
from keygroups.errors import InvalidArgument
from keygroups.hashing import assign_key_groups, check_key_type, check_scheme
from keygroups.spark.hashcode import flink_key_group, java_hash_code
from keygroups.spark.types import arrow_type

ColumnOrName: TypeAlias = Column | str

# Raised inside the JVM; keygroups.spark.failures finds the name of our error in it.
_NULL_KEY = (
    "keygroups.errors.InvalidArgument: a key is null; drop or replace null keys first, for "
    "instance with df.na.drop(subset=[key])"
)


def key_group(
    col: ColumnOrName,
    max_parallelism: int,
    scheme: str = "flink",
    *,
    type: str | spark.DataType | None = None,
    native: bool = True,
) -> Column:
    """Returns the key group of each key, ``int``: what ``keygroups.assign_key_groups`` gives.

    A column does not know its type before it meets a DataFrame. Told the ``type``, Spark
    computes scheme ``flink`` inside the JVM for integers, booleans, dates, timestamps, strings,
    floats, doubles, and structs of these. Otherwise, and for other types, an Arrow function
    computes it in Python: the same values at two to five times the cost. Scheme ``spark``
    is always computed in the JVM, ``murmur3`` always in Python.

    Args:
        col: The key column; for a composite key a struct, ``sf.struct("a", "b")``.
        max_parallelism: How many key groups there are.
        scheme: ``"flink"``, ``"murmur3"`` or ``"spark"``.
        type: The column's type, ``df.schema["id"].dataType`` or its name (``"bigint"``).
        native: Whether reflection (``java_method``) may be used for strings, floats and
            doubles. ``False`` where the platform forbids it: then these go through Arrow too.

    Raises:
        InvalidArgument: If an argument is out of bounds, or the scheme takes no such keys. A
            null key fails the query.
    """
    check_scheme(scheme)
    max_parallelism = check_max_parallelism(max_parallelism)
    column = sf.col(col) if isinstance(col, str) else col
    data_type = spark.DataType.fromDDL(type) if isinstance(type, str) else type
    if data_type is not None:
        check_key_type(arrow_type(data_type), scheme)
    if scheme == "spark":
        return _without_nulls(column, sf.pmod(sf.hash(column), sf.lit(max_parallelism)))
    if scheme == "flink" and data_type is not None:
        code = java_hash_code(column, data_type, reflection=native)
        if code is not None:
            return _without_nulls(column, flink_key_group(code, max_parallelism))
    # PySpark's stub of the module does not list it.
    arrow_udf: Any = sf.arrow_udf  # type: ignore[attr-defined]
    udf = arrow_udf(_arrow_function(max_parallelism, scheme), spark.IntegerType())
    result: Column = udf(column)
    return result


def subtask(
    key_group: ColumnOrName,
    max_parallelism: int,
    parallelism: int | None = None,
    *,
    ranges: Sequence[KeyGroupRange] | None = None,
) -> Column:
    """Returns the subtask that owns each key group, ``int``: the argument of ``repartitionById``.

    Args:
        key_group: A column of key groups, as :func:`key_group` returns it.
        max_parallelism: How many key groups there are.
        parallelism: How many subtasks there are; then Flink's formula says which one it is.
        ranges: Instead of that, the ranges of a cut, in order: subtask ``i`` owns ``ranges[i]``.

    Raises:
        InvalidArgument: If a number is out of bounds, the ranges do not tile all key groups, or
            not exactly one of ``parallelism`` and ``ranges`` is given.
    """
    column = sf.col(key_group) if isinstance(key_group, str) else key_group
    if (parallelism is None) == (ranges is None):
        raise InvalidArgument("give either parallelism or ranges")
    if parallelism is not None:
        max_parallelism, parallelism = check_parallelism(max_parallelism, parallelism)
        # Below 2^30, so int arithmetic is exact; `div` is Spark's integral division.
        return sf.call_function("div", column * sf.lit(parallelism), sf.lit(max_parallelism)).cast(
            "int"
        )
    cut = _checked_cut(ranges or (), max_parallelism)
    if cut == key_group_ranges(max_parallelism, len(cut)):
        return subtask(column, max_parallelism, len(cut))
    owners = np.repeat(np.arange(len(cut)), [len(key_groups) for key_groups in cut])
    # One string literal, which Spark folds to an array before the query runs; as many
    # literals as key groups would make plans of megabytes.
    table = sf.split(sf.lit(",".join(map(str, owners.tolist()))), ",").cast("array<int>")
    return sf.element_at(table, column + sf.lit(1))


def _without_nulls(keys: Column, result: Column) -> Column:
    failure = sf.raise_error(sf.lit(_NULL_KEY)).cast("int")
    return sf.when(keys.isNull(), failure).otherwise(result)


def _arrow_function(max_parallelism: int, scheme: str) -> Callable[[pa.Array], pa.Array]:
    def key_groups(keys: pa.Array) -> pa.Array:
        return assign_key_groups(keys, max_parallelism, scheme).cast(pa.int32())

    return key_groups


def _checked_cut(ranges: Sequence[KeyGroupRange], max_parallelism: int) -> list[KeyGroupRange]:
    cut = list(ranges)
    if not cut or ranges_of_starts([r.start for r in cut], max_parallelism) != cut:
        raise InvalidArgument(
            f"the ranges {cut!r:.200} do not tile the key groups [0, {max_parallelism - 1}]"
        )
    return cut
