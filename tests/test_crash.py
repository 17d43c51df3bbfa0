"""The process is killed at every step: the old snapshot reads, the new one is whole or absent.

This file is also the program that is killed. It imports once and forks for every step; the child
kills itself with SIGKILL right before that step, so nothing of it can tidy up.
"""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest

import keygroups as kg
from keygroups.snapshot.verify import unreferenced_files
from keygroups.testing.faults import observed
from keygroups.testing.scratch import scratch_folder, segment_size


def table(writer):
    values = pa.array([f"{writer} {i}" for i in range(24)])
    return pa.table({"k": pa.array(range(24), pa.int64()), "v": values})


def write(path, writer, backend, **options):
    return kg.write_snapshot(
        path,
        table(writer),
        key="k",
        max_parallelism=4,
        parallelism=2,
        backend=backend,
        memory_budget_bytes=300,  # some rows are spilled and read again
        **options,
    )


ACTIONS = {
    "write": lambda _, path, backend, **options: write(path, "source", backend, **options),
    "link": lambda source, path, _, **options: kg.rescale(source, path, 3, mode="link", **options),
    "rewrite": lambda source, path, _, **options: kg.rescale(source, path, 3, jobs=1, **options),
    "re-hash": lambda source, path, _, **options: kg.rescale(
        source, path, 3, max_parallelism=6, jobs=1, **options
    ),
}


@pytest.mark.parametrize(("backend", "before"), [("parquet", "nothing"), ("rocksdb", "old")])
@pytest.mark.parametrize("action", ACTIONS)
def test_killed_at_every_step(action, backend, before):
    ran = subprocess.run(
        [sys.executable, __file__, action, backend, before],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    killed = [line for line in lines if not line.startswith("survived")]
    assert len(killed) > 15
    assert lines[-1].startswith(f"survived {len(killed)} steps: source")
    # The commit is the one step that tells the two apart.
    states = [line.rsplit(" ", 1)[1] for line in killed]
    assert [state for state, _ in itertools.groupby(states)] == [before, "source"]
    first_new = killed[states.index("source")]
    assert first_new.split()[1] in {"sync", "delete"}
    assert killed[states.index("source") - 1].split()[1] == "commit"


def main(action, backend, before):
    act = ACTIONS[action]
    options = {"overwrite": True} if before == "old" else {}
    with scratch_folder() as folder, segment_size(backend, 400):
        source, path = folder / "source", folder / "target"
        write(source, "source", backend)
        for number in itertools.count():
            shutil.rmtree(path, ignore_errors=True)
            if before == "old":
                write(path, "old", backend)
            step = run_until(number, folder / "step", lambda: act(source, path, backend, **options))
            found = who_is(path)
            assert who_is(source) == "source", step
            assert leftovers(path, found) <= reclaimable(path, found), step
            # A retry needs nobody's help: with the same arguments, unless it was committed.
            act(source, path, backend, overwrite=found != "nothing")
            assert who_is(path) == "source", step
            if step is None:
                print(f"survived {number} steps: {found}")
                break
            print(f"{number} {step} {found}")


def run_until(number, note, act):
    """Runs an action in a child that is killed before a step; returns which, None if it lived."""
    note.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            with observed(kill_at(number, note)):
                act()
            os._exit(0)
        except BaseException as error:
            print(f"the child failed: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return note.read_text()
    assert os.WEXITSTATUS(status) == 0
    return None


def kill_at(number, note):
    count = itertools.count()

    def observer(operation, path, _):
        if next(count) == number:
            note.write_text(f"{operation} {path}")
            os.kill(os.getpid(), signal.SIGKILL)

    return observer


def who_is(path):
    """Whose rows a snapshot has, when all of it is verified."""
    try:
        snapshot = kg.Snapshot.open(path)
    except kg.SnapshotNotFound:
        return "nothing"
    assert kg.verify(path).findings == ()
    rows = snapshot.to_table().sort_by("k")
    writer = rows.column("v")[0].as_py().split()[0]
    assert rows.equals(table(writer).cast(rows.schema))
    return writer


def leftovers(path, writer):
    found = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    if writer == "nothing":
        return found
    manifest = kg.Snapshot.open(path).manifest
    return found - {file.path for file in manifest.files} - {"manifest.json"}


def reclaimable(path, writer):
    if writer == "nothing":
        return {
            file.relative_to(path).as_posix()
            for pattern in ("data/**/*", "manifest.json.*.tmp")
            for file in Path(path).glob(pattern)
        }
    return {found for found, _, _ in unreferenced_files(kg.Snapshot.open(path))}


if __name__ == "__main__":
    main(*sys.argv[1:])
