"""Key groups, ranges and cuts, held to Flink and to brute force."""

import csv
import gzip
import itertools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keygroups.assignment import (
    KeyGroupRange,
    balanced_cut,
    check_max_parallelism,
    check_parallelism,
    default_max_parallelism,
    key_group_range_for_subtask,
    key_group_ranges,
    ranges_of_starts,
    subtask_for_key_group,
)
from keygroups.errors import InvalidArgument

FLINK = Path(__file__).parent / "golden/flink"
LIMIT = 32768


def rows_of(name):
    with gzip.open(FLINK / f"{name}.csv.gz", "rt", encoding="ascii", newline="") as lines:
        yield from csv.DictReader(lines)


# --- Golden: Flink's own classes --------------------------------------------------------------


def test_ranges_are_those_of_flink():
    seen = 0
    for row in rows_of("ranges"):
        m, p, i, start, end = map(int, row.values())
        assert key_group_range_for_subtask(m, p, i) == KeyGroupRange(start, end), row
        seen += 1
    assert seen > 5_000


def test_subtasks_are_those_of_flink():
    seen = 0
    for row in rows_of("operator_index"):
        m, p, key_group, index = map(int, row.values())
        assert subtask_for_key_group(m, p, key_group) == index, row
        seen += 1
    assert seen > 5_000


def test_the_default_max_parallelism_is_that_of_flink():
    refused = set()
    for row in rows_of("default_max_parallelism"):
        parallelism = int(row["parallelism"])
        if row["error"]:
            refused.add(parallelism)
            with pytest.raises(InvalidArgument):
                default_max_parallelism(parallelism)
        else:
            wanted = int(row["default_max_parallelism"])
            assert default_max_parallelism(parallelism) == wanted, row
    assert {-1, 0} <= refused


def test_odd_calls_of_flink():
    """Where Flink refuses, so do we; where it answers without checking, we refuse as well."""
    calls = {row["call"]: row["result"] for row in rows_of("edge_calls")}
    functions = {
        "computeKeyGroupRangeForOperatorIndex": key_group_range_for_subtask,
        "computeOperatorIndexForKeyGroup": subtask_for_key_group,
    }
    accepted = set()
    for call, result in calls.items():
        name, _, arguments = call.rstrip(")").partition("(")
        if name not in functions:
            continue
        try:
            ours = functions[name](*map(int, arguments.split(",")))
        except InvalidArgument:
            continue
        accepted.add(call)
        start, end = (ours.start, ours.end) if isinstance(ours, KeyGroupRange) else (ours, None)
        theirs = f"ok: KeyGroupRange{{startKeyGroup={start}, endKeyGroup={end}}}"
        assert result == (theirs if end is not None else f"ok: {start}")
    assert accepted == {
        "computeKeyGroupRangeForOperatorIndex(32768, 32768, 32767)",
        "computeOperatorIndexForKeyGroup(32768, 32768, 32767)",
        "computeKeyGroupRangeForOperatorIndex(1, 1, 0)",
        "computeOperatorIndexForKeyGroup(1, 1, 0)",
        "computeOperatorIndexForKeyGroup(2, 1, 1)",
        "computeOperatorIndexForKeyGroup(128, 2, 2)",
    }
    for value in (-1, 0, 32769):
        assert "IllegalArgumentException" in calls[f"checkParallelismPreconditions({value})"]
        with pytest.raises(InvalidArgument):
            check_parallelism(LIMIT, value)
    for value in (1, 32768):
        assert calls[f"checkParallelismPreconditions({value})"].startswith("ok")
        assert check_parallelism(LIMIT, value) == (LIMIT, value)


# --- Properties of Flink's cut ----------------------------------------------------------------

PARALLELISMS = st.integers(1, LIMIT).flatmap(lambda m: st.tuples(st.just(m), st.integers(1, m)))


def check_cut(m, p):
    ranges = key_group_ranges(m, p)
    assert len(ranges) == p
    assert list(itertools.chain.from_iterable(ranges)) == list(range(m))  # they tile
    sizes = {len(part) for part in ranges}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    return ranges


def test_every_small_cut_tiles_is_even_and_inverts():
    for m in range(1, 65):
        for p in range(1, m + 1):
            for index, part in enumerate(check_cut(m, p)):
                assert {subtask_for_key_group(m, p, group) for group in part} == {index}


@given(PARALLELISMS, st.data())
def test_every_cut_tiles_is_even_and_inverts(parallelisms, data):
    m, p = parallelisms
    ranges = check_cut(m, p)
    group = data.draw(st.integers(0, m - 1))
    owner = subtask_for_key_group(m, p, group)
    assert group in ranges[owner]
    index = data.draw(st.integers(0, p - 1))
    assert key_group_range_for_subtask(m, p, index) == ranges[index]
    assert ranges_of_starts([part.start for part in ranges], m) == ranges


