"""Rescaling: any chain of any rescales holds the same rows, or nothing is committed."""

import errno
import itertools
import os
import shutil
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

import keygroups as kg
from keygroups.rescale import execute, plan_rescale
from keygroups.rescale.plan import source_key_groups
from keygroups.snapshot.commit import read_manifest
from keygroups.snapshot.storage import LocalStorage
from keygroups.snapshot.verify import unreferenced_files
from keygroups.testing import Steps, observed, rows_of, tables
from keygroups.testing.scratch import scratch_folder, segment_size
from keygroups.testing.snapshots import tiles, write_as_several
from keygroups.testing.strategies import KeyedTable, table_of

BACKENDS = ("parquet", "rocksdb", "memory")
RULES = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

backends = st.sampled_from(BACKENDS)
segment_sizes = st.sampled_from([1, 100, 1 << 25])
modes = st.sampled_from(["rewrite", "link"])
balances = st.sampled_from([None, "rows", "bytes"])


@st.composite
def parallelisms(draw, max_parallelism=None, largest=60):
    """Max parallelism and parallelism; the small ones, the primes and the powers of two."""
    if max_parallelism is None:
        max_parallelism = draw(st.one_of(st.integers(1, largest), st.sampled_from([1, 2, 32, 64])))
    return max_parallelism, draw(st.integers(1, max_parallelism))


def write(path, rows, max_parallelism, parallelism, backend, **options):
    return kg.write_snapshot(
        path,
        rows.table,
        key=rows.key,
        max_parallelism=max_parallelism,
        parallelism=parallelism,
        backend=backend,
        scheme=rows.scheme,
        **options,
    )


def numbered(count, value=lambda i: f"value {i}"):
    values = [value(i) for i in range(count)]
    table = pa.table({"k": pa.array(range(count), pa.int64()), "v": values})
    schema = execute.RowSchema(
        (pa.field("k", pa.int64(), nullable=False),), (pa.field("v", table.schema.field("v").type),)
    )
    return KeyedTable(table, ("k",), "flink", tuple(rows_of(table)), schema)


def heaviest(weights, ranges):
    return max(int(np.sum(weights[r.start : r.end + 1])) for r in ranges)


def lightest_possible(weights, parallelism):
    """The weight of the heaviest range in the best of all cuts, found by trying all of them."""
    count = len(weights)
    return min(
        max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *starts, count)))
        for starts in itertools.combinations(range(1, count), parallelism - 1)
    )


