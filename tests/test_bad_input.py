"""Whatever stands in the files: an error of ours that says what is wrong, or the right rows.

Two kinds of damage. Accidents change bytes and are found by digests. Forgeries have the right
digests: here every text is digested again after it was changed, so that what stands behind the
digest is what must refuse.
"""

import copy
import itertools
import json
import os
import re
import tracemalloc
from dataclasses import fields, replace

import numpy as np
import pyarrow as pa
import pytest

import keygroups as kg
from keygroups.rescale import plan_rescale
from keygroups.snapshot import index as index_module
from keygroups.snapshot import reader, types
from keygroups.snapshot.digest import digest_bytes
from keygroups.snapshot.index import SegmentIndex
from keygroups.snapshot.storage import LocalStorage
from keygroups.testing import rows_of
from keygroups.testing.scratch import scratch_folder, segment_size

BACKENDS = ("parquet", "rocksdb", "memory")
MANIFEST = "manifest.json"
BAD_SNAPSHOT = (kg.SnapshotCorrupted, kg.IncompatibleSnapshot)


def table(count=24):
    values = pa.array([None if i % 5 == 0 else f"value {i}" for i in range(count)])
    return pa.table({"k": pa.array(range(count), pa.int64()), "v": values})


@pytest.fixture
def folder():
    with scratch_folder() as path:
        yield path


@pytest.fixture
def snapshot(folder):
    with segment_size("parquet", 200):
        yield kg.write_snapshot(
            folder / "s", table(), key="k", max_parallelism=8, parallelism=2, uid="uid"
        )


# --- Forging ---------------------------------------------------------------------------------


def manifest_of(snapshot):
    return json.loads((snapshot.storage.root / MANIFEST).read_text())


def signed(text):
    """The bytes of a manifest, with the digest that makes them believed."""
    body = {key: value for key, value in text.items() if key != "digest"}
    covered = json.dumps(body, indent=2).removesuffix("\n}").encode() + b",\n"
    return covered + f'  "digest": "{digest_bytes(covered)}"\n}}\n'.encode()


def forge(snapshot, text):
    (snapshot.storage.root / MANIFEST).write_bytes(signed(text))


def forge_file(snapshot, entry, data):
    """Puts other bytes into a file that the manifest names, with their digest."""
    text = manifest_of(snapshot)
    for file in files_in(text):
        if file["path"] == entry["path"]:
            file.update(size_bytes=len(data), digest=digest_bytes(data))
            if file.pop("footer", None) and data:
                file["footer"] = {"size_bytes": len(data), "digest": digest_bytes(data)}
    (snapshot.storage.root / entry["path"]).write_bytes(data)
    forge(snapshot, text)


def files_in(text):
    yield text["index"]
    for operator in text["operators"]:
        for state in operator["states"]:
            for run in state["runs"]:
                yield from run["segments"]


def use_all_of(path):
    """Everything that can be done with a snapshot by whoever trusts it."""
    snapshot = kg.Snapshot.open(path)
    for operator in snapshot.manifest.operators:
        assert repr(snapshot)
        snapshot.key_group_sizes(uid=operator.uid)
        for state in operator.states:
            list(snapshot.to_batches(uid=operator.uid, state=state.name))
            one = kg.KeyGroupRange(0, 0)
            list(snapshot.to_batches(one, uid=operator.uid, state=state.name, columns=[]))
    for parallelism in (None, 1):
        plan_rescale(snapshot, parallelism, mode="link")
    kg.verify(path)


def run_of(text):
    return text["operators"][0]["states"][0]["runs"][0]


def change(path, value):
    """A change of a manifest: the value at a path of keys and indices."""

    def apply(text):
        *parents, last = path
        for key in parents:
            text = text[key]
        text[last] = value

    return apply


OPERATOR, STATE = ("operators", 0), ("operators", 0, "states", 0)
RUN, SEGMENT = (*STATE, "runs", 0), (*STATE, "runs", 0, "segments", 0)
INCOMPATIBLE, CORRUPTED = kg.IncompatibleSnapshot, kg.SnapshotCorrupted

