"""Planning a rescale: a pure function from a manifest and its index to what will be done.

``plan_rescale`` reads and writes nothing, so a plan can be printed, tested and thrown away;
:mod:`keygroups.rescale.execute` carries it out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from keygroups.assignment import (
    KeyGroupRange,
    balanced_cut,
    check_parallelism,
    key_group_ranges,
)
from keygroups.errors import InvalidArgument
from keygroups.snapshot.index import SegmentIndex
from keygroups.snapshot.manifest import Operator, Run, State
from keygroups.snapshot.reader import Snapshot

Mode = Literal["link", "rewrite"]
Balance = Literal["rows", "bytes"]
Action = Literal["link", "copy", "re-encode", "re-hash"]
MODES = ("rewrite", "link")
BALANCES = ("rows", "bytes")
ACTIONS: tuple[Action, ...] = ("link", "copy", "re-encode", "re-hash")


@dataclass(frozen=True, slots=True)
class Slice:
    """What a new range takes of one segment.

    Attributes:
        state: The state's name.
        run_number: Which of the state's runs.
        segment_number: Which segment of the run.
        path: The segment's file.
        key_groups: The key groups taken, in the old numbering; ``re-hash`` takes those of
            their rows that the new numbering puts in the new range.
        action: ``link``: the file gets another name; ``copy``: byte for byte; ``re-encode``: a
            cut falls inside, so rows are read and written; ``re-hash``: max parallelism changes.
        rows: How many rows are taken; of a ``re-hash``, how many are read.
        size_bytes: How large the file is, of which the action reads all or a part.
    """

    state: str
    run_number: int
    segment_number: int
    path: str
    key_groups: KeyGroupRange
    action: Action
    rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class RangePlan:
    """What becomes one new range.

    Attributes:
        key_groups: The new range.
        lanes: For each new run, the slices that make it up, in order.
        rows: How many rows it will have; ``None`` where only re-hashing can tell.
        size_bytes: How much data (FORMAT.md, "Size"); ``None`` likewise.
    """

    key_groups: KeyGroupRange
    lanes: tuple[tuple[Slice, ...], ...]
    rows: int | None
    size_bytes: int | None

    @property
    def slices(self) -> tuple[Slice, ...]:
        """All slices of all lanes."""
        return tuple(piece for lane in self.lanes for piece in lane)

    def bytes_of(self, action: Action) -> int:
        """Returns the size of the files that are treated in this way."""
        return sum(piece.size_bytes for piece in self.slices if piece.action == action)


@dataclass(frozen=True, slots=True)
class OperatorPlan:
    """How one operator is rescaled.

    Attributes:
        operator: The operator as it is.
        max_parallelism: The new max parallelism.
        ranges: One plan for each new range.
    """

    operator: Operator
    max_parallelism: int
    ranges: tuple[RangePlan, ...]

    @property
    def is_rehash(self) -> bool:
        """Whether the number of key groups changes."""
        return self.max_parallelism != self.operator.max_parallelism


@dataclass(frozen=True, slots=True)
class RescalePlan:
    """What a rescale will do.

    Attributes:
        mode: ``"link"`` or ``"rewrite"``.
        operators: One plan for each operator of the snapshot.
    """

    mode: Mode
    operators: tuple[OperatorPlan, ...]

    def bytes_of(self, action: Action) -> int:
        """Returns the size of the files that are treated in this way, each counted once."""
        pieces = (p for operator in self.operators for r in operator.ranges for p in r.slices)
        return sum({p.path: p.size_bytes for p in pieces if p.action == action}.values())


def plan_rescale(
    snapshot: Snapshot,
    parallelism: int | None = None,
    max_parallelism: int | None = None,
    mode: Mode = "rewrite",
    balance: Balance | None = None,
) -> RescalePlan:
    """Plans a rescale of every operator of a snapshot; reads no data, writes nothing.

    Args:
        snapshot: The opened snapshot.
        parallelism: The new number of ranges; as before if ``None``.
        max_parallelism: The new number of key groups; as before if ``None``.
        mode: ``"rewrite"``: a self-contained copy; ``"link"``: a new manifest over the same files.
        balance: Cut so that the heaviest range has as few ``"rows"`` or ``"bytes"`` as can be;
            by Flink's formula if ``None``.

    Raises:
        InvalidArgument: If a number is out of bounds, or link mode is to change max parallelism.
    """
    if mode not in MODES:
        raise InvalidArgument(f"mode {mode!r} is none of {', '.join(MODES)}")
    if balance is not None and balance not in BALANCES:
        raise InvalidArgument(f"balance {balance!r} is none of {', '.join(BALANCES)}")
    return RescalePlan(
        mode,
        tuple(
            _plan_operator(snapshot, operator, parallelism, max_parallelism, mode, balance)
            for operator in snapshot.manifest.operators
        ),
    )


def source_key_groups(
    key_groups: KeyGroupRange, new_max_parallelism: int, old_max_parallelism: int
) -> list[KeyGroupRange]:
    """Returns the old key groups whose rows can fall into ``key_groups`` of the new numbering.

    Both numberings are remainders of one value, so where one divides the other the remainders
    tell; else any old group can hold rows of any new one.
    """
    every = KeyGroupRange(0, old_max_parallelism - 1)
    groups = np.arange(key_groups.start, key_groups.end + 1)
    if new_max_parallelism % old_max_parallelism == 0:
        sources = np.unique(groups % old_max_parallelism)
    elif old_max_parallelism % new_max_parallelism == 0:
        steps = np.arange(0, old_max_parallelism, new_max_parallelism)
        sources = np.unique(groups[:, None] + steps)
    else:
        return [every]
    breaks = np.flatnonzero(np.diff(sources) > 1)
    starts = sources[np.concatenate(([0], breaks + 1))]
    ends = sources[np.concatenate((breaks, [len(sources) - 1]))]
    return [
        KeyGroupRange(start, end) for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
    ]


def _plan_operator(
    snapshot: Snapshot,
    operator: Operator,
    parallelism: int | None,
    max_parallelism: int | None,
    mode: Mode,
    balance: Balance | None,
) -> OperatorPlan:
    new_max, new_parallelism = check_parallelism(
        operator.max_parallelism if max_parallelism is None else max_parallelism,
        operator.parallelism if parallelism is None else parallelism,
    )
    sizes = snapshot.key_group_sizes(uid=operator.uid)
    rows, size_bytes = sizes.column("rows").to_numpy(), sizes.column("size_bytes").to_numpy()
    if new_max != operator.max_parallelism:
        _check_rehash(mode, balance)
        ranges = key_group_ranges(new_max, new_parallelism)
        plans = tuple(_rehash_range(snapshot, operator, new_max, new) for new in ranges)
        return OperatorPlan(operator, new_max, plans)
    if balance is None and new_parallelism == operator.parallelism:
        ranges = list(operator.ranges)  # a cut that was balanced stays as it is
    elif balance is None:
        ranges = key_group_ranges(new_max, new_parallelism)
    else:
        ranges = balanced_cut(rows if balance == "rows" else size_bytes, new_parallelism)
    new_rows, new_bytes = _sums(rows, ranges), _sums(size_bytes, ranges)
    plans = tuple(
        RangePlan(new, _lanes(snapshot, operator, new, mode), new_rows[i], new_bytes[i])
        for i, new in enumerate(ranges)
    )
    return OperatorPlan(operator, new_max, plans)


def _check_rehash(mode: Mode, balance: Balance | None) -> None:
    if mode == "link":
        raise InvalidArgument(
            "mode 'link' cannot change max parallelism: every row gets another key group; use "
            "mode 'rewrite'"
        )
    if balance is not None:
        raise InvalidArgument(
            "a change of max parallelism cannot be balanced in the same step, as the weights of "
            "the new key groups are not known before; rescale the result with balance after it"
        )


def _lanes(
    snapshot: Snapshot, operator: Operator, new: KeyGroupRange, mode: Mode
) -> tuple[tuple[Slice, ...], ...]:
    """One lane for each new run: old runs one after another where they do not overlap."""

    def action_of(segment: SegmentIndex) -> Action:
        if mode == "link":
            return "link"
        return "copy" if new.intersection(segment.key_groups) == segment.key_groups else "re-encode"

    return _cut_lanes(snapshot, operator, [new], action_of)


def _rehash_range(
    snapshot: Snapshot, operator: Operator, new_max: int, new: KeyGroupRange
) -> RangePlan:
    sources = source_key_groups(new, new_max, operator.max_parallelism)
    lanes = _cut_lanes(snapshot, operator, sources, lambda _: "re-hash")
    return RangePlan(new, lanes, None, None)


def _cut_lanes(
    snapshot: Snapshot,
    operator: Operator,
    sources: Sequence[KeyGroupRange],
    action_of: Callable[[SegmentIndex], Action],
) -> tuple[tuple[Slice, ...], ...]:
    lanes = []
    for state in operator.states:
        numbers = {id(run): number for number, run in enumerate(state.runs)}
        for lane in _disjoint(state.runs):
            slices = [
                piece
                for run in lane
                for source in sources
                if run.key_groups.intersection(source)
                for piece in _slices(snapshot, state, run, numbers[id(run)], source, action_of)
            ]
            if slices:
                lanes.append(tuple(slices))
    return tuple(lanes)


def _slices(
    snapshot: Snapshot,
    state: State,
    run: Run,
    run_number: int,
    source: KeyGroupRange,
    action_of: Callable[[SegmentIndex], Action],
) -> list[Slice]:
    slices = []
    for number, (segment, index) in enumerate(zip(run.segments, snapshot.index(run), strict=True)):
        part = index.within(source)
        if len(part.key_group):
            slices.append(
                Slice(
                    state=state.name,
                    run_number=run_number,
                    segment_number=number,
                    path=segment.file.path,
                    key_groups=part.key_groups,
                    action=action_of(index),
                    rows=int(part.rows.sum()),
                    size_bytes=segment.file.size_bytes,
                )
            )
    return slices


def _disjoint(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups runs so that those of one group do not overlap: each group becomes one new run."""
    lanes: list[list[Run]] = []
    for run in sorted(runs, key=lambda run: run.key_groups):
        before = (lane for lane in lanes if lane[-1].key_groups.end < run.key_groups.start)
        if (lane := next(before, None)) is None:
            lanes.append([run])
        else:
            lane.append(run)
    return lanes


def _sums(weights: npt.NDArray[np.int64], ranges: Sequence[KeyGroupRange]) -> tuple[int, ...]:
    return tuple(int(weights[r.start : r.end + 1].sum()) for r in ranges)