class TestAnyRescale:
    @RULES
    @given(tables(), parallelisms(), backends, segment_sizes, st.data())
    def test_any_chain_holds_the_rows_of_a_snapshot_written_directly(
        self, rows, sizes, backend, segment_bytes, data
    ):
        with scratch_folder() as folder, segment_size(backend, segment_bytes):
            max_parallelism, parallelism = sizes
            snapshot = write(folder / "0", rows, max_parallelism, parallelism, backend)
            for step in range(1, data.draw(st.integers(1, 4), label="steps") + 1):
                arguments, max_parallelism = self.draw_arguments(data, max_parallelism)
                source, target = folder / f"{step - 1}", folder / f"{step}"
                before = snapshot
                snapshot = kg.rescale(source, target, jobs=1, **arguments)
                self.check_cut(before, snapshot, arguments)
            direct = write(folder / "direct", rows, max_parallelism, 1, backend)
            rows.model(max_parallelism).expect(direct)
            names = rows.schema.stored.names
            assert rows_of(snapshot.to_table(columns=names)) == rows_of(
                direct.to_table(columns=names)
            )
            rows.model(max_parallelism).expect(snapshot, snapshot.ranges)
            assert snapshot.key_group_sizes().equals(direct.key_group_sizes())
            assert kg.verify(snapshot.storage.root).findings == ()
            assert kg.diff(direct.storage.root, snapshot.storage.root).is_equal

    def draw_arguments(self, data, max_parallelism):
        mode = data.draw(modes, label="mode")
        if mode == "rewrite" and data.draw(st.booleans(), label="re-hash"):
            max_parallelism, parallelism = data.draw(parallelisms(), label="max, parallelism")
            return {"parallelism": parallelism, "max_parallelism": max_parallelism}, max_parallelism
        _, parallelism = data.draw(parallelisms(max_parallelism), label="parallelism")
        balance = data.draw(balances, label="balance")
        return {"parallelism": parallelism, "mode": mode, "balance": balance}, max_parallelism

    def check_cut(self, before, snapshot, arguments):
        parallelism, balance = arguments["parallelism"], arguments.get("balance")
        assert tiles(snapshot.ranges, snapshot.max_parallelism)
        assert snapshot.parallelism == parallelism
        is_rehash = before.max_parallelism != snapshot.max_parallelism
        if balance is None and (is_rehash or parallelism != before.parallelism):
            indices = range(parallelism)
            assert snapshot.ranges == [
                kg.key_group_range_for_subtask(snapshot.max_parallelism, parallelism, i)
                for i in indices
            ]
        if balance is not None:
            column = {"rows": "rows", "bytes": "size_bytes"}[balance]
            weights = snapshot.key_group_sizes().column(column).to_numpy()
            assert snapshot.ranges == kg.balanced_cut(weights, parallelism)

    @given(st.lists(st.integers(0, 30), min_size=1, max_size=9), st.data(), backends)
    def test_a_balanced_cut_is_as_light_as_can_be(self, counts, data, backend):
        max_parallelism = len(counts)
        parallelism = data.draw(st.integers(1, max_parallelism), label="parallelism")
        keys = keys_with_counts(counts)
        values = pa.array(["x" * (k % 50) for k in keys], pa.string())
        table = pa.table({"k": pa.array(keys, pa.int64()), "v": values})
        with scratch_folder() as folder:
            kg.write_snapshot(
                folder / "a", table, key="k", max_parallelism=max_parallelism, backend=backend
            )
            for balance, column in (("rows", "rows"), ("bytes", "size_bytes")):
                snapshot = kg.rescale(
                    folder / "a", folder / balance, parallelism=parallelism, balance=balance, jobs=1
                )
                weights = snapshot.key_group_sizes().column(column).to_pylist()
                best = lightest_possible(weights, parallelism)
                assert heaviest(weights, snapshot.ranges) == best
                assert tiles(snapshot.ranges, max_parallelism)
                kept = kg.rescale(folder / balance, folder / f"{balance}-kept", jobs=1)
                assert kept.ranges == snapshot.ranges  # a balanced cut stays as it is

    @given(*[st.integers(1, 300)] * 2, st.data())
    def test_rows_of_a_new_range_come_from_these_old_key_groups(self, new, old, data):
        start, end = sorted(data.draw(st.tuples(*[st.integers(0, new - 1)] * 2)))
        sources = source_key_groups(kg.KeyGroupRange(start, end), new, old)
        taken = [group for source in sources for group in source]
        assert taken == sorted(set(taken))
        # Both numberings are remainders of one number; lcm(old, new) of them are all cases.
        values = np.arange(np.lcm(new, old))
        inside = (values % new >= start) & (values % new <= end)
        assert set(np.unique(values[inside] % old)) <= set(taken)


def keys_with_counts(counts):
    """Keys of which ``counts[g]`` fall into key group ``g`` of ``len(counts)``."""
    left, keys, key = list(counts), [], 0
    while any(left):
        group = kg.assign_to_key_group(key, len(counts))
        if left[group]:
            left[group] -= 1
            keys.append(key)
        key += 1
    return keys