FORGERIES = [
    (("format",), "other-format", INCOMPATIBLE, 'not the manifest of a "keygroups-snapshot"'),
    (("version",), 2, INCOMPATIBLE, "format version 2 is not 1"),
    (("version",), 0, INCOMPATIBLE, "format version 0 is not 1"),
    (("version",), "1", INCOMPATIBLE, "format version '1' is not 1"),
    (("version",), True, INCOMPATIBLE, "format version True is not 1"),
    (("version",), 1.0, INCOMPATIBLE, "format version 1.0 is not 1"),
    (("must_understand",), ["delta-runs"], INCOMPATIBLE, "'delta-runs'.*use a newer one"),
    (("must_understand",), None, CORRUPTED, '"must_understand" is None, expected list'),
    (("operators",), [], CORRUPTED, "names no operator"),
    ((*OPERATOR, "max_parallelism"), 0, CORRUPTED, r"max parallelism 0 is not within \[1, 32768\]"),
    ((*OPERATOR, "max_parallelism"), 32769, CORRUPTED, r"32769 is not within \[1, 32768\]"),
    ((*OPERATOR, "max_parallelism"), 3, CORRUPTED, "beyond the last|not .start, end. within"),
    ((*OPERATOR, "scheme"), "crc32", INCOMPATIBLE, "scheme 'crc32' is unknown"),
    ((*OPERATOR, "cut"), [], CORRUPTED, "parallelism 0"),
    ((*OPERATOR, "cut"), [1, 4], CORRUPTED, "first range starts at key group 1, not 0"),
    ((*OPERATOR, "cut"), [0, 0], CORRUPTED, "do not increase strictly"),
    ((*OPERATOR, "cut"), [0, 5, 4], CORRUPTED, "do not increase strictly"),
    ((*OPERATOR, "cut"), [0, 8], CORRUPTED, "a range starts at key group 8, beyond the last, 7"),
    ((*OPERATOR, "cut"), [0, 1.5], CORRUPTED, "must be an integer"),
    ((*OPERATOR, "cut"), [0, True], CORRUPTED, "must be an integer"),
    ((*OPERATOR, "cut"), list(range(1_000_000)), CORRUPTED, "1000000"),
    ((*OPERATOR, "cut"), [-1, 4], CORRUPTED, "-1"),
    ((*OPERATOR, "key"), [], CORRUPTED, "has no key column"),
    ((*OPERATOR, "key", 0, "type"), "uint64", CORRUPTED, "takes no keys of type uint64"),
    ((*OPERATOR, "key", 0, "type"), "float128", INCOMPATIBLE, "unknown type 'float128'"),
    ((*OPERATOR, "key", 0, "type"), {"type": "list"}, INCOMPATIBLE, "not a valid list type"),
    ((*OPERATOR, "key", 0, "name"), "key_group", CORRUPTED, "every snapshot uses itself"),
    ((*OPERATOR, "key", 0, "name"), "v", CORRUPTED, "column 'v' is named twice"),
    ((*OPERATOR, "key", 0, "name"), "\ud800", INCOMPATIBLE, "not valid"),
    ((*OPERATOR, "uid"), "u" * 1025, CORRUPTED, "1025 characters, over 1024"),
    ((*OPERATOR, "epoch"), -1, CORRUPTED, '"epoch" is -1'),
    ((*OPERATOR, "epoch"), 1 << 63, CORRUPTED, r"not within \[0, 2\^62\]"),
    ((*OPERATOR, "watermark_ms"), "now", CORRUPTED, "not an integer or null"),
    ((*STATE, "kind"), "map", INCOMPATIBLE, "state kind 'map' is unknown"),
    ((*STATE, "backend"), "lmdb", INCOMPATIBLE, "unknown backend 'lmdb'.*parquet.*install"),
    ((*RUN, "kind"), "delta", INCOMPATIBLE, "run kind 'delta' is unknown"),
    ((*RUN, "key_groups"), [0, 8], CORRUPTED, r"not \[start, end\] within \[0, 7\]"),
    ((*RUN, "key_groups"), [3, 2], CORRUPTED, r"not \[start, end\]"),
    ((*RUN, "key_groups"), [-1, 2], CORRUPTED, r"not \[start, end\]"),
    ((*RUN, "key_groups"), [0], CORRUPTED, r"not \[start, end\]"),
    ((*RUN, "key_groups"), [0, 0], CORRUPTED, r"not within the run's KeyGroupRange\[0, 0\]"),
    ((*SEGMENT, "rows"), 1 << 60, CORRUPTED, f"the segment {1 << 60}"),
    ((*SEGMENT, "rows"), 0, CORRUPTED, "the segment 0"),
    ((*SEGMENT, "size_bytes"), 1 << 60, CORRUPTED, f"the manifest says {1 << 60}"),
    ((*SEGMENT, "digest"), "0" * 32, CORRUPTED, "digest .*, the manifest says 0000"),
    ((*SEGMENT, "digest"), "A" * 32, CORRUPTED, "not a digest of 32 hexadecimal digits"),
    ((*SEGMENT, "footer"), None, CORRUPTED, '"footer" is None, expected dict'),
    ((*SEGMENT, "footer"), {}, CORRUPTED, '"size_bytes" is None'),
    ((*SEGMENT, "footer", "size_bytes"), 0, CORRUPTED, "the footer of .* has 0 of"),
    ((*SEGMENT, "footer", "size_bytes"), 1 << 60, CORRUPTED, f"the footer of .* has {1 << 60} of"),
    ((*SEGMENT, "path"), "data/nothing", CORRUPTED, "is missing"),
    ((*SEGMENT, "path"), "data", CORRUPTED, "is missing or no file"),
    ((*SEGMENT, "path"), MANIFEST, CORRUPTED, "manifest says"),
    ((*SEGMENT, "path"), f"{MANIFEST}/x", CORRUPTED, "is missing"),
    ((*SEGMENT, "path"), "/".join(["x" * 300] * 3), CORRUPTED, "is missing"),
    *(
        ((*SEGMENT, "path"), path, CORRUPTED, "not the relative path of a file inside the snapshot")
        for path in (
            "", ".", "..", "../x", "/etc/passwd", "data/../../x", "data//x", "data/", "/",
            "data\\x", "C:\\x", "data/./x", "data/x\0", "data/x\n", "~/x", ".hidden", "data/é",
            "file:///etc/passwd", "data/ x", "data/*",
        )
    ),
    ((*SEGMENT, "path"), "\ud800", CORRUPTED, "is not valid Unicode"),
    ((*SEGMENT, "path"), "x" * 1025, CORRUPTED, "1025 characters, over 1024"),
    (("index", "rows"), 1 << 60, CORRUPTED, f"the manifest says {1 << 60}"),
    (("index", "rows"), 0, CORRUPTED, "the manifest says 0"),
    (("index", "size_bytes"), 1 << 60, CORRUPTED, f"the manifest says {1 << 60}"),
    (("index", "path"), "../s/index", CORRUPTED, "not the relative path"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "value", "kind", "message"), FORGERIES, ids=lambda x: f"{x!s:.40}"
)
def test_a_forged_manifest_is_refused_and_says_where_and_why(snapshot, path, value, kind, message):
    text = manifest_of(snapshot)
    change(path, value)(text)
    forge(snapshot, text)
    root = snapshot.storage.root
    with pytest.raises(kind, match=f"(?s){re.escape(str(root))}.*({message})") as error:
        kg.Snapshot.open(root).to_table(columns=snapshot.schema().stored.names)
    assert type(error.value) is kind
    assert len(str(error.value)) < 3000


