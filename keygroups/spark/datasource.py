"""The data source ``keygroups``: snapshots as DataFrames, DataFrames as snapshots."""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from keygroups.snapshot.reader import Snapshot
from keygroups.spark.options import ReadOptions, WriteOptions
from keygroups.spark.reader import FilteringReader, SnapshotReader, readable_schema
from keygroups.spark.writer import SnapshotWriter


def register(spark: SparkSession) -> None:
    """Makes the data source ``keygroups`` known to a session, classic or Connect."""
    spark.dataSource.register(KeyGroupsDataSource)


class KeyGroupsDataSource(DataSource):
    """Reads and writes snapshots; see :func:`register`.

    **Reading**: ``spark.read.format("keygroups").option("parallelism", 8).load(path)``.
    Partition *i* holds exactly the rows of range *i*, in snapshot order; a range without rows is
    an empty partition. The columns are those of the key and the value, and ``key_group``.

    =============== ==========================================================================
    ``parallelism`` How many partitions. Left out, or the snapshot's own: its own cut, however
                    balanced. Another one: Flink's formula. Above max parallelism: an error.
    ``uid``         Which operator, where there are several.
    ``state``       Which state, where there are several.
    ``columns``     Which columns to read, joined by commas, in this order. Spark does not tell a
                    Python data source which columns a query needs, so name them where a state
                    is wide; ``.schema(…)`` does the same. ``key_group`` and ``key_hash`` count.
    ``keyGroups``   Only rows of these key groups, as in ``0-15,77``; segments without them are
                    not read.
    ``pushdown``    ``true``: use the query's own filters to skip segments as well, ``=`` and
                    ``IN`` on all key columns (not floats) and comparisons of ``key_group``.
                    Needs ``spark.sql.python.filterPushdown.enabled`` set. **Only for a
                    DataFrame that is used in one query, once**: Spark applies the filters of
                    one query to the next one on the same DataFrame, and loses rows.
    =============== ==========================================================================

    **Writing**: ``df.write.format("keygroups").option("key", "a,b").mode("append").save(path)``.
    Each task writes one sorted run for each range it has rows of, and the driver commits all of
    them at once or none; :func:`keygroups.spark.write_snapshot` places the rows first and gets
    one run a range.

    ================== ========================================================================
    ``key``            The key columns, joined by commas; several are hashed as a tuple.
    ``maxParallelism`` How many key groups; Flink's default for the parallelism if left out.
    ``parallelism``    How many ranges; 1 if left out.
    ``backend``        ``parquet`` (the default) or ``rocksdb``.
    ``scheme``         ``flink`` (the default), ``murmur3`` or ``spark``.
    ``uid``            The operator uid.
    ``state``          The name of the state.
    ================== ========================================================================

    Mode ``append`` writes a snapshot where there is none and raises ``SnapshotExists`` where
    there is one: a snapshot is immutable, nothing is ever added to it. Mode ``overwrite``
    replaces it in the moment of the commit. The other modes, also the default, are refused by
    Spark for every Python data source.
    """

    @classmethod
    def name(cls) -> str:
        """Returns the name for ``format(…)``."""
        return "keygroups"

    def schema(self) -> StructType:
        """Returns the columns that a read gives."""
        options = ReadOptions.parse(self.options)
        return readable_schema(Snapshot.open(options.path), options)

    def reader(self, schema: StructType) -> SnapshotReader:
        """Returns the reader of these columns."""
        options = ReadOptions.parse(self.options)
        return (FilteringReader if options.pushdown else SnapshotReader)(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> SnapshotWriter:
        """Returns the writer of a new snapshot."""
        return SnapshotWriter(WriteOptions.parse(self.options), schema, overwrite=overwrite)
