"""Whether launches of one commit share their luck."""

import numpy as np
import pytest

from ppbench.judge.differences import group
from ppbench.statistics.change_points import launches_are_correlated


def commits(seed, nums, shared, own=0.008):
    draw = np.random.default_rng(seed)
    return [group(draw.normal(draw.normal(0, shared), own, num)) for num in nums]


@pytest.mark.parametrize("nums", [[5] * 60, [3] * 20, [1, 2, 5] * 10])
def test_shared_luck_is_seen_and_none_is_seen_where_there_is_none(nums):
    seen = [launches_are_correlated(commits(seed, nums, 0.012), [], 0.01) for seed in range(50)]
    assert np.mean(seen) > 0.9
    seen = [launches_are_correlated(commits(seed, nums, 0.0), [], 0.0) for seed in range(200)]
    assert np.mean(seen) < 0.05


def test_a_change_of_level_and_a_single_commit_are_no_shared_luck():
    alike = [group([0.0, 0.01, -0.01])] * 10
    changed = [group([0.1, 0.11, 0.09])] * 10
    assert launches_are_correlated([*alike, *changed], [], 0.01)
    assert not launches_are_correlated([*alike, *changed], [10], 0.01)
    assert not launches_are_correlated([*alike, changed[0]], [], 0.01)
    assert not launches_are_correlated([*alike, changed[0], *alike], [], 0.01)


def test_luck_that_is_far_smaller_than_what_matters_is_as_good_as_none():
    groups = commits(2, [3] * 20, shared=0.001, own=0.0001)
    assert launches_are_correlated(groups, [], 0.002)
    assert not launches_are_correlated(groups, [], 0.01)


@pytest.mark.parametrize("nums", [[], [5], [5, 5], [1] * 30])
def test_too_few_launches_or_commits_tell_of_none(nums):
    assert not launches_are_correlated(commits(3, nums, shared=1.0), [], 0.01)


def test_launches_that_agree_to_the_last_digit_still_tell():
    groups = [group([value] * 3) for value in (1.0, 1.1, 0.9, 1.05, 0.95)]
    assert launches_are_correlated(groups, [], 0.01)
    assert not launches_are_correlated([group([0.1] * 3)] * 5, [], 0.0)
