"""Writing: what rows, names and types are taken, in what forms, and what is refused and why."""

import decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import keygroups as kg
from keygroups.testing import KeyedTable, rows_of, scratch_folder, segment_size, tables

BACKENDS = ("parquet", "rocksdb", "memory")
backends = pytest.mark.parametrize("backend", BACKENDS)
GOOD = pa.table({"k": [1, 2], "v": ["x", None]})


@pytest.fixture
def path():
    with scratch_folder() as folder:
        yield folder / "s"


def table(**columns):
    return pa.table({"k": pa.array(range(len(next(iter(columns.values()))))), **columns})


REFUSED = {
    "no such key": ({"key": "x"}, GOOD, "key column 'x' is not one column of .*k.*v"),
    "no key": ({"key": []}, GOOD, "has no key column"),
    "an empty key": ({"key": ""}, GOOD, "key column '' is not one column"),
    "a key named twice": ({"key": "k,k"}, GOOD, "column 'k' is named twice"),
    "a column named twice": (
        {},
        pa.table([[1], ["x"], ["y"]], names=["k", "v", "v"]),
        "column 'v' is named twice",
    ),
    "our own column": ({}, table(key_hash=[1]), "'key_hash' has a name that every snapshot uses"),
    "op": ({}, table(op=[1]), "'op' has a name that every snapshot uses itself; rename or drop it"),
    "a null key": ({"key": "v"}, GOOD, "'v' is null in row 1; .*filter the row out or fill it"),
    "a null in a dictionary": (
        {},
        pa.table({"k": pa.DictionaryArray.from_arrays(pa.array([0, 1]), pa.array(["x", None]))}),
        "is null in row 1",
    ),
    "a list as key": ({}, pa.table({"k": [[1]]}), "takes no keys of type list"),
    "an unsigned key": ({}, pa.table({"k": pa.array([1], pa.uint8())}), "wider signed integer"),
    "key 0 twice": ({}, pa.table({"k": [0, 1, 0]}), "key 0 is there more than once.*aggregate"),
    "an empty key twice": ({}, pa.table({"k": ["", ""]}), "key '' is there more than once"),
    "NaN twice": (
        {},
        pa.table({"k": np.array([0x7FF8 << 48, (0x7FF8 << 48) + 1], "u8").view("f8")}),
        "key nan is there more than once",
    ),
    "a composite key twice": (
        {"key": "a,b"},
        pa.table({"a": ["", ""], "b": pa.array([None, None], pa.int8())}),
        "more than once",
    ),
    "a type": ({}, table(v=pa.nulls(2)), "column 'v': state cannot hold the Arrow type null"),
    "a wide list": (
        {},
        table(v=pa.array([[1]], pa.large_list(pa.int8()))),
        "column 'v': state cannot hold the Arrow type large_list",
    ),
    "a scale": (
        {},
        table(v=pa.array([decimal.Decimal(1000)], pa.decimal128(5, -2))),
        r"a scale of -2 is not within \[0, 5\]",
    ),
    "no width": ({}, table(v=pa.array([b""], pa.binary(0))), "a width of 0 bytes"),
    "no fields": ({}, table(v=pa.array([{}], pa.struct([]))), "a struct has at least one field"),
    "not UTF-8": (
        {},
        table(v=pa.array([b"a", b"\xff"]).view(pa.string())),
        "column 'v' is not valid string.*UTF8.*cast other bytes to binary",
    ),
    "a surrogate as key": (
        {},
        pa.table({"k": pa.array([b"\xed\xa0\x80"]).view(pa.string())}),
        "column 'k' is not valid",
    ),
    "not UTF-8 in a list": (
        {},
        table(v=pa.ListArray.from_arrays([0, 1], pa.array([b"\xff"]).view(pa.string()))),
        "column 'v' is not valid",
    ),
    "a null that is declared not to be": (
        {},
        pa.table(
            [[1], [None]],
            schema=pa.schema([("k", pa.int64()), pa.field("v", pa.int64(), nullable=False)]),
        ),
        "column 'v' is null in row 0",
    ),
    "a nested one": (
        {},
        table(
            v=pa.StructArray.from_arrays(
                [pa.array([1, None])], fields=[pa.field("f", pa.int64(), nullable=False)]
            )
        ),
        "column 'v': field 'f' is null, and is declared not null",
    ),
    "a long uid": ({"uid": "u" * 1025}, GOOD, "the uid has 1025 characters, over 1024"),
    "a uid of another type": ({"uid": 5}, GOOD, "the uid is 5, not a string"),
    "half a character": ({"uid": "\ud800"}, GOOD, "the uid .* is not valid Unicode"),
    "a long state": ({"state": "s" * 1025}, GOOD, "the state name has 1025 characters"),
    "a long column": ({}, table(**{"c" * 1025: [1]}), "the name of a column has 1025 characters"),
    "a backend": ({"backend": "lmdb"}, GOOD, "unknown backend 'lmdb'; installed are .*parquet"),
    "a scheme": ({"scheme": "md5"}, GOOD, "unknown scheme 'md5'"),
    "no parallelism": ({"parallelism": 0}, GOOD, r"parallelism 0 is not within \[1, 32768\]"),
    "too many": ({"max_parallelism": 4, "parallelism": 5}, GOOD, "5 exceeds max parallelism 4"),
    "a max parallelism": ({"max_parallelism": 1 << 16}, GOOD, "65536 is not within"),
    "no rows": ({}, [], "at least one to tell the columns, got list"),
    "no table": ({}, 5, "rows must be an Arrow table.*got int"),
    "a string": ({}, "rows", "rows must be an Arrow table.*got str"),
    "None": ({}, None, "rows must be an Arrow table.*got NoneType"),
    "another column": (
        {},
        [*GOOD.to_batches(), *table(w=[1]).to_batches()],
        "a batch of rows has no column 'v'",
    ),
    "another type": (
        {},
        [*GOOD.to_batches(), *table(v=[1]).to_batches()],
        "a batch of rows has int64 in column 'v', the first had string",
    ),
}


