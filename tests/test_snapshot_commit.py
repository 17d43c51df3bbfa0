"""The commit: one writer wins, the old one reads until the new one is whole, failures tidy up."""

import errno
import itertools
import json
import shutil
import subprocess
import sys
import textwrap
import threading

import pyarrow as pa
import pytest

import keygroups as kg
from keygroups.snapshot.storage import LocalStorage
from keygroups.snapshot.verify import unreferenced_files
from keygroups.testing import Steps, fail_at, observed
from keygroups.testing.scratch import scratch_folder, segment_size

ROUNDS = 30


def table(writer, count=40):
    return pa.table({"k": pa.array(range(count), pa.int64()), "writer": [writer] * count})


def write(path, writer, *, backend="parquet", **options):
    options = {"max_parallelism": 8, "parallelism": 2} | options
    return kg.write_snapshot(path, table(writer), key="k", backend=backend, **options)


def writer_of(path):
    """Who wrote the snapshot that is there, all of which is checked; None if there is none."""
    try:
        snapshot = kg.Snapshot.open(path)
    except kg.SnapshotNotFound:
        return None
    assert kg.verify(path).findings == ()
    rows = snapshot.to_table()
    (writer,) = set(rows.column("writer").to_pylist())
    assert rows.sort_by("k").equals(table(writer).cast(rows.schema))
    return writer


def files_of(path):
    return {found for found, _, _ in LocalStorage(path).list_files()}


def leftovers(path):
    """The files at a path that no manifest names."""
    try:
        snapshot = kg.Snapshot.open(path)
    except kg.SnapshotNotFound:
        return files_of(path)
    named = {file.path for file in snapshot.manifest.files}
    return files_of(path) - named - {"manifest.json"}


class TestOneWins:
    def test_among_threads(self):
        with scratch_folder() as folder:
            for number in range(ROUNDS):
                path, writers = folder / str(number), range(4)
                barrier, outcomes = threading.Barrier(len(writers)), {}

                def contend(writer, path=path, barrier=barrier, outcomes=outcomes):
                    barrier.wait()
                    try:
                        write(path, writer)
                        outcomes[writer] = "committed"
                    except kg.KeyGroupsError as error:
                        outcomes[writer] = type(error).__name__

                threads = [threading.Thread(target=contend, args=(w,)) for w in writers]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                (winner,) = [w for w, outcome in outcomes.items() if outcome == "committed"]
                assert sorted(outcomes.values()) == ["SnapshotExists"] * 3 + ["committed"]
                assert writer_of(path) == winner
                assert leftovers(path) == set()

    def test_among_processes(self):
        with scratch_folder() as folder, contestants(3) as ask:
            for number in range(ROUNDS):
                path = folder / str(number)
                outcomes = ask({"path": str(path)})
                assert sorted(outcomes) == ["SnapshotExists", "SnapshotExists", "committed"]
                assert writer_of(path) == outcomes.index("committed")
                assert leftovers(path) == set()

    def test_who_overwrites_among_processes_never_leaves_a_broken_one(self):
        with scratch_folder() as folder, contestants(3) as ask:
            path = folder / "s"
            write(path, 7)
            for _ in range(ROUNDS):
                assert ask({"path": str(path), "overwrite": True}) == ["committed"] * 3
                assert writer_of(path) in {0, 1, 2}
                reclaimable = {found for found, _, _ in unreferenced_files(kg.Snapshot.open(path))}
                assert leftovers(path) == reclaimable

    def test_who_fails_does_not_disturb_who_writes(self):
        """The one deletes its empty folders while the other makes its own there."""
        with scratch_folder() as folder:
            for number in range(ROUNDS):
                path, stop = folder / str(number), threading.Event()
                barrier, errors = threading.Barrier(2), []

                def fail(path=path, stop=stop, barrier=barrier):
                    barrier.wait()
                    while not stop.is_set():
                        storage = LocalStorage(path)
                        attempt = kg.snapshot.commit.Attempt.begin(storage, overwrite=True)
                        with storage.create(f"{attempt.folder}/x"):
                            pass
                        attempt.abort()

                thread = threading.Thread(target=record, args=(fail, errors))
                thread.start()
                barrier.wait()
                try:
                    write(path, 1)
                finally:
                    stop.set()
                    thread.join()
                assert errors == []
                assert writer_of(path) == 1


