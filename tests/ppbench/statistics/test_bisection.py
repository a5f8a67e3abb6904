"""Searches over commits made by hand and by simulation."""

import itertools
import math

import numpy as np
import pytest

from ppbench.judge.evidence import Noise
from ppbench.statistics.bisection import (
    FEWEST_AT_BOUNDARY,
    MOST_AT_ENDS,
    Finding,
    fewest_launches,
    reach_of_ends,
    search_first_bad,
)


def searched(levels, deviation=0.0087, seed=0, runs=None, noise=None, most=200, **more):
    """The search when it is over, and how often each commit was launched."""
    draw = np.random.default_rng(seed)
    launches = [[] for _ in levels]
    for _ in range(most):
        search = search_first_bad(launches, runs, noise, **more)
        if search.next_commit is None:
            return search, [len(figures) for figures in launches]
        luck = draw.lognormal(0, deviation) if deviation else 1.0
        launches[search.next_commit].append(levels[search.next_commit] * luck)
    raise AssertionError(f"no end after {most} launches")


def step(num_commits, first_bad, factor=1.05):
    return [factor if commit >= first_bad else 1.0 for commit in range(num_commits)]


@pytest.mark.parametrize("num_commits", [2, 8, 33])
def test_without_noise_every_first_bad_commit_is_named(num_commits):
    for first_bad in range(1, num_commits):
        search, nums = searched(step(num_commits, first_bad), deviation=0)
        assert search.finding is Finding.found
        assert search.earliest == search.latest == first_bad
        assert search.confidence > 0.99
        assert nums[first_bad - 1] >= FEWEST_AT_BOUNDARY <= nums[first_bad]
        # two of each end and of the boundary, and one of each commit that a bisection asks
        assert sum(nums) <= 8 + math.ceil(math.log2(num_commits))
        assert sum(nums) >= fewest_launches(num_commits - 1)


def test_first_both_ends_are_launched_in_turn():
    launches = [[] for _ in range(9)]
    order = []
    for _ in range(4):
        order.append(search_first_bad(launches).next_commit)
        launches[order[-1]].append(1.0 if order[-1] else 1.0 + 0.001 * len(order))
    assert sorted(order) == [0, 0, 8, 8]
    assert all(one != other for one, other in itertools.pairwise(order))


def test_then_the_commit_that_halves_the_chances():
    search = search_first_bad([[1.0, 1.0], [], [], [], [], [], [], [], [1.1, 1.1]])
    assert search.next_commit == 4
    assert search.chances == pytest.approx((0, *[1 / 8] * 8))
    assert search.ratio.estimate == pytest.approx(1.1)


def test_the_drawing_is_what_a_search_says():
    good, bad = [1.0, 1.008, 0.995], [1.02, 1.027, 1.012]
    launches = [good, [], [1.006], [0.994, 1.012], [1.03, 1.018], [], [], bad]
    search = search_first_bad(launches, runs=[True] * 6 + [False, True])
    rounded = [round(chance, 2) for chance in search.chances]
    assert rounded == [0, 0.03, 0.03, 0.04, 0.85, 0.02, 0.02, 0.02]
    assert (search.finding, search.earliest, search.latest) == (Finding.searching, 4, 4)


def test_one_launch_is_doubted_and_repeated_near_the_boundary():
    noise = Noise(0.01, 30)
    ends = [1.0, 1.005, 0.995, 1.0], [1.02, 1.025, 1.015, 1.02]
    launches = [ends[0], [], [], [], [1.01], [], [], [], ends[1]]
    search = search_first_bad(launches, noise=noise)
    assert search.next_commit == 4  # right between the levels: nothing is learnt yet
    launches[4] = [1.02]
    search = search_first_bad(launches, noise=noise)
    before, behind = sum(search.chances[:5]), sum(search.chances[5:])
    assert 1.5 < before / behind < 20


def test_ends_that_do_not_differ_end_the_search():
    for seed in range(10):
        search, nums = searched(step(20, 10, 1.0), seed=seed)
        assert search.finding is Finding.no_difference
        assert sum(nums) == nums[0] + nums[-1] <= 2 * MOST_AT_ENDS
    equal, nums = searched([1.0] * 5, deviation=0)
    assert equal.finding is Finding.no_difference
    assert sum(nums) == 4


