"""The data source `keygroups` and `write_snapshot`: DataFrames to snapshots and back."""

import contextlib
import datetime as dt
import pickle
import uuid
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.errors import PySparkException
from pyspark.sql import functions as sf
from pyspark.sql import types as spark_types
from pyspark.sql.datasource import EqualTo, GreaterThan, In, IsNotNull, LessThanOrEqual, Not

import keygroups as kg
from keygroups.keys import encode_keys
from keygroups.snapshot.commit import MANIFEST_PATH
from keygroups.spark import key_group, register, write_snapshot
from keygroups.spark.options import ReadOptions, WriteOptions, local_path
from keygroups.spark.reader import FilteringReader, SnapshotReader, readable_schema
from keygroups.spark.types import arrow_schema, spark_type
from keygroups.spark.writer import SnapshotWriter
from keygroups.testing import Steps, observed

BACKENDS = ["parquet", "rocksdb"]
ROWS = 600


@pytest.fixture(scope="module")
def session(spark):
    register(spark)
    return spark


def sample(rows=ROWS, seed=1):
    """Rows of every type that both Spark and snapshots have, nulls and falsy values included."""
    random = np.random.default_rng(seed)
    place = np.arange(rows)
    missing = random.random(rows) < 0.2

    def sometimes(values, type_):
        return pa.array(values, type_, mask=missing)

    day = dt.date(1970, 1, 1)
    return pa.table(
        {
            "id": pa.array(place * 7 - 100, pa.int64()),
            "name": pa.array([f"näme-{i}" if i else "" for i in place]),
            "small": sometimes((place % 100).astype(np.int8), pa.int8()),
            "flag": sometimes(place % 3 == 0, pa.bool_()),
            "ratio": sometimes(place / 3 - 1, pa.float64()),
            "price": sometimes([Decimal(int(i)) / 100 for i in place], pa.decimal128(12, 2)),
            "day": sometimes([day + dt.timedelta(int(i) * 40 - 9000) for i in place], pa.date32()),
            "at": sometimes(place * 10**12 - 5, pa.int64()).view(pa.timestamp("us", "UTC")),
            "local": sometimes(place * 10**12 + 7, pa.int64()).view(pa.timestamp("us")),
            "data": sometimes([bytes([i % 256]) * (i % 5) for i in place], pa.binary()),
            "list": pa.array([[1, None, i] if i % 4 else None for i in place.tolist()]),
            "map": pa.array(
                [[("k", i)] if i % 5 else [] for i in place.tolist()],
                pa.map_(pa.string(), pa.int32()),
            ),
            "struct": pa.array([{"x": i, "y": None if i % 2 else "y"} for i in place.tolist()]),
        }
    )


def dataframe(session, table, partitions=3):
    # A Table without a declared schema becomes a DataFrame with LTZ where there is no zone.
    columns = [spark_type(field.type).simpleString() for field in table.schema]
    names = zip(table.schema.names, columns, strict=True)
    df = session.createDataFrame(table, ", ".join(f"`{n}` {c}" for n, c in names))
    return df.repartition(partitions)


def load(session, path, schema=None, **options):
    reader = session.read.format("keygroups").options(**options)
    return (reader.schema(schema) if schema else reader).load(str(path))


def save(df, path, mode="append", **options):
    df.write.format("keygroups").options(**options).mode(mode).save(str(path))


def rows_of(table, key="id"):
    """Rows as Python values, by key, whatever the order and the encoding of types."""
    return table.sort_by([(key, "ascending")]).to_pylist()


def files_below(path):
    return [p for p in path.rglob("*") if p.is_file()] if path.exists() else []


def damage(snapshot, segment):
    file = snapshot.storage.root / segment.file.path
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0xFF
    file.write_bytes(data)


@pytest.fixture(scope="module")
def ids(tmp_path_factory):
    """4000 ids, eight ranges and a segment or more for each, written without Spark."""
    path = tmp_path_factory.mktemp("ids") / "snapshot"
    table = pa.table({"id": pa.array(range(4000)), "v": [f"value {i}" for i in range(4000)]})
    return kg.write_snapshot(path, table, key="id", parallelism=8)


