"""Rescaling on Spark, and the whole adapter on Spark Connect and from a zip."""

import os
import shutil
import subprocess
import sysconfig
import textwrap
import venv
from pathlib import Path

import pyarrow as pa
import pytest

import keygroups as kg

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", params=["parquet", "rocksdb"])
def source(request, tmp_path_factory):
    """3000 rows in five ranges."""
    path = tmp_path_factory.mktemp("source") / "snapshot"
    rows = pa.table({"id": [f"key {i}" for i in range(3000)], "v": pa.array(range(3000))})
    return kg.write_snapshot(
        path, rows, key="id", max_parallelism=96, parallelism=5, backend=request.param
    )


@pytest.mark.parametrize(
    "arguments",
    [
        {"parallelism": 7},
        {"parallelism": 2, "balance": "rows"},
        {"max_parallelism": 64, "parallelism": 3},
        {"parallelism": 3, "mode": "link"},
    ],
    ids=str,
)
def test_the_engines_do_the_same(spark, source, tmp_path, arguments):
    here = kg.rescale(source.storage.root, tmp_path / "local", **arguments)
    there = kg.rescale(source.storage.root, tmp_path / "spark", engine=spark, **arguments)
    assert there.ranges == here.ranges
    assert kg.diff(tmp_path / "local", tmp_path / "spark").is_equal
    assert kg.diff(source.storage.root, tmp_path / "spark").is_equal
    assert there.to_table().equals(here.to_table())
    verification = kg.verify(tmp_path / "spark")
    assert verification.is_ok
    assert verification.unreferenced == ()


def test_one_task_writes_one_range(spark, source, tmp_path):
    there = kg.rescale(source.storage.root, tmp_path / "s", parallelism=6, engine=spark)
    assert [run.key_groups for run in there.state().runs] == there.ranges


def test_an_empty_snapshot_is_rescaled(spark, tmp_path):
    empty = pa.table({"id": pa.array([], pa.int64())})
    kg.write_snapshot(tmp_path / "a", empty, key="id", parallelism=2)
    there = kg.rescale(tmp_path / "a", tmp_path / "b", parallelism=3, engine=spark)
    assert there.parallelism == 3
    assert there.to_table().num_rows == 0


def test_damage_stops_it_and_nothing_is_visible(spark, tmp_path):
    rows = pa.table({"id": range(3000)})
    source = kg.write_snapshot(tmp_path / "a", rows, key="id", parallelism=4)
    file = source.storage.root / source.state().runs[2].segments[0].file.path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(kg.SnapshotCorrupted, match=r"\.parquet"):
        kg.rescale(tmp_path / "a", tmp_path / "b", parallelism=3, engine=spark)
    assert not (tmp_path / "b").exists()


def test_what_is_there_is_kept_or_replaced_as_asked(spark, source, tmp_path):
    kg.write_snapshot(tmp_path / "s", pa.table({"id": [1]}), key="id")
    with pytest.raises(kg.SnapshotExists):
        kg.rescale(source.storage.root, tmp_path / "s", parallelism=2, engine=spark)
    kg.rescale(source.storage.root, tmp_path / "s", parallelism=2, engine=spark, overwrite=True)
    assert kg.diff(source.storage.root, tmp_path / "s").is_equal
    assert kg.verify(tmp_path / "s").unreferenced == ()


# --- elsewhere -------------------------------------------------------------------------------