@backends
@pytest.mark.parametrize(("options", "rows", "message"), REFUSED.values(), ids=REFUSED)
def test_what_is_wrong_is_refused_and_leaves_nothing(path, backend, options, rows, message):
    arguments = {"key": "k", "backend": backend} | options
    with pytest.raises(kg.InvalidArgument, match=f"(?s){message}"):
        kg.write_snapshot(path, rows, **arguments)
    assert not path.exists()


def test_seconds_too_far_away_for_parquet(path):
    rows = table(v=pa.array([1 << 61], pa.timestamp("s")))
    with pytest.raises(kg.InvalidArgument, match="Parquet holds times in milliseconds"):
        kg.write_snapshot(path, rows, key="k", backend="parquet")
    assert not path.exists()
    for backend in ("rocksdb", "memory"):
        snapshot = kg.write_snapshot(path / backend, rows, key="k", backend=backend)
        assert rows_of(snapshot.to_table()) == [(0, 1 << 61)]


@backends
def test_empty_names_and_a_thousand_characters_are_names(path, backend):
    rows = pa.table({"": [1], "é" * 1024: ["x"]})
    snapshot = kg.write_snapshot(path, rows, key=[""], backend=backend, uid="", state="𝄞" * 1024)
    assert snapshot.operator("").uid == ""
    assert rows_of(snapshot.to_table(state="𝄞" * 1024, uid="")) == [(1, "x")]