def record(function, errors):
    try:
        function()
    except BaseException as error:
        errors.append(error)


class contestants:  # noqa: N801 - used as a function
    """Processes that start a write at the same moment, as often as asked."""

    PROGRAM = textwrap.dedent("""
        import json, sys, pyarrow as pa, keygroups as kg
        writer = int(sys.argv[1])
        rows = pa.table({"k": pa.array(range(40), pa.int64()), "writer": [writer] * 40})
        print("ready", flush=True)
        for line in sys.stdin:
            arguments = json.loads(line)
            try:
                kg.write_snapshot(rows=rows, key="k", max_parallelism=8, parallelism=2, **arguments)
                print("committed", flush=True)
            except kg.KeyGroupsError as error:
                exists = isinstance(error, kg.SnapshotExists)
                print(type(error).__name__, "" if exists else error, flush=True)
    """)

    def __init__(self, count):
        self.count = count

    def __enter__(self):
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", self.PROGRAM, str(number)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(self.count)
        ]
        for process in self.processes:
            assert process.stdout.readline() == "ready\n"
        return self.ask

    def ask(self, arguments):
        for process in self.processes:
            process.stdin.write(json.dumps(arguments) + "\n")
            process.stdin.flush()
        return [process.stdout.readline().strip() for process in self.processes]

    def __exit__(self, *_):
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            with process.stdout:
                assert process.wait() == 0


ACTIONS = {
    "write": lambda _, path, **options: write(path, 2, **options),
    "rewrite": lambda source, path, **options: kg.rescale(source, path, 3, jobs=1, **options),
    "link": lambda source, path, **options: kg.rescale(source, path, 3, mode="link", **options),
    "re-hash": lambda source, path, **options: kg.rescale(
        source, path, 3, max_parallelism=12, jobs=1, **options
    ),
}
actions = pytest.mark.parametrize("action", ACTIONS)


@pytest.fixture
def places():
    """A source whose writer is 2, and where to write."""
    with scratch_folder() as folder, segment_size("parquet", 400):
        write(folder / "source", 2)
        yield folder / "source", folder / "target"


