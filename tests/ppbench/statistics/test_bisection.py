"""Searches over commits made by hand and by simulation."""

import math

import numpy as np
import pytest

from ppbench.judge.evidence import Metric, Rounds
from ppbench.statistics.bisection import (
    FEWEST_AT_BOUNDARY,
    MOST_AT_ENDS,
    Finding,
    search_first_bad,
)

STEP = Metric("step_ns", higher_is_better=False, in_points=False)
BUBBLE = Metric("bubble_fraction", higher_is_better=False, in_points=True)
CLEAR = [0.1, 0.1, 0.1]


def search_of(differences, runs=None, metric=STEP, **more):
    """The search by launches of one round each, in which commits differ so from the good one."""
    base = 0.1 if metric.in_points else 1.0
    launches = [
        [Rounds((base,), (base + one if metric.in_points else math.exp(one),)) for one in own]
        for own in differences
    ]
    return search_first_bad(metric, launches, runs, **more)


def searched(levels, deviation=0.0087, seed=0, runs=None, disturbed=0.0, most=200, **more):
    """The search when it is over, and how often each commit was launched beside the good one."""
    draw = np.random.default_rng(seed)
    differences = [[] for _ in levels]
    for _ in range(most):
        search = search_of(differences, runs, **more)
        if search.next_commit is None:
            return search, [len(each) for each in differences]
        noise = draw.normal(0, deviation, 2) if deviation else np.zeros(2)
        slowed = math.log(draw.uniform(1.1, 1.35)) if draw.random() < disturbed else 0.0
        change = levels[search.next_commit] - levels[0] + slowed
        differences[search.next_commit].append(change + noise[1] - noise[0])
    return search, [len(each) for each in differences]


def step(num_commits, first_bad, change=0.05):
    return [change if commit >= first_bad else 0.0 for commit in range(num_commits)]


@pytest.mark.parametrize("num_commits", [2, 8, 33])
def test_without_noise_every_first_bad_commit_is_named(num_commits):
    for first_bad in range(1, num_commits):
        search, nums = searched(step(num_commits, first_bad), deviation=0)
        assert search.finding is Finding.found
        assert search.earliest == search.latest == first_bad
        assert search.confidence > 0.99
        assert nums[first_bad] >= FEWEST_AT_BOUNDARY
        assert first_bad == 1 or nums[first_bad - 1] >= FEWEST_AT_BOUNDARY
        # three of the ends, two of the boundary, and one of each commit that a bisection asks
        assert sum(nums) <= 3 + math.ceil(math.log2(num_commits - 1)) + 3


def test_the_good_commit_is_no_launch_of_its_own_and_the_bad_one_comes_first():
    for num in range(3):
        search = search_of([[], [], [], [0.1] * num])
        assert (search.finding, search.next_commit) == (Finding.searching, 3)
        assert search.chances == pytest.approx((0, *[1 / 3] * 3))


def test_then_the_commit_that_halves_the_chances():
    search = search_of([[], [], [], [], [], [], [], [], CLEAR])
    assert search.next_commit == 4
    assert search.chances == pytest.approx((0, *[1 / 8] * 8))
    assert search.ends.ratio.estimate == pytest.approx(math.exp(0.1))


def test_the_drawing_is_what_a_search_says():
    launches = [[], [], [0.006], [-0.006, 0.012], [0.03, 0.02], [], [], [0.02, 0.027, 0.012]]
    search = search_of(launches, runs=[True] * 6 + [False, True])
    rounded = [round(chance, 2) for chance in search.chances]
    assert rounded == [0, 0.04, 0.04, 0.05, 0.85, 0.01, 0.01, 0.01]


def test_one_launch_is_doubted_and_repeated_near_the_boundary():
    ends = [0.02, 0.025, 0.015, 0.02, 0.022, 0.018]
    launches = [[], [], [], [], [0.01], [], [], [], ends]
    search = search_of(launches)
    assert search.next_commit == 4  # right between the levels: nothing is learnt yet
    launches[4] = [0.013]
    search = search_of(launches)
    before, behind = sum(search.chances[:5]), sum(search.chances[5:])
    assert 1.5 < before / behind < 20


def test_ends_that_do_not_differ_end_the_search():
    for seed in range(10):
        search, nums = searched([0.0] * 20, seed=seed)
        assert search.finding is Finding.no_difference
        assert sum(nums) == nums[-1] <= MOST_AT_ENDS
    equal, nums = searched([0.0] * 5, deviation=0)
    assert equal.finding is Finding.no_difference
    assert sum(nums) == 3


def test_commits_that_do_not_run_are_not_asked_and_named_as_a_range():
    runs = [not 4 <= commit <= 6 for commit in range(12)]
    for first_bad in (4, 5, 6, 7):
        search, nums = searched(step(12, first_bad, 0.08), runs=runs)
        assert search.finding is Finding.found
        assert nums[4:7] == [0, 0, 0]
        assert (search.earliest, search.latest) == (4, 7)
    search, _ = searched(step(12, 3, 0.08), runs=runs)
    assert search.earliest == search.latest == 3


def test_where_only_the_ends_run_all_others_are_named():
    runs = [True, False, False, True]
    search, nums = searched(step(4, 2, 0.08), runs=runs)
    assert (search.finding, search.earliest, search.latest) == (Finding.found, 1, 3)
    assert nums[1:3] == [0, 0]
    assert search.confidence == pytest.approx(1)


def test_a_level_between_is_told():
    levels = [0.0] * 10 + [0.05] * 10 + [0.1] * 10
    searches = [searched(levels, seed=seed)[0] for seed in range(10)]
    several = [search for search in searches if search.finding is Finding.several]
    assert len(several) >= 8
    assert all(10 <= search.between < 20 for search in several)


def test_a_fraction_is_searched_in_points():
    search, _ = searched([0.0] * 5 + [0.04] * 4, deviation=0, metric=BUBBLE)
    assert (search.finding, search.latest) == (Finding.found, 5)
    assert search.ends.ratio is None
    assert search.ends.difference.estimate == pytest.approx(0.04)


def test_it_is_right_as_often_as_it_says():
    results = []
    for seed in range(40):
        first_bad = 1 + seed * 13 % 63
        search, _ = searched(step(64, first_bad, 0.02), seed=seed, deviation=0.0062)
        results.append((search, search.latest == first_bad))
    found = [is_right for search, is_right in results if search.finding is Finding.found]
    assert len(found) >= 37
    assert np.mean(found) >= 0.95


@pytest.mark.parametrize(
    ("launches", "runs"),
    [([[]], None), ([[], []], [True, False]), ([[], []], [False, True]), ([[], []], [True])],
)
def test_a_search_needs_two_ends_that_run(launches, runs):
    with pytest.raises(ValueError, match="expected at least two, with the first and the last"):
        search_first_bad(STEP, launches, runs)


def test_a_disturbed_launch_leads_nowhere_and_its_commit_is_launched_anew():
    right = []
    for seed in range(20):
        first_bad = 1 + seed * 11 % 31
        levels = step(32, first_bad)
        search, _ = searched(levels, 0.0057, seed, disturbed=0.1, most=100)
        right.append(search.finding is Finding.found and search.latest == first_bad)
    assert np.mean(right) >= 0.9