FORMS = {
    "table": lambda t: t,
    "batch": lambda t: t.combine_chunks().to_batches()[0],
    "batches": lambda t: t.to_batches(max_chunksize=3),
    "tables": lambda t: [t.slice(0, 4), t.slice(4)],
    "generator": lambda t: (batch for batch in t.to_batches(max_chunksize=3)),
    "reader": lambda t: t.to_reader(max_chunksize=2),
    "sliced": lambda t: pa.concat_tables([t, t]).slice(t.num_rows),
    "chunked": lambda t: pa.concat_tables([t.slice(i, 1) for i in range(t.num_rows)]),
    "columns in another order": lambda t: [
        *t.slice(0, 2).to_batches(),
        *t.slice(2).select(["v", "k"]).to_batches(),
    ],
    "with an empty batch": lambda t: (
        [*t.slice(0, 0).to_batches(), *t.to_batches()] or t.schema.empty_table().to_batches()
    ),
}


@backends
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_rows_of_any_form_give_the_same_snapshot(path, backend, form):
    rows = pa.table({"k": pa.array(range(10)), "v": [None, *"abcdefghi"]})
    expected = kg.write_snapshot(path / "a", rows, key="k", backend=backend)
    snapshot = kg.write_snapshot(path / "b", form(rows), key="k", backend=backend)
    assert rows_of(snapshot.to_table()) == rows_of(expected.to_table())
    assert snapshot.key_group_sizes().equals(expected.key_group_sizes())


@backends
def test_encodings_are_taken_off(path, backend):
    plain = pa.table({"k": ["a", "b"], "v": ["x", None], "w": [b"", None]})
    encoded = pa.table(
        {
            "k": plain["k"].combine_chunks().dictionary_encode(),
            "v": plain["v"].cast(pa.string_view()),
            "w": plain["w"].cast(pa.binary_view()),
        }
    )
    expected = kg.write_snapshot(path / "a", plain, key="k", backend=backend)
    snapshot = kg.write_snapshot(path / "b", encoded, key="k", backend=backend)
    assert snapshot.to_table().equals(expected.to_table())
    pairs = pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8(), keys_sorted=True))
    snapshot = kg.write_snapshot(path / "c", table(v=pairs), key="k", backend=backend)
    assert rows_of(snapshot.to_table()) == [(0, (("a", 1),))]


@backends
def test_nulls_hide_nothing(path, backend):
    """Arrow allows any bytes, items and fields below a null; none of them is stored."""
    lists = pa.ListArray.from_arrays(
        pa.array([0, 2, 3]), pa.array([1, 2, 3]), mask=pa.array([True, False])
    )
    field = pa.field("f", pa.string(), nullable=False)
    structs = pa.StructArray.from_arrays(
        [pa.array([None, "x"])], fields=[field], mask=pa.array([True, False])
    )
    values = pa.Array.from_buffers(
        pa.int64(), 2, [pa.py_buffer(b"\2"), pa.py_buffer(b"hidden!!" + bytes(8))]
    )
    noisy = table(a=lists, b=structs, c=values)
    clean = table(
        a=pa.array([None, [3]]),
        b=pa.array([None, {"f": "x"}], pa.struct([field])),
        c=pa.array([None, 0]),
    )
    snapshots = [
        kg.write_snapshot(path / name, rows, key="k", backend=backend)
        for name, rows in (("noisy", noisy), ("clean", clean))
    ]
    first, second = (snapshot.key_group_sizes() for snapshot in snapshots)
    assert first.equals(second)
    for snapshot in snapshots:
        assert kg.verify(snapshot.storage.root).findings == ()
        assert rows_of(snapshot.to_table().sort_by("k")) == rows_of(clean)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    tables(min_rows=1),
    st.integers(1, 300),
    st.sampled_from([0, 1, 500, 1 << 20]),
    st.sampled_from(BACKENDS),
    st.randoms(use_true_random=False),
)
def test_neither_order_nor_batches_nor_memory_make_a_difference(
    rows, max_parallelism, budget, backend, random
):
    order = list(range(rows.table.num_rows))
    random.shuffle(order)
    shuffled = [rows.table.take(pa.array([i])) for i in order]
    with scratch_folder() as folder, segment_size(backend, 300):
        options = {
            "key": rows.key,
            "max_parallelism": max_parallelism,
            "scheme": rows.scheme,
            "backend": backend,
        }
        whole = kg.write_snapshot(folder / "a", rows.table, **options)
        spilled = kg.write_snapshot(folder / "b", shuffled, memory_budget_bytes=budget, **options)
        rows.model(max_parallelism).expect(spilled)
        assert spilled.key_group_sizes().equals(whole.key_group_sizes())
        assert kg.verify(folder / "b").unreferenced == ()  # nothing that was spilled is left


