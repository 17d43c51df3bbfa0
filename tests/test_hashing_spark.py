"""The scheme ``spark`` against the ``hash`` of a running Spark."""

import decimal

import numpy as np
import pyarrow as pa
import pytest

from keygroups.hashing import assign_key_groups, hash_keys

GENERATOR = np.random.default_rng(43)


def decimals(precision, scale):
    unscaled = [0, 1, -1, 127, 128, -128, -129, 255, 256, -256, 32767, -32769, 10**precision - 1]
    unscaled += [1 - 10**precision]
    unscaled += [
        sign * (2 ** (8 * size - 1) + delta)
        for size in range(1, 17)
        for sign in (1, -1)
        for delta in (-1, 0, 1)
    ]
    with decimal.localcontext(prec=60):
        values = [decimal.Decimal(u).scaleb(-scale) for u in unscaled if abs(u) < 10**precision]
    return pa.array(values, pa.decimal128(precision, scale))


def integers(type_, dtype):
    info = np.iinfo(dtype)
    values = GENERATOR.integers(info.min, info.max, 200, dtype, endpoint=True)
    values[:5] = 0, -1, 1, info.min, info.max
    return pa.array(values).view(type_)


def floats(dtype, unsigned):
    values = np.frombuffer(GENERATOR.bytes(200 * np.dtype(dtype).itemsize), unsigned).copy()
    some = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1.5], dtype)
    values[: len(some)] = some.view(unsigned)
    values[6] = some.view(unsigned)[2] | 5  # a NaN with a payload
    return pa.array(values.view(dtype))


TEXTS = ["", "a", "ab", "abc", "abcd", "é", "ab🙂", "名🙂x", "x" * 1025, "y" * 5001, "\0", "ÿþ€"]
BYTES = [GENERATOR.bytes(n) for n in [*range(40), 1023, 1024, 1025, 4099]]
STRUCT = pa.array(
    [
        {"a": None, "b": None, "c": None},
        {"a": "x", "b": None, "c": {"d": None, "e": True}},
        {"a": None, "b": -7, "c": {"d": -0.0, "e": None}},
        {"a": "é", "b": 2**40, "c": None},
    ],
    pa.struct(
        [
            ("a", pa.string()),
            ("b", pa.int64()),
            ("c", pa.struct([("d", pa.float64()), ("e", pa.bool_())])),
        ]
    ),
)
COLUMNS = {
    "bool": pa.array([True, False]),
    "int8": integers(pa.int8(), np.int8),
    "int16": integers(pa.int16(), np.int16),
    "int32": integers(pa.int32(), np.int32),
    "int64": integers(pa.int64(), np.int64),
    "float32": floats(np.float32, np.uint32),
    "float64": floats(np.float64, np.uint64),
    "string": pa.array(TEXTS),
    "strings of one length": pa.array([f"key-{i:07d}" for i in range(500)]),
    "binary": pa.array(BYTES, pa.binary()),
    "date32": pa.array([0, -1, 1, -719162, 2932896, 19782], pa.int32()).view(pa.date32()),
    "timestamp with a zone": pa.array(
        [0, -1, 10**15, -(10**15), 2**53, -62135596800000000], pa.int64()
    ).view(pa.timestamp("us", "UTC")),
    "timestamp without": pa.array([0, -1, 10**15, -(10**15), 2**53], pa.int64()).view(
        pa.timestamp("us")
    ),
    "decimal of 5 digits": decimals(5, 2),
    "decimal of 18 digits": decimals(18, 0),
    "decimal of 19 digits": decimals(19, 4),
    "decimal of 38 digits": decimals(38, 10),
    "struct": STRUCT,
}


@pytest.mark.parametrize("name", COLUMNS)
def test_hashes_and_key_groups_are_those_of_spark(spark, name):
    keys = COLUMNS[name]
    frame = spark.createDataFrame(pa.table({"k": keys}))
    rows = frame.selectExpr(
        "hash(k) as h", "pmod(hash(k), 128) as g", "pmod(hash(k), 100) as g100"
    ).collect()
    assert hash_keys(keys, "spark").to_pylist() == [row.h for row in rows]
    assert assign_key_groups(keys, 128, "spark").to_pylist() == [row.g for row in rows]
    assert assign_key_groups(keys, 100, "spark").to_pylist() == [row.g100 for row in rows]


def test_several_columns_hash_as_a_struct_of_them(spark):
    frame = spark.createDataFrame(pa.Table.from_struct_array(STRUCT))
    assert hash_keys(STRUCT, "spark").to_pylist() == [
        row.h for row in frame.selectExpr("hash(a, b, c) as h").collect()
    ]


def test_coarser_timestamps_hash_as_sparks_microseconds(spark):
    micros = pa.array([0, -(10**12), 86_400 * 10**9], pa.int64()).view(pa.timestamp("us", "UTC"))
    frame = spark.createDataFrame(pa.table({"k": micros}))
    expected = [row.h for row in frame.selectExpr("hash(k) as h").collect()]
    for unit in ("s", "ms", "us", "ns"):
        keys = micros.cast(pa.timestamp(unit, "UTC"))
        assert hash_keys(keys, "spark").to_pylist() == expected


def test_the_flink_scheme_is_expressible_in_spark_sql(spark):
    # A first literal whose hash is 0 resets the seed, so that this is Flink's raw murmur.
    keys = COLUMNS["int32"]
    frame = spark.createDataFrame(pa.table({"k": keys}))
    murmur = "hash(-1693959553, k)"
    group = f"if({murmur} = -2147483648, 0, abs(cast({murmur} as bigint))) % 1000"
    groups = [row.g for row in frame.selectExpr(f"{group} as g").collect()]
    assert assign_key_groups(keys, 1000).to_pylist() == groups