# --- there and back --------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("key", ["id", "name,day"])
def test_rows_of_every_type_come_back_as_they_were(session, tmp_path, backend, key, request):
    zone = "spark.sql.session.timeZone"
    request.addfinalizer(lambda: session.conf.set(zone, "UTC"))
    session.conf.set(zone, "Asia/Tokyo" if key == "id" else "UTC")  # snapshots do not know it
    table = sample()
    df = dataframe(session, table)
    placed = write_snapshot(
        df, tmp_path / "placed", key=key, max_parallelism=96, parallelism=4, backend=backend
    )
    save(
        df,
        tmp_path / "plain",
        key=key,
        maxParallelism=96,
        parallelism=4,
        backend=backend,
    )
    assert kg.verify(tmp_path / "placed").is_ok
    assert kg.verify(tmp_path / "plain").findings == ()
    assert kg.diff(tmp_path / "placed", tmp_path / "plain").is_equal
    assert rows_of(placed.to_table().select(table.column_names)) == rows_of(table)
    session.conf.set(zone, "UTC")
    back = load(session, tmp_path / "plain", parallelism=3).toArrow()
    key_type = placed.operator().key_type
    names = key.split(",")
    arrays = [back.column(name).combine_chunks() for name in names]
    keys = (
        arrays[0] if len(names) == 1 else pa.StructArray.from_arrays(arrays, list(key_type.names))
    )
    assert back.column("key_group").to_pylist() == kg.assign_key_groups(keys, 96).to_pylist()
    assert rows_of(back.select(table.column_names)) == rows_of(table)
    assert rows_of(load(session, tmp_path / "placed").toArrow()) == rows_of(back)


def test_a_snapshot_of_spark_is_the_one_of_the_core(session, tmp_path):
    table = sample().select(["id", "name", "price", "at"])
    ours = write_snapshot(dataframe(session, table), tmp_path / "a", key="id", parallelism=5)
    core = kg.write_snapshot(tmp_path / "b", table.cast(table.schema), key="id", parallelism=5)
    assert ours.ranges == core.ranges
    assert ours.to_table().equals(core.to_table())
    sizes = [snapshot.key_group_sizes().column("digest") for snapshot in (ours, core)]
    assert sizes[0].equals(sizes[1])


@pytest.mark.parametrize(
    ("scheme", "key"),
    [
        ("flink", "id"),
        ("flink", "name"),
        ("flink", "flag"),
        ("flink", "price"),
        ("flink", "id,name,day"),
        ("murmur3", "id,name"),
        ("spark", "at"),
        ("spark", "id,name"),
    ],
)
def test_placed_rows_become_one_run_a_range(session, tmp_path, scheme, key):
    """Which also says that Spark's placement and the writer's own hashing agree."""
    table = sample(2 if key == "flag" else ROWS).select(
        ["id", "name", "price", "day", "at", "flag"]
    )
    table = table.filter(pc.is_valid(table.column("at")))
    df = dataframe(session, table)
    snapshot = write_snapshot(
        df, tmp_path / "s", key=key, parallelism=7, max_parallelism=129, scheme=scheme
    )
    runs = snapshot.state().runs
    assert sum(run.rows for run in runs) == table.num_rows
    assert [run.key_groups for run in runs] == [
        r for r in snapshot.ranges if snapshot.to_table(r).num_rows
    ]


def test_types_that_spark_lacks_are_read_as_the_next_wider_one(session, tmp_path):
    ids = [uuid.UUID(int=i**9) for i in range(20)]
    table = pa.table(
        {
            "u": pa.array([i.bytes for i in ids], pa.binary(16)),
            "u8": pa.array(range(236, 256), pa.uint8()),
            "u16": pa.array(range(65_516, 65_536), pa.uint16()),
            "u32": pa.array(range(2**32 - 20, 2**32), pa.uint32()),
            "u64": pa.array(range(2**64 - 20, 2**64), pa.uint64()),
            "half": pa.array(np.arange(20, dtype=np.float16)),
            "large": pa.array([str(i) for i in range(20)], pa.large_string()),
            "fixed": pa.array([bytes([i] * 3) for i in range(20)], pa.binary(3)),
            "seconds": pa.array(range(20), pa.timestamp("s")),
            "nanos": pa.array([i * 1000 for i in range(20)], pa.timestamp("ns", "Asia/Tokyo")),
            "maybe": pa.array([None if i.int % 2 else i.bytes for i in ids], pa.binary(16)),
        }
    )
    for name in ("u", "maybe"):
        uuids = pa.ExtensionArray.from_storage(pa.uuid(), table.column(name).combine_chunks())
        table = table.set_column(table.schema.get_field_index(name), name, uuids)
    kg.write_snapshot(tmp_path / "s", table, key="u", parallelism=2)
    df = load(session, tmp_path / "s")
    assert df.schema.simpleString() == (
        "struct<u:string,u8:smallint,u16:int,u32:bigint,u64:decimal(20,0),half:float,"
        "large:string,fixed:binary,seconds:timestamp_ntz,nanos:timestamp,maybe:string,"
        "key_group:int>"
    )
    expected = [
        {name: str(value) if name == "u" else value for name, value in row.items()}
        for row in table.drop_columns(["u64", "seconds", "nanos", "maybe"]).to_pylist()
    ]
    expected = sorted(expected, key=lambda row: row["u"])
    back = df.toArrow()
    narrow = back.drop_columns(["key_group", "u64", "seconds", "nanos", "maybe"])
    assert rows_of(narrow, "u") == expected
    by_id = {row["u"]: row for row in back.to_pylist()}
    for i, key in enumerate(map(str, ids)):
        row = by_id[key]
        assert row["u64"] == 2**64 - 20 + i
        assert row["seconds"] == dt.datetime(1970, 1, 1) + dt.timedelta(seconds=i)
        assert row["nanos"] == dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=i)
        assert row["maybe"] == (None if ids[i].int % 2 else key)