class TestReading:
    @pytest.fixture
    def snapshot(self, path):
        return kg.write_snapshot(path, GOOD, key="k", max_parallelism=8)

    def test_names_and_ranges_that_are_not_there(self, snapshot):
        for arguments, message in (
            ({"columns": ["x"]}, "no column 'x' among key_group, key_hash, k, v"),
            ({"state": "x"}, "name one state of 'state' in operator 'operator', not 'x'"),
            ({"uid": "x"}, "name one operator uid of 'operator', not 'x'"),
            ({"range": kg.KeyGroupRange(0, 8)}, r"KeyGroupRange\[0, 8\] is not within \[0, 7\]"),
            ({"keys": pa.array([None], pa.int64())}, "null"),
            ({"keys": pa.array([1], pa.int32())}, "the keys are of type int32, those.*of int64"),
            ({"keys": pa.array(["1"])}, "of type string, .*; cast them"),
            ({"keys": [1]}, "must be a pyarrow array"),
        ):
            with pytest.raises(kg.InvalidArgument, match=message):
                list(snapshot.to_batches(**arguments))

    def test_columns_in_any_order_once_twice_or_none(self, snapshot):
        assert rows_of(snapshot.to_table(columns=["v", "k"]).sort_by("k")) == [("x", 1), (None, 2)]
        assert snapshot.to_table(columns=[]).num_rows == 2
        assert snapshot.to_table(columns=[]).num_columns == 0

    @backends
    @pytest.mark.parametrize(
        ("keys", "sought"),
        [
            (pa.array([0, 1, -1]), [0]),
            (pa.array(["", "\0", "a"]), ["", "nothing"]),
            (pa.array([False, True]), [False]),
            (pa.array([0.0, -0.0, float("nan")]), [float("nan"), -0.0]),
        ],
        ids=str,
    )
    def test_looking_up_falsy_keys(self, path, backend, keys, sought):
        rows = pa.table({"k": keys, "v": range(len(keys))})
        snapshot = kg.write_snapshot(path, rows, key="k", max_parallelism=4, backend=backend)
        sought = pa.array(sought, keys.type)
        found = snapshot.to_table(keys=sought)
        wanted = {row[0] for row in rows_of(pa.table([sought], names=["k"]))}
        assert {row[0] for row in rows_of(found)} == wanted & {row[0] for row in rows_of(rows)}
        assert snapshot.to_table(keys=sought.slice(0, 0)).num_rows == 0

    def test_a_model_that_is_wrong_is_noticed(self, path):
        """The oracle of all these tests is no yes-man."""
        rows = ((0, "x"), (1, "y"))
        snapshot = kg.write_snapshot(
            path, pa.table({"k": [0, 1], "v": ["x", "y"]}), key="k", max_parallelism=4
        )
        schema = snapshot.schema()
        for wrong in (rows[:1], (*rows, (2, "z")), ((0, "x"), (1, None)), ((0, "x"), (-1, "y"))):
            model = KeyedTable(None, ("k",), "flink", wrong, schema).model(4)
            with pytest.raises(AssertionError):
                model.expect(snapshot)
        right = KeyedTable(None, ("k",), "flink", rows, schema)
        right.model(4).expect(snapshot)
        for model in (right.model(5), right.model(4, 2)):
            with pytest.raises(AssertionError):
                model.expect(snapshot)
