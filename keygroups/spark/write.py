"""Writing a DataFrame as a snapshot of one run a range: rows are placed first, then written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from os import PathLike
from typing import Literal

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql import types as spark

from keygroups.assignment import check_parallelism, default_max_parallelism
from keygroups.errors import InvalidArgument
from keygroups.snapshot.commit import Attempt
from keygroups.snapshot.reader import Snapshot
from keygroups.snapshot.storage import LocalStorage
from keygroups.snapshot.writer import DEFAULT_STATE, DEFAULT_UID
from keygroups.spark.datasource import register
from keygroups.spark.failures import our_errors
from keygroups.spark.functions import key_group, subtask
from keygroups.spark.options import local_path

Mode = Literal["errorifexists", "overwrite"]


def write_snapshot(
    df: DataFrame,
    path: str | PathLike[str],
    *,
    key: str | Sequence[str],
    max_parallelism: int | None = None,
    parallelism: int,
    backend: str = "parquet",
    scheme: str = "flink",
    uid: str = DEFAULT_UID,
    state: str = DEFAULT_STATE,
    mode: Mode = "errorifexists",
    native: bool = True,
) -> Snapshot:
    """Writes a DataFrame as a snapshot: all of it, or nothing that anybody sees.

    Rows are shuffled so that task *i* has exactly the rows of range *i* and writes them as one
    sorted run; the driver commits. The data source is registered on the way.

    Args:
        df: The rows, each key once; of a classic session or of Spark Connect.
        path: A directory that the driver and every executor see (and a Connect client, for the
            returned value).
        key: The key column, or several: a list, or names joined by commas.
        max_parallelism: How many key groups; Flink's default for the parallelism if ``None``.
        parallelism: How many ranges, which is how many tasks write.
        backend: ``"parquet"`` or ``"rocksdb"``.
        scheme: ``"flink"``, ``"murmur3"`` or ``"spark"``.
        uid: The operator uid.
        state: The name of the state.
        mode: What to do if a snapshot is there: raise, or replace it by the commit.
        native: As of :func:`keygroups.spark.key_group`.

    Returns:
        The committed snapshot.

    Raises:
        InvalidArgument: If an argument is out of bounds, a key is null or there twice, or a
            column has a type that state cannot have.
        SnapshotExists: If a snapshot is there and mode is ``"errorifexists"``.
        StorageUnavailable: If the disk refuses.
    """
    if mode not in ("errorifexists", "overwrite"):
        raise InvalidArgument(f"mode {mode!r} is neither 'errorifexists' nor 'overwrite'")
    if max_parallelism is None:
        max_parallelism = default_max_parallelism(parallelism)
    max_parallelism, parallelism = check_parallelism(max_parallelism, parallelism)
    storage = LocalStorage(local_path(os.fspath(path)))
    target = str(storage.root)  # absolute: a task may run in another directory
    Attempt.begin(storage, overwrite=mode == "overwrite")  # finds a snapshot in the way early
    names = [name.strip() for name in (key.split(",") if isinstance(key, str) else key)]
    keys, key_type = _key_column(df, names)
    group = key_group(keys, max_parallelism, scheme, type=key_type, native=native)
    placed = _placed(df, group, max_parallelism, parallelism)
    options: dict[str, str | int] = {
        "key": ",".join(names),
        "maxParallelism": max_parallelism,
        "parallelism": parallelism,
        "backend": backend,
        "scheme": scheme,
        "uid": uid,
        "state": state,
    }
    register(df.sparkSession)
    with our_errors():
        writer = placed.write.format("keygroups").options(**options)
        writer.mode("overwrite" if mode == "overwrite" else "append").save(target)
    return Snapshot.open(target)


def _placed(df: DataFrame, group: Column, max_parallelism: int, parallelism: int) -> DataFrame:
    """The same rows, those of range ``i`` in partition ``i``."""
    group_name, subtask_name = _unused(df, "key_group"), _unused(df, "subtask")
    # A column each: Spark takes reflection for non-deterministic and must not compute it twice.
    return (
        df.withColumn(group_name, group)
        .withColumn(subtask_name, subtask(group_name, max_parallelism, parallelism))
        .repartitionById(parallelism, sf.col(subtask_name))
        .drop(group_name, subtask_name)
    )


def _key_column(df: DataFrame, names: Sequence[str]) -> tuple[Column, spark.DataType]:
    """The column that is hashed, and its type."""
    fields = {field.name: field for field in df.schema.fields}
    for name in names:
        if name not in fields:
            raise InvalidArgument(
                f"key column {name!r} is not one column of {', '.join(fields)!r:.500}"
            )
    columns = [sf.col(f"`{name.replace('`', '``')}`") for name in names]
    if len(names) == 1:
        return columns[0], fields[names[0]].dataType
    return sf.struct(*columns), spark.StructType([fields[name] for name in names])


def _unused(df: DataFrame, name: str) -> str:
    taken = {column.lower() for column in df.columns}
    while name in taken:
        name += "_"
    return name