def test_a_timestamp_with_nanoseconds_is_refused_by_name(session, tmp_path):
    table = pa.table({"id": [1, 2], "at": pa.array([1, 2], pa.timestamp("ns"))})
    kg.write_snapshot(tmp_path / "s", table, key="id")
    with pytest.raises(PySparkException, match="column 'at' has a value that is no timestamp"):
        load(session, tmp_path / "s").collect()
    assert load(session, tmp_path / "s", columns="id").count() == 2


# --- partitions ------------------------------------------------------------------------------


def partitions_of(df):
    """The ids of each partition, in the order in which its task gets them."""

    def tagged(batches):
        from pyspark import TaskContext

        number = TaskContext.get().partitionId()
        found = [i for batch in batches for i in batch.column("id").to_pylist()]
        yield pa.record_batch(
            {"n": pa.array([number], pa.int32()), "ids": pa.array([found], pa.list_(pa.int64()))}
        )

    rows = df.select("id").mapInArrow(tagged, "n int, ids array<bigint>").collect()
    return [row.ids for row in sorted(rows)]


@pytest.mark.parametrize("parallelism", [None, 1, 5, 8, 20])
def test_partition_i_is_range_i_in_snapshot_order(session, ids, parallelism):
    options = {} if parallelism is None else {"parallelism": parallelism}
    p = parallelism or 8
    ranges = [kg.key_group_range_for_subtask(128, p, i) for i in range(p)]
    expected = [ids.to_table(r).column("id").to_pylist() for r in ranges]
    assert partitions_of(load(session, ids.storage.root, **options)) == expected


def test_empty_ranges_are_empty_partitions(session, tmp_path):
    kg.write_snapshot(tmp_path / "s", pa.table({"id": [7]}), key="id", parallelism=16)
    for options in ({}, {"parallelism": 21}):
        found = partitions_of(load(session, tmp_path / "s", **options))
        p = options.get("parallelism", 16)
        home = kg.subtask_for_key_group(128, p, kg.assign_to_key_group(7, 128))
        assert found == [[7] if i == home else [] for i in range(p)]


def test_a_balanced_cut_is_kept_unless_another_parallelism_is_asked_for(session, ids, tmp_path):
    balanced = kg.rescale(ids.storage.root, tmp_path / "s", parallelism=3, balance="rows")
    flinks = [kg.key_group_range_for_subtask(128, 3, i) for i in range(3)]
    assert balanced.ranges != flinks
    own = [balanced.to_table(r).column("id").to_pylist() for r in balanced.ranges]
    for options in ({}, {"parallelism": 3}):
        assert partitions_of(load(session, tmp_path / "s", **options)) == own
    two = [
        balanced.to_table(kg.key_group_range_for_subtask(128, 2, i)).column("id").to_pylist()
        for i in range(2)
    ]
    assert partitions_of(load(session, tmp_path / "s", parallelism=2)) == two


def test_a_parallelism_above_the_max_is_refused(session, ids):
    with pytest.raises(PySparkException, match="parallelism 129 exceeds max parallelism 128"):
        load(session, ids.storage.root, parallelism=129).collect()


def test_operators_and_states_are_chosen_by_name(session, tmp_path):
    save(session.range(10), tmp_path / "s", key="id", uid="counter", state="count")
    assert kg.Snapshot.open(tmp_path / "s").operator().uid == "counter"
    assert load(session, tmp_path / "s", uid="counter", state="count").count() == 10
    with pytest.raises(PySparkException, match="name one operator uid of 'counter', not 'x'"):
        load(session, tmp_path / "s", uid="x")
    with pytest.raises(PySparkException, match="name one state of 'count'"):
        load(session, tmp_path / "s", state="x")


# --- what is read ----------------------------------------------------------------------------


def read_in_process(path, filters=(), **options):
    """What the tasks would read: the reader goes through pickle as on its way to them."""
    parsed = ReadOptions.parse({"path": str(path), **options})
    reader = FilteringReader(parsed, readable_schema(kg.Snapshot.open(path), parsed))
    assert list(reader.pushFilters(list(filters))) == list(filters)
    partitions = reader.partitions()
    reader = pickle.loads(pickle.dumps(reader))
    tables = [list(reader.read(partition)) for partition in partitions]
    return [[row for batch in batches for row in batch.to_pylist()] for batches in tables]