# --- Balanced cuts ----------------------------------------------------------------------------

WEIGHTS = st.lists(st.integers(0, 20) | st.integers(0, 2**40), min_size=1, max_size=9)


def heaviest(weights, ranges):
    return max(sum(weights[group] for group in part) for part in ranges)


def lightest_heaviest(weights, p):
    m = len(weights)
    cuts = itertools.combinations(range(1, m), p - 1)
    return min(heaviest(weights, ranges_of_starts([0, *starts], m)) for starts in cuts)


@given(WEIGHTS, st.data())
def test_a_balanced_cut_is_the_best_there_is(weights, data):
    p = data.draw(st.integers(1, len(weights)))
    ranges = balanced_cut(weights, p)
    assert len(ranges) == p
    assert list(itertools.chain.from_iterable(ranges)) == list(range(len(weights)))
    assert all(ranges)  # no range is empty
    assert heaviest(weights, ranges) == lightest_heaviest(weights, p)


@given(st.lists(st.integers(0, 2**48), min_size=1, max_size=300), st.data())
def test_a_balanced_cut_is_never_heavier_than_flinks(weights, data):
    p = data.draw(st.integers(1, len(weights)))
    for values in (weights, np.array(weights), np.array(weights, np.uint64)):
        ranges = balanced_cut(values, p)
        assert len(ranges) == p
        assert list(itertools.chain.from_iterable(ranges)) == list(range(len(weights)))
        assert all(ranges)
        assert heaviest(weights, ranges) <= heaviest(weights, key_group_ranges(len(weights), p))


@pytest.mark.parametrize("p", [1, 2, 100, 32767, 32768])
def test_balanced_cuts_of_the_most_key_groups(p):
    weights = np.zeros(LIMIT, np.int64)
    weights[7], weights[20_000] = 10**12, 3
    ranges = balanced_cut(weights, p)
    assert len(ranges) == p
    assert all(ranges)
    assert sum(map(len, ranges)) == LIMIT
    assert heaviest(weights.tolist(), ranges) == (10**12 + 3 if p == 1 else 10**12)


def test_balanced_cuts_by_hand():
    def starts(weights, p):
        return [part.start for part in balanced_cut(weights, p)]

    assert starts([1, 1, 1, 9], 2) == [0, 3]
    assert starts([9, 1, 1, 1], 2) == [0, 1]
    assert starts([0, 0, 0], 3) == [0, 1, 2]
    assert starts([5], 1) == [0]
    assert len(balanced_cut([2**62, 2**62 - 1], 1)) == 1


@pytest.mark.parametrize(
    ("weights", "p", "why"),
    [
        ([1, -1], 1, "weight -1 of key group 1 is negative"),
        ([1, 2], 3, "parallelism 3 exceeds"),
        ([1, 2], 0, "parallelism 0"),
        ([], 1, "max parallelism 0"),
        ([1] * (LIMIT + 1), 1, "max parallelism 32769"),
        ([1.5, 2.0], 1, "integers"),
        (["a"], 1, "integers"),
        ([True, False], 1, "integers"),
        ([[1, 2]], 1, "2 dimensions"),
        ([2**62, 2**62], 1, "2\\^63"),
        ([1, 2], 1.0, "must be an integer"),
    ],
)
def test_weights_that_cannot_be_cut_are_refused(weights, p, why):
    with pytest.raises(InvalidArgument, match=why):
        balanced_cut(weights, p)


@pytest.mark.parametrize(
    ("starts", "m", "why"),
    [
        ([], 4, "parallelism 0"),
        ([1], 4, "starts at key group 1, not 0"),
        ([0, 2, 2], 4, "increase strictly"),
        ([0, 3, 1], 4, "increase strictly"),
        ([0, 4], 4, "beyond the last, 3"),
        ([0, 1, 2], 2, "parallelism 3 exceeds"),
        ([0], 0, "max parallelism 0"),
    ],
)
def test_starts_that_are_no_cut_are_refused(starts, m, why):
    with pytest.raises(InvalidArgument, match=why):
        ranges_of_starts(starts, m)


# --- Arguments --------------------------------------------------------------------------------