def test_a_name_that_stands_twice_is_refused(snapshot):
    good = manifest_of(snapshot)
    run = run_of(good)
    twice = {
        "operator uid 'uid' is named twice": lambda t: t["operators"].append(t["operators"][0]),
        "state 'state' is named twice": lambda t: t["operators"][0]["states"].append(
            {**t["operators"][0]["states"][0], "runs": []}
        ),
        "column 'v' is named twice": lambda t: t["operators"][0]["states"][0]["fields"].append(
            t["operators"][0]["states"][0]["fields"][0]
        ),
        f"file '{run['segments'][0]['path']}' is named twice": lambda t: run_of(t)[
            "segments"
        ].append(run["segments"][0]),
    }
    for message, apply in twice.items():
        text = copy.deepcopy(good)
        apply(text)
        forge(snapshot, text)
        with pytest.raises(kg.SnapshotCorrupted, match=re.escape(message)):
            kg.Snapshot.open(snapshot.storage.root)


def test_members_that_a_newer_writer_added_are_ignored(snapshot):
    text = manifest_of(snapshot)
    text["new"] = {"x": 1}
    text["operators"][0]["new"] = run_of(text)["segments"][0]["new"] = [1]
    forge(snapshot, text)
    assert kg.Snapshot.open(snapshot.storage.root).to_table().equals(snapshot.to_table())


EVIL = [
    None, True, False, 0, -1, 1, 7, 8, 1 << 31, 1 << 62, 1 << 63, 1 << 64, -(1 << 64), 10**400,
    1.5, float("nan"), float("inf"), "", "x", "0", "..", "/", "\0", "\ud800", "int64", "x" * 2000,
    [], [[]], [0], [0, 0], [None], ["x"] * 3, {}, {"type": "list"}, {"type": {}}, {"name": "x"},
]  # fmt: skip


def places_in(node, path=()):
    """The path of every node of a JSON text below the root."""
    children = node.items() if isinstance(node, dict) else enumerate(node)
    for key, child in children:
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from places_in(child, (*path, key))