def test_only_the_named_columns_are_read(session, tmp_path):
    table = pa.table({"id": range(50), "a": range(50), "wide": ["x"] * 50})
    kg.write_snapshot(tmp_path / "s", table, key="id", parallelism=2)
    by_option = load(session, tmp_path / "s", columns="a, key_group").toArrow()
    by_schema = load(session, tmp_path / "s", "a bigint, key_group int").toArrow()
    assert by_option.column_names == ["a", "key_group"]
    assert sorted(by_option.to_pylist(), key=str) == sorted(by_schema.to_pylist(), key=str)
    hashes = load(session, tmp_path / "s", columns="id,key_hash").toArrow().sort_by("id")
    assert hashes.column("key_hash").to_pylist() == kg.hash_keys(table.column("id")).to_pylist()


@pytest.mark.parametrize(
    ("filters", "wanted", "segments"),
    [
        ([EqualTo(("id",), 5)], lambda row: row["id"] == 5, 1),
        ([In(("id",), (5, 6, None))], lambda row: row["id"] in (5, 6), 2),
        ([In(("id",), ())], lambda _: False, 0),
        ([EqualTo(("id",), 5), EqualTo(("id",), 6)], None, 2),
        ([EqualTo(("key_group",), 77)], lambda row: row["key_group"] == 77, 1),
        ([In(("key_group",), (0, 1, 127))], lambda row: row["key_group"] in (0, 1, 127), 2),
        (
            [GreaterThan(("key_group",), 15), LessThanOrEqual(("key_group",), 32)],
            lambda row: 15 < row["key_group"] <= 32,
            2,
        ),
        ([EqualTo(("key_group",), 1), EqualTo(("id",), 10**9)], lambda _: False, 1),
        ([EqualTo(("key_group",), 500)], lambda _: False, 0),
        ([EqualTo(("v",), "value 5")], lambda _: True, 8),
        ([Not(EqualTo(("id",), 5)), IsNotNull(("id",))], lambda _: True, 8),
        ([EqualTo(("id",), "text")], lambda _: True, 8),
        ([EqualTo(("id",), 2**70)], lambda _: True, 8),
    ],
)
def test_filters_skip_the_segments_that_cannot_match(ids, filters, wanted, segments):
    steps = Steps()
    with observed(steps):
        found = read_in_process(ids.storage.root, filters)
    assert len(found) == 8
    assert len({p for p in steps.paths("open") if p.endswith(".parquet")}) <= segments
    if wanted is not None:  # else the reader may give more; Spark filters again
        every = ids.to_table(columns=["id", "v", "key_group"]).to_pylist()
        assert [row for rows in found for row in rows] == [row for row in every if wanted(row)]


def test_a_query_does_not_open_segments_that_its_filter_excludes(session, ids, tmp_path):
    """Shown end to end: all other segments are damaged, and nobody notices."""
    copy = kg.rescale(ids.storage.root, tmp_path / "s", parallelism=8)
    home = kg.assign_to_key_group(1234, 128)
    for run in copy.state().runs:
        if home not in run.key_groups:
            for segment in run.segments:
                damage(copy, segment)

    def fresh():
        return load(session, tmp_path / "s", pushdown="true")

    with pushdown_enabled(session):
        assert fresh().where("id = 1234").collect()[0].v == "value 1234"
        assert fresh().where(f"key_group = {home} and id > 0").count() > 10
        assert fresh().where("id in (1234, 1234) and v like 'value%'").count() == 1
        with pytest.raises(PySparkException, match=r"SnapshotCorrupted: \S+\.parquet"):
            fresh().count()
    with pytest.raises(PySparkException, match="filterPushdown.enabled"):
        fresh().count()
    ours = load(session, tmp_path / "s", keyGroups=home)
    assert ours.where("id = 1234").count() == 1
    with pytest.raises(PySparkException, match=r"SnapshotCorrupted: \S+\.parquet"):
        load(session, tmp_path / "s").where("id = 1234").count()


@contextlib.contextmanager
def pushdown_enabled(session):
    name = "spark.sql.python.filterPushdown.enabled"
    session.conf.set(name, "true")
    try:
        yield
    finally:
        session.conf.unset(name)


@pytest.mark.parametrize("enabled", [False, True])
def test_a_dataframe_can_be_used_again_after_a_filter(session, ids, enabled):
    """Spark keeps the plan that a Python reader made for one filter, so ours must not depend."""
    df = load(session, ids.storage.root)
    with pushdown_enabled(session) if enabled else contextlib.nullcontext():
        assert df.where("id = 5").count() == 1
        assert df.count() == 4000
        assert df.where("id = 6").union(df.where("key_group >= 0")).count() == 4001