class TestOverlappingRuns:
    """Several writers, each with some rows of any range: one lane each, merged when read."""

    @RULES
    @given(
        tables(min_rows=1),
        parallelisms(),
        parallelisms(),
        backends,
        segment_sizes,
        st.data(),
    )
    def test_they_are_merged_on_read_and_survive_rescales(
        self, rows, sizes, others, backend, segment_bytes, data
    ):
        count = len(rows.rows)
        writers = data.draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
        max_parallelism, parallelism = sizes
        new = min(others[1], max_parallelism)
        with scratch_folder() as folder, segment_size(backend, segment_bytes):
            snapshot = write_as_several(
                folder / "a",
                rows,
                writers,
                max_parallelism=max_parallelism,
                parallelism=parallelism,
                backend=backend,
            )
            model = rows.model(max_parallelism, parallelism)
            model.expect(snapshot)
            assert kg.verify(folder / "a").findings == ()
            model.parallelism = new
            for mode in ("link", "rewrite"):
                other = kg.rescale(folder / "a", folder / mode, parallelism=new, mode=mode, jobs=1)
                model.expect(other, other.ranges)
                assert kg.verify(folder / mode).findings == ()
                assert other.key_group_sizes().equals(snapshot.key_group_sizes())
            rehashed = kg.rescale(
                folder / "link", folder / "m", max_parallelism=others[0], parallelism=others[1]
            )
            rows.model(*others).expect(rehashed)

    def test_runs_that_do_not_overlap_become_one_run_a_range(self):
        with scratch_folder() as folder, segment_size("memory", 200):
            rows = numbered(200)
            write(folder / "a", rows, 64, 64, "memory")
            assert len(kg.Snapshot.open(folder / "a").manifest.runs) > 30
            merged = kg.rescale(folder / "a", folder / "b", parallelism=2, jobs=1)
            assert len(merged.manifest.runs) == 2

    def test_a_key_in_two_runs_is_refused_and_named(self):
        with scratch_folder() as folder:
            once = numbered(20)
            twice = KeyedTable(
                pa.concat_tables([once.table, once.table.slice(7, 1)]),
                once.key,
                once.scheme,
                once.rows,
                once.schema,
            )
            write_as_several(
                folder / "a",
                twice,
                [0] * 20 + [1],
                max_parallelism=4,
                parallelism=2,
                backend="parquet",
            )
            (finding,) = kg.verify(folder / "a").findings
            assert "key 7 is there more than once" in finding.message
            with pytest.raises(kg.InvalidArgument, match="key 7 "):
                kg.Snapshot.open(folder / "a").to_table()


class TestPlan:
    @RULES
    @given(tables(), parallelisms(), parallelisms(), backends, segment_sizes, modes, balances)
    def test_it_touches_no_file_and_its_numbers_add_up(
        self, rows, sizes, others, backend, segment_bytes, mode, balance
    ):
        with scratch_folder() as folder, segment_size(backend, segment_bytes):
            write(folder / "s", rows, *sizes, backend)
            steps = Steps()
            snapshot = kg.Snapshot.open(folder / "s", observer=steps)
            shutil.rmtree(folder / "s")  # whoever looks at it now fails
            opened = len(steps)
            parallelism = min(others[1], sizes[0])
            (plan,) = plan_rescale(snapshot, parallelism, None, mode, balance).operators
            files = {s.file.path: s for run in snapshot.manifest.runs for s in run.segments}
            assert [r.key_groups for r in plan.ranges] == [
                r.key_groups for r in sorted(plan.ranges, key=lambda r: r.key_groups)
            ]
            assert tiles([r.key_groups for r in plan.ranges], sizes[0])
            sizes_table = snapshot.key_group_sizes()
            for planned in plan.ranges:
                self.check_range(planned, files, sizes_table)
            assert sum(r.rows for r in plan.ranges) == len(rows.rows)
            self.check_actions(plan, files, mode)
            rehash = plan_rescale(snapshot, others[1], others[0]).operators[0]
            if rehash.is_rehash:
                for piece in (p for r in rehash.ranges for p in r.slices):
                    assert piece.action == "re-hash"
                    assert piece.size_bytes == files[piece.path].file.size_bytes
            assert len(steps) == opened

    def check_range(self, planned, files, sizes):
        groups = slice(planned.key_groups.start, planned.key_groups.end + 1)
        assert planned.rows == sizes.column("rows").to_numpy()[groups].sum()
        assert planned.size_bytes == sizes.column("size_bytes").to_numpy()[groups].sum()
        assert sum(piece.rows for piece in planned.slices) == planned.rows
        for piece in planned.slices:
            assert piece.key_groups.intersection(planned.key_groups) == piece.key_groups
            assert piece.size_bytes == files[piece.path].file.size_bytes

    def check_actions(self, plan, files, mode):
        pieces = [piece for planned in plan.ranges for piece in planned.slices]
        assert {piece.path for piece in pieces} == set(files)  # no segment is forgotten
        for path, segment in files.items():
            parts = [piece for piece in pieces if piece.path == path]
            assert sum(piece.rows for piece in parts) == segment.rows
            actions = {piece.action for piece in parts}
            if mode == "link":
                assert actions == {"link"}
            else:
                assert actions == ({"copy"} if len(parts) == 1 else {"re-encode"})

    def test_bytes_of_an_action_count_each_file_once(self):
        with scratch_folder() as folder, segment_size("parquet", 500):
            snapshot = write(folder / "s", numbered(500), 128, 4, "parquet")
            plan = plan_rescale(snapshot, 7)
            total = sum(s.file.size_bytes for run in snapshot.manifest.runs for s in run.segments)
            assert plan.bytes_of("copy") > 0
            assert plan.bytes_of("re-encode") > 0
            assert plan.bytes_of("copy") + plan.bytes_of("re-encode") == total
            assert plan_rescale(snapshot, 7, mode="link").bytes_of("link") == total
            sizes = snapshot.key_group_sizes()
            for planned in plan.operators[0].ranges:
                within = slice(planned.key_groups.start, planned.key_groups.end + 1)
                assert planned.rows == sizes["rows"].to_numpy()[within].sum()
                assert planned.size_bytes == sizes["size_bytes"].to_numpy()[within].sum()

    def test_what_is_copied_is_the_same_bytes(self):
        with scratch_folder() as folder, segment_size("rocksdb", 500):
            source = write(folder / "a", numbered(500), 128, 2, "rocksdb")
            copied = kg.rescale(folder / "a", folder / "b", parallelism=3, jobs=2)
            digests = {s.file.digest for run in source.manifest.runs for s in run.segments}
            again = {s.file.digest for run in copied.manifest.runs for s in run.segments}
            plan = plan_rescale(source, 3)
            (operator,) = plan.operators
            copies = [p for r in operator.ranges for p in r.slices if p.action == "copy"]
            assert len(digests & again) == len(copies) >= 10