@pytest.mark.parametrize("backend", ["parquet", "rocksdb"])
def test_any_node_replaced_by_anything_gives_our_errors_only(folder, backend):
    """Every node of a manifest of every kind of type, deleted, doubled or of another value."""
    nested = pa.array(
        [{"a": [1], "m": [("x", 1.5)], "t": 0, "d": None, "f": b"abc"}, None],
        pa.struct(
            [
                ("a", pa.list_(pa.int8())),
                ("m", pa.map_(pa.string(), pa.float64())),
                ("t", pa.timestamp("us", "UTC")),
                ("d", pa.decimal128(5, 2)),
                ("f", pa.binary(3)),
            ]
        ),
    )
    rows = pa.table({"a": ["x", "y"], "b": pa.array([0, None], pa.int32()), "v": nested})
    path = folder / "s"
    kg.write_snapshot(path, rows, key="a,b", max_parallelism=4, backend=backend)
    good = manifest_of(kg.Snapshot.open(path))
    expected = rows_of(kg.Snapshot.open(path).to_table())
    opened = refused = 0
    for place in places_in(good):
        for evil in [*EVIL, "delete", "double"]:
            text = copy.deepcopy(good)
            *parents, last = place
            parent = text
            for key in parents:
                parent = parent[key]
            if evil == "delete":
                del parent[last]
            elif evil == "double":
                parent[last] = [copy.deepcopy(parent[last])] * 2
            else:
                parent[last] = evil
            (path / MANIFEST).write_bytes(signed(text))
            try:
                use_all_of(path)
                opened += 1
            except BAD_SNAPSHOT:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{place} replaced by {evil!r:.100}: {error!r}") from error
    assert refused > 1500
    assert opened > 50  # the times, ids and names that mean nothing to a reader
    (path / MANIFEST).write_bytes(signed(good))
    assert rows_of(kg.Snapshot.open(path).to_table()) == expected