def test_only_the_key_groups_of_the_option_are_read(session, ids):
    df = load(session, ids.storage.root, keyGroups="3, 60-70,127")
    wanted = [3, *range(60, 71), 127]
    every = ids.to_table(columns=["id", "key_group"]).to_pylist()
    expected = {row["id"] for row in every if row["key_group"] in wanted}
    found = partitions_of(df)
    assert len(found) == 8
    assert {i for part in found for i in part} == expected
    with pytest.raises(PySparkException, match="keyGroups.*KeyGroupRange\\[128, 128\\] is not"):
        load(session, ids.storage.root, keyGroups="128").collect()


FILTERED_KEYS = {
    "id": ["id = 5", "id in (5, 12, 6)", "id <=> 5", "5 = id", "id = 5 or id = 12", "id + 0 = 5"],
    "name": ["name = ''", "name in ('näme-3', 'x')", "name = 'NÄME-3'"],
    "small": ["small = 7", "small = 7000", "small in (1, 2)", "small = 7.0"],
    "ratio": ["ratio = -1.0", "ratio = 0.0", "ratio = -0.0", "ratio = 'NaN'"],
    "price": ["price = 1.5", "price = 1.50", "price in (0, 1.51)", "price = 1.505"],
    "day": ["day = date'1970-01-29'", "day in (date'1945-05-12', date'2000-01-01')"],
    "at": [
        "at = timestamp'2001-09-09 01:46:39.999995+00:00'",
        "at in (timestamp'1969-12-31 23:59:59.999995Z')",
    ],
    "local": ["local = timestamp_ntz'2001-09-09 01:46:40.000007'"],
    "flag": ["flag", "flag = true", "not flag", "flag = false"],
    "data": ["data = X'0303'", "data = X''"],
    "id,name": ["id = -100 and name = ''", "id = -93", "name in ('näme-1') and id in (-93, 5)"],
}


@pytest.mark.parametrize("key", FILTERED_KEYS)
def test_filtered_reads_equal_filtered_rows(session, tmp_path, key):
    names = key.split(",")
    table = sample().select(["id", *(n for n in names if n != "id")])
    for name in names:
        table = table.filter(pc.is_valid(table.column(name)))
    arrays = [table.column(name).combine_chunks() for name in names]
    keys = arrays[0] if len(names) == 1 else pa.StructArray.from_arrays(arrays, names)
    first = np.unique(np.array(encode_keys([keys]).to_pylist(), object), return_index=True)[1]
    table = table.take(pa.array(first))
    if key == "ratio":
        odd = pa.table({"id": [-1, -2, -3], "ratio": [0.0, -0.0, float("nan")]})
        table = pa.concat_tables([table, odd]).filter(pc.not_equal(pc.field("id"), 3 * 7 - 100))
    scheme = "spark" if key == "data" else "flink"
    kg.write_snapshot(tmp_path / "s", table, key=key, parallelism=6, scheme=scheme)
    plain = dataframe(session, table)
    with pushdown_enabled(session):
        for condition in FILTERED_KEYS[key]:
            stored = load(session, tmp_path / "s", pushdown="true").drop("key_group")
            found = sorted(map(str, stored.where(condition).collect()))
            expected = plain.where(condition).select(*stored.columns).collect()
            assert found == sorted(map(str, expected)), condition


def test_a_snapshot_replaced_during_a_query_is_noticed(tmp_path):
    kg.write_snapshot(tmp_path / "s", pa.table({"id": [1]}), key="id")
    options = ReadOptions.parse({"path": str(tmp_path / "s")})
    reader = SnapshotReader(options, readable_schema(kg.Snapshot.open(tmp_path / "s"), options))
    partition = reader.partitions()[0]
    kg.write_snapshot(tmp_path / "s", pa.table({"id": [2]}), key="id", overwrite=True)
    with pytest.raises(kg.IncompatibleSnapshot, match="was replaced since the query was planned"):
        list(reader.read(partition))


def test_batches_are_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("keygroups.spark.reader._BATCH_BYTES", 100_000)
    table = pa.table({"id": range(20), "v": ["x" * 20_000] * 20})
    kg.write_snapshot(tmp_path / "s", table, key="id")
    options = ReadOptions.parse({"path": str(tmp_path / "s")})
    reader = SnapshotReader(options, readable_schema(kg.Snapshot.open(tmp_path / "s"), options))
    batches = list(reader.read(reader.partitions()[0]))
    assert sum(batch.num_rows for batch in batches) == 20
    assert max(batch.nbytes for batch in batches) < 110_000


@pytest.mark.parametrize(
    ("schema", "match"),
    [
        ("id bigint, nothing int", "there is no column 'nothing'"),
        ("id int", "declared as int, the snapshot has bigint"),
        ("v string not null", "can be null"),
    ],
)
def test_a_declared_schema_must_fit(ids, schema, match):
    options = ReadOptions.parse({"path": str(ids.storage.root)})
    declared = _struct(schema)
    with pytest.raises(kg.InvalidArgument, match=match):
        SnapshotReader(options, declared)


