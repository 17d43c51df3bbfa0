"""The files of a snapshot as other programs read them: Arrow, DuckDB, Spark, RocksDB."""

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import keygroups as kg
from keygroups.keys import encode_keys
from keygroups.snapshot.rows import encode_rows
from keygroups.testing import rocksdb_entries, rows_of, segment_size

ROWS = 500


def table():
    return pa.table(
        {
            "name": [f"key {i}" for i in range(ROWS)],
            "number": pa.array([None if i % 7 == 0 else i for i in range(ROWS)], pa.int32()),
            "seen": pa.array([i * 1000 for i in range(ROWS)], pa.timestamp("us", "UTC")),
            "tags": [[] if i % 3 == 0 else [str(i), None] for i in range(ROWS)],
            "half": pa.array([i / 2 for i in range(ROWS)], pa.float64()),
        }
    )


@pytest.fixture
def write(tmp_path):
    def write(backend, **options):
        with segment_size(backend, 3000):
            return kg.write_snapshot(
                tmp_path / "s",
                table(),
                key="name",
                max_parallelism=64,
                parallelism=3,
                backend=backend,
                **options,
            )

    return write


def segments(snapshot):
    return [
        snapshot.storage.root / segment.file.path
        for run in sorted(snapshot.manifest.runs, key=lambda run: run.key_groups)
        for segment in run.segments
    ]


class TestParquet:
    @pytest.fixture
    def snapshot(self, write):
        return write("parquet")

    @pytest.fixture
    def stored(self, snapshot):
        return snapshot.to_table(columns=snapshot.schema().stored.names)

    def test_arrow_reads_them_with_their_types(self, snapshot, stored):
        files = segments(snapshot)
        assert len(files) > 5
        tables = [pq.read_table(path, page_checksum_verification=True) for path in files]
        assert rows_of(pa.concat_tables(tables)) == rows_of(stored)
        assert tables[0].schema.equals(stored.schema)

    def test_each_page_has_a_checksum_that_finds_damage(self, snapshot):
        path = segments(snapshot)[0]
        chunk = pq.ParquetFile(path).metadata.row_group(0).column(2)
        whole = path.read_bytes()
        position = chunk.data_page_offset + chunk.total_compressed_size - 1  # the last of its page
        damaged = bytearray(whole)
        damaged[position] ^= 1
        path.write_bytes(damaged)
        unchecked = pq.read_table(path, page_checksum_verification=False)
        assert unchecked.num_rows  # it parses, with another string in it
        with pytest.raises(OSError, match="CRC"):
            pq.read_table(path, page_checksum_verification=True)

    def test_row_groups_hold_whole_key_groups_and_say_which(self, tmp_path, monkeypatch):
        monkeypatch.setattr("keygroups.backends.parquet.ROW_GROUP_ROWS", 50)
        snapshot = kg.write_snapshot(tmp_path / "s", table(), key="name", max_parallelism=16)
        (path,) = segments(snapshot)
        metadata = pq.ParquetFile(path).metadata
        assert metadata.num_row_groups > 5
        statistics = [
            metadata.row_group(i).column(0).statistics for i in range(metadata.num_row_groups)
        ]
        bounds = [bound for s in statistics for bound in (s.min, s.max)]
        assert bounds == sorted(bounds)
        starts = [s.min for s in statistics]
        assert len(starts) == len(set(starts))
        sizes = snapshot.key_group_sizes()["rows"].to_numpy()
        for i, s in enumerate(statistics):
            assert metadata.row_group(i).num_rows == sizes[s.min : s.max + 1].sum()
            for group in range(s.min, s.max + 1):
                one = snapshot.to_table(kg.KeyGroupRange(group, group))
                assert one.num_rows == sizes[group]

    def test_duckdb_reads_them(self, snapshot, stored):
        with duckdb.connect() as db:
            db.execute("set timezone = 'UTC'")
            found = db.execute(
                "select key_group, key_hash, name, number, epoch_us(seen), tags, half "
                "from read_parquet(?) order by key_group, key_hash, name",
                [str(snapshot.storage.root / "data" / "*" / "*" / "*.parquet")],
            ).fetchall()
        micros = stored.column("seen").cast(pa.int64())
        plain = stored.set_column(4, "seen", micros)
        expected = [tuple(row.values()) for row in plain.to_pylist()]
        assert sorted(found, key=str) == sorted(expected, key=str)

    def test_duckdb_groups_by_key_group_as_the_index_does(self, snapshot):
        with duckdb.connect() as db:
            found = db.execute(
                "select key_group, count(*) from read_parquet(?) group by 1 order by 1",
                [str(snapshot.storage.root / "data" / "*" / "*" / "*.parquet")],
            ).fetchall()
        sizes = snapshot.key_group_sizes().to_pydict()
        pairs = zip(sizes["key_group"], sizes["rows"], strict=True)
        assert found == [(group, rows) for group, rows in pairs if rows]

    def test_spark_reads_them(self, spark, snapshot, stored):
        found = spark.read.parquet(str(snapshot.storage.root / "data" / "*" / "*" / "*.parquet"))
        assert found.columns == stored.column_names
        assert dict(found.dtypes)["tags"] == "array<string>"
        # Spark's `hash` has the seed 42 and no remainder by key group: its columns are its own.
        rows = sorted(tuple(row) for row in found.drop("seen", "half").collect())
        expected = stored.drop_columns(["seen", "half"]).to_pylist()
        assert rows == sorted(tuple(row.values()) for row in expected)

    def test_spark_hashes_its_own_scheme_to_the_same_groups(self, spark, write):
        snapshot = write("parquet", scheme="spark")
        found = spark.read.parquet(str(snapshot.storage.root / "data" / "*" / "*" / "*.parquet"))
        wrong = found.where("key_hash <> hash(name) or key_group <> pmod(hash(name), 64)")
        assert found.count() == ROWS
        assert wrong.count() == 0