TEXTS = {
    "nothing": b"",
    "not JSON": b"manifest",
    "a part of JSON": b'{"format": "keygroups-snapshot", ',
    "not UTF-8": b'{"format": "\xff\xfe"}',
    "UTF-16": '{"format": "keygroups-snapshot"}'.encode("utf-16"),
    "a number": b"1",
    "a list": b"[]",
    "null": b"null",
    "deep lists": b"[" * 1_000_000,
    "deep closed lists": b"[" * 500_000 + b"]" * 500_000,
    "deep objects": b'{"a":' * 500_000,
    "a huge integer": b'{"format": "keygroups-snapshot", "version": ' + b"9" * 1_000_000 + b"}",
    "not a number": b'{"format": "keygroups-snapshot", "version": NaN}',
    "zeros": bytes(4096),
    "other JSON": b'{"format": "keygroups-snapshot"}',
    "no digest": b'{"format": "keygroups-snapshot", "version": 1, "must_understand": []}',
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_a_manifest_that_is_none(snapshot, text):
    (snapshot.storage.root / MANIFEST).write_bytes(text)
    with pytest.raises(BAD_SNAPSHOT, match=re.escape(str(snapshot.storage.root / MANIFEST))):
        kg.Snapshot.open(snapshot.storage.root)


def test_a_type_nested_too_deep_is_refused_on_both_sides(snapshot, folder):
    text = manifest_of(snapshot)
    deep = "int8"
    for _ in range(types.NESTING_LIMIT):
        deep = {"type": "list", "item": {"name": "item", "type": deep, "nullable": True}}
    text["operators"][0]["states"][0]["fields"][0]["type"] = deep
    forge(snapshot, text)
    with pytest.raises(kg.IncompatibleSnapshot, match="nested more than 32 deep"):
        kg.Snapshot.open(snapshot.storage.root)
    data_type = pa.int8()
    for _ in range(types.NESTING_LIMIT):
        data_type = pa.list_(data_type)
    rows = pa.table({"k": [1], "v": pa.nulls(1, data_type)})
    with pytest.raises(kg.InvalidArgument, match="nested more than 32 deep"):
        kg.write_snapshot(folder / "deep", rows, key="k")
    assert not (folder / "deep").exists()


# --- Files -----------------------------------------------------------------------------------


class TestLinks:
    def test_a_symbolic_link_that_leads_out_is_refused(self, snapshot, folder):
        root = snapshot.storage.root
        for file in (snapshot.manifest.index, snapshot.manifest.runs[0].segments[0].file):
            path = root / file.path
            outside = folder / "outside"
            path.rename(outside)
            path.symlink_to(outside)
            with pytest.raises(kg.SnapshotCorrupted, match="leads out of the snapshot"):
                kg.Snapshot.open(root).to_table()
            path.unlink()
            outside.rename(path)
        assert kg.verify(root).findings == ()

    def test_a_folder_that_leads_out_is_refused(self, snapshot, folder):
        (snapshot.storage.root / "data").rename(folder / "data")
        (snapshot.storage.root / "data").symlink_to(folder / "data")
        with pytest.raises(kg.SnapshotCorrupted, match="leads out of the snapshot"):
            kg.Snapshot.open(snapshot.storage.root)

    def test_links_inside_and_a_root_that_is_one_are_fine(self, snapshot, folder):
        path = snapshot.storage.root / snapshot.manifest.index.path
        path.rename(path.with_name("moved"))
        path.symlink_to("moved")
        (folder / "root").symlink_to(snapshot.storage.root)
        assert kg.Snapshot.open(folder / "root").to_table().num_rows == 24

    def test_loops_pipes_and_folders_are_no_files(self, snapshot):
        segment = snapshot.manifest.runs[0].segments[0].file
        path = snapshot.storage.root / segment.path
        path.unlink()
        for make in (lambda: path.symlink_to(path.name), lambda: os.mkfifo(path), path.mkdir):
            make()
            for read in (snapshot.to_table, lambda: snapshot.to_table(kg.KeyGroupRange(0, 3))):
                with pytest.raises(kg.SnapshotCorrupted, match="missing or no file"):
                    read()
            path.rmdir() if path.is_dir() else path.unlink()

    def test_a_manifest_that_is_a_link_out_is_refused(self, snapshot, folder):
        path = snapshot.storage.root / MANIFEST
        path.rename(folder / "outside")
        path.symlink_to(folder / "outside")
        with pytest.raises(kg.SnapshotCorrupted, match="leads out"):
            kg.Snapshot.open(snapshot.storage.root)


class TestMissing:
    def test_no_snapshot(self, folder):
        for path in (folder / "nothing", folder):
            for read in (kg.Snapshot.open, kg.verify):
                with pytest.raises(kg.SnapshotNotFound, match="no snapshot at.*Check the path"):
                    read(path)

    def test_any_file(self, snapshot):
        root = snapshot.storage.root
        for file in snapshot.manifest.files:
            path = root / file.path
            data = path.read_bytes()
            path.unlink()
            with pytest.raises(kg.SnapshotCorrupted, match=f"{file.path} is missing"):
                kg.Snapshot.open(root).to_table()
            path.write_bytes(data)

    def test_verify_goes_on_after_a_missing_file(self, snapshot):
        segments = [s for run in snapshot.manifest.runs for s in run.segments]
        for segment in segments[1:3]:
            (snapshot.storage.root / segment.file.path).unlink()
        findings = kg.verify(snapshot.storage.root).findings
        assert [f.path for f in findings] == [s.file.path for s in segments[1:3]]
        assert all("missing" in f.message for f in findings)

    def test_files_that_were_swapped(self, snapshot):
        """Each is whole, of rows of this snapshot, and in the wrong place."""
        root = snapshot.storage.root
        first, second = (root / run.segments[0].file.path for run in snapshot.manifest.runs)
        one, other = first.read_bytes(), second.read_bytes()
        first.write_bytes(other)
        second.write_bytes(one)
        assert len(kg.verify(root).findings) == 2
        text = manifest_of(snapshot)  # and with digests, sizes and counts that fit the files
        a, b = (run["segments"][0] for run in text["operators"][0]["states"][0]["runs"])
        for member in ("digest", "size_bytes", "rows", "footer"):
            a[member], b[member] = b[member], a[member]
        forge(snapshot, text)
        with pytest.raises(kg.SnapshotCorrupted):
            kg.Snapshot.open(root).to_table()


# --- The index -------------------------------------------------------------------------------


def columns_of(snapshot):
    data = (snapshot.storage.root / snapshot.manifest.index.path).read_bytes()
    table = pa.ipc.open_file(pa.BufferReader(data)).read_all()
    return {name: table.column(name).to_numpy().copy() for name in table.column_names}


def forge_index(snapshot, columns, *, schema=index_module.SCHEMA, options=None, stream=False):
    sink = pa.BufferOutputStream()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    table = pa.table({n: pa.array(c) for n, c in columns.items()})
    table = table.cast(schema) if schema is not None else table
    with new(sink, table.schema, options=options) as writer:
        writer.write_table(table)
    data = sink.getvalue().to_pybytes()
    forge_file(snapshot, {"path": snapshot.manifest.index.path}, data)
    text = manifest_of(snapshot)
    text["index"]["rows"] = table.num_rows
    forge(snapshot, text)


def at(name, place, value):
    def apply(columns):
        columns[name][place] = value
        return columns

    return apply


def taking(places):
    return lambda columns: {name: values[places] for name, values in columns.items()}


INDICES = {
    "a run that is not there": (at("run", -1, 9), "names run 9 of 2"),
    "a segment that is not there": (at("segment", -1, 9), "a segment that its run does not have"),
    "a huge run": (at("run", -1, (1 << 32) - 1), f"names run {(1 << 32) - 1} of 2"),
    "a huge segment": (at("segment", -1, (1 << 32) - 1), "a segment that its run does not have"),
    "no rows": (at("rows", 0, 0), "without rows"),
    "too many rows": (at("rows", 0, (1 << 64) - 1), r"a count above 2\^62"),
    "other rows": (at("rows", 0, 99), "rows, the segment"),
    "a huge size": (at("size_bytes", 0, 1 << 63), r"a count above 2\^62"),
    "a key group outside": (at("key_group", -1, 60000), "60000 are not within the run's"),
    "unsorted": (taking(slice(None, None, -1)), "not in order of runs and segments"),
    "a key group twice": (taking([0, 0, 1, 2, 3, 4, 5]), "not in ascending order|the segment"),
    "a segment forgotten": (taking(slice(1, None)), "without rows|rows, the segment"),
    "empty": (taking(slice(0, 0)), "without rows"),
}


class TestIndex:
    @pytest.mark.parametrize(("apply", "message"), INDICES.values(), ids=INDICES)
    def test_a_forged_one_is_refused(self, snapshot, apply, message):
        forge_index(snapshot, apply(columns_of(snapshot)))
        path = re.escape(str(snapshot.storage.root / snapshot.manifest.index.path))
        with pytest.raises(kg.SnapshotCorrupted, match=f"{path}.*({message})"):
            kg.Snapshot.open(snapshot.storage.root)

    def test_other_columns_types_and_files(self, snapshot):
        root, good = snapshot.storage.root, columns_of(snapshot)
        for columns in (
            {**good, "more": good["rows"]},
            {name: good[name] for name in list(good)[1:]},
            {**good, "rows": good["rows"].astype(np.int64)},
            {name.upper(): column for name, column in good.items()},
        ):
            forge_index(snapshot, columns, schema=None)
            with pytest.raises(kg.SnapshotCorrupted, match="the index has the schema"):
                kg.Snapshot.open(root)
        forge_index(snapshot, good, stream=True)
        with pytest.raises(kg.SnapshotCorrupted, match="not a readable Arrow file"):
            kg.Snapshot.open(root)
        for data in (b"", b"ARROW1", bytes(1000), b"PAR1" * 300):
            forge_file(snapshot, {"path": snapshot.manifest.index.path}, data)
            with pytest.raises(kg.SnapshotCorrupted, match="not a readable Arrow file"):
                kg.Snapshot.open(root)

    def test_a_wrong_digest_or_size_is_found_by_verify(self, snapshot):
        """They promise nothing to a reader, so only who looks at all finds them."""
        good = columns_of(snapshot)
        for name in ("digest", "size_bytes"):
            columns = {n: c.copy() for n, c in good.items()}
            columns[name][2] ^= np.uint64(1)
            forge_index(snapshot, columns)
            (finding,) = kg.verify(snapshot.storage.root).findings
            assert f"has {name}" in finding.message
            assert "the index says" in finding.message

    def test_any_byte_of_it_changed_under_a_right_digest(self, snapshot):
        """Arrow parses what a forger wrote: it may read, but it must not harm."""
        path = snapshot.storage.root / snapshot.manifest.index.path
        good, text = path.read_bytes(), manifest_of(snapshot)
        entry = text["index"]
        refused = 0
        for position, bit in itertools.product(range(len(good)), (0, 3, 7)):
            data = bytearray(good)
            data[position] ^= 1 << bit
            path.write_bytes(data)
            entry["digest"] = digest_bytes(bytes(data))
            forge(snapshot, text)
            try:
                kg.Snapshot.open(snapshot.storage.root)
            except kg.SnapshotCorrupted:
                refused += 1
            except Exception as error:
                raise AssertionError(f"byte {position}, bit {bit}: {error!r}") from error
        assert refused > len(good)


# --- Accidents -------------------------------------------------------------------------------


def all_files(root):
    return [root / path for path, _, _ in LocalStorage(root).list_files()]


def outcome(root, expected):
    """What :func:`verify` says of a snapshot: an error, ``found``, or ``harmless`` if it is."""
    try:
        verification = kg.verify(root)
    except BAD_SNAPSHOT as error:
        return type(error).__name__
    if verification.findings:
        return "found"
    assert rows_of(kg.Snapshot.open(root).to_table()) == expected
    return "harmless"


class TestAccidents:
    """A small snapshot, every file of it, every bit and every length."""

    @pytest.fixture(params=["parquet", "rocksdb"])
    def small(self, request, folder):
        rows = table(6)
        small = kg.write_snapshot(
            folder / "s", rows, key="k", max_parallelism=4, parallelism=1, backend=request.param
        )
        return small.storage.root, rows_of(small.to_table())

    def test_every_bit(self, small):
        root, expected = small
        assert outcome(root, expected) == "harmless"
        outcomes = {}
        for path in all_files(root):
            with path.open("r+b", buffering=0) as file:
                descriptor = file.fileno()
                for position, byte in enumerate(path.read_bytes()):
                    for bit in range(8):
                        os.pwrite(descriptor, bytes([byte ^ (1 << bit)]), position)
                        found = outcome(root, expected)
                        key = (path.suffix, found)
                        outcomes[key] = outcomes.get(key, 0) + 1
                        assert found != "harmless", f"{path}: bit {bit} of byte {position}"
                    os.pwrite(descriptor, bytes([byte]), position)
        assert outcome(root, expected) == "harmless"
        # Other formats and versions are told apart from damage, by their members alone.
        assert 0 < outcomes[(".json", "IncompatibleSnapshot")] < 500

    def test_every_length(self, small):
        root, expected = small
        for path in all_files(root):
            whole = path.read_bytes()
            for length in range(len(whole)):
                path.write_bytes(whole[:length])
                assert outcome(root, expected) != "harmless", f"{path}: cut to {length} bytes"
            for added in (b"\0", b"\n", b" ", whole[-1:], b"garbage", whole, bytes(10_000)):
                path.write_bytes(whole + added)
                assert outcome(root, expected) != "harmless", f"{path}: {added[:10]} added"
            path.write_bytes(whole)
        assert outcome(root, expected) == "harmless"

    def test_bytes_moved_inside_a_file(self, small):
        root, expected = small
        for path in all_files(root):
            whole = path.read_bytes()
            half = len(whole) // 2
            for moved in (whole[half:] + whole[:half], whole[::-1], bytes(len(whole))):
                path.write_bytes(moved)
                assert outcome(root, expected) != "harmless", path
            path.write_bytes(whole)


# --- Rows ------------------------------------------------------------------------------------


class TestVerify:
    """Rows that are no rows of this state, in files whose digests are right."""

    def forged(self, folder, backend, apply):
        """A snapshot whose only segment holds other rows, under an index that fits them."""
        good = kg.write_snapshot(
            folder / backend, table(), key="k", max_parallelism=8, backend=backend
        )
        store = reader.backend_of_snapshot(backend)
        rows = apply(good.to_table(columns=good.schema().stored.names))
        path = "data/forged"
        with good.storage.create(path) as file:
            store.write_segment(file, good.schema(), rows)
            digest = file.close_durably()
        data = (good.storage.root / path).read_bytes()
        segment = good.manifest.runs[0].segments[0].file
        (good.storage.root / path).unlink()
        assert digest == digest_bytes(data)
        forge_file(good, {"path": segment.path}, data)
        return good

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize(
        ("column", "value", "message"),
        [
            ("key_hash", pa.array([5] * 24, pa.int32()), "has key_hash 5, its key gives"),
            ("v", pa.array(["other"] * 24), "the index says"),
            ("k", pa.array(range(100, 124), pa.int64()), "its key gives"),
        ],
        ids=["hash", "value", "key"],
    )
    def test_a_column_of_other_values(self, folder, backend, column, value, message):
        def apply(rows):
            place = rows.schema.get_field_index(column)
            new = rows.set_column(place, rows.schema.field(column), value)
            order = np.lexsort((new["key_hash"].to_numpy(), new["key_group"].to_numpy()))
            return new.take(pa.array(order))

        forged = self.forged(folder, backend, apply)
        (finding,) = kg.verify(forged.storage.root).findings
        assert message in finding.message
        assert finding.path == forged.manifest.runs[0].segments[0].file.path
        assert finding.key_groups

    @pytest.mark.parametrize("backend", ["parquet", "memory"])
    def test_rows_out_of_order(self, folder, backend):
        def apply(rows):
            group = rows["key_group"].to_numpy()
            order = np.lexsort((-rows["key_hash"].to_numpy().astype(np.int64), group))
            return rows.take(pa.array(order))

        forged = self.forged(folder, backend, apply)
        (finding,) = kg.verify(forged.storage.root).findings
        assert "not in order of key group, key hash and key" in finding.message

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_rows_that_are_missing(self, folder, backend):
        forged = self.forged(folder, backend, lambda rows: rows.slice(1))
        with pytest.raises(kg.SnapshotCorrupted, match="where the index says 24 rows"):
            kg.Snapshot.open(forged.storage.root).to_table()

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_files_of_another_encoding(self, folder, backend):
        good = kg.write_snapshot(folder / "s", table(), key="k", backend=backend)
        segment = good.manifest.runs[0].segments[0].file
        for data in (b"", b"PAR1", b"x" * 100, bytes(5000)):
            forge_file(good, {"path": segment.path}, data)
            with pytest.raises(BAD_SNAPSHOT, match=re.escape(segment.path)):
                kg.Snapshot.open(folder / "s").to_table()

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_schema_that_is_not_that_of_the_files(self, folder, backend):
        good = kg.write_snapshot(folder / "s", table(), key="k", backend=backend)
        for field in ({"type": "int32"}, {"name": "w"}, {"type": "binary"}):
            text = manifest_of(good)
            text["operators"][0]["states"][0]["fields"][0].update(field)
            forge(good, text)
            if backend == "rocksdb" and field != {"type": "int32"}:
                continue  # an SST file knows bytes only
            with pytest.raises(kg.SnapshotCorrupted):
                kg.Snapshot.open(folder / "s").to_table()
            forge(good, manifest_of(good))


def test_absurd_counts_cost_no_memory(snapshot):
    """Each is refused for what it is before anything of its size is made."""
    cases = [
        ((*SEGMENT, "rows"), 1 << 60),
        ((*SEGMENT, "size_bytes"), 1 << 60),
        ((*SEGMENT, "footer", "size_bytes"), 1 << 60),
        (("index", "rows"), 1 << 60),
        (("index", "size_bytes"), 1 << 60),
        ((*OPERATOR, "cut"), list(range(200_000))),
        ((*OPERATOR, "key"), [manifest_of(snapshot)["operators"][0]["key"][0]] * 20_000),
        ((*RUN, "segments"), [run_of(manifest_of(snapshot))["segments"][0]] * 20_000),
    ]
    pool = pa.default_memory_pool()
    for path, value in cases:
        text = manifest_of(snapshot)
        assert "footer" in run_of(text)["segments"][0]
        good = copy.deepcopy(text)
        change(path, value)(text)
        forge(snapshot, text)
        size = (snapshot.storage.root / MANIFEST).stat().st_size
        before = pool.bytes_allocated()
        tracemalloc.start()
        try:
            with pytest.raises(kg.SnapshotCorrupted):
                kg.Snapshot.open(snapshot.storage.root).to_table()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < (4 << 20) + 30 * size, path
        assert pool.bytes_allocated() - before < 1 << 20
        forge(snapshot, good)


def test_a_manifest_above_the_limit_is_not_read(snapshot, monkeypatch):
    monkeypatch.setattr("keygroups.snapshot.commit.MANIFEST_SIZE_LIMIT_BYTES", 100)
    with pytest.raises(kg.SnapshotCorrupted, match="the limit is 100"):
        kg.Snapshot.open(snapshot.storage.root)


def test_a_manifest_above_the_limit_is_not_written(folder, monkeypatch):
    monkeypatch.setattr("keygroups.snapshot.commit.MANIFEST_SIZE_LIMIT_BYTES", 100)
    with pytest.raises(kg.InvalidArgument, match="the limit is 100"):
        kg.write_snapshot(folder / "s", table(), key="k")
    assert not (folder / "s").exists()


def test_an_index_of_runs_without_segments_is_read(snapshot):
    """A run may be empty; whoever looks for its first segment must bear that."""
    text = manifest_of(snapshot)
    state = text["operators"][0]["states"][0]
    empty = {"kind": "base", "epoch": 0, "key_groups": [0, 7], "segments": []}
    state["runs"] += [empty, copy.deepcopy(empty)]
    forge(snapshot, text)
    root = snapshot.storage.root
    assert kg.verify(root).findings == ()
    assert rows_of(kg.Snapshot.open(root).to_table()) == rows_of(snapshot.to_table())
    kg.rescale(root, root.parent / "b", parallelism=3)
    assert kg.verify(root.parent / "b").findings == ()


def test_segments_of_the_index_are_slices_of_one_table(snapshot):
    """What the tests above take for granted: the columns are those of the class."""
    assert [field.name for field in fields(SegmentIndex)] == list(columns_of(snapshot))[2:]
    assert replace(snapshot.manifest.index, size_bytes=1).size_bytes == 1