NO_INTEGERS = [1.0, "1", None, True, np.bool_(True), np.float64(1)]
CALLS = {
    "max parallelism of check": check_max_parallelism,
    "parallelism of default": default_max_parallelism,
    "max parallelism of subtask": lambda x: subtask_for_key_group(x, 1, 0),
    "parallelism of subtask": lambda x: subtask_for_key_group(8, x, 0),
    "key group of subtask": lambda x: subtask_for_key_group(8, 2, x),
    "max parallelism of range": lambda x: key_group_range_for_subtask(x, 1, 0),
    "parallelism of range": lambda x: key_group_range_for_subtask(8, x, 0),
    "index of range": lambda x: key_group_range_for_subtask(8, 2, x),
    "max parallelism of ranges": lambda x: key_group_ranges(x, 1),
    "parallelism of ranges": lambda x: key_group_ranges(8, x),
    "start": lambda x: KeyGroupRange(x, 5),
    "end": lambda x: KeyGroupRange(0, x),
}


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_integer_is_refused(name, value):
    with pytest.raises(InvalidArgument, match="must be an integer"):
        CALLS[name](value)


@pytest.mark.parametrize("value", [-(2**40), -1, 0, 2, 9, LIMIT, LIMIT + 1, 2**40])
@pytest.mark.parametrize("name", CALLS)
def test_what_is_out_of_bounds_is_refused(name, value):
    allowed = {
        "max parallelism of check": range(1, LIMIT + 1),
        "parallelism of default": range(1, LIMIT + 1),
        "max parallelism of subtask": range(1, LIMIT + 1),
        "parallelism of subtask": range(1, 9),
        "key group of subtask": range(8),
        "max parallelism of range": range(1, LIMIT + 1),
        "parallelism of range": range(1, 9),
        "index of range": range(2),
        "max parallelism of ranges": range(1, LIMIT + 1),
        "parallelism of ranges": range(1, 9),
        "start": range(2**50),  # beyond the end it is an empty range
        "end": range(-(2**50), LIMIT),
    }
    if value in allowed[name]:
        CALLS[name](value)
    else:
        with pytest.raises(InvalidArgument, match=str(value)):
            CALLS[name](value)


def test_numpy_integers_are_integers():
    assert default_max_parallelism(np.int64(2)) == 128
    assert type(subtask_for_key_group(np.int32(128), np.int16(5), np.int8(127))) is int
    part = KeyGroupRange(np.int64(1), np.int64(2))
    assert (type(part.start), type(part.end)) == (int, int)


# --- KeyGroupRange ----------------------------------------------------------------------------

BOUNDS = st.integers(0, 40)
RANGES = st.builds(KeyGroupRange, BOUNDS, BOUNDS)


def test_empty_ranges_are_one():
    assert KeyGroupRange(5, 3) == KeyGroupRange.EMPTY == KeyGroupRange(0, -1)
    assert KeyGroupRange(LIMIT, 3) == KeyGroupRange(-5, -7) == KeyGroupRange.EMPTY
    assert hash(KeyGroupRange(5, 3)) == hash(KeyGroupRange.EMPTY)
    assert not KeyGroupRange.EMPTY
    assert KeyGroupRange(0, 0)
    assert (KeyGroupRange.EMPTY.start, KeyGroupRange.EMPTY.end) == (0, -1)


@given(RANGES, RANGES)
def test_a_range_is_the_set_of_its_key_groups(a, b):
    assert len(a) == len(list(a)) == len(set(a))
    assert sorted(a) == list(a)
    assert all((group in a) == (group in set(a)) for group in range(-2, 43))
    both = a.intersection(b)
    assert set(both) == set(a) & set(b)
    assert both == b.intersection(a)
    assert a.intersection(a) == a
    assert a.intersection(KeyGroupRange.EMPTY) == KeyGroupRange.EMPTY
    assert (a < b) == ((a.start, a.end) < (b.start, b.end))


def test_membership_is_of_integers():
    part = KeyGroupRange(0, 9)
    assert 0 in part
    assert np.uint16(9) in part
    assert 10 not in part
    assert -1 not in part
    assert "1" not in part
    assert None not in part
    assert (np.int64(3) in part) is True


def test_a_range_says_what_it_is():
    assert repr(KeyGroupRange(43, 85)) == "KeyGroupRange[43, 85]"
    assert repr(KeyGroupRange(7, 7)) == "KeyGroupRange[7, 7]"
    assert repr(KeyGroupRange.EMPTY) == "KeyGroupRange[]"


def test_a_range_is_a_value():
    part = KeyGroupRange(1, 2)
    with pytest.raises(AttributeError):
        part.start = 0
    by_range = defaultdict(int)
    by_range[part] += 1
    by_range[KeyGroupRange(1, 2)] += 1
    assert by_range == {part: 2}


@pytest.mark.parametrize(("start", "end"), [(-1, 5), (0, LIMIT), (-(2**40), 2**40)])
def test_a_range_beyond_all_key_groups_is_refused(start, end):
    with pytest.raises(InvalidArgument, match="not within"):
        KeyGroupRange(start, end)