class TestRocksDb:
    @pytest.fixture
    def snapshot(self, write):
        return write("rocksdb")

    def test_rocksdb_reads_them(self, snapshot):
        files = segments(snapshot)
        assert len(files) > 5
        entries = [entry for path in files for entry in rocksdb_entries(path)]
        rows = snapshot.to_table(columns=snapshot.schema().stored.names).combine_chunks()
        schema = snapshot.schema()
        groups = [row.to_bytes(2, "big") for row in rows["key_group"].to_pylist()]
        hashes = [(row + (1 << 31)).to_bytes(4, "big") for row in rows["key_hash"].to_pylist()]
        keys = encode_keys([schema.key_array(rows)]).to_pylist()
        values = [rows[field.name].combine_chunks() for field in schema.value]
        encoded = encode_rows(values, rows.num_rows).to_pylist()
        prefixed = [g + h + k for g, h, k in zip(groups, hashes, keys, strict=True)]
        assert entries == list(zip(prefixed, encoded, strict=True))
        assert [key for key, _ in entries] == sorted(key for key, _ in entries)

    def test_a_key_group_is_one_interval_of_keys(self, snapshot):
        keys = [key for path in segments(snapshot) for key, _ in rocksdb_entries(path)]
        groups = np.array([int.from_bytes(key[:2], "big") for key in keys])
        assert (np.diff(groups) >= 0).all()
        rows = snapshot.key_group_sizes()["rows"].to_numpy()
        assert np.array_equal(np.bincount(groups, minlength=64), rows)
        for key in keys:
            name = key[6:].decode()
            assert int.from_bytes(key[:2], "big") == kg.assign_to_key_group(name, 64)

    def test_all_files_go_into_one_database(self, snapshot, tmp_path):
        """Runs of one snapshot do not overlap: RocksDB takes them all as they are."""
        import rocksdict

        options = rocksdict.Options(raw_mode=True)
        options.create_if_missing(True)
        db = rocksdict.Rdict(str(tmp_path / "db"), options)
        try:
            db.ingest_external_file([str(path) for path in segments(snapshot)])
            found, it = 0, db.iter()
            it.seek((21).to_bytes(2, "big"))
            while it.valid() and it.key() < (43).to_bytes(2, "big"):
                found += 1
                it.next()
            it.status()
            del it
        finally:
            db.close()
        sizes = snapshot.key_group_sizes()["rows"].to_numpy()
        assert found == sizes[21:43].sum() > 0


class TestMemory:
    def test_arrow_maps_them(self, write):
        snapshot = write("memory")
        tables = []
        for path in segments(snapshot):
            with pa.memory_map(str(path)) as file:
                tables.append(pa.ipc.open_file(file).read_all())
        stored = snapshot.to_table(columns=snapshot.schema().stored.names)
        assert rows_of(pa.concat_tables(tables)) == rows_of(stored)


def test_the_index_is_an_arrow_file_that_anybody_reads(write):
    snapshot = write("parquet")
    path = snapshot.storage.root / snapshot.manifest.index.path
    with pa.memory_map(str(path)) as file:
        index = pa.ipc.open_file(file).read_all()
    by_group = index.group_by("key_group").aggregate([("rows", "sum")]).sort_by("key_group")
    sizes = snapshot.key_group_sizes()
    assert by_group["rows_sum"].to_pylist() == [n for n in sizes["rows"].to_pylist() if n]
