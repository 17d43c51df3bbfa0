"""The Spark columns `key_group` and `subtask`, held to Flink's vectors and to the Arrow core."""

import csv
import datetime as dt
import gzip
import json
from collections import defaultdict
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

import keygroups as kg
from keygroups.assignment import key_group_ranges
from keygroups.spark import key_group, subtask

GOLDEN = Path(__file__).parent / "golden" / "flink"
GOLDEN_TYPES = {
    "Integer": ("int", pa.int32()),
    "Character": ("int", pa.int32()),  # a char hashes as its code
    "Long": ("bigint", pa.int64()),
    "Byte": ("tinyint", pa.int8()),
    "Short": ("smallint", pa.int16()),
    "Boolean": ("boolean", pa.bool_()),
    "Double": ("double", pa.float64()),
    "Float": ("float", pa.float32()),
    "String": ("string", pa.string()),
    "Tuple2<String,Long>": (
        "struct<f0: string, f1: bigint>",
        pa.struct([("f0", pa.string()), ("f1", pa.int64())]),
    ),
    "Tuple2<Integer,Integer>": (
        "struct<f0: int, f1: int>",
        pa.struct([("f0", pa.int32()), ("f1", pa.int32())]),
    ),
    "Tuple3<String,Integer,Boolean>": (
        "struct<f0: string, f1: int, f2: boolean>",
        pa.struct([("f0", pa.string()), ("f1", pa.int32()), ("f2", pa.bool_())]),
    ),
}


@pytest.fixture(scope="module")
def golden_rows():
    rows = defaultdict(list)
    for path in sorted(GOLDEN.glob("keys_*.csv.gz")):
        with gzip.open(path, "rt", encoding="ascii", newline="") as lines:
            for row in csv.DictReader(lines):
                rows[row["type"]].append(row)
    return rows


@pytest.fixture
def ansi(spark, request):
    """Sets ANSI mode, the default, or not."""
    name = "spark.sql.ansi.enabled"
    before = spark.conf.get(name)
    spark.conf.set(name, str(request.param).lower())
    yield
    spark.conf.set(name, before)


def both_modes(names, in_both):
    """All cases in ANSI mode, and those that could overflow without it as well."""
    cases = [(name, True) for name in names] + [(name, False) for name in in_both]
    return {"argvalues": cases, "indirect": ["ansi"]}


def has_lone_surrogates(value):
    """Java strings may have them; Spark's are UTF-8, so that such a key cannot get in."""
    texts = value if isinstance(value, list) else [value]
    return any("\ud800" <= c <= "\udfff" for t in texts if isinstance(t, str) for c in t)


def golden_column(java_type, rows):
    type_ = GOLDEN_TYPES[java_type][1]
    if pa.types.is_floating(type_):
        bits = np.array([int(row["key_bits"], 16) for row in rows], f"u{type_.bit_width // 8}")
        return pa.array(bits).view(type_)
    values = [json.loads(row["key_json"]) for row in rows]
    if java_type == "Character":
        values = [ord(value) for value in values]
    if pa.types.is_struct(type_):
        columns = zip(*values, strict=True)
        arrays = [pa.array(c, f.type) for c, f in zip(columns, type_, strict=True)]
        return pa.StructArray.from_arrays(arrays, fields=list(type_))
    return pa.array(values, type_)


def computed(spark, keys, spark_type, **columns):
    """The columns as computed by Spark, in the order of the keys."""
    rows = pa.table({"place": pa.array(range(len(keys)), pa.int32()), "k": keys})
    df = spark.createDataFrame(rows, f"place int, k {spark_type}")
    df = df.select("place", *(c.alias(n) for n, c in columns.items()))
    return df.toArrow().sort_by("place")