class TestConservation:
    """Whatever a unit of work does wrong, nothing becomes visible and the source stays."""

    @pytest.fixture
    def source(self, tmp_path):
        with segment_size("memory", 600):
            yield write(tmp_path / "a", numbered(200), 64, 2, "memory")

    def refused(self, source, target, **arguments):
        with pytest.raises(kg.SnapshotCorrupted, match="Nothing was committed"):
            kg.rescale(source.storage.root, target, **arguments)
        with pytest.raises(kg.SnapshotNotFound):
            kg.Snapshot.open(target)
        assert not target.exists()
        assert kg.verify(source.storage.root).findings == ()
        numbered(200).model(64, 2).expect(kg.Snapshot.open(source.storage.root))

    @pytest.mark.parametrize("arguments", [{"parallelism": 5}, {"max_parallelism": 32}])
    def test_a_row_is_dropped(self, source, tmp_path, monkeypatch, arguments):
        append = execute.RunWriter.append
        dropped = []

        def dropping(self, rows):
            if not dropped:
                dropped.append(rows.slice(0, 1))
                rows = rows.slice(1)
            append(self, rows)

        monkeypatch.setattr(execute.RunWriter, "append", dropping)
        self.refused(source, tmp_path / "b", jobs=1, **arguments)
        assert dropped

    def test_a_segment_is_written_twice(self, source, tmp_path, monkeypatch):
        copy = execute.RunWriter.copy

        def twice(self, *arguments):
            copy(self, *arguments)
            copy(self, *arguments)

        monkeypatch.setattr(execute.RunWriter, "copy", twice)
        self.refused(source, tmp_path / "b", jobs=1, parallelism=3)

    def test_a_range_is_lost(self, source, tmp_path, monkeypatch):
        whole = execute.execute_range
        monkeypatch.setattr(execute, "execute_range", lambda *a: [] if a[-1] == 1 else whole(*a))
        self.refused(source, tmp_path / "b", parallelism=3)

    def test_a_value_is_changed(self, source, tmp_path, monkeypatch):
        append = execute.RunWriter.append

        def changing(self, rows):
            values = rows.column("v").to_pylist()
            values[0] = values[0].replace("v", "V")  # as long as before
            append(self, rows.set_column(3, rows.schema.field("v"), pa.array(values)))

        monkeypatch.setattr(execute.RunWriter, "append", changing)
        self.refused(source, tmp_path / "b", jobs=1, parallelism=5)

    def test_a_source_that_changed_is_refused_before_the_commit(self, source, tmp_path):
        segment = source.manifest.runs[0].segments[1]
        path = source.storage.root / segment.file.path
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        with pytest.raises(kg.SnapshotCorrupted, match="digest"):
            kg.rescale(tmp_path / "a", tmp_path / "b", parallelism=3)
        assert not (tmp_path / "b").exists()


