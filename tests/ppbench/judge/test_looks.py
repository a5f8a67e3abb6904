"""Levels against the closed form and a simulated walk."""

import math

import numpy as np
import pytest
import scipy.stats

from ppbench.judge.looks import ONE_LOOK, SPENDING, Looks


def levels(counts, most, total):
    return [Looks(counts[: place + 1], most).level(total) for place in range(len(counts))]


def test_one_look_at_the_whole_budget_has_the_whole_level():
    assert ONE_LOOK.level(0.01) == pytest.approx(0.01)
    assert ONE_LOOK.spent(0.01) == 0.01


def test_the_first_look_spends_its_share():
    first = Looks((3,), 12)
    assert first.level(0.01) == pytest.approx(0.01 * (3 / 12) ** SPENDING)
    assert first.spent(0.01) == pytest.approx(0.01 * (3 / 12) ** SPENDING)


def test_the_second_level_is_that_of_two_normal_sums():
    """Oracle: the two-dimensional normal distribution."""
    first, second = (-scipy.stats.norm.ppf(level / 2) for level in levels((4, 8), 8, 0.05))
    both = scipy.stats.multivariate_normal([0, 0], [[1, math.sqrt(0.5)], [math.sqrt(0.5), 1]])
    ends = [(x, y) for x in (first, -first) for y in (second, -second)]
    inside = both.cdf(ends[0]) - both.cdf(ends[1]) - both.cdf(ends[2]) + both.cdf(ends[3])
    assert 1 - inside == pytest.approx(0.05, abs=1e-4)


def test_a_walk_crosses_with_the_chance_of_all_looks_together():
    at = tuple(range(3, 13))
    sums = np.random.default_rng(0).normal(size=(100_000, 12)).cumsum(axis=1)
    walks = sums[:, np.array(at) - 1] / np.sqrt(at)
    bounds = -scipy.stats.norm.ppf(np.array(levels(at, 12, 0.05)) / 2)
    assert np.mean((np.abs(walks) > bounds).any(axis=1)) == pytest.approx(0.05, abs=0.003)


def test_later_looks_do_not_change_the_levels_of_earlier_ones():
    assert levels((3, 5, 9), 12, 0.01)[:2] == levels((3, 5), 12, 0.01)


@pytest.mark.parametrize("counts", [(5, 5), (5, 4), (0,), (5, 11)])
def test_shares_that_do_not_rise_to_at_most_1_are_refused(counts):
    with pytest.raises(ValueError, match="expected shares that rise to at most 1"):
        Looks(counts, 10).level(0.01)