def test_commits_that_do_not_run_are_not_asked_and_named_as_a_range():
    runs = [not 4 <= commit <= 6 for commit in range(12)]
    for first_bad in (4, 5, 6, 7):
        search, nums = searched(step(12, first_bad, 1.08), runs=runs)
        assert search.finding is Finding.found
        assert nums[4:7] == [0, 0, 0]
        assert (search.earliest, search.latest) == (4, 7)
    search, _ = searched(step(12, 3, 1.08), runs=runs)
    assert search.earliest == search.latest == 3


def test_where_only_the_ends_run_all_others_are_named():
    runs = [True, False, False, True]
    search, nums = searched(step(4, 2, 1.08), runs=runs)
    assert (search.finding, search.earliest, search.latest) == (Finding.found, 1, 3)
    assert nums[1:3] == [0, 0]
    assert search.confidence == pytest.approx(1)


def test_a_level_between_is_told():
    levels = [1.0] * 10 + [1.05] * 10 + [1.1] * 10
    for seed in range(10):
        search, _ = searched(levels, seed=seed, noise=Noise(0.0087, 20))
        if search.finding is Finding.several:
            assert 10 <= search.between < 20
    found = [searched(levels, seed=seed)[0].finding for seed in range(10)]
    assert found.count(Finding.several) >= 8


def test_a_fraction_is_searched_in_points():
    search, _ = searched([0.0] * 5 + [0.04] * 4, deviation=0, in_points=True)
    assert (search.finding, search.latest) == (Finding.found, 5)
    assert search.ratio is None
    assert search.difference.estimate == pytest.approx(0.04)


def test_it_is_right_as_often_as_it_says():
    results, noise = [], Noise(0.0087, 20)
    for seed in range(40):
        first_bad = 1 + seed * 13 % 63
        search, _ = searched(step(64, first_bad, 1.02), seed=seed, noise=noise)
        results.append((search, search.latest == first_bad))
    found = [is_right for search, is_right in results if search.finding is Finding.found]
    assert len(found) >= 37
    assert np.mean(found) >= 0.95


def test_launches_that_scatter_more_than_the_noise_are_believed_less():
    draw = np.random.default_rng(0)
    launches = [draw.lognormal(0.1 * (at > 4), 0.03, 4).tolist() for at in range(9)]
    quiet, unknown = (search_first_bad(launches, noise=noise) for noise in (Noise(1e-3, 50), None))
    assert quiet.chances == pytest.approx(unknown.chances)


@pytest.mark.parametrize(
    ("launches", "runs"),
    [([[1.0]], None), ([[], []], [True, False]), ([[], []], [False, True]), ([[], []], [True])],
)
def test_a_search_needs_two_ends_that_run(launches, runs):
    with pytest.raises(ValueError, match="expected at least two, with the first and the last"):
        search_first_bad(launches, runs)


def test_a_disturbed_launch_leads_nowhere_and_its_commit_is_launched_anew():
    right = []
    for seed in range(20):
        draw, launches = np.random.default_rng(seed), [[] for _ in range(32)]
        first_bad, num = int(draw.integers(1, 32)), 0
        search = search_first_bad(launches, slow_sign=1)
        while search.next_commit is not None and num < 100:
            slowed = draw.uniform(1.1, 1.35) if draw.random() < 0.1 else 1.0
            level = 1.05 if search.next_commit >= first_bad else 1.0
            launches[search.next_commit].append(level * slowed * draw.lognormal(0, 0.008))
            search, num = search_first_bad(launches, slow_sign=1), num + 1
        right.append(search.finding is Finding.found and search.latest == first_bad)
    assert np.mean(right) >= 0.9


def test_the_ends_show_the_change_that_is_said_with_the_launches_that_are_said():
    deviation = 0.01
    for num, change in reach_of_ends(Noise(deviation, 1000)):
        found = 0
        for seed in range(100):
            draw = np.random.default_rng(seed)
            ends = [
                list(level * draw.lognormal(0, deviation, num)) for level in (1.0, 1.0 + change)
            ]
            search = search_first_bad(ends, noise=Noise(deviation, 1000))
            found += search.finding is Finding.found
        assert found >= 65