class TestArguments:
    @pytest.fixture
    def source(self, tmp_path):
        write(tmp_path / "a", numbered(20), 16, 2, "parquet")
        return tmp_path / "a"

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"parallelism": 0}, r"parallelism 0 is not within \[1, 32768\]"),
            ({"parallelism": 17}, "parallelism 17 exceeds max parallelism 16"),
            ({"parallelism": True}, "must be an integer"),
            ({"parallelism": 2.0}, "must be an integer"),
            ({"parallelism": "2"}, "must be an integer"),
            ({"max_parallelism": 0}, r"max parallelism 0 is not within"),
            ({"max_parallelism": 32769}, "32769 is not within"),
            ({"max_parallelism": 1}, "parallelism 2 exceeds max parallelism 1"),
            ({"mode": "move"}, "mode 'move' is none of rewrite, link"),
            ({"mode": None}, "mode None is none of"),
            ({"balance": "keys"}, "balance 'keys' is none of rows, bytes"),
            ({"balance": ""}, "balance '' is none of"),
            ({"engine": "flink"}, "engine 'flink' is neither 'local' nor a Spark session"),
            ({"engine": "", "mode": "link"}, "engine '' is neither"),
            ({"mode": "link", "max_parallelism": 32}, "use mode 'rewrite'"),
            ({"balance": "rows", "max_parallelism": 32}, "rescale the result with balance"),
        ],
        ids=str,
    )
    def test_a_wrong_one_is_refused_and_nothing_is_made(self, source, tmp_path, arguments, message):
        with pytest.raises(kg.InvalidArgument, match=message):
            kg.rescale(source, tmp_path / "b", **arguments)
        assert not (tmp_path / "b").exists()

    def test_source_and_target_are_one(self, source, tmp_path):
        (tmp_path / "again").symlink_to(source)
        for target in (source, tmp_path / "x" / ".." / "a", tmp_path / "again"):
            for overwrite in (False, True):
                with pytest.raises(kg.InvalidArgument, match="source and target are both"):
                    kg.rescale(source, target, parallelism=3, overwrite=overwrite)
        numbered(20).model(16, 2).expect(kg.Snapshot.open(source))

    def test_no_source(self, tmp_path):
        with pytest.raises(kg.SnapshotNotFound, match=str(tmp_path)):
            kg.rescale(tmp_path / "nothing", tmp_path / "b", parallelism=2)

    def test_the_target_exists(self, source, tmp_path):
        write(tmp_path / "b", numbered(5), 16, 1, "rocksdb")
        with pytest.raises(kg.SnapshotExists, match="left as it is"):
            kg.rescale(source, tmp_path / "b", parallelism=3)
        numbered(5).model(16, 1).expect(kg.Snapshot.open(tmp_path / "b"))
        kg.rescale(source, tmp_path / "b", parallelism=3, overwrite=True)
        numbered(20).model(16, 3).expect(kg.Snapshot.open(tmp_path / "b"))
        assert list(unreferenced_files(kg.Snapshot.open(tmp_path / "b"))) == []

    def test_progress_counts_every_range(self, source, tmp_path):
        seen = []
        kg.rescale(
            source, tmp_path / "b", parallelism=5, jobs=1, progress=lambda *p: seen.append(p)
        )
        assert seen == [(i, 5) for i in range(1, 6)]

    @pytest.mark.parametrize("jobs", [1, 2, 7])
    def test_any_number_of_threads_gives_the_same(self, source, tmp_path, jobs):
        numbered(20).model(16, 5).expect(
            kg.rescale(source, tmp_path / "b", parallelism=5, jobs=jobs)
        )


