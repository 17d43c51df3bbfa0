"""The command line: what it prints where, and how it exits."""

import csv
import datetime as dt
import decimal
import io
import json
import os
import pty
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

import keygroups as kg
from keygroups.cli.app import app
from keygroups.cli.keys import parse_type, type_name
from keygroups.cli.output import printable, size
from keygroups.snapshot.gc import collect_garbage

COMMANDS = ("rescale", "plan", "inspect", "verify", "diff", "cat", "hash", "gc")
BACKENDS = ("parquet", "rocksdb")
ROWS = 1000
DAY_S = 24 * 3600


def run(*words, stdin=None):
    return CliRunner().invoke(app, [str(word) for word in words], input=stdin)


def text_of(*words, stdin=None, code=0):
    done = run(*words, stdin=stdin)
    assert (done.exit_code, done.stderr) == (code, "")
    return done.stdout


def json_of(command, *words, stdin=None, code=0):
    return json.loads(text_of(command, "--output", "json", *words, stdin=stdin, code=code))


def error_of(*words, code, stdin=None):
    """The one line on stderr of a command that fails and prints nothing on stdout."""
    done = run(*words, stdin=stdin)
    assert (done.exit_code, done.stdout) == (code, "")
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    return done.stderr


def process(*words, **options):
    """Runs the command as a user does, with no Java and no Spark on the path."""
    return subprocess.run(
        [sys.executable, "-m", "keygroups", *map(str, words)],
        env={"PATH": "", "LC_ALL": "C"},
        capture_output=True,
        check=False,
        timeout=120,
        **options,
    )


def tree(root):
    return {p: p.read_bytes() for p in sorted(Path(root).rglob("*")) if p.is_file()}