def _struct(ddl):
    types = {
        "bigint": spark_types.LongType(),
        "int": spark_types.IntegerType(),
        "string": spark_types.StringType(),
    }
    fields = []
    for column in ddl.split(", "):
        name, type_, *rest = column.split(" ")
        fields.append(spark_types.StructField(name, types[type_], not rest))
    return spark_types.StructType(fields)


# --- writing: all or nothing -----------------------------------------------------------------


def test_a_key_that_is_there_twice_is_refused_wherever_its_rows_are(session, tmp_path):
    rows = session.range(0, 1000, 1, 4)
    within = rows.union(session.range(7, 8)).coalesce(1)
    across = rows.selectExpr("id % 999 as id")
    composite = rows.selectExpr("id % 500 as a", "cast(null as string) as b")
    for number, (df, key) in enumerate([(within, "id"), (across, "id"), (composite, "a,b")]):
        path = tmp_path / str(number)
        with pytest.raises(PySparkException, match=r"key .* is there more than once"):
            save(df, path, key=key, parallelism=3)
        with pytest.raises(kg.InvalidArgument, match=r"key .* is there more than once"):
            write_snapshot(df, path, key=key, parallelism=3)
        assert files_below(path) == []


def test_a_null_key_is_refused(session, tmp_path):
    df = session.range(10).selectExpr("nullif(id, 7) as id", "id as v")
    with pytest.raises(PySparkException, match="column 'id' is null in row"):
        save(df, tmp_path / "s", key="id")
    with pytest.raises(kg.InvalidArgument, match="a key is null; drop or replace"):
        write_snapshot(df, tmp_path / "s", key="id", parallelism=2)
    assert files_below(tmp_path) == []


def test_a_failed_job_leaves_nothing_and_is_no_obstacle(session, tmp_path):
    @sf.udf("bigint")
    def breaks(i):
        if i == 990:
            raise ValueError("the user's own mistake")
        return i

    rows = session.range(0, 1000, 1, 5)
    broken = rows.select(breaks("id").alias("id"))
    with pytest.raises(PySparkException, match="the user's own mistake"):
        save(broken, tmp_path / "s", key="id", parallelism=4)
    with pytest.raises(PySparkException, match="the user's own mistake"):
        write_snapshot(broken, tmp_path / "s", key="id", parallelism=4)
    with pytest.raises(kg.SnapshotNotFound):
        kg.Snapshot.open(tmp_path / "s")
    save(rows, tmp_path / "s", key="id", parallelism=4)
    assert load(session, tmp_path / "s").count() == 1000
    with pytest.raises(PySparkException, match="the user's own mistake"):
        save(broken, tmp_path / "s", key="id", mode="overwrite")
    assert load(session, tmp_path / "s").count() == 1000


def test_a_snapshot_that_is_there_is_kept_or_replaced_as_asked(session, tmp_path):
    path = tmp_path / "s"
    first, second = session.range(5), session.range(100, 120)
    write_snapshot(first, path, key="id", parallelism=2)
    before = set(files_below(path))
    with pytest.raises(PySparkException, match="SnapshotExists: a snapshot is already committed"):
        save(second, path, key="id")
    with pytest.raises(kg.SnapshotExists, match="already committed"):
        write_snapshot(second, path, key="id", parallelism=2)
    assert set(files_below(path)) == before
    save(second, path, mode="overwrite", key="id", parallelism=3)
    assert load(session, path).count() == 20
    assert not set(files_below(path)) & before - {path / MANIFEST_PATH}
    write_snapshot(first, path, key="id", parallelism=2, mode="overwrite")
    assert load(session, path).count() == 5
    for mode in ("errorifexists", "ignore"):  # Spark's word on every Python data source
        with pytest.raises(PySparkException, match="UNSUPPORTED_DATA_SOURCE_SAVE_MODE"):
            save(second, tmp_path / "new", mode=mode, key="id")


def test_a_snapshot_can_be_overwritten_by_its_own_rows(session, tmp_path):
    write_snapshot(session.range(50), tmp_path / "s", key="id", parallelism=2)
    df = load(session, tmp_path / "s").drop("key_group").withColumn("id", sf.col("id") + 1)
    write_snapshot(df, tmp_path / "s", key="id", parallelism=4, mode="overwrite")
    ids = load(session, tmp_path / "s").toArrow().column("id").to_pylist()
    assert sorted(ids) == list(range(1, 51))


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_few_rows(session, tmp_path, rows, backend):
    for df in (
        session.range(rows),
        session.createDataFrame([(i,) for i in range(rows)], "id long"),
    ):
        save(df, tmp_path / "s", mode="overwrite", key="id", parallelism=3, backend=backend)
        assert load(session, tmp_path / "s").count() == rows
    snapshot = write_snapshot(
        session.range(rows), tmp_path / "t", key="id", parallelism=3, backend=backend
    )
    assert snapshot.to_table().num_rows == rows
    assert len(snapshot.ranges) == 3
    assert partitions_of(load(session, tmp_path / "t")).count([]) == 3 - rows


