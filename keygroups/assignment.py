"""Key groups, ranges and cuts: the one axis on which keyed state moves.

``max_parallelism`` key groups exist for as long as the state does; ``parallelism``
subtasks each own one contiguous :class:`KeyGroupRange`. A *cut* is the list of those
ranges. Everything here is arithmetic: no input or output, no engine.

Limits: ``1 <= parallelism <= max_parallelism <= 32768``.
Formulas: Apache Flink 2.3, ``KeyGroupRangeAssignment``; vectors in ``tests/golden``.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from keygroups.errors import InvalidArgument

LOWER_BOUND_MAX_PARALLELISM = 1 << 7
UPPER_BOUND_MAX_PARALLELISM = 1 << 15


@dataclass(frozen=True, slots=True, order=True)
class KeyGroupRange:
    """Inclusive range ``[start, end]`` of key groups; empty iff ``end < start``.

    Every empty range equals :data:`KeyGroupRange.EMPTY`.

    Attributes:
        start: First key group, ``0 <= start``.
        end: Last key group, inclusive, ``end < 32768``.

    Raises:
        InvalidArgument: If a bound is negative, too large, or no integer.
    """

    start: int
    end: int

    EMPTY: ClassVar[KeyGroupRange]

    def __post_init__(self) -> None:
        start, end = _integer("start", self.start), _integer("end", self.end)
        if end < start:
            start, end = 0, -1
        elif start < 0 or end >= UPPER_BOUND_MAX_PARALLELISM:
            raise InvalidArgument(
                f"key-group range [{start}, {end}] is not within "
                f"[0, {UPPER_BOUND_MAX_PARALLELISM - 1}]"
            )
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "end", end)

    def __len__(self) -> int:
        return self.end - self.start + 1

    def __contains__(self, key_group: object) -> bool:
        if not isinstance(key_group, (int, np.integer)):
            return False
        return self.start <= int(key_group) <= self.end

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.end + 1))

    def __repr__(self) -> str:
        return f"KeyGroupRange[{self.start}, {self.end}]" if self else "KeyGroupRange[]"

    def intersection(self, other: KeyGroupRange) -> KeyGroupRange:
        """Returns the key groups in both ranges, :data:`EMPTY` if there are none."""
        return KeyGroupRange(max(self.start, other.start), min(self.end, other.end))


def default_max_parallelism(parallelism: int) -> int:
    """Returns Flink's default: the power of two above 1.5 x ``parallelism``, in [128, 32768].

    Raises:
        InvalidArgument: If ``parallelism`` is not within [1, 32768].
    """
    parallelism = _bounded("parallelism", parallelism)
    wanted = parallelism + parallelism // 2
    power_of_two = 1 << (wanted - 1).bit_length()
    return min(max(power_of_two, LOWER_BOUND_MAX_PARALLELISM), UPPER_BOUND_MAX_PARALLELISM)


def subtask_for_key_group(max_parallelism: int, parallelism: int, key_group: int) -> int:
    """Returns the index of the subtask that owns ``key_group`` under Flink's formula.

    Raises:
        InvalidArgument: If not ``1 <= parallelism <= max_parallelism <= 32768`` or the key
            group is not within ``[0, max_parallelism - 1]``. (Flink checks neither.)
    """
    max_parallelism, parallelism = check_parallelism(max_parallelism, parallelism)
    key_group = _integer("key_group", key_group)
    if not 0 <= key_group < max_parallelism:
        raise InvalidArgument(f"key group {key_group} is not within [0, {max_parallelism - 1}]")
    return key_group * parallelism // max_parallelism


def key_group_range_for_subtask(
    max_parallelism: int, parallelism: int, index: int
) -> KeyGroupRange:
    """Returns the key groups of subtask ``index`` under Flink's formula.

    Raises:
        InvalidArgument: If not ``1 <= parallelism <= max_parallelism <= 32768`` or the index
            is not within ``[0, parallelism - 1]``. (Flink does not check the index.)
    """
    max_parallelism, parallelism = check_parallelism(max_parallelism, parallelism)
    index = _integer("subtask index", index)
    if not 0 <= index < parallelism:
        raise InvalidArgument(f"subtask index {index} is not within [0, {parallelism - 1}]")
    return KeyGroupRange(
        _div_ceil(index * max_parallelism, parallelism),
        _div_ceil((index + 1) * max_parallelism, parallelism) - 1,
    )


def key_group_ranges(max_parallelism: int, parallelism: int) -> list[KeyGroupRange]:
    """Returns Flink's cut: the ranges of subtasks ``0 … parallelism - 1``, which tile all groups.

    Raises:
        InvalidArgument: As :func:`key_group_range_for_subtask`.
    """
    check_parallelism(max_parallelism, parallelism)
    return [
        key_group_range_for_subtask(max_parallelism, parallelism, index)
        for index in range(parallelism)
    ]


def balanced_cut(
    weights: Sequence[int] | npt.NDArray[np.integer], parallelism: int
) -> list[KeyGroupRange]:
    """Cuts the key groups so that the heaviest range is as light as possible.

    Exact, not greedy: the least feasible heaviest weight is found by bisection over
    integers, each probe one binary search a range. Every range has at least one group.

    Args:
        weights: Rows or bytes of each key group; its length is the max parallelism.
        parallelism: How many ranges to cut.

    Returns:
        ``parallelism`` contiguous non-empty ranges that tile ``[0, len(weights) - 1]``.

    Raises:
        InvalidArgument: If a weight is negative, the weights overflow 63 bits together,
            or not ``1 <= parallelism <= len(weights) <= 32768``.
    """
    weight = np.asarray(weights)
    if weight.ndim != 1 or (weight.size and weight.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"weights must be a flat sequence of integers, got {weight.dtype} "
            f"with {weight.ndim} dimensions"
        )
    _, parallelism = check_parallelism(weight.size, parallelism)
    if weight.min() < 0:
        raise InvalidArgument(f"weight {weight.min()} of key group {weight.argmin()} is negative")
    if sum(weight.tolist()) >= 1 << 63:
        raise InvalidArgument("the weights sum to 2^63 or more; scale them down")
    ends = [0, *np.cumsum(weight, dtype=np.int64).tolist()]

    heaviest_group = int(weight.max())
    low = max(heaviest_group, _div_ceil(ends[-1], parallelism))
    high = low + heaviest_group  # ranges filled up to this always suffice
    while low < high:
        middle = (low + high) // 2
        if len(_fill(ends, parallelism, middle)) <= parallelism:
            high = middle
        else:
            low = middle + 1
    starts = _fill(ends, parallelism, low)
    starts += _spare_starts(starts, weight.size, parallelism)
    return ranges_of_starts(sorted(starts), weight.size)


def ranges_of_starts(starts: Sequence[int], max_parallelism: int) -> list[KeyGroupRange]:
    """Returns the ranges that begin at ``starts`` and tile ``[0, max_parallelism - 1]``.

    Raises:
        InvalidArgument: If the starts do not begin at 0, do not increase strictly, or leave
            ``[0, max_parallelism - 1]``.
    """
    max_parallelism, _ = check_parallelism(max_parallelism, len(starts))
    starts = [_integer("the start of a range", start) for start in starts]
    if starts[0] != 0:
        raise InvalidArgument(f"the first range starts at key group {starts[0]}, not 0")
    if any(b <= a for a, b in pairwise(starts)):
        raise InvalidArgument("the starts of the ranges do not increase strictly")
    if starts[-1] >= max_parallelism:
        raise InvalidArgument(
            f"a range starts at key group {starts[-1]}, beyond the last, {max_parallelism - 1}"
        )
    ends = [start - 1 for start in starts[1:]] + [max_parallelism - 1]
    return [KeyGroupRange(start, end) for start, end in zip(starts, ends, strict=True)]


def check_max_parallelism(max_parallelism: int) -> int:
    """Returns ``max_parallelism`` as an ``int`` if it is within [1, 32768].

    Raises:
        InvalidArgument: Otherwise.
    """
    return _bounded("max parallelism", max_parallelism)


def check_parallelism(max_parallelism: int, parallelism: int) -> tuple[int, int]:
    """Returns both as ``int`` if ``1 <= parallelism <= max_parallelism <= 32768``.

    Raises:
        InvalidArgument: Otherwise.
    """
    max_parallelism = check_max_parallelism(max_parallelism)
    parallelism = _bounded("parallelism", parallelism)
    if parallelism > max_parallelism:
        raise InvalidArgument(
            f"parallelism {parallelism} exceeds max parallelism {max_parallelism}: a subtask "
            f"owns at least one key group; lower the parallelism or raise the max parallelism"
        )
    return max_parallelism, parallelism


def _fill(ends: list[int], parallelism: int, limit: int) -> list[int]:
    """Fills ranges up to ``limit`` from the left; gives up one past ``parallelism``."""
    starts, start, groups = [0], 0, len(ends) - 1
    while len(starts) <= parallelism:
        start = bisect_right(ends, ends[start] + limit, start) - 1
        if start >= groups:
            break
        starts.append(start)
    return starts


def _spare_starts(starts: list[int], groups: int, parallelism: int) -> list[int]:
    """The starts still missing when fewer ranges suffice: any split makes none heavier."""
    taken = set(starts)
    free = (group for group in range(groups) if group not in taken)
    return list(islice(free, parallelism - len(starts)))


def _bounded(name: str, value: int) -> int:
    value = _integer(name, value)
    if not 1 <= value <= UPPER_BOUND_MAX_PARALLELISM:
        raise InvalidArgument(f"{name} {value} is not within [1, {UPPER_BOUND_MAX_PARALLELISM}]")
    return value


def _integer(name: str, value: int) -> int:
    if isinstance(value, (bool, np.bool_)):
        raise InvalidArgument(f"{name} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} must be an integer, got {value!r}") from None


def _div_ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


KeyGroupRange.EMPTY = KeyGroupRange(0, -1)
