"""Filters that Spark offers, as the key groups and keys that can match them.

Only filters that cannot drop a row too many are used, and Spark applies all of them again. Keys
of floats are left out: Spark takes 0.0 and -0.0 for equal, which are two keys here.

Off unless option ``pushdown`` asks for it. Spark (seen in 4.3) keeps what a Python reader planned
under one filter and takes it for the next query on the same DataFrame, and for both sides of a
union of it with itself: rows are missing, without an error. So nothing that changes with the
filters is safe unless each query loads a DataFrame of its own.
"""

from __future__ import annotations

import datetime as dt
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from keygroups.assignment import KeyGroupRange
from keygroups.errors import InvalidArgument
from keygroups.keys import kind_of
from keygroups.snapshot.backend import RowSchema
from keygroups.spark.types import arrow_type, spark_field

KEY_GROUP = "key_group"
_KEYS_LIMIT = 10_000
_KINDS = frozenset({"bool", "int", "decimal", "date", "timestamp", "string", "binary"})

_COMPARISONS: dict[type[Filter], Callable[[Any, Any], Any]] = {
    EqualTo: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}


def matching_key_groups(
    filters: Sequence[Filter], max_parallelism: int
) -> npt.NDArray[np.bool_] | None:
    """Returns for each key group whether filters on ``key_group`` let it pass; ``None``: all."""
    groups = np.arange(max_parallelism)
    passes: npt.NDArray[np.bool_] | None = None
    for found in filters:
        if getattr(found, "attribute", None) != (KEY_GROUP,):
            continue
        value, compare = getattr(found, "value", None), _COMPARISONS.get(type(found))
        if isinstance(found, In):
            mask = np.isin(groups, [v for v in found.value if isinstance(v, int)])
        elif compare is not None and isinstance(value, int):
            mask = compare(groups, value)
        else:
            continue
        passes = mask if passes is None else passes & mask
    return passes


def matching_keys(filters: Sequence[Filter], schema: RowSchema) -> pa.Array | None:
    """Returns the keys that filters allow, as ``Snapshot.to_batches`` takes them; ``None``: all."""
    candidates = []
    for field in schema.key:
        values = _allowed(filters, field.name)
        if values is None:
            return None
        candidates.append(values)
    count = int(np.prod([len(values) for values in candidates]))
    if count > _KEYS_LIMIT:
        return None
    rows = list(itertools.product(*candidates))
    columns = []
    for place, field in enumerate(schema.key):
        column = _key_column([row[place] for row in rows], field)
        if column is None:
            return None
        columns.append(column)
    if len(columns) == 1:
        return columns[0]
    return pa.StructArray.from_arrays(columns, fields=list(schema.key))


def ranges_where(passes: npt.NDArray[np.bool_], key_groups: KeyGroupRange) -> list[KeyGroupRange]:
    """Returns the maximal ranges of passing key groups within ``key_groups``."""
    inside = passes[key_groups.start : key_groups.end + 1].astype(np.int8)
    edges = np.flatnonzero(np.diff(inside, prepend=0, append=0)) + key_groups.start
    return [
        KeyGroupRange(start, end - 1)
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)
    ]


def _allowed(filters: Sequence[Filter], name: str) -> list[Any] | None:
    """The fewest values that one filter allows a column; null equals nothing."""
    allowed = [
        [value for value in (f.value if isinstance(f, In) else (f.value,)) if value is not None]
        for f in filters
        if isinstance(f, (EqualTo, In)) and f.attribute == (name,)
    ]
    return min(allowed, key=len, default=None)


def _key_column(values: list[Any], field: pa.Field) -> pa.Array | None:
    """The values as key column, if Spark's equality of them is that of keys."""
    if kind_of(field.type) not in _KINDS:
        return None
    is_instant = pa.types.is_timestamp(field.type) and field.type.tz is not None
    if is_instant and not all(isinstance(v, dt.datetime) and v.tzinfo for v in values):
        return None
    try:
        return pa.array(values, arrow_type(spark_field(field).dataType)).cast(field.type)
    except (pa.ArrowException, InvalidArgument, TypeError, ValueError, OverflowError):
        return None
