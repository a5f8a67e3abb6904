"""Disturbed launches by hand, the choice of launches by trying every one, rates by simulation."""

import itertools
import math

import numpy as np
import pytest
from samples import sampled

from ppbench.judge.disturbances import (
    APART,
    APART_ALONE,
    are_two_levels,
    disturbed_in_series,
    inflation,
    without_disturbed,
)

QUIET = np.array([0.0, 0.004, -0.003, 0.006, -0.005])


def kept(*sides, **known):
    return tuple(side.num_kept for side in without_disturbed(sides, **known))


def drawn(seed, num=5, deviation=0.008):
    return np.random.default_rng(seed).normal(0, deviation, num)


def with_slow(values, *slowdowns):
    """The last launches are so much slower."""
    result = values.copy()
    result[len(values) - len(slowdowns) :] += slowdowns
    return result


def test_a_launch_far_on_the_slow_side_is_discounted_and_a_fast_one_is_not():
    assert kept(with_slow(QUIET, 0.2), QUIET + 0.05) == (4, 5)
    assert kept(with_slow(QUIET, 0.3, 0.2, 0.12), QUIET) == (2, 5)
    assert kept(with_slow(QUIET, -0.2), QUIET + 0.05) == (5, 5)


def test_its_place_is_that_in_the_order_given():
    (side,) = without_disturbed([np.array([0.0, 0.3, 0.004, -0.003, 0.006])])
    assert side.places[side.num_kept :].tolist() == [1]
    assert side.discounted.tolist() == [0.3]


def test_launches_without_any_spread_discount_none():
    assert kept(np.zeros(5), np.array([0.0, 0.0, 0.0, 0.0, 0.05])) == (5, 5)
    assert kept(np.zeros(3), np.zeros(4)) == (3, 4)


def test_a_measured_noise_counts_as_launches():
    side = with_slow(QUIET[:3], 0.03)
    assert kept(side, QUIET[:3], known_squares=19 * 0.03**2, known_freedom=19) == (3, 3)
    assert kept(side, QUIET[:3], known_squares=19 * 0.005**2, known_freedom=19) == (2, 3)


def test_the_more_tests_are_made_the_further_apart_a_disturbed_launch_must_lie():
    sides = with_slow(QUIET, 0.04), QUIET
    nums = [without_disturbed(sides, num_tests=num)[0].num_kept for num in (1, 10**4)]
    assert nums == [4, 5]


def likeliest_by_trial(sides):
    """The likeliest numbers of kept launches, by trying all, and the definition in words."""
    best, result = -math.inf, None
    num_all = sum(map(len, sides))
    for nums in itertools.product(*(range(max(2, len(s) // 2), len(s) + 1) for s in sides)):
        parts = [np.sort(s)[:num] for s, num in zip(sides, nums, strict=True)]
        if sum(nums) < num_all / 2:
            continue
        alone = [
            (len(s) - 1) / 2 * math.log(np.var(s) * len(s) / (np.var(part) * len(part)))
            >= APART_ALONE * (len(s) - len(part)) - 1e-9
            for s, part in zip(sides, parts, strict=True)
        ]
        squares = sum(np.var(part) * len(part) for part in parts)
        worth = -(num_all - len(sides)) / 2 * math.log(squares) - APART * (num_all - sum(nums))
        if all(alone) and worth > best:
            best, result = worth, nums
    return result


@pytest.mark.parametrize("seed", sampled(range(40), 6))
def test_the_choice_is_the_likeliest_one(seed):
    draw = np.random.default_rng(seed)
    sides = [draw.normal(0, 0.01, num) + 0.2 * (draw.random(num) < 0.25) for num in (5, 7)]
    assert kept(*sides) == likeliest_by_trial(sides)


def test_of_normal_launches_hardly_any_are_discounted():
    found = [kept(drawn([seed, 0]), drawn([seed, 1])) != (5, 5) for seed in range(200)]
    assert np.mean(found) < 0.04


def test_fewer_kept_launches_count_as_less_sure():
    assert inflation(0, 10) == 1
    assert inflation(1, 10) == pytest.approx(1.3)
    assert 1 < inflation(4, 40) < inflation(1, 10) < inflation(2, 10)
    assert inflation(1, 10, known_freedom=19) < inflation(1, 10)


def levels(faster, slower):
    return are_two_levels(*without_disturbed([np.asarray(faster), np.asarray(slower)]), 0.0, 0)


def test_one_disturbed_launch_may_lie_on_the_other_level_and_two_may_not():
    slower = QUIET + 0.1
    assert not levels(with_slow(QUIET, 0.1), slower)
    assert not levels(with_slow(QUIET, 0.25, 0.3), slower)
    assert levels(with_slow(QUIET, 0.1, 0.1), slower)


def test_not_even_one_may_where_the_levels_are_near_or_of_three_launches():
    near = QUIET / 2
    assert kept(with_slow(near, 0.016), near + 0.011) == (4, 5)
    assert levels(with_slow(near, 0.016), near + 0.011)
    assert levels(with_slow(QUIET[:3], 0.1), QUIET[:3] + 0.1)


def test_no_launch_of_the_slower_side_may_lie_on_the_fast_level():
    assert levels(QUIET, with_slow(QUIET + 0.1, -0.1))
    assert not levels(QUIET, QUIET + 0.1)


@pytest.mark.parametrize("level", sampled([0.03, 0.01, 0.1]))
def test_two_levels_are_shared_out_by_chance_in_one_of_a_hundred_comparisons_at_most(level):
    draw = np.random.default_rng(1)
    wrong = 0
    for _ in range(300):
        sides = draw.normal(0, 0.008, (2, 5)) + level * (draw.random((2, 5)) < 0.5)
        base, head = without_disturbed(sides)
        distance = head.kept.mean() - base.kept.mean()
        apart = distance > 4 * math.sqrt(base.kept.var() + head.kept.var())
        wrong += apart and not are_two_levels(base, head, 0.0, 0)
    assert wrong / 300 < 0.015


def series_of(num=40, seed=0, deviation=0.008):
    return np.random.default_rng(seed).normal(0, deviation, num)


def test_a_launch_of_a_series_is_disturbed_if_it_lies_above_both_sides():
    values = series_of()
    values[[7, 20]] += [0.12, 0.3]
    assert np.flatnonzero(disturbed_in_series(values)).tolist() == [7, 20]
    assert not disturbed_in_series(-values)[[7, 20]].any()


@pytest.mark.parametrize("at", [20, 36, 38])
def test_a_new_level_is_none_down_to_its_second_launch(at):
    values = series_of()
    values[at:] += 0.05
    assert not disturbed_in_series(values)[at:].any()


def test_the_newest_launch_alone_counts_as_disturbed_until_a_second_agrees():
    values = series_of()
    values[-1] += 0.05
    assert np.flatnonzero(disturbed_in_series(values)).tolist() == [39]


def test_three_launches_in_a_row_that_agree_are_a_level_and_two_are_not():
    values = series_of()
    values[10:13] += 0.06
    assert not disturbed_in_series(values).any()
    values = series_of()
    values[10:12] += 0.06
    assert np.flatnonzero(disturbed_in_series(values)).tolist() == [10, 11]


@pytest.mark.parametrize("num", [0, 1, 2, 3])
def test_so_few_launches_have_none(num):
    assert not disturbed_in_series(np.array([0.0, 0.3, 0.1][:num])).any()


def test_in_equal_launches_one_that_is_slower_is_disturbed():
    values = np.zeros(20)
    assert not disturbed_in_series(values).any()
    values[5] = 0.01
    assert np.flatnonzero(disturbed_in_series(values)).tolist() == [5]