@pytest.mark.parametrize(
    ("java_type", "ansi"),
    **both_modes(GOLDEN_TYPES, ["Integer", "Long", "Tuple2<String,Long>"]),
)
def test_key_groups_are_those_of_flink(spark, ansi, golden_rows, java_type):
    every = golden_rows[java_type]
    rows = [row for row in every if not has_lone_surrogates(json.loads(row["key_json"]))]
    assert len(rows) > len(every) * 0.7
    spark_type = GOLDEN_TYPES[java_type][0]
    columns = {}
    for name in (name for name in rows[0] if name.startswith("kg_")):
        m = int(name[3:])
        columns[f"{name} native"] = key_group("k", m, type=spark_type)
        columns[f"{name} arrow"] = key_group("k", m)
        columns[f"{name} no reflection"] = key_group("k", m, type=spark_type, native=False)
    result = computed(spark, golden_column(java_type, rows), spark_type, **columns)
    for label in columns:
        expected = [int(row[label.split()[0]]) for row in rows]
        assert result.column(label).to_pylist() == expected, label


@pytest.mark.parametrize("java_type", ["Integer", "Long", "String", "Tuple2<String,Long>"])
def test_types_with_an_expression_need_no_python(spark, java_type, capsys):
    spark_type = GOLDEN_TYPES[java_type][0]
    df = spark.createDataFrame([], f"k {spark_type}").select(key_group("k", 128, type=spark_type))
    df.explain()
    assert "ArrowEvalPython" not in capsys.readouterr().out
    df = spark.createDataFrame([], f"k {spark_type}").select(key_group("k", 128))
    df.explain()
    assert "ArrowEvalPython" in capsys.readouterr().out


MICROS = [0, 1, -1, 999_999, -1_000_001, 1_700_000_000_123_456, 2**63 - 1, -(2**63), -(2**40) - 7]
OTHER_KEYS = {
    "date": pa.array([0, 1, -1, 19_000, -719_528, 2**31 - 1, -(2**31), 60, -141_428], pa.date32()),
    "timestamp": pa.array(MICROS, pa.int64()).view(pa.timestamp("us", "UTC")),
    "timestamp_ntz": pa.array(MICROS, pa.int64()).view(pa.timestamp("us")),
    "decimal(9,2)": pa.array([Decimal("-1.50"), Decimal("0.00"), Decimal("7654321.09")]).cast(
        pa.decimal128(9, 2)
    ),
    "decimal(38,10)": pa.array([Decimal(-(10**27)), Decimal("0.0000000001"), Decimal(5)]).cast(
        pa.decimal128(38, 10)
    ),
    "double": pa.array([0.0, -0.0, float("nan"), float("inf"), -1.5e300]),
    "string": pa.array(["", "a", "ab", "abc", "abcd", "ünïcödé", "𝄞 clef", "x" * 3000]),
    "bigint": pa.array([0, 1, -1, 2**63 - 1, -(2**63)]),
    "boolean": pa.array([True, False]),
    "struct<a: date, b: timestamp, c: decimal(9,2)>": pa.array(
        [
            {"a": dt.date(1969, 12, 31), "b": dt.datetime(1, 1, 1, tzinfo=dt.UTC), "c": None},
            {"a": None, "b": None, "c": Decimal("1.00")},
        ],
        pa.struct(
            [
                ("a", pa.date32()),
                ("b", pa.timestamp("us", "UTC")),
                ("c", pa.decimal128(9, 2)),
            ]
        ),
    ),
    "struct<a: struct<x: int, y: date>, b: double>": pa.array(
        [{"a": {"x": 1, "y": None}, "b": 0.5}, {"a": None, "b": -0.0}],
        pa.struct([("a", pa.struct([("x", pa.int32()), ("y", pa.date32())])), ("b", pa.float64())]),
    ),
}


@pytest.mark.parametrize(
    ("spark_type", "ansi"), **both_modes(OTHER_KEYS, ["date", "timestamp", "bigint"])
)
def test_key_groups_are_those_of_the_core_under_every_scheme(spark, ansi, spark_type):
    keys = OTHER_KEYS[spark_type]
    columns, expected = {}, {}
    for scheme in ("flink", "murmur3", "spark"):
        for m in (128, 1000, 32768):
            for type_ in (None, spark_type):
                label = f"{scheme} {m} {type_}"
                columns[label] = key_group("k", m, scheme, type=type_)
                expected[label] = kg.assign_key_groups(keys, m, scheme).to_pylist()
    result = computed(spark, keys, spark_type, **columns)
    assert {label: result.column(label).to_pylist() for label in columns} == expected