def people(rows=ROWS):
    return pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "name": pa.array([f"user {i}" * (i % 7) for i in range(rows)], pa.string()),
        }
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Snapshots that no test changes, by backend."""
    root = tmp_path_factory.mktemp("snapshots")
    for backend in BACKENDS:
        kg.write_snapshot(
            root / backend, people(), key="id", max_parallelism=16, parallelism=4, backend=backend
        )
    return root


@pytest.fixture(params=BACKENDS)
def snapshot(request, made):
    return made / request.param


@pytest.fixture
def damaged(made, tmp_path):
    """A copy whose first data file is truncated, with an attempt that died beside it."""
    kg.rescale(made / "parquet", tmp_path / "damaged", parallelism=4)
    victim = next(tmp_path.glob("damaged/data/*/00000-*/*.parquet"))
    victim.write_bytes(victim.read_bytes()[:-5])
    return tmp_path / "damaged"


def write_keys(path, keys, **options):
    table = pa.table({"key": keys, "value": pa.array(range(len(keys)), pa.int32())})
    return kg.write_snapshot(path, table, key="key", max_parallelism=8, **options)


# --- help, and what is there ----------------------------------------------------------------


def test_help_lists_the_commands_and_the_exit_codes():
    text = text_of("--help")
    for command in COMMANDS:
        assert f"\n  {command} " in text
    for later in ("compact", "import", "export", "report"):
        assert f"\n  {later} " not in text
    assert "Exit codes: 0 ok, 1 findings" in text
    assert "..." not in text.split("Commands:")[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example_and_both_outputs(command):
    text = text_of(command, "--help")
    assert f"Example: keygroups {command} " in " ".join(text.split())
    assert "--output [text|json]" in text


def test_no_command_is_a_wrong_argument():
    done = run()
    assert (done.exit_code, done.stdout) == (2, "")
    assert "Commands:" in done.stderr


def test_version():
    assert re.fullmatch(r"keygroups \d+\.\d+\.\d+\n", text_of("--version"))


# --- rescale and plan -----------------------------------------------------------------------

RANGE = {"index", "key_groups", "rows", "size_bytes"}
PLANNED = RANGE | {
    "read_bytes",
    "link_bytes",
    "copy_bytes",
    "re_encode_bytes",
    "re_hash_bytes",
    "sources",
}
OPERATOR = {"uid", "max_parallelism", "parallelism", "before", "balance", "ranges"}


@pytest.mark.parametrize("mode", ["rewrite", "link"])
def test_rescale_tells_the_new_ranges(snapshot, tmp_path, mode):
    document = json_of("rescale", snapshot, tmp_path / "new", "--parallelism", 3, "--mode", mode)
    assert set(document) == {"source", "destination", "mode", "snapshot_id", "operators"}
    (operator,) = document["operators"]
    assert set(operator) == OPERATOR
    assert [set(r) for r in operator["ranges"]] == [RANGE] * 3
    assert [r["key_groups"] for r in operator["ranges"]] == [[0, 5], [6, 10], [11, 15]]
    assert sum(r["rows"] for r in operator["ranges"]) == ROWS
    assert operator["before"]["parallelism"] == 4
    heaviest = max(r["rows"] for r in operator["ranges"])
    assert operator["balance"]["rows"]["heaviest"] == heaviest
    assert operator["balance"]["rows"]["ratio"] == pytest.approx(heaviest * 3 / ROWS)
    assert kg.diff(snapshot, tmp_path / "new").is_equal
    assert document["snapshot_id"] == kg.Snapshot.open(tmp_path / "new").manifest.snapshot_id


def test_rescale_changes_max_parallelism_and_balances(snapshot, tmp_path):
    document = json_of("rescale", snapshot, tmp_path / "a", "--max-parallelism", 40)
    assert document["operators"][0]["max_parallelism"] == 40
    assert document["operators"][0]["parallelism"] == 4
    options = ("--parallelism", 5, "--balance", "bytes", "--jobs", 1)
    after = json_of("rescale", tmp_path / "a", tmp_path / "b", *options)["operators"][0]
    weights = kg.Snapshot.open(tmp_path / "a").key_group_sizes().column("size_bytes").to_numpy()
    cut = [[r.start, r.end] for r in kg.balanced_cut(weights, 5)]
    assert [r["key_groups"] for r in after["ranges"]] == cut
    assert kg.diff(snapshot, tmp_path / "b").is_equal


def test_rescale_as_text(snapshot, tmp_path):
    text = text_of("rescale", snapshot, tmp_path / "new", "--parallelism", 3)
    assert f"{snapshot} -> {tmp_path / 'new'} (rewrite)" in text
    assert "parallelism 4 -> 3, max parallelism 16" in text
    assert re.search(r"^0 +0-5 +\d+ +\d", text, re.MULTILINE)
    assert re.search(r"^before +\d.*\n^after +\d", text, re.MULTILINE)


def test_rescale_overwrites_only_when_told(made, tmp_path):
    new = tmp_path / "new"
    text_of("rescale", made / "parquet", new, "--parallelism", 3)
    before = tree(new)
    for dry_run in ([], ["--dry-run"]):
        words = ("rescale", made / "parquet", new, "--parallelism", 2, *dry_run)
        assert "already committed" in error_of(*words, code=2)
    assert tree(new) == before
    text_of("rescale", made / "parquet", new, "--parallelism", 2, "--overwrite")
    assert kg.Snapshot.open(new).parallelism == 2


@pytest.mark.parametrize("output", ["text", "json"])
@pytest.mark.parametrize(
    "options", [("--mode", "link"), ("--balance", "rows"), ("--max-parallelism", 32)]
)
def test_dry_run_touches_nothing(made, tmp_path, output, options):
    kg.rescale(made / "parquet", tmp_path / "src", parallelism=2)
    before = tree(tmp_path)
    words = (tmp_path / "src", tmp_path / "dst", "--parallelism", 3, *options)
    text_of("rescale", *words, "--dry-run", "--output", output)
    text_of("plan", *words[:1], *words[2:], "--output", output)
    assert tree(tmp_path) == before
    assert not (tmp_path / "dst").exists()


def test_plan_is_the_dry_run_without_a_target(snapshot, tmp_path):
    document = json_of("plan", snapshot, "--parallelism", 3)
    words = ("rescale", snapshot, tmp_path / "x", "--parallelism", 3, "--dry-run")
    assert json_of(*words) | {"destination": None} == document
    (operator,) = document["operators"]
    assert set(operator) == OPERATOR
    assert [set(r) for r in operator["ranges"]] == [PLANNED] * 3
    named = {file.path for file in kg.Snapshot.open(snapshot).manifest.files}
    for planned in operator["ranges"]:
        assert {source["path"] for source in planned["sources"]} <= named
        for action in ("link", "copy", "re_encode", "re_hash"):
            sources = [s for s in planned["sources"] if s["action"] == action]
            assert planned[f"{action}_bytes"] == sum(s["size_bytes"] for s in sources)
    assert document["read_bytes"] == document["copy_bytes"] + document["re_encode_bytes"] > 0
    assert operator["balance"]["rows"]["mean"] == pytest.approx(ROWS / 3, abs=0.001)


def test_plan_of_a_link_reads_nothing(snapshot):
    document = json_of("plan", snapshot, "--parallelism", 3, "--mode", "link")
    assert document["read_bytes"] == 0
    assert document["link_bytes"] > 0


def test_plan_of_a_rehash_does_not_know_the_rows(snapshot):
    words = ("plan", snapshot, "--max-parallelism", 24)
    (operator,) = json_of(*words)["operators"]
    assert operator["balance"] is None
    assert {(r["rows"], r["size_bytes"]) for r in operator["ranges"]} == {(None, None)}
    assert all(r["re_hash_bytes"] == r["read_bytes"] > 0 for r in operator["ranges"])
    assert "after: known only" in text_of(*words)


# --- inspect --------------------------------------------------------------------------------


def test_inspect_tells_what_is_there(snapshot):
    document = json_of("inspect", snapshot)
    assert set(document) == {
        "snapshot",
        "snapshot_id",
        "created_at",
        "rows",
        "size_bytes",
        "files",
        "file_bytes",
        "operators",
    }
    (operator,) = document["operators"]
    assert operator["key"] == [{"name": "id", "type": "int64", "nullable": False}]
    (state,) = operator["states"]
    assert state["columns"] == [{"name": "name", "type": "string", "nullable": True}]
    assert (state["rows"], state["backend"]) == (ROWS, snapshot.name)
    assert (operator["scheme"], operator["max_parallelism"]) == ("flink", 16)
    assert (operator["epoch"], operator["watermark_ms"]) == (0, None)
    assert [set(r) for r in operator["ranges"]] == [RANGE] * 4
    assert len(operator["heaviest_key_groups"]) == 10
    assert "key_groups" not in operator
    assert document["rows"] == ROWS
    assert document["file_bytes"] == sum(p.stat().st_size for p in snapshot.rglob("data/*/**/*.*"))


def test_inspect_weighs_other_cuts(snapshot):
    (operator,) = json_of("inspect", snapshot, "--key-groups")["operators"]
    groups = operator["key_groups"]
    assert [group["key_group"] for group in groups] == list(range(16))
    for measure, option in (("rows", "balance_rows"), ("size_bytes", "balance_bytes")):
        weights = [group[measure] for group in groups]
        total, mean = sum(weights), sum(weights) / 4
        heaviest = max(sum(weights[r.start : r.end + 1]) for r in kg.balanced_cut(weights, 4))
        balance = operator["options"][option][measure]
        assert balance["heaviest"] == heaviest
        assert balance["ratio"] == pytest.approx(heaviest / mean, abs=1e-6)
        assert operator["balance"][measure]["ratio"] >= balance["ratio"]
        lower = operator["options"]["heaviest_key_group_ratio"][measure]
        assert balance["ratio"] >= lower == pytest.approx(max(weights) / mean, abs=1e-6)
        assert groups[3][f"{measure}_share"] == pytest.approx(weights[3] / total, abs=1e-6)
    even = operator["options"]["max_parallelism_if_keys_are_even"]
    assert [option["max_parallelism"] for option in even] == [1 << e for e in range(7, 16)]
    assert {option["ratio"] for option in even} == {1.0}


def test_inspect_estimates_max_parallelism_from_counts(tmp_path):
    kg.write_snapshot(tmp_path / "s", people(), key="id", max_parallelism=128, parallelism=100)
    (operator,) = json_of("inspect", tmp_path / "s")["operators"]
    even = operator["options"]["max_parallelism_if_keys_are_even"]
    assert {o["max_parallelism"]: o["ratio"] for o in even}[128] == pytest.approx(2 * 100 / 128)


def test_inspect_as_text(snapshot):
    text = text_of("inspect", snapshot)
    assert "parallelism 4 of max parallelism 16, scheme flink, epoch 0" in text
    assert "key: id int64 not null" in text
    assert "state 'state': name string" in text
    for name in ("now", "Flink's cut", "--balance rows", "--balance bytes"):
        assert re.search(rf"^{name} +[\d,]+ +[\d,]+ +\d\.\d\d ", text, re.MULTILINE)
    assert len(re.findall(r"^\d+ +\d+ +\d+\.\d\d % ", text, re.MULTILINE)) == 10
    all_groups = text_of("inspect", snapshot, "--key-groups")
    assert len(re.findall(r"^\d+ +\d+ +\d+\.\d\d % ", all_groups, re.MULTILINE)) == 16


def test_an_empty_snapshot_is_shown_too(tmp_path):
    kg.write_snapshot(tmp_path / "s", people(0), key="id", max_parallelism=4, parallelism=2)
    (operator,) = json_of("inspect", tmp_path / "s")["operators"]
    assert operator["balance"]["rows"]["ratio"] is None
    assert operator["options"]["heaviest_key_group_ratio"]["rows"] is None
    assert "4 of 4 are empty" in text_of("inspect", tmp_path / "s")
    assert text_of("cat", tmp_path / "s") == "key_group  id  name\n"
    assert text_of("cat", tmp_path / "s", "--format", "csv") == '"key_group","id","name"\n'
    assert json_of("cat", tmp_path / "s")["rows"] == []
    text_of("rescale", tmp_path / "s", tmp_path / "t", "--parallelism", 3)


def test_text_is_not_cut_when_piped(made, tmp_path):
    deep = tmp_path / ("long" * 40)
    done = process("rescale", made / "parquet", deep, "--parallelism", 3)
    assert str(deep) in done.stdout.decode()
    assert b"\x1b" not in done.stdout + done.stderr
    assert max(len(line) - len(line.rstrip()) for line in done.stdout.splitlines()) == 0


# --- verify and diff ------------------------------------------------------------------------


def test_verify_finds_nothing(snapshot):
    document = json_of("verify", snapshot)
    assert set(document) == {
        "snapshot",
        "ok",
        "files",
        "rows",
        "size_bytes",
        "findings",
        "unreferenced",
    }
    assert (document["ok"], document["rows"], document["findings"]) == (True, ROWS, [])
    assert text_of("verify", snapshot).startswith("0 findings in 4 files, 1,000 rows")


def test_verify_tells_the_file_and_its_key_groups(damaged):
    (damaged / "data" / "dead").mkdir()
    (damaged / "data" / "dead" / "left.parquet").write_bytes(b"left")
    document = json_of("verify", damaged, code=1)
    (finding,) = document["findings"]
    assert set(finding) == {"path", "key_groups", "message"}
    assert re.fullmatch(r"data/\w+/00000-00003-\w+/000000\.parquet", finding["path"])
    assert finding["key_groups"] == [0, 3]
    assert "bytes, the manifest says" in finding["message"]
    assert document["unreferenced"] == ["data/dead/left.parquet"]
    text = text_of("verify", damaged, code=1)
    assert f"{finding['path']} (key groups 0-3)\n" in text
    assert "1 finding in 4 files" in text
    assert "\n  data/dead/left.parquet\n" in text


def test_diff_of_equal_snapshots(made):
    document = json_of("diff", made / "parquet", made / "rocksdb")
    assert set(document) == {"a", "b", "equal", "states", "states_only_in_a", "states_only_in_b"}
    assert document["equal"] is True
    (state,) = document["states"]
    assert (state["compared_key_groups"], state["different_key_groups"]) == (16, [])
    assert "equal: the same keys" in text_of("diff", made / "parquet", made / "rocksdb")


def test_diff_names_keys_up_to_the_limit(made, tmp_path):
    other = pa.table({"id": [*range(1, ROWS), 5000], "name": ["x"] * ROWS})
    kg.write_snapshot(tmp_path / "b", other, key="id", max_parallelism=8)
    words = ("diff", made / "parquet", tmp_path / "b", "--limit", 7)
    (state,) = json_of(*words, code=1)["states"]
    assert (state["only_in_a"], state["only_in_b"], state["changed"]) == (1, 1, ROWS - 1)
    assert state["compared_key_groups"] == 8
    assert len(state["keys"]) == 7
    assert {key["change"] for key in state["keys"]} <= {"only_in_a", "only_in_b", "changed"}
    assert set(state["keys"][0]) == {"change", "key_group", "key"}
    assert set(state["keys"][0]["key"]) == {"id"}
    text = text_of(*words, code=1)
    assert "and 994 keys more" in text
    assert text.endswith("\ndifferent\n")


def test_diff_tells_states_that_only_one_has(made, tmp_path):
    kg.write_snapshot(tmp_path / "b", people(), key="id", uid="other", max_parallelism=16)
    document = json_of("diff", made / "parquet", tmp_path / "b", code=1)
    assert document["states_only_in_a"] == [{"uid": "operator", "state": "state"}]
    assert document["states_only_in_b"] == [{"uid": "other", "state": "state"}]
    text = text_of("diff", made / "parquet", tmp_path / "b", code=1)
    assert "only in b: state 'state' of operator 'other'" in text


# --- cat ------------------------------------------------------------------------------------


def expected_rows(snapshot, **selection):
    return (
        kg.Snapshot.open(snapshot)
        .to_table(columns=["key_group", "id", "name"], **selection)
        .to_pylist()
    )


def test_cat_prints_rows_in_snapshot_order(snapshot):
    expected = expected_rows(snapshot)
    document = json_of("cat", snapshot)
    assert set(document) == {"snapshot", "uid", "state", "rows"}
    assert document["rows"] == expected
    assert list(document["rows"][0]) == ["key_group", "id", "name"]
    lines = text_of("cat", snapshot, "--format", "jsonl").splitlines()
    assert [json.loads(line) for line in lines] == expected
    read = csv.DictReader(io.StringIO(text_of("cat", snapshot, "--format", "csv")))
    assert list(read) == [{name: str(v) for name, v in row.items()} for row in expected]
    text = text_of("cat", snapshot).splitlines()
    assert text[0].split() == ["key_group", "id", "name"]
    assert [int(line.split()[1]) for line in text[1:]] == [row["id"] for row in expected]


@pytest.mark.parametrize(
    ("options", "chosen"),
    [
        (["--subtask", 1], lambda row: 4 <= row["key_group"] <= 7),
        (["--range", "3-5"], lambda row: 3 <= row["key_group"] <= 5),
        (["--key-group", 9, "--key-group", 2], lambda row: row["key_group"] in {2, 9}),
        (["--key-group", 0], lambda row: row["key_group"] == 0),
        (["--key", "0"], lambda row: row["id"] == 0),
        (["--key", 7, "--key", 999, "--key", 5000], lambda row: row["id"] in {7, 999}),
        (["--key", 7, "--range", "0-15", "--state", "state"], lambda row: row["id"] == 7),
        (["--uid", "operator", "--limit", 10000], lambda _: True),
    ],
)
def test_cat_selects(snapshot, options, chosen):
    expected = [row for row in expected_rows(snapshot) if chosen(row)]
    assert json_of("cat", snapshot, *options)["rows"] == expected != []


@pytest.mark.parametrize("limit", [0, 1, 5, 300])
def test_cat_stops_at_the_limit(snapshot, limit):
    rows = json_of("cat", snapshot, "--limit", limit, "--columns", "name")["rows"]
    expected = [{k: row[k] for k in ("key_group", "name")} for row in expected_rows(snapshot)]
    assert rows == expected[:limit]


def test_cat_chooses_columns_in_the_order_given(snapshot):
    (row,) = json_of("cat", snapshot, "--limit", 1, "--columns", "name, key_hash,id")["rows"]
    assert list(row) == ["key_group", "name", "key_hash", "id"]


NASTY = ["", "a,b", 'q"uote', "new\nline", "tab\t", "ünï😀", "\x1b[31mred", "null", "-5", "'"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_strings_come_back_from_csv_and_json(tmp_path, backend):
    write_keys(tmp_path / "s", NASTY, backend=backend)
    lines = text_of("cat", tmp_path / "s", "--format", "jsonl").splitlines()
    assert {(r["key"], r["value"]) for r in map(json.loads, lines)} == set(
        zip(NASTY, range(len(NASTY)), strict=True)
    )
    text = text_of("cat", tmp_path / "s", "--format", "csv")
    assert {row["key"] for row in csv.DictReader(io.StringIO(text, newline=""))} == set(NASTY)
    for number, key in enumerate(NASTY):
        (row,) = json_of("cat", tmp_path / "s", "--key", key)["rows"]
        assert (row["key"], row["value"]) == (key, number)
    text = text_of("cat", tmp_path / "s")
    assert len(text.splitlines()) == len(NASTY) + 1
    assert "\x1b" not in text


def test_csv_tells_null_from_empty(tmp_path):
    table = pa.table({"k": [1, 2, 3], "v": ["", None, "x"]})
    kg.write_snapshot(tmp_path / "s", table, key="k", max_parallelism=1)
    text = text_of("cat", tmp_path / "s", "--format", "csv", "--columns", "k,v")
    assert set(text.splitlines()[1:]) == {'0,1,""', "0,2,", '0,3,"x"'}


KEYS = {
    "bool": pa.array([False, True]),
    "int8": pa.array([0, -128, 127], pa.int8()),
    "int64": pa.array([0, -1, (1 << 63) - 1, -(1 << 63)]),
    "float": pa.array([0.0, -0.0, 0.1, float("nan"), float("-inf")], pa.float32()),
    "double": pa.array([0.0, -0.0, 0.1, float("nan"), float("inf"), 5e-324]),
    "string": pa.array(["", "0", "null", "ü"]),
    "large_string": pa.array(["", "x"], pa.large_string()),
    "binary": pa.array([b"", b"\x00", b"\xff\x00"]),
    "fixed_size_binary[2]": pa.array([b"\x00\x00", b"ab"], pa.binary(2)),
    "decimal128(20, 4)": pa.array(
        [decimal.Decimal(text) for text in ("0.0000", "-1.5000", "1234567890123456.7891")],
        pa.decimal128(20, 4),
    ),
    "date32[day]": pa.array([dt.date(1970, 1, 1), dt.date(1, 1, 1), dt.date(9999, 12, 31)]),
    "timestamp[s]": pa.array([0, -1, 1 << 33], pa.timestamp("s")),
    "timestamp[ns]": pa.array([0, -1, 1 << 62], pa.timestamp("ns")),
    "timestamp[us, tz=Europe/Berlin]": pa.array(
        [0, 1, -(1 << 50)], pa.timestamp("us", "Europe/Berlin")
    ),
    "time32[ms]": pa.array([0, 86_399_999], pa.time32("ms")),
    "time64[ns]": pa.array([0, 86_399_999_999_999], pa.time64("ns")),
    "uuid": pa.array([uuid.UUID(int=0).bytes, uuid.uuid4().bytes], pa.uuid()),
}


@pytest.mark.parametrize("name", KEYS)
def test_a_key_is_selected_as_it_is_printed(tmp_path, name):
    keys = KEYS[name]
    write_keys(tmp_path / "s", keys, scheme="murmur3")
    (operator,) = json_of("inspect", tmp_path / "s")["operators"]
    assert operator["key"][0]["type"] == name
    assert parse_type(name) == keys.type
    rows = json_of("cat", tmp_path / "s")["rows"]
    assert sorted(row["value"] for row in rows) == list(range(len(keys)))
    for row in rows:
        printed = row["key"] if isinstance(row["key"], str) else json.dumps(row["key"])
        assert json_of("cat", tmp_path / "s", "--key", printed)["rows"] == [row]
    text = text_of("cat", tmp_path / "s").splitlines()[1:]
    printed = [line.split()[1] for line in text]
    if name not in {"string", "large_string", "binary"}:  # where it shows an empty key as ""
        selected = [word for key in printed for word in ("--key", key)]
        assert json_of("cat", tmp_path / "s", *selected)["rows"] == rows


def test_composite_keys_are_json_arrays(tmp_path):
    table = pa.table(
        {
            "a": ["x", "", None, "x"],
            "b": pa.array([0, 1, 2, None], pa.int64()),
            "c": pa.array([decimal.Decimal("1.50")] * 4, pa.decimal128(4, 2)),
        }
    )
    kg.write_snapshot(tmp_path / "s", table, key="a,b,c", max_parallelism=8)
    for key in (["x", 0, 1.5], ["", 1, "1.50"], [None, 2, 1.5], ["x", None, 1.5]):
        (row,) = json_of("cat", tmp_path / "s", "--key", json.dumps(key))["rows"]
        assert [row["a"], row["b"], row["c"]] == [*key[:2], "1.50"]
    for key in ("x", '["x", 0]', '{"a": "x"}', '["x", "y", 1.5]', '["x", 0, 1.555]'):
        assert "is not of type string,int64,decimal128(4, 2)" in error_of(
            "cat", tmp_path / "s", "--key", key, code=2
        )


def test_every_type_of_value_is_printed(tmp_path):
    table = pa.table(
        {
            "k": ["a", "b"],
            "f": [float("nan"), None],
            "g": pa.array([float("-inf"), 0.1], pa.float32()),
            "h": pa.array([float("inf"), 1.5], pa.float16()),
            "b": [b"\x00\xff", None],
            "d": pa.array([decimal.Decimal("0.0000000001"), None], pa.decimal128(12, 10)),
            "t": pa.array([1, None], pa.timestamp("us", "Asia/Tokyo")),
            "u": pa.array([5, None], pa.duration("ms")),
            "l": [[1, None], None],
            "s": [{"x": float("nan"), "y": b"\x01"}, None],
            "m": pa.array([[("k", None)], None], pa.map_(pa.string(), pa.int64())),
        }
    )
    kg.write_snapshot(tmp_path / "s", table, key="k", max_parallelism=4)
    rows = {row.pop("k"): row for row in json_of("cat", tmp_path / "s")["rows"]}
    rows["a"].pop("key_group")
    assert rows["a"] == {
        "f": "NaN",
        "g": "-Infinity",
        "h": "Infinity",
        "b": "00ff",
        "d": "0.0000000001",
        "t": "1970-01-01T00:00:00.000001Z",
        "u": 5,
        "l": [1, None],
        "s": {"x": "NaN", "y": "01"},
        "m": [["k", None]],
    }
    assert (rows["b"]["f"], rows["b"]["g"], rows["b"]["h"]) == (None, 0.1, 1.5)
    for form in ("text", "csv"):
        text = text_of("cat", tmp_path / "s", "--format", form)
        assert "0.0000000001" in text
        assert "00ff" in text


# --- hash -----------------------------------------------------------------------------------


def test_hash_of_arguments():
    words = ("hash", "", "0", "ü", "--max-parallelism", 128, "--parallelism", 5)
    document = json_of(*words)
    assert set(document) == {"scheme", "type", "max_parallelism", "parallelism", "keys"}
    assert (document["scheme"], document["type"]) == ("flink", "string")
    for row, key in zip(document["keys"], ["", "0", "ü"], strict=True):
        group = kg.assign_to_key_group(key, 128)
        subtask = kg.subtask_for_key_group(128, 5, group)
        hash_ = kg.hash_keys(pa.array([key]))[0].as_py()
        assert row == {"key": key, "hash": hash_, "key_group": group, "subtask": subtask}
    header, first, *_ = text_of(*words).splitlines()
    assert header.split() == ["key", "hash", "key_group", "subtask"]
    assert first.split()[:2] == ['""', "0"]


@pytest.mark.parametrize("scheme", ["flink", "murmur3", "spark"])
def test_hash_of_lines(scheme):
    lines = [str(number) for number in range(-50_000, 50_000)]
    document = json_of(
        "hash", "--max-parallelism", 777, "--type", "int32", "--scheme", scheme,
        stdin="\n".join(lines),
    )  # fmt: skip
    keys = pa.array(range(-50_000, 50_000), pa.int32())
    groups = kg.assign_key_groups(keys, 777, scheme)
    assert [row["key_group"] for row in document["keys"]] == groups.to_pylist()
    assert [row["key"] for row in document["keys"]] == keys.to_pylist()
    assert "subtask" not in document["keys"][0]


def test_hash_keeps_empty_lines_and_takes_both_line_ends():
    document = json_of("hash", "-", "--max-parallelism", 8, stdin="a\r\n\n b\n")
    assert [row["key"] for row in document["keys"]] == ["a", "", " b"]
    assert json_of("hash", "--max-parallelism", 8, stdin="")["keys"] == []


def test_hash_of_composite_and_negative_keys():
    words = ("hash", "--max-parallelism", 128, "--type")
    (row,) = json_of(*words, "string,int64", '["a",1]')["keys"]
    assert (row["key"], row["key_group"]) == ('["a", 1]', kg.assign_to_key_group(("a", 1), 128))
    (row,) = json_of(*words, "int64", "--", "-5")["keys"]
    assert (row["key"], row["key_group"]) == (-5, kg.assign_to_key_group(-5, 128))
    assert "put -- before" in error_of(*words, "int64", "-5", code=2)


@pytest.mark.parametrize("name", ["string,int64", "decimal128(10, 2),string", "int8"])
def test_type_names_come_back(name):
    assert type_name(parse_type(name)) == name


# --- gc -------------------------------------------------------------------------------------


@pytest.fixture
def littered(made, tmp_path):
    kg.rescale(made / "parquet", tmp_path / "s", parallelism=2)
    dead = tmp_path / "s" / "data" / "dead" / "00000-00015-x"
    dead.mkdir(parents=True)
    (dead / "000000.parquet").write_bytes(b"left")
    (tmp_path / "s" / f"manifest.json.{'0' * 32}.tmp").write_bytes(b"{")
    (tmp_path / "s" / "notes.txt").write_text("not ours")
    return tmp_path / "s"


def test_gc_is_a_dry_run_and_leaves_the_young(littered):
    before = tree(littered)
    document = json_of("gc", littered)
    assert document == {
        "snapshot": str(littered),
        "deleted": False,
        "older_than_hours": 24,
        "files": [],
        "size_bytes": 0,
        "younger_files": 2,
    }
    assert "left: 2 files younger than 24 hours" in text_of("gc", littered, "--delete")
    document = json_of("gc", littered, "--older-than", 0)
    assert {file["path"] for file in document["files"]} == {
        "data/dead/00000-00015-x/000000.parquet",
        f"manifest.json.{'0' * 32}.tmp",
    }
    assert document["size_bytes"] == 5
    assert "a dry run, add --delete" in text_of("gc", littered, "--older-than", 0)
    assert tree(littered) == before


def test_gc_deletes_what_no_manifest_names(littered):
    before = tree(littered)
    assert "deleted 2 files, 5 B" in text_of("gc", littered, "--older-than", 0, "--delete")
    gone = {path.name for path in set(before) - set(tree(littered))}
    assert gone == {"000000.parquet", f"manifest.json.{'0' * 32}.tmp"}
    assert not (littered / "data" / "dead").exists()
    assert (littered / "notes.txt").exists()
    assert json_of("verify", littered)["ok"] is True
    assert json_of("gc", littered, "--older-than", 0)["files"] == []


def test_garbage_is_as_old_as_the_youngest_file_of_its_attempt(littered):
    now_s = time.time()
    assert collect_garbage(littered, older_than_s=DAY_S, now_s=now_s + DAY_S - 60) == []
    assert len(collect_garbage(littered, older_than_s=DAY_S, now_s=now_s + DAY_S + 60)) == 2
    # A rescale in link mode gives new names to files that were modified long ago.
    linked = littered / "data" / "dead" / "linked.parquet"
    os.link(next(littered.glob("data/*/*/*.parquet")), linked)
    os.utime(linked, (0, 0))
    assert collect_garbage(littered, older_than_s=DAY_S, now_s=now_s + 60) == []
    assert len(collect_garbage(littered, older_than_s=60, now_s=now_s + 3600, delete=True)) == 3
    assert not linked.exists()
    assert kg.verify(littered).is_ok


# --- errors and exit codes ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("rescale S N --parallelism 0", "parallelism 0 is not within [1, 32768]"),
        ("rescale S N --parallelism 17", "exceeds max parallelism 16"),
        ("rescale S N --parallelism 40000", "not within"),
        ("rescale S N --parallelism x", "'x' is not a valid integer"),
        ("rescale S N --parallelism", "requires an argument"),
        ("rescale S N", "say what is to change"),
        ("rescale S S --parallelism 2 --overwrite", "source and target are both"),
        ("rescale S S --parallelism 2 --overwrite --dry-run", "source and target are both"),
        ("rescale S N --max-parallelism 32 --mode link", "link"),
        ("rescale S N --max-parallelism 32 --balance rows", "cannot be balanced"),
        ("rescale S N --parallelism 2 --mode move", "'move' is not one of"),
        ("rescale S N --parallelism 2 --jobs 0", "0 is not in the range"),
        ("rescale S --parallelism 2", "Missing argument 'DST'"),
        ("rescale NONE N --parallelism 2", "no snapshot at"),
        ("plan NONE --parallelism 2", "no snapshot at"),
        ("plan S --parallelism -1", "not within"),
        ("inspect NONE", "no snapshot at"),
        ("verify NONE", "no snapshot at"),
        ("gc NONE --delete", "no snapshot at"),
        ("diff S NONE", "no snapshot at"),
        ("diff S", "Missing argument 'B'"),
        ("cat NONE", "no snapshot at"),
        ("cat S --key x", "key 'x' is not of type int64"),
        ("cat S --key 1.5", "key '1.5' is not of type int64"),
        ("cat S --key-group 16", "not within [0, 15]"),
        ("cat S --key-group -1", "-1 is not in the range"),
        ("cat S --range 5", "is not A-B"),
        ("cat S --range 9-5", "is not A-B"),
        ("cat S --range 0-16", "not within [0, 15]"),
        ("cat S --range 0-99999", "not within"),
        ("cat S --subtask 4", "subtask 4 is not within [0, 3]"),
        ("cat S --subtask 0 --range 0-1", "give one of"),
        ("cat S --columns id,nope", "no column 'nope'"),
        ("cat S --state nope", "name one state"),
        ("cat S --uid nope", "name one operator"),
        ("cat S --limit -1", "-1 is not in the range"),
        ("cat S --format csv --output json", "leave out --format csv"),
        ("cat S --format xml", "'xml' is not one of"),
        ("hash x", "Missing option '--max-parallelism'"),
        ("hash x --max-parallelism 0", "max parallelism 0 is not within"),
        ("hash x --max-parallelism 8 --parallelism 9", "exceeds"),
        ("hash x --max-parallelism 8 --type complex", "unknown type 'complex'"),
        ("hash x --max-parallelism 8 --type decimal128(99,1)", "unknown type"),
        ("hash 00 --max-parallelism 8 --type binary", "scheme flink takes no keys"),
        ("hash 1 y 3 --max-parallelism 8 --type int64", "key 'y' is not of type int64"),
        ("hash 2024-02-30 --max-parallelism 8 --type date", "2024-02-30"),
        ("frobnicate S", "No such command 'frobnicate'"),
        ("inspect S --frobnicate", "No such option '--frobnicate'"),
        ("inspect S --output yaml", "'yaml' is not one of"),
    ],
)
@pytest.mark.parametrize("output", ["text", "json"])
def test_wrong_arguments_exit_with_2(made, tmp_path, words, message, output):
    places = {"S": made / "parquet", "N": tmp_path / "new", "NONE": tmp_path / "none"}
    line = [places.get(word, word) for word in words.split()]
    if output == "json" and not {"--output", "--parallelism"} & {line[-2], line[-1]}:
        line += ["--output", "json"]
    assert message in error_of(*line, code=2)
    assert list(tmp_path.iterdir()) == []


def test_stdin_that_is_not_utf8_is_a_wrong_argument():
    done = CliRunner().invoke(app, ["hash", "--max-parallelism", "8"], input=b"a\n\xff\n")
    assert (done.exit_code, done.stdout) == (2, "")
    assert "is not UTF-8" in done.stderr


@pytest.mark.parametrize("output", ["text", "json"])
@pytest.mark.parametrize(
    "words", ["rescale D N --parallelism 2", "cat D", "cat D --format jsonl", "diff D O"]
)
def test_a_truncated_file_exits_with_3(made, damaged, tmp_path, words, output):
    kg.write_snapshot(tmp_path / "other", people(10), key="id", max_parallelism=16, overwrite=True)
    places = {"D": damaged, "N": tmp_path / "new", "O": tmp_path / "other"}
    line = [places.get(word, word) for word in words.split()]
    if output == "json" and "--format" not in words:
        line += ["--output", "json"]
    assert "the manifest says" in error_of(*line, code=3)
    assert not (tmp_path / "new").exists()


def test_rows_before_the_damage_are_printed(made, tmp_path):
    kg.rescale(made / "parquet", tmp_path / "s", parallelism=4)
    victim = next(tmp_path.glob("s/data/*/00012-*/*.parquet"))
    victim.write_bytes(victim.read_bytes()[:-5])
    done = run("cat", tmp_path / "s", "--format", "jsonl")
    assert done.exit_code == 3
    rows = list(map(json.loads, done.stdout.splitlines()))
    assert rows == [row for row in expected_rows(made / "parquet") if row["key_group"] < 12]
    assert text_of("cat", tmp_path / "s", "--subtask", 0) != ""
    error_of("cat", tmp_path / "s", "--output", "json", code=3)


ON_ONE = ["inspect", "verify", "cat", "gc", "plan --parallelism 2", "diff S"]


@pytest.mark.parametrize("damage", ["altered", "empty", "no json", "newer", "no index"])
@pytest.mark.parametrize("command", [*ON_ONE, "rescale N --parallelism 2"])
def test_a_damaged_manifest_exits_with_3(made, tmp_path, damage, command):
    kg.rescale(made / "parquet", tmp_path / "s", parallelism=4)
    manifest = tmp_path / "s" / "manifest.json"
    text = manifest.read_text()
    if damage == "no index":
        next(tmp_path.glob("s/data/*/index.arrow")).unlink()
    else:
        manifest.write_text(
            {
                "altered": text.replace('"uid": "operator"', '"uid": "operators"'),
                "empty": "",
                "no json": text[:-9],
                "newer": text.replace('"version": 1', '"version": 99'),
            }[damage]
        )
    before = tree(tmp_path)
    places = {"S": made / "parquet", "N": tmp_path / "new"}
    command, *rest = command.split()
    line = [command, tmp_path / "s", *(places.get(word, word) for word in rest)]
    error_of(*line, code=3)
    error_of(*line, "--output", "json", code=3)
    assert tree(tmp_path) == before


def fail(error):
    def raising(*_, **__):
        raise error

    return raising


def test_a_refusing_storage_exits_with_4(made, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", fail(OSError(18, "Invalid cross-device link")))
    words = ("rescale", made / "parquet", tmp_path / "new", "--parallelism", 2, "--mode", "link")
    assert "use mode 'rewrite'" in error_of(*words, code=4)
    assert not (tmp_path / "new").exists()


def test_output_that_cannot_be_written_exits_with_4(made):
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "keygroups", "inspect", str(made / "parquet")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=120,
        )
    assert done.returncode == 4
    assert done.stderr == "error: [Errno 28] No space left on device\n"


def test_an_interrupt_exits_with_130_and_leaves_nothing(made, tmp_path, monkeypatch):
    from keygroups.rescale import execute

    monkeypatch.setattr(execute, "execute_range", fail(KeyboardInterrupt()))
    done = run("rescale", made / "parquet", tmp_path / "new", "--parallelism", 2)
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr.strip() == "error: interrupted"
    assert not (tmp_path / "new").exists()


def test_a_bug_exits_with_70_and_a_traceback_only_on_demand(made, monkeypatch):
    monkeypatch.setattr(kg.Snapshot, "open", fail(RuntimeError("boom\nboom")))
    assert "please report" in error_of("inspect", made / "parquet", code=70)
    monkeypatch.setenv("KEYGROUPS_DEBUG", "1")
    done = run("inspect", made / "parquet")
    assert done.exit_code == 70
    assert "Traceback" in done.stderr


def test_an_argument_that_is_not_utf8_is_wrong(tmp_path):
    done = process("hash", os.fsdecode(b"a\xff"), "--max-parallelism", 8)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"error: key 'a\\udcff' is not of type string")
    done = process("inspect", tmp_path / os.fsdecode(b"a\xff"))
    assert done.returncode == 2
    assert b"a\\udcff" in done.stderr


# --- as a process ---------------------------------------------------------------------------


def test_exit_codes_of_the_process(made, damaged):
    for words, code in (
        (("verify", made / "parquet"), 0),
        (("verify", damaged), 1),
        (("verify", damaged.parent), 2),
        (("cat", damaged), 3),
    ):
        done = process(*words)
        assert done.returncode == code
        assert bool(done.stdout) is (code < 2)
        assert bool(done.stderr) is (code >= 2)
        assert b"Traceback" not in done.stderr


def test_commands_run_without_spark(made, tmp_path):
    code = (
        "import sys; sys.modules['pyspark'] = None; from keygroups.cli import main; "
        f"sys.argv = ['keygroups', 'rescale', {str(made / 'parquet')!r}, {str(tmp_path / 'n')!r},"
        " '--parallelism', '2']; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PATH": ""},
        check=False,
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_without_click_it_says_what_to_install():
    code = "import sys; sys.modules['click'] = None; from keygroups.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "pip install 'keygroups[cli]'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("form", [["--format", "jsonl"], [], ["--output", "json"]])
def test_a_reader_that_goes_away_is_no_traceback(tmp_path, form):
    kg.write_snapshot(tmp_path / "s", people(30_000), key="id", max_parallelism=8)
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-m", "keygroups", "cat", str(tmp_path / "s"), *form],
        stdout=writer,
        stderr=subprocess.PIPE,
    ) as child:
        os.close(writer)
        assert os.read(reader, 10) != b""
        os.close(reader)
        _, stderr = child.communicate(timeout=120)
    assert (child.returncode, stderr) == (141, b"")


def test_output_is_utf8_in_any_locale(tmp_path):
    write_keys(tmp_path / "s", ["ünï😀"])
    for form in ("text", "jsonl", "csv"):
        done = process("cat", tmp_path / "s", "--format", form)
        assert "ünï😀" in done.stdout.decode()


def test_a_terminal_gets_tables_and_a_bar(made, tmp_path):
    primary, secondary = pty.openpty()
    words = ["rescale", str(made / "parquet"), str(tmp_path / "new"), "--parallelism", "3"]
    with subprocess.Popen(
        [sys.executable, "-m", "keygroups", *words],
        env={"PATH": "", "TERM": "xterm", "COLUMNS": "60"},
        stdout=secondary,
        stderr=secondary,
    ) as child:
        os.close(secondary)
        shown = b""
        while piece := _read_terminal(primary):
            shown += piece
    os.close(primary)
    assert child.returncode == 0
    assert b"\x1b[" in shown
    assert b"100%" in shown
    assert "─".encode() in shown


def _read_terminal(descriptor):
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other side is closed
        return b""


# --- small things ---------------------------------------------------------------------------


def test_names_from_a_snapshot_cannot_move_the_cursor(tmp_path):
    uid = "\x1b[2J[red]\n\u202e"
    kg.write_snapshot(tmp_path / "s", people(3), key="id", uid=uid, max_parallelism=4)
    for words in (("inspect",), ("plan", "--parallelism", "2"), ("cat", "--state", "x")):
        done = run(words[0], tmp_path / "s", *words[1:])
        assert not re.search(r"[\x1b\u202e]", done.stdout + done.stderr)
    assert json_of("inspect", tmp_path / "s")["operators"][0]["uid"] == uid
    assert printable("a\tb\u2066") == "a\\tb\\u2066"


def test_sizes_are_readable():
    assert [size(n) for n in (0, 1023, 1536, 1 << 20, 3 << 40, 5 << 50, None)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 MiB",
        "3.0 TiB",
        "5.0 PiB",
        "-",
    ]