class TestLink:
    def test_it_reads_and_writes_no_row(self, tmp_path):
        source = write(tmp_path / "a", numbered(300), 64, 2, "parquet")
        segments = {s.file.path for run in source.manifest.runs for s in run.segments}
        steps = Steps()
        with observed(steps):
            kg.rescale(tmp_path / "a", tmp_path / "b", parallelism=7, mode="link")
        assert not steps.paths("read") & segments
        assert not any(path.endswith(".parquet") for path in steps.paths("write"))
        assert len(steps.paths("link")) == len(segments)

    def test_it_outlives_its_source(self, tmp_path):
        write(tmp_path / "a", numbered(50), 64, 2, "rocksdb")
        kg.rescale(tmp_path / "a", tmp_path / "b", parallelism=7, mode="link")
        write(tmp_path / "a", numbered(3), 64, 1, "rocksdb", overwrite=True)
        linked = kg.Snapshot.open(tmp_path / "b")
        numbered(50).model(64, 7).expect(linked)
        shutil.rmtree(tmp_path / "a")
        assert kg.verify(tmp_path / "b").findings == ()

    def test_two_file_systems(self, tmp_path, monkeypatch):
        """On two of them where this machine has two; where not, as the system would say it."""
        write(tmp_path / "a", numbered(20), 16, 2, "parquet")
        with scratch_folder() as other:
            if other.stat().st_dev == tmp_path.stat().st_dev:
                link = os.link

                def across(source, target):
                    if Path(target).suffix == ".parquet":
                        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
                    link(source, target)

                monkeypatch.setattr(os, "link", across)
            with pytest.raises(kg.StorageUnavailable, match="two file systems; use mode 'rewrite'"):
                kg.rescale(tmp_path / "a", other / "b", parallelism=3, mode="link")
            assert not (other / "b").exists()
            moved = kg.rescale(tmp_path / "a", other / "b", parallelism=3)
            numbered(20).model(16, 3).expect(moved)


class TestSequential:
    """One axis, read and written along it."""

    @pytest.fixture
    def snapshot(self, tmp_path):
        with segment_size("parquet", 600), segment_size("rocksdb", 600):
            yield lambda backend: write(tmp_path / "a", numbered(2000), 128, 3, backend)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_a_range_opens_only_the_segments_that_hold_it(self, snapshot, backend):
        with segment_size(backend, 600):
            whole = snapshot(backend)
        segments = [s for run in whole.manifest.runs for s in run.segments]
        index = [i for run in whole.manifest.runs for i in whole.index(run)]
        assert len(segments) > 40
        for parallelism in (1, 2, 5, 16, 128):
            for place in range(parallelism):
                key_groups = kg.key_group_range_for_subtask(128, parallelism, place)
                steps = Steps()
                opened = kg.Snapshot.open(whole.storage.root, observer=steps)
                steps.seen.clear()
                opened.to_table(key_groups)
                inside, cut = [], []
                for segment, held in zip(segments, index, strict=True):
                    part = held.within(key_groups)
                    if len(part.key_group):
                        is_whole = len(part.key_group) == len(held.key_group)
                        (inside if is_whole else cut).append(segment)
                assert len(cut) <= 2  # at most one at each end
                paths = {segment.file.path for segment in inside + cut}
                assert steps.paths("open") == paths == steps.paths("read")
                size = sum(segment.file.size_bytes for segment in inside + cut)
                assert steps.bytes("read") <= size + 3 * 4096 * len(cut)
                for segment in inside:  # each byte once
                    assert steps.bytes("read", segment.file.path) == segment.file.size_bytes

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_ranges_together_read_each_segment_once_and_cut_ones_again(self, snapshot, backend):
        with segment_size(backend, 600):
            whole = snapshot(backend)
        total = sum(s.file.size_bytes for run in whole.manifest.runs for s in run.segments)
        largest = max(s.file.size_bytes for run in whole.manifest.runs for s in run.segments)
        for parallelism in (2, 7, 20):
            steps = Steps()
            opened = kg.Snapshot.open(whole.storage.root, observer=steps)
            steps.seen.clear()
            for place in range(parallelism):
                opened.to_table(kg.key_group_range_for_subtask(128, parallelism, place))
            assert steps.bytes("read") <= total + (parallelism - 1) * (largest + 3 * 4096)

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("arguments", [{"parallelism": 5}, {"max_parallelism": 100}], ids=str)
    def test_files_are_written_once_in_order_of_key_group(self, tmp_path, backend, arguments):
        steps = Steps()
        with segment_size(backend, 600), observed(steps):
            write(tmp_path / "a", numbered(500), 128, 3, backend)
            self.check_writes(steps)
            steps.seen.clear()
            kg.rescale(tmp_path / "a", tmp_path / "b", jobs=1, **arguments)
            self.check_writes(steps)

    def check_writes(self, steps):
        """Each file is created, written to its end, synced and never touched again, one by one."""
        written = [
            (operation, path)
            for operation, path, _ in steps.seen
            if operation in {"create", "write"}
            or (operation == "sync" and not path.startswith("/"))  # not that of a folder
        ]
        files = [path for path, _ in itertools.groupby(path for _, path in written)]
        assert len(files) == len(set(files))
        for path in files:
            operations = [operation for operation, at in written if at == path]
            assert operations[0] == "create"
            assert operations[-1] == "sync"
            assert set(operations[1:-1]) == {"write"}
        data = [path for path in files if path.count("/") == 3]
        starts = [int(Path(path).parent.name.split("-")[0]) for path in data]
        assert starts == sorted(starts)
        assert len(data) > 10

    def test_a_written_file_cannot_be_sought(self, tmp_path):
        with LocalStorage(tmp_path).create("data/x") as file:
            assert not file.seekable()
            with pytest.raises(OSError, match="seek"):
                file.seek(0)