def test_the_key_group_of_an_instant_does_not_depend_on_the_time_zone(spark):
    keys = OTHER_KEYS["timestamp"]
    zone = "spark.sql.session.timeZone"
    before = spark.conf.get(zone)
    try:
        spark.conf.set(zone, "America/New_York")
        result = computed(
            spark,
            keys,
            "timestamp",
            a=key_group("k", 128, type="timestamp"),
            b=key_group("k", 128),
        )
    finally:
        spark.conf.set(zone, before)
    expected = kg.assign_key_groups(keys, 128).to_pylist()
    assert result.column("a").to_pylist() == result.column("b").to_pylist() == expected


@pytest.mark.parametrize("scheme", ["flink", "spark", "murmur3"])
@pytest.mark.parametrize("type_", ["bigint", "string", None])
def test_a_null_key_fails_the_query(spark, scheme, type_):
    df = spark.createDataFrame([(1,), (None,)], f"k {type_ or 'bigint'}")
    with pytest.raises(Exception, match="null.*; drop or replace null keys first"):
        df.select(key_group("k", 128, scheme, type=type_)).collect()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ((0,), "max parallelism 0"),
        ((128, "java"), "unknown scheme 'java'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(spark, arguments, match):
    with pytest.raises(kg.InvalidArgument, match=match):
        key_group("k", *arguments)


@pytest.mark.parametrize(
    ("scheme", "type_"),
    [("flink", "binary"), ("flink", "array<int>"), ("spark", "map<int, int>"), ("flink", "void")],
)
def test_types_that_are_no_keys_are_refused_at_once(spark, scheme, type_):
    with pytest.raises(kg.InvalidArgument):
        key_group("k", 128, scheme, type=type_)


def test_a_key_group_can_be_filtered_grouped_and_joined_by(spark):
    df = spark.range(1000).selectExpr("cast(id as string) k")
    placed = df.withColumn("g", key_group("k", 16, type="string"))
    assert placed.where("g = 3").count() == placed.groupBy("g").count().where("g=3").first()[1]


# --- subtask ---------------------------------------------------------------------------------


def owners(spark, m, **arguments):
    df = spark.range(m).selectExpr("cast(id as int) g")
    rows = df.select("g", subtask("g", m, **arguments).alias("s")).toArrow().sort_by("g")
    assert rows.schema.field("s").type == pa.int32()
    return rows.column("s").to_pylist()


@pytest.mark.parametrize(("m", "p"), [(1, 1), (128, 3), (1000, 999), (32768, 32768), (32768, 7)])
def test_the_subtask_is_flinks(spark, m, p):
    expected = [kg.subtask_for_key_group(m, p, g) for g in range(m)]
    assert owners(spark, m, parallelism=p) == expected


@pytest.mark.parametrize("m", [1, 130, 32768])
def test_the_subtask_follows_any_cut(spark, m):
    weights = np.random.default_rng(m).zipf(1.5, m) % 10_000
    ranges = kg.balanced_cut(weights, min(m, 9))
    expected = [i for i, key_groups in enumerate(ranges) for _ in key_groups]
    assert owners(spark, m, ranges=ranges) == expected


def test_the_default_cut_needs_no_table(spark, capsys):
    ranges = key_group_ranges(128, 5)
    spark.range(1).select(subtask("id", 128, ranges=ranges)).explain()
    assert "element_at" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"parallelism": 2, "ranges": [kg.KeyGroupRange(0, 127)]},
        {"parallelism": 129},
        {"ranges": []},
        {"ranges": [kg.KeyGroupRange(0, 126)]},
        {"ranges": [kg.KeyGroupRange(0, 5), kg.KeyGroupRange(7, 127)]},
    ],
)
def test_a_cut_that_does_not_tile_is_refused(spark, arguments):
    with pytest.raises(kg.InvalidArgument):
        subtask("g", 128, **arguments)