@pytest.mark.parametrize("what", ["manifest", "segment"])
def test_damage_is_told_in_our_words(session, tmp_path, what):
    snapshot = kg.write_snapshot(tmp_path / "s", pa.table({"id": range(100)}), key="id")
    if what == "manifest":
        (tmp_path / "s" / MANIFEST_PATH).write_text("{}")
        match = "this is not the manifest of"
    else:
        damage(snapshot, snapshot.state().runs[0].segments[0])
        match = r"SnapshotCorrupted: \S+\.parquet"
    with pytest.raises(PySparkException, match=match):
        load(session, tmp_path / "s").collect()


def test_a_path_without_a_snapshot(session, tmp_path):
    with pytest.raises(PySparkException, match="SnapshotNotFound: no snapshot at"):
        load(session, tmp_path / "none")


def task_batches(*columns):
    schema = pa.schema([("id", pa.int64()), ("v", pa.string())])
    return iter([pa.record_batch(list(columns), schema=schema)])


def test_only_the_runs_of_committed_tasks_count(tmp_path):
    """Two attempts of one task wrote; the one that Spark did not choose leaves no trace."""
    options = WriteOptions.parse({"path": str(tmp_path / "s"), "key": "id", "parallelism": "2"})
    schema = spark_types.StructType(
        [
            spark_types.StructField("id", spark_types.LongType()),
            spark_types.StructField("v", spark_types.StringType()),
        ]
    )
    writer = SnapshotWriter(options, schema, overwrite=False)
    tasks = pickle.loads(pickle.dumps(writer))
    loser = tasks.write(task_batches([1, 2, 3], ["x", "x", "x"]))
    winner = tasks.write(task_batches([1, 2, 3], ["a", "b", "c"]))
    other = tasks.write(task_batches([4], [None]))
    assert loser.runs
    writer.commit([pickle.loads(pickle.dumps(winner)), None, other])
    snapshot = kg.Snapshot.open(tmp_path / "s")
    assert rows_of(snapshot.to_table()) == [
        {"id": i, "v": v} for i, v in ((1, "a"), (2, "b"), (3, "c"), (4, None))
    ]
    assert kg.verify(tmp_path / "s").unreferenced == ()


def test_a_task_that_was_given_up_deletes_its_files(tmp_path):
    options = WriteOptions.parse({"path": str(tmp_path / "s"), "key": "id"})
    schema = spark_types.StructType(
        [
            spark_types.StructField("id", spark_types.LongType()),
            spark_types.StructField("v", spark_types.StringType()),
        ]
    )
    for end in ("abort", "commit"):
        writer = SnapshotWriter(options, schema, overwrite=True)
        getattr(writer, end)([])
        files = files_below(tmp_path)
        with pytest.raises(kg.StorageUnavailable, match="is over"):
            writer.write(task_batches([1], ["x"]))
        assert files_below(tmp_path) == files


def test_large_overlaps_are_checked_in_windows(tmp_path, monkeypatch):
    monkeypatch.setattr("keygroups.snapshot.reader.MERGE_WINDOW_BYTES", 400)
    options = WriteOptions.parse({"path": str(tmp_path / "s"), "key": "id"})
    schema = spark_types.StructType(
        [
            spark_types.StructField("id", spark_types.LongType()),
            spark_types.StructField("v", spark_types.StringType()),
        ]
    )

    def commit(*tasks):
        writer = SnapshotWriter(options, schema, overwrite=True)
        writer.commit([writer.write(task_batches(ids, ["v"] * len(ids))) for ids in tasks])
        return writer

    commit(range(300), range(300, 500), range(-40, 0))
    assert kg.verify(tmp_path / "s").rows == 540
    for twice in (0, 150, 299):
        with pytest.raises(kg.InvalidArgument, match=f"key {twice} is there more than once"):
            commit(range(300), [twice])


# --- options ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"key": "id", "paralelism": "4"}, "unknown option 'paralelism'; .* maxParallelism, par"),
        ({}, "option 'key' is missing"),
        ({"key": "id,"}, "option 'key' is 'id,', not names"),
        ({"key": "id", "parallelism": "four"}, "option 'parallelism' is 'four', not an integer"),
        ({"key": "id", "parallelism": "9", "maxparallelism": "8"}, "parallelism 9 exceeds"),
        ({"key": "id", "maxParallelism": "0"}, "options 'maxParallelism'.*max parallelism 0"),
        ({"key": "id", "backend": "tape"}, "unknown backend 'tape'; installed are"),
        ({"key": "id", "scheme": "java"}, "unknown scheme 'java'"),
        ({"key": "id", "path": "s3://bucket/x"}, "option 'path': 's3://bucket/x' is not on a"),
        ({"key": "id", "path": ""}, "option 'path' is missing"),
    ],
)
def test_wrong_options_are_named(options, match):
    with pytest.raises(kg.InvalidArgument, match=match):
        WriteOptions.parse({"path": "/x", **options})


