"""Carrying out a rescale: links, copies and re-encoded segments, proved and committed.

Work is cut into units, one for each new range of each operator, that share nothing; an
*engine* runs them: threads here, Spark tasks in :mod:`keygroups.spark.engine`. Before the
commit, rows, bytes and digests of every key group are compared with the source's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from keygroups.assignment import KeyGroupRange
from keygroups.errors import InvalidArgument, SnapshotCorrupted
from keygroups.hashing import key_groups_of_hashes
from keygroups.rescale.plan import (
    Balance,
    Mode,
    OperatorPlan,
    RescalePlan,
    Slice,
    plan_rescale,
)
from keygroups.snapshot.backend import KEY_GROUP, RowSchema, backend_of_snapshot
from keygroups.snapshot.commit import Attempt
from keygroups.snapshot.index import SegmentIndex
from keygroups.snapshot.manifest import Operator, State
from keygroups.snapshot.reader import Snapshot
from keygroups.snapshot.sort import Sorter
from keygroups.snapshot.storage import LocalStorage
from keygroups.snapshot.writer import RunWriter, WrittenRun, write_runs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Progress: TypeAlias = Callable[[int, int], None]
"""Called as ``progress(units_done, unit_count)`` after each unit of work."""


@dataclass(frozen=True)
class ProducedRun:
    """A run that a unit of work wrote, and where it belongs."""

    operator_number: int
    state: str
    written: WrittenRun


@dataclass(frozen=True)
class RescaleArguments:
    """The arguments of a rescale: with them any process can make the same plan again."""

    parallelism: int | None = None
    max_parallelism: int | None = None
    mode: Mode = "rewrite"
    balance: Balance | None = None

    def plan(self, snapshot: Snapshot) -> RescalePlan:
        """Returns the plan for a snapshot."""
        return plan_rescale(
            snapshot, self.parallelism, self.max_parallelism, self.mode, self.balance
        )


def rescale(
    src: str | PathLike[str],
    dst: str | PathLike[str],
    parallelism: int | None = None,
    max_parallelism: int | None = None,
    mode: Mode = "rewrite",
    balance: Balance | None = None,
    engine: Literal["local"] | SparkSession = "local",
    *,
    overwrite: bool = False,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Snapshot:
    """Writes a snapshot again with another parallelism or max parallelism.

    The source is only read. The result is proved to hold the same rows (rows, bytes and digest
    of every key group) before it becomes visible.

    Args:
        src: The snapshot to rescale.
        dst: Where the new one goes.
        parallelism: The new number of ranges; as before if ``None``.
        max_parallelism: The new number of key groups; as before if ``None``.
        mode: ``"rewrite"`` copies whole segments byte for byte and re-encodes those that a cut
            crosses; ``"link"`` gives the same files a second name (one file system).
        balance: Cut by ``"rows"`` or ``"bytes"`` instead of by Flink's formula.
        engine: ``"local"``, or a Spark session (classic or Connect) whose executors see both
            paths; then each new range is one task.
        overwrite: Replace a snapshot at ``dst``.
        jobs: How many threads the local engine uses; the number of processors if ``None``.
        progress: Called with units done and units in all.

    Returns:
        The new snapshot.

    Raises:
        InvalidArgument: If an argument is out of bounds.
        SnapshotNotFound, SnapshotCorrupted, IncompatibleSnapshot: If the source is not there,
            damaged, or not for this version.
        SnapshotExists: If there is a snapshot at ``dst`` and ``overwrite`` is false.
        StorageUnavailable: If the disk refuses.
    """
    if isinstance(engine, str) and engine != "local":
        raise InvalidArgument(f"engine {engine!r} is neither 'local' nor a Spark session")
    arguments = RescaleArguments(parallelism, max_parallelism, mode, balance)
    snapshot = Snapshot.open(src)
    plan = arguments.plan(snapshot)
    with check_target(snapshot, dst, overwrite=overwrite) as attempt:
        if mode == "link":
            produced = _link(attempt, snapshot, plan)
        elif isinstance(engine, str):
            produced = _run_local(attempt, snapshot, plan, jobs or os.cpu_count() or 1, progress)
        else:
            # Only here does the core know of Spark, and only when it is handed a session.
            from keygroups.spark.engine import run_on_spark

            produced = run_on_spark(engine, attempt, snapshot, arguments, plan)
        _commit(attempt, snapshot, plan, produced)
    return Snapshot.open(dst)


def check_target(
    snapshot: Snapshot, dst: str | PathLike[str], *, overwrite: bool = False
) -> Attempt:
    """Returns an attempt to write a rescaled ``snapshot`` at ``dst``; touches nothing yet.

    Raises:
        InvalidArgument: If that is where the snapshot lies itself.
        SnapshotExists: If there is a snapshot that is not to be replaced.
    """
    storage = LocalStorage(dst)
    if snapshot.storage.root.resolve() == storage.root.resolve():
        raise InvalidArgument(
            f"source and target are both {snapshot.storage.root}; a rescale leaves its source as "
            f"it is, so give it another path"
        )
    return Attempt.begin(storage, overwrite=overwrite)


def execute_range(
    attempt: Attempt,
    snapshot: Snapshot,
    plan: RescalePlan,
    operator_number: int,
    range_number: int,
) -> list[ProducedRun]:
    """Writes one new range of one operator: the unit of work of every engine."""
    operator_plan = plan.operators[operator_number]
    planned = operator_plan.ranges[range_number]
    produced: list[ProducedRun] = []
    for lane in planned.lanes:
        state, schema = _state_of(operator_plan.operator, lane[0].state)
        if operator_plan.is_rehash:
            rows = (_read(snapshot, state, schema, piece) for piece in lane)
            key_groups = [planned.key_groups]
            runs = _rehash(attempt, operator_plan, state, schema, rows, key_groups)
        else:
            runs = _rewrite(attempt, snapshot, planned.key_groups, state, schema, lane)
        produced += [ProducedRun(operator_number, state.name, run) for run in runs]
    return produced


def _run_local(
    attempt: Attempt,
    snapshot: Snapshot,
    plan: RescalePlan,
    jobs: int,
    progress: Progress | None,
) -> list[ProducedRun]:
    units: list[Callable[[], list[ProducedRun]]] = []
    for number, operator_plan in enumerate(plan.operators):
        if operator_plan.is_rehash:  # one pass over the source for all ranges
            units.append(partial(_rehash_all, attempt, snapshot, plan, number))
        else:
            units += [
                partial(execute_range, attempt, snapshot, plan, number, place)
                for place in range(len(operator_plan.ranges))
            ]
    produced: list[ProducedRun] = []
    with ThreadPoolExecutor(max_workers=max(1, min(jobs, len(units)))) as pool:
        futures = [pool.submit(unit) for unit in units]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                produced += future.result()
                if progress:
                    progress(done, len(units))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return produced


def _link(attempt: Attempt, snapshot: Snapshot, plan: RescalePlan) -> list[ProducedRun]:
    produced = []
    for number, operator_plan in enumerate(plan.operators):
        for state in operator_plan.operator.states:
            suffix = backend_of_snapshot(state.backend).suffix
            for run in state.runs:
                folder = attempt.new_run_folder(run.key_groups)
                segments = []
                for place, segment in enumerate(run.segments):
                    path = attempt.segment_path(folder, place, suffix)
                    attempt.storage.link(path, snapshot.storage, segment.file.path)
                    segments.append(replace(segment, file=replace(segment.file, path=path)))
                linked = WrittenRun(replace(run, segments=tuple(segments)), snapshot.index(run))
                produced.append(ProducedRun(number, state.name, linked))
    return produced


def _rewrite(
    attempt: Attempt,
    snapshot: Snapshot,
    key_groups: KeyGroupRange,
    state: State,
    schema: RowSchema,
    lane: Sequence[Slice],
) -> list[WrittenRun]:
    """Copies or re-encodes the slices of one lane as one run."""
    epoch = max(state.runs[piece.run_number].epoch for piece in lane)
    backend = backend_of_snapshot(state.backend)
    writer = RunWriter(attempt, key_groups, schema, backend, epoch)
    for piece in lane:
        run = state.runs[piece.run_number]
        if piece.action == "copy":
            segment = run.segments[piece.segment_number]
            writer.copy(snapshot.storage, segment, snapshot.index(run)[piece.segment_number])
        else:
            writer.append(_read(snapshot, state, schema, piece))
    return writer.close()


def _rehash_all(
    attempt: Attempt, snapshot: Snapshot, plan: RescalePlan, operator_number: int
) -> list[ProducedRun]:
    """Re-hashes all ranges of an operator in one pass over each of its states."""
    operator_plan = plan.operators[operator_number]
    operator = operator_plan.operator
    ranges = [planned.key_groups for planned in operator_plan.ranges]
    produced = []
    for state in operator.states:
        schema = RowSchema(operator.key, state.fields)
        every = KeyGroupRange(0, operator.max_parallelism - 1)
        rows = snapshot.read_runs(state.runs, state.backend, schema, every, schema.stored.names)
        runs = _rehash(attempt, operator_plan, state, schema, rows, ranges)
        produced += [ProducedRun(operator_number, state.name, run) for run in runs]
    return produced


def _rehash(
    attempt: Attempt,
    operator_plan: OperatorPlan,
    state: State,
    schema: RowSchema,
    tables: Iterable[pa.Table],
    ranges: Sequence[KeyGroupRange],
) -> list[WrittenRun]:
    """Writes those rows that fall into ``ranges`` under the new max parallelism, as its runs.

    The key group follows from the stored key hash; no key is hashed again.
    """
    operator, new_max = operator_plan.operator, operator_plan.max_parallelism
    backend = backend_of_snapshot(state.backend)
    first, last = ranges[0].start, ranges[-1].end
    with Sorter(schema, new_max, attempt.spill_folder) as sorter:
        for table in tables:
            hashes = table.column("key_hash").combine_chunks()
            groups = key_groups_of_hashes(hashes, new_max, operator.scheme)
            table = table.set_column(0, KEY_GROUP, pa.array(groups))
            if last - first + 1 < new_max:
                table = table.filter(pa.array((groups >= first) & (groups <= last)))
            sorter.add(table)
        return write_runs(attempt, sorter.sorted_tables(), ranges, schema, backend)


def _read(snapshot: Snapshot, state: State, schema: RowSchema, piece: Slice) -> pa.Table:
    run = state.runs[piece.run_number]
    return snapshot.read_segment(
        run, piece.segment_number, state.backend, schema, piece.key_groups, schema.stored.names
    )


def _state_of(operator: Operator, name: str) -> tuple[State, RowSchema]:
    state = next(state for state in operator.states if state.name == name)
    return state, RowSchema(operator.key, state.fields)


def _commit(
    attempt: Attempt, snapshot: Snapshot, plan: RescalePlan, produced: Sequence[ProducedRun]
) -> None:
    """Proves that nothing was lost or added, then publishes."""
    operators, index = [], []
    for number, operator_plan in enumerate(plan.operators):
        states = []
        for state in operator_plan.operator.states:
            runs = sorted(
                (
                    p.written
                    for p in produced
                    if (p.operator_number, p.state) == (number, state.name)
                ),
                key=lambda written: written.run.key_groups,
            )
            _prove_conservation(snapshot, operator_plan, state, runs)
            states.append(replace(state, runs=tuple(written.run for written in runs)))
            index += [written.index for written in runs]
        operators.append(
            replace(
                operator_plan.operator,
                max_parallelism=operator_plan.max_parallelism,
                ranges=tuple(planned.key_groups for planned in operator_plan.ranges),
                states=tuple(states),
            )
        )
    attempt.commit(operators, index)


def _prove_conservation(
    snapshot: Snapshot, operator_plan: OperatorPlan, state: State, written: Sequence[WrittenRun]
) -> None:
    """Compares rows, bytes and digests before and after, by key group.

    Two numberings of the groups are remainders of one value, so they agree when folded to the
    greatest common divisor of the two max parallelisms: to every group where it did not change.
    """
    old_max, new_max = operator_plan.operator.max_parallelism, operator_plan.max_parallelism
    common = math.gcd(old_max, new_max)
    before = _fold([snapshot.index(run) for run in state.runs], common)
    after = _fold([run.index for run in written], common)
    if not np.array_equal(before, after):
        group = int(np.flatnonzero((before != after).any(axis=0))[0])
        raise SnapshotCorrupted(
            f"state {state.name!r} of operator {operator_plan.operator.uid!r}: key group {group} "
            f"(mod {common}) has rows, bytes, digest {before[:, group].tolist()} in "
            f"{snapshot.storage.root} and {after[:, group].tolist()} in what was written. Nothing "
            f"was committed; run `keygroups verify` on the source"
        )


def _fold(runs: Sequence[Sequence[SegmentIndex]], group_count: int) -> npt.NDArray[np.uint64]:
    """Shape ``(3, group_count)``: sums of rows, bytes and digests, modulo 2^64."""
    totals = np.zeros((3, group_count), np.uint64)
    for segment in (segment for run in runs for segment in run):
        place = segment.key_group % group_count
        for total, values in zip(
            totals, (segment.rows, segment.size_bytes, segment.digest), strict=True
        ):
            np.add.at(total, place, values)
    return totals