EVERYTHING = """
    import sys
    from pathlib import Path

    archive, folder, kind = sys.argv[1:]
    sys.path.insert(0, archive)
    import keygroups as kg
    assert kg.__file__.startswith(archive)
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession
    from pyspark.sql import functions as F
    from keygroups.spark import key_group, register, subtask, write_snapshot

    builder = SparkSession.builder.config("spark.ui.enabled", "false")
    builder = builder.config("spark.sql.shuffle.partitions", "4")
    builder = builder.config("spark.driver.bindAddress", "127.0.0.1")
    builder = builder.config("spark.driver.host", "127.0.0.1")
    if kind == "connect":
        spark = builder.remote("local[2]").getOrCreate()
        spark.addArtifact(archive, pyfile=True)
    else:
        builder = builder.config("spark.submit.pyFiles", archive)
        spark = builder.master("local[2]").getOrCreate()
    assert (kind == "connect") == type(spark).__module__.startswith("pyspark.sql.connect")

    rows = spark.range(2000).selectExpr("id", "concat('key ', id) as name")
    one = write_snapshot(rows, f"{folder}/one", key="name,id", parallelism=3, backend="rocksdb")
    assert len(one.state().runs) == 3, one.state().runs
    assert kg.verify(f"{folder}/one").is_ok
    if kind == "classic":  # the rest runs in the other tests
        again = kg.rescale(f"{folder}/one", f"{folder}/three", parallelism=5, engine=spark)
        assert kg.diff(f"{folder}/one", f"{folder}/three").is_equal
        back = spark.read.format("keygroups").load(f"{folder}/three")
        column = key_group(F.struct("name", "id"), 128)
        assert back.where(column == F.col("key_group")).count() == 2000
        print("all of it")
        sys.exit()
    (
        rows.write.format("keygroups").mode("append").option("key", "name,id")
        .option("parallelism", 2).save(f"{folder}/two")
    )
    assert kg.diff(f"{folder}/one", f"{folder}/two").is_equal

    register(spark)
    back = spark.read.format("keygroups").option("parallelism", 4).load(f"{folder}/two")
    counts = back.groupBy(F.spark_partition_id().alias("p")).agg(
        F.count("*").alias("n"), F.min("key_group").alias("low"), F.max("key_group").alias("high")
    )
    for row in counts.collect():
        owned = kg.key_group_range_for_subtask(128, 4, row.p)
        assert row.low in owned and row.high in owned, row
    assert sorted(back.drop("key_group").collect()) == sorted(
        rows.select("name", "id").collect()
    )
    home = F.struct("name", "id")
    column = key_group(home, 128)
    assert back.where(column != F.col("key_group")).count() == 0
    native = key_group("id", 128, type="bigint")
    other = subtask(native, 128, ranges=kg.balanced_cut([i % 5 for i in range(128)], 3))
    assert rows.where(key_group("id", 128) != native).count() == 0
    assert rows.select(other.alias("s")).distinct().count() == 3

    three = kg.rescale(f"{folder}/two", f"{folder}/three", parallelism=5, engine=spark)
    assert len(three.ranges) == 5 and kg.diff(f"{folder}/one", f"{folder}/three").is_equal

    double = rows.unionAll(rows.limit(1))
    for wrong, error, words in (
        (lambda: write_snapshot(double, f"{folder}/x", key="id", parallelism=2),
         kg.InvalidArgument, "is there more than once"),
        (lambda: write_snapshot(rows, f"{folder}/one", key="id", parallelism=2),
         kg.SnapshotExists, "already committed"),
        (lambda: spark.read.format("keygroups").load(f"{folder}/x").collect(),
         PySparkException, "SnapshotNotFound: no snapshot at"),
    ):
        try:
            wrong()
        except error as found:
            assert words in str(found), found
        else:
            raise AssertionError(words)
    assert not Path(folder, "x").exists()
    print("all of it")
    spark.stop()
"""


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """The wheel, which is a zip of the packages, under the name that Spark asks for."""
    folder = tmp_path_factory.mktemp("archive")
    done = subprocess.run(
        [ROOT / "tools" / "wheel", folder], capture_output=True, text=True, check=True
    )
    return Path(shutil.copy(done.stdout.strip(), folder / "keygroups.zip"))


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """An interpreter with everything but keygroups: .pth files below a .pth are not followed."""
    folder = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin" / "python"


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["classic", "connect"])
def test_all_of_it_works_from_a_zip(archive, bare_python, tmp_path, kind):
    """On Connect too. A process of its own, as the two kinds of sessions do not mix in one."""
    script = tmp_path / "everything.py"
    script.write_text(textwrap.dedent(EVERYTHING))
    environment = {
        name: value
        for name, value in os.environ.items()
        if name != "PYTHONPATH" and not name.startswith(("SPARK_", "PYSPARK_"))
    }
    environment |= {
        "PYSPARK_PYTHON": str(bare_python),
        "PYSPARK_DRIVER_PYTHON": str(bare_python),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(tmp_path / "spark"),
    }
    absent = subprocess.run(
        [bare_python, "-c", "import pyspark, keygroups"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "No module named 'keygroups'" in absent.stderr
    done = subprocess.run(
        [bare_python, script, archive, tmp_path, kind],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.stdout.splitlines()[-1:] == ["all of it"], done.stderr[-5000:]