def test_options_are_known_in_any_case(tmp_path):
    assert WriteOptions.parse({"PATH": "/x", "Key": "a, b", "MAXPARALLELISM": "9"}).key == (
        "a",
        "b",
    )
    assert ReadOptions.parse({"path": "/x", "COLUMNS": "a"}).columns == ("a",)
    with pytest.raises(kg.InvalidArgument, match="unknown option 'key'; to read a snapshot"):
        ReadOptions.parse({"path": "/x", "key": "id"})
    with pytest.raises(kg.InvalidArgument, match="option 'pushdown' is 'yes', neither"):
        ReadOptions.parse({"path": "/x", "pushdown": "yes"})
    for text in ("", "a", "5-3", "-1", "1-2-3", "40000"):
        with pytest.raises(kg.InvalidArgument):
            ReadOptions.parse({"path": "/x", "keyGroups": text})


def test_wrong_options_reach_the_user(session, tmp_path):
    with pytest.raises(PySparkException, match="InvalidArgument: unknown option 'kee'; to write"):
        save(session.range(3), tmp_path / "s", kee="id")
    with pytest.raises(PySparkException, match="key column 'nope' is not one column of 'id'"):
        save(session.range(3), tmp_path / "s", key="nope")
    with pytest.raises(PySparkException, match="InvalidArgument: unknown option 'shards'"):
        load(session, tmp_path / "s", shards=3)
    with pytest.raises(kg.InvalidArgument, match="key column 'nope' is not one column of 'id'"):
        write_snapshot(session.range(3), tmp_path / "s", key="nope", parallelism=1)
    with pytest.raises(kg.InvalidArgument, match="mode 'ignore' is neither"):
        write_snapshot(session.range(3), tmp_path / "s", key="id", parallelism=1, mode="ignore")
    with pytest.raises(PySparkException, match="column 'key_group' has a name that every"):
        save(session.range(3).withColumn("key_group", sf.lit(1)), tmp_path / "s", key="id")
    odd = session.range(3).withColumn("m", sf.parse_json(sf.lit("1")))
    with pytest.raises(PySparkException, match="column 'm': state cannot hold Spark's type vari"):
        save(odd, tmp_path / "s", key="id")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("/a/b", "/a/b"),
        ("a/b", "a/b"),
        ("a/b:c", "a/b:c"),
        ("file:/a/b", "/a/b"),
        ("file:///a/b", "/a/b"),
        ("FILE:///a", "/a"),
    ],
)
def test_paths_of_spark_become_paths_of_the_system(given, expected):
    assert local_path(given) == expected


def test_odd_column_names(session, tmp_path):
    table = pa.table({"a.b": [1, 2, 3], "key `x`": ["p", "q", "r"], "KEY_GROUP": [7, 8, 9]})
    df = session.createDataFrame(table)
    snapshot = write_snapshot(df, tmp_path / "s", key=["a.b", "key `x`"], parallelism=2)
    assert rows_of(snapshot.to_table(), "a.b") == table.to_pylist()


def test_key_group_of_the_data_source_is_the_one_of_the_column(session, ids):
    df = load(session, ids.storage.root)
    other = key_group("id", 128, type="bigint")
    assert df.where(other != sf.col("key_group")).count() == 0


def test_every_spark_type_has_its_way_back():
    plain = [
        "boolean",
        "tinyint",
        "smallint",
        "int",
        "bigint",
        "float",
        "double",
        "string",
        "binary",
        "date",
        "timestamp",
        "timestamp_ntz",
    ]
    types = [
        spark_types.DecimalType(38, 18),
        spark_types.TimeType(),
        spark_types.DayTimeIntervalType(),
    ]
    for type_ in types:
        schema = arrow_schema(spark_types.StructType([spark_types.StructField("c", type_)]))
        assert spark_type(schema.field("c").type) == type_
    for name in plain:
        type_ = spark_types._parse_datatype_json_value(
            {"tinyint": "byte", "smallint": "short", "int": "integer", "bigint": "long"}.get(
                name, name
            )
        )
        nested = spark_types.MapType(
            type_,
            spark_types.ArrayType(
                spark_types.StructType([spark_types.StructField("x", type_, False)])
            ),
        )
        schema = arrow_schema(spark_types.StructType([spark_types.StructField("c", nested, False)]))
        assert spark_type(schema.field("c").type) == nested