class RescaleMachine(RuleBasedStateMachine):
    """Snapshots and their models side by side, through writes, rescales, links, overwrites."""

    paths = Bundle("paths")

    def __init__(self):
        super().__init__()
        self.scratch = scratch_folder()
        self.folder = self.scratch.__enter__()
        self.count = 0
        self.models = {}

    def teardown(self):
        try:
            for path in self.models:
                self.check(path)
        finally:
            self.scratch.__exit__(None, None, None)

    def new_path(self):
        self.count += 1
        return self.folder / str(self.count)

    def check(self, path):
        model, ranges = self.models[path]
        snapshot = kg.Snapshot.open(path)
        model.expect(snapshot, ranges)
        result = kg.verify(path)
        assert result.findings == result.unreferenced == ()

    @rule(
        target=paths,
        rows=tables(max_rows=12, max_depth=1),
        sizes=parallelisms(largest=20),
        backend=backends,
        segment_bytes=segment_sizes,
    )
    def write(self, rows, sizes, backend, segment_bytes):
        path = self.new_path()
        with segment_size(backend, segment_bytes):
            write(path, rows, *sizes, backend)
        self.models[path] = (rows.model(*sizes), None)
        return path

    @rule(
        target=paths,
        source=paths,
        sizes=parallelisms(largest=20),
        mode=modes,
        balance=balances,
        jobs=st.integers(1, 3),
    )
    def rescale(self, source, sizes, mode, balance, jobs):
        path = self.new_path()
        self.do_rescale(source, path, sizes, mode, balance, jobs=jobs)
        return path

    @rule(source=paths, path=paths, sizes=parallelisms(largest=20), mode=modes)
    def rescale_over(self, source, path, sizes, mode):
        if source == path:
            with pytest.raises(kg.InvalidArgument):
                self.do_rescale(source, path, sizes, mode, None, overwrite=True)
            return
        with pytest.raises(kg.SnapshotExists):
            self.do_rescale(source, path, sizes, mode, None)
        self.do_rescale(source, path, sizes, mode, None, overwrite=True)

    def do_rescale(self, source, path, sizes, mode, balance, **options):
        model, _ = self.models[source]
        max_parallelism, parallelism = sizes
        if mode == "link" or balance:
            max_parallelism = model.max_parallelism
            parallelism = min(parallelism, max_parallelism)
        snapshot = kg.rescale(source, path, parallelism, max_parallelism, mode, balance, **options)
        new = replace_model(model, max_parallelism, parallelism)
        is_cut_kept = snapshot.parallelism == kg.Snapshot.open(source).parallelism and (
            max_parallelism == model.max_parallelism
        )
        self.models[path] = (new, snapshot.ranges if balance or is_cut_kept else None)
        assert tiles(snapshot.ranges, max_parallelism)

    @rule(path=paths, rows=tables(max_rows=12, max_depth=1), sizes=parallelisms(largest=20))
    def overwrite(self, path, rows, sizes):
        with pytest.raises(kg.SnapshotExists):
            write(path, rows, *sizes, "parquet")
        write(path, rows, *sizes, "parquet", overwrite=True)
        self.models[path] = (rows.model(*sizes), None)

    @rule(path=consumes(paths))
    def delete(self, path):
        """What was linked or copied from it stays."""
        shutil.rmtree(path)
        del self.models[path]
        with pytest.raises(kg.SnapshotNotFound):
            kg.Snapshot.open(path)

    @rule(path=paths, data=st.data())
    def read(self, path, data):
        model, _ = self.models[path]
        last = model.max_parallelism - 1
        start, end = sorted(data.draw(st.tuples(*[st.integers(0, last)] * 2)))
        key_groups = kg.KeyGroupRange(start, end)
        table = kg.Snapshot.open(path).to_table(key_groups, columns=model.schema.stored.names)
        assert rows_of(table) == model.stored_rows(key_groups)

    @rule(path=paths, data=st.data())
    def look_up(self, path, data):
        model, _ = self.models[path]
        keys = []
        if model.rows:
            keys = data.draw(st.lists(st.sampled_from(list(model.rows)), unique=True))
        sought = model.schema.key_array(table_of(keys, pa.schema(model.schema.key)))
        found = rows_of(kg.Snapshot.open(path).to_table(keys=sought))
        assert sorted(found, key=repr) == sorted((k + model.rows[k] for k in keys), key=repr)

    @invariant()
    def nothing_is_left_over(self):
        assert {path.name for path in self.folder.iterdir()} == {p.name for p in self.models}