class TestOverwrite:
    @actions
    def test_the_old_one_reads_until_the_new_one_is_committed(self, places, action):
        source, path = places
        write(path, 1)
        seen = []

        def look(operation, at, _):
            if operation != "list" and not seen_from_within():
                with looking():
                    seen.append((operation, at, writer_of(path)))

        inside = []

        def seen_from_within():
            return bool(inside)

        class looking:  # noqa: N801 - used as a function
            def __enter__(self):
                inside.append(True)

            def __exit__(self, *_):
                inside.pop()

        with observed(look):
            ACTIONS[action](source, path, overwrite=True)
        writers = [writer for _, _, writer in seen]
        assert writers == sorted(writers)  # 1, and from one step on 2; always one of them
        steps = [(operation, at) for operation, at, writer in seen if writer == 1]
        assert steps[-1] == ("commit", "manifest.json")
        assert writer_of(path) == 2
        assert leftovers(path) == set()

    def test_what_the_new_manifest_does_not_name_is_deleted_after_it(self, places):
        _, path = places
        old = write(path, 1)
        steps = Steps()
        with observed(steps):
            write(path, 2, overwrite=True)
        operations = [operation for operation, _, _ in steps.seen]
        assert operations.index("commit") < operations.index("delete")
        assert not any((path / file.path).exists() for file in old.manifest.files)

    def test_a_reader_that_has_it_open_is_told_what_is_missing(self, places):
        _, path = places
        old = write(path, 1)
        write(path, 2, overwrite=True)
        with pytest.raises(kg.SnapshotCorrupted, match="missing"):
            old.to_table()

    def test_one_that_is_overwritten_while_it_is_opened(self, places):
        _, path = places
        write(path, 1)
        done = []

        def overwrite_before_the_index(operation, at, _):
            if operation == "size" and at.endswith("index.arrow") and not done:
                done.append(at)
                write(path, 2, overwrite=True)

        snapshot = kg.Snapshot.open(path, observer=overwrite_before_the_index)
        assert done
        assert set(snapshot.to_table().column("writer").to_pylist()) == {2}

    @pytest.mark.parametrize("text", [b"", b"{", b'{"format": "other"}', None], ids=str)
    def test_a_damaged_or_foreign_one_can_be_overwritten(self, places, text):
        _, path = places
        write(path, 1)
        manifest = path / "manifest.json"
        newer = manifest.read_bytes().replace(b'"version": 1', b'"version": 2')
        manifest.write_bytes(newer if text is None else text)
        with pytest.raises(kg.SnapshotExists):
            write(path, 2)
        write(path, 2, overwrite=True)
        assert writer_of(path) == 2

    def test_only_folders_of_data_are_deleted_whatever_the_old_manifest_names(self, places):
        """A manifest is no permission to delete: it may name anything."""
        _, path = places
        write(path, 1)
        (path / "mine").mkdir()
        (path / "mine" / "notes").write_text("keep")
        (path / "data" / "loose").write_text("keep")
        manifest = path / "manifest.json"
        text = json.loads(manifest.read_text())
        runs = text["operators"][0]["states"][0]["runs"]
        entries = itertools.chain(*(run["segments"] for run in runs))
        for name in ("mine/notes", "data/loose", "manifest.json"):
            next(entries)["path"] = name
        covered = json.dumps({k: v for k, v in text.items() if k != "digest"}, indent=2)
        covered = covered.removesuffix("\n}").encode() + b",\n"
        digest = kg.snapshot.digest.digest_bytes(covered)
        manifest.write_bytes(covered + f'  "digest": "{digest}"\n}}\n'.encode())
        write(path, 2, overwrite=True)
        assert writer_of(path) == 2
        assert (path / "mine" / "notes").read_text() == "keep"
        assert (path / "data" / "loose").read_text() == "keep"


