"""Snapshots of every format version that was released, in files that never change.

``tools/make_fixtures`` made them. Each has the rows that it must give, and some a damaged twin.
"""

import json
import shutil
import subprocess
from pathlib import Path

import pyarrow as pa
import pytest

import keygroups as kg
from keygroups.testing import rows_of

FIXTURES = Path(__file__).parent / "fixtures"
VERSIONS = (1,)
WHOLE = [path for v in VERSIONS for path in sorted((FIXTURES / f"v{v}").iterdir())]
DAMAGED = [path for v in VERSIONS for path in sorted((FIXTURES / f"v{v}-damaged").iterdir())]
whole = pytest.mark.parametrize("path", WHOLE, ids=lambda path: path.name)
damaged = pytest.mark.parametrize("path", DAMAGED, ids=lambda path: path.name)


def jsonable(value):
    """A plain value as JSON: bytes as an object with their hexadecimal digits."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return [jsonable(part) for part in value] if isinstance(value, tuple) else value


def expected_rows(path):
    return [json.loads(line) for line in (path / "rows.jsonl").read_text().splitlines()]


def rows_in(snapshot, key_groups=None):
    names = snapshot.schema().stored.names
    return [jsonable(row) for row in rows_of(snapshot.to_table(key_groups, columns=names))]


def test_there_are_as_many_as_were_made():
    assert len(WHOLE) == 9
    assert len(DAMAGED) == 9
    assert sum(len(expected_rows(path)) for path in WHOLE) > 80


@whole
def test_a_snapshot_holds_exactly_its_rows(path):
    snapshot = kg.Snapshot.open(path)
    expected = expected_rows(path)
    assert rows_in(snapshot) == expected
    for key_groups in snapshot.ranges:
        assert rows_in(snapshot, key_groups) == [row for row in expected if row[0] in key_groups]
    verification = kg.verify(path)
    assert verification.findings == verification.unreferenced == ()
    assert verification.rows == len(expected)


@whole
def test_any_row_less_is_noticed(path, tmp_path):
    """By the rows, by the digests of the index and by diff: the expectations can fail."""
    old = kg.Snapshot.open(path)
    operator, rows = old.operator(), old.to_table()
    for place in range(0, rows.num_rows, 5):
        less = kg.write_snapshot(
            tmp_path / str(place),
            pa.concat_tables([rows.slice(0, place), rows.slice(place + 1)]),
            key=[field.name for field in operator.key],
            max_parallelism=operator.max_parallelism,
            scheme=operator.scheme,
            backend=operator.states[0].backend,
            uid=operator.uid,
            state=operator.states[0].name,
        )
        assert rows_in(less) != expected_rows(path)
        assert not less.key_group_sizes().equals(old.key_group_sizes())
        (difference,) = kg.diff(path, tmp_path / str(place)).states
        assert (difference.only_in_a, difference.only_in_b, difference.changed) == (1, 0, 0)


@whole
def test_a_snapshot_rescales_and_is_written_again_the_same(path, tmp_path):
    old = kg.Snapshot.open(path)
    expected = expected_rows(path)
    for mode in ("rewrite", "link"):
        shutil.copytree(path, tmp_path / f"{mode}-source")
        target = tmp_path / mode
        kg.rescale(tmp_path / f"{mode}-source", target, parallelism=2, mode=mode)
        assert rows_in(kg.Snapshot.open(target)) == expected
        assert kg.diff(path, target).is_equal
    operator = old.operator()
    again = kg.write_snapshot(
        tmp_path / "again",
        old.to_table(),
        key=[field.name for field in operator.key],
        max_parallelism=operator.max_parallelism,
        parallelism=operator.parallelism,
        scheme=operator.scheme,
        backend=operator.states[0].backend,
        uid=operator.uid,
        state=operator.states[0].name,
    )
    assert again.key_group_sizes().equals(old.key_group_sizes())
    assert kg.diff(path, tmp_path / "again").is_equal


@damaged
def test_a_damaged_one_gives_its_error(path):
    expected = json.loads((path / "expected.json").read_text())
    if "error" in expected:
        kind = getattr(kg, expected["error"])
        for use in (kg.Snapshot.open, kg.verify):
            with pytest.raises(kind, match=expected["message"]) as error:
                use(path)
            assert type(error.value) is kind
            assert str(path) in str(error.value)
    else:
        findings = kg.verify(path).findings
        assert findings
        for found in findings:
            assert expected["finding"] in found.message
            assert found.path in found.message
        snapshot = kg.Snapshot.open(path)
        with pytest.raises(kg.SnapshotCorrupted, match=expected["finding"]):
            snapshot.to_table(columns=snapshot.schema().stored.names)


@damaged
def test_a_damaged_one_is_no_source(path, tmp_path):
    with pytest.raises(kg.KeyGroupsError):
        kg.rescale(path, tmp_path / "target", max_parallelism=64, parallelism=2)
    assert not (tmp_path / "target").exists()


def test_git_ignores_none_of_the_files():
    files = [str(path) for path in FIXTURES.rglob("*") if path.is_file()]
    ran = subprocess.run(
        ["git", "check-ignore", "--no-index", *files],
        cwd=FIXTURES,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (1, "")  # 1: none is ignored
    assert sum(Path(file).stat().st_size for file in files) < 100_000