def replace_model(model, max_parallelism, parallelism):
    new = type(model)(
        model.schema, scheme=model.scheme, max_parallelism=max_parallelism, parallelism=parallelism
    )
    new.rows = dict(model.rows)
    return new


TestRescaleMachine = RescaleMachine.TestCase
TestRescaleMachine.settings = settings(
    RULES, max_examples=max(5, settings().max_examples // 3), stateful_step_count=12
)


def test_several_operators_and_states_are_rescaled_together(tmp_path):
    """Two operators, one of two states, in one snapshot: each by its own cut."""
    path = two_operators(tmp_path / "a")
    for arguments in (
        {"parallelism": 3},
        {"parallelism": 3, "mode": "link"},
        {"parallelism": 3, "balance": "rows"},
        {"max_parallelism": 48},
    ):
        target = tmp_path / "-".join(map(str, arguments.values()))
        result = kg.rescale(path, target, **arguments)
        assert [o.uid for o in result.manifest.operators] == ["first", "second"]
        for uid, state in (("first", "x"), ("first", "y"), ("second", "z")):
            before = kg.Snapshot.open(path).to_table(uid=uid, state=state)
            after = result.to_table(uid=uid, state=state)
            assert sorted(rows_of(after)) == sorted(rows_of(before))
        assert kg.verify(target).findings == ()
        assert kg.diff(path, target).is_equal


def two_operators(path):
    """A snapshot made of two others, by their manifests alone."""
    storage = LocalStorage(path)
    first = write(path / "1", numbered(50), 16, 2, "parquet", uid="first", state="x")
    second = write(path / "2", numbered(40), 16, 2, "rocksdb", uid="first", state="y")
    third = write(path / "3", numbered(30), 24, 4, "rocksdb", uid="second", state="z")
    attempt = execute.Attempt.begin(storage)
    operators, index = [], []
    for snapshots in ((first, second), (third,)):
        states = []
        for snapshot in snapshots:
            (state,) = read_manifest(snapshot.storage).operators[0].states
            runs = []
            for run, opened in zip(state.runs, snapshot.manifest.runs, strict=True):
                segments = []
                folder = attempt.new_run_folder(run.key_groups)
                for number, segment in enumerate(run.segments):
                    name = attempt.segment_path(folder, number, "any")
                    storage.link(name, snapshot.storage, segment.file.path)
                    segments.append(replace(segment, file=replace(segment.file, path=name)))
                runs.append(replace(run, segments=tuple(segments)))
                index.append(snapshot.index(opened))
            states.append(replace(state, runs=tuple(runs)))
        operators.append(replace(snapshots[0].manifest.operators[0], states=tuple(states)))
    attempt.commit(operators, index)
    for part in "123":
        shutil.rmtree(path / part)
    return path