class TestFailures:
    """Each step fails in turn, alone or with all after it."""

    @pytest.mark.parametrize("ever_after", [False, True], ids=["once", "for ever"])
    @pytest.mark.parametrize("before", [None, 1], ids=["new", "overwrite"])
    @actions
    def test_the_target_is_whole_or_as_it_was(self, places, action, before, ever_after):
        source, path = places
        options = {} if before is None else {"overwrite": True}
        committed_in_spite = 0
        for number in itertools.count():
            shutil.rmtree(path, ignore_errors=True)
            if before:
                write(path, before)
            error = OSError(errno.EIO, "")
            steps = Steps()
            faults = fail_at(number, error, ever_after=ever_after)
            try:
                with observed(lambda *a, s=steps, f=faults: (s(*a), f(*a))):
                    ACTIONS[action](source, path, **options)
                failure = None
            except kg.KeyGroupsError as found:
                failure = found
            where = f"step {number} of {action}: {steps.seen[min(number, len(steps) - 1)]}"
            assert writer_of(source) == 2, where
            writer = writer_of(path)
            if failure is None:
                assert writer == 2, where
            else:
                assert isinstance(failure, kg.StorageUnavailable), where
                assert "Input/output error" in str(failure), where
                assert writer in {before, 2}, where
                committed_in_spite += writer == 2
            self.check_leftovers(path, where, ever_after or (failure and writer == 2))
            write(path, 3, overwrite=True)  # what is left is in nobody's way
            assert writer_of(path) == 3
            if number >= len(steps):
                break
        assert number > 15
        assert committed_in_spite > 0  # e.g. the sync after it: an error, and yet it is there

    def check_leftovers(self, path, where, may_leave):
        left = leftovers(path)
        if writer_of(path) is None:
            allowed = {found for found in left if found.startswith(("data/", "manifest.json."))}
        else:
            allowed = {found for found, _, _ in unreferenced_files(kg.Snapshot.open(path))}
        assert left == allowed, where
        operations = ("delete", "exists", "size", "open", "read")
        if not may_leave and not any(f"'{name}'" in where for name in operations):
            assert left == set(), where  # who can tidy up does

    def test_a_failure_of_the_rows_leaves_nothing(self, places):
        _, path = places

        def rows():
            yield from table(1).to_batches()
            raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            kg.write_snapshot(path, rows(), key="k", memory_budget_bytes=1)
        assert not path.exists()

    def test_a_duplicate_key_leaves_nothing(self, places):
        _, path = places
        rows = pa.concat_tables([table(1), table(2)])
        with pytest.raises(kg.InvalidArgument, match="is there more than once"):
            kg.write_snapshot(path, rows, key="k")
        assert not path.exists()

    @pytest.mark.parametrize("budget", [1000, 1 << 20], ids=["spilling", "in memory"])
    def test_a_full_disk(self, places, budget):
        """The system refuses to let any file grow: first those of spilled rows."""
        _, path = places
        program = textwrap.dedent(f"""
            import resource, signal, sys
            import pyarrow as pa, keygroups as kg
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
            table = pa.table({{"k": pa.array(range(10000), pa.int64())}})
            try:
                kg.write_snapshot(sys.argv[1], table, key="k", memory_budget_bytes={budget})
            except kg.StorageUnavailable as error:
                print(error)
        """)
        ran = subprocess.run(
            [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=False
        )
        assert ran.stderr == ""
        assert "File too large" in ran.stdout
        assert not path.exists()

    def test_a_path_that_is_a_file(self, places):
        _, path = places
        path.write_text("mine")
        with pytest.raises(kg.StorageUnavailable, match=str(path)):
            write(path, 1)
        with pytest.raises(kg.SnapshotNotFound, match=str(path)):
            kg.Snapshot.open(path)
        assert path.read_text() == "mine"

    def test_a_path_that_is_a_link_to_nowhere(self, places):
        source, path = places
        path.symlink_to(source / "nowhere")
        with pytest.raises(kg.StorageUnavailable, match="Not a directory"):
            write(path, 1)
        with pytest.raises(kg.SnapshotNotFound):
            kg.Snapshot.open(path)

    def test_a_folder_that_was_there_stays(self, places):
        _, path = places
        path.mkdir()
        (path / "notes").write_text("mine")
        write(path, 1)
        assert (path / "notes").read_text() == "mine"
        with pytest.raises(kg.InvalidArgument):
            kg.write_snapshot(path / "x", table(1), key="nothing")
        assert not (path / "x").exists()


def test_a_file_takes_nothing_after_its_end_or_a_failed_write(tmp_path):
    """A failed encoder may be finalised late, when its descriptor is already another file's."""
    storage = LocalStorage(tmp_path)
    file = storage.create("a")
    file.write(b"whole")
    file.close_durably()
    with storage.create("b") as other:  # takes the descriptor that "a" had
        with pytest.raises(kg.StorageUnavailable, match="closed"):
            file.write(b"late")
        other.write(b"own")
        other.close_durably()
    assert (tmp_path / "b").read_bytes() == b"own"
    reader = storage.open("a")
    reader.close()
    with storage.open("b"), pytest.raises(kg.StorageUnavailable, match="closed"):
        reader.read_at(0, 3)

    def fail_to_write(operation, path, size_bytes):
        if operation == "write":
            raise OSError(5, "I/O error")

    with LocalStorage(tmp_path, fail_to_write).create("c") as failed:
        for _ in range(2):
            with pytest.raises(kg.StorageUnavailable):
                failed.write(b"x")
        with pytest.raises(kg.StorageUnavailable, match="a write failed"):
            failed.close_durably()
    assert not (tmp_path / "c").exists()
