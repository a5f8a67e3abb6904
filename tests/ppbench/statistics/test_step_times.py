"""Hand-written step times, exact expected answers; the interval against scipy's binomial."""

import numpy as np
import pytest
from scipy.stats import binom

from ppbench.statistics.step_times import has_settled, is_outlier, median_interval


@pytest.mark.parametrize(
    ("step_ns", "is_settled"),
    [
        ([], False),
        ([100, 100], False),  # nothing to compare with
        ([300, 100, 100], False),  # the first was slow
        ([300, 100, 100, 100], True),
        ([300, 100, 180, 96], True),  # no record by more than 5 %
        ([300, 100, 180, 94], False),
        ([300, 100, 94, 400, 500], True),  # slow steps are no warming up
    ],
)
def test_warm_up_is_over_when_the_last_two_steps_set_no_record_by_more_than_5_percent(
    step_ns, is_settled
):
    assert has_settled(step_ns) is is_settled


def test_an_outlier_is_far_from_the_median_by_the_deviations_of_the_others():
    assert is_outlier([100, 102, 98, 101, 99, 150]) == [False] * 5 + [True]
    assert is_outlier([100, 140, 60, 120, 80]) == [False] * 5


def test_steps_that_differ_by_less_than_a_hundredth_have_no_outliers():
    assert is_outlier([1000, 1000, 1000, 1000, 1009]) == [False] * 5
    assert is_outlier([1000, 1000, 1000, 1000, 1011]) == [False] * 4 + [True]


def test_the_interval_of_a_median_is_made_of_two_of_the_values():
    assert median_interval([5, 1, 4, 2, 3, 6]) == (1, 6)
    assert median_interval(range(1, 11)) == (2, 9)
    assert median_interval(range(1, 6)) is None


@pytest.mark.parametrize("num_values", [6, 7, 10, 31, 100])
def test_the_interval_is_the_narrowest_that_covers_95_percent(num_values):
    low, high = median_interval(np.arange(1, num_values + 1))
    below = int(low) - 1  # of the true median, for the interval to miss it on one side
    assert high == num_values + 1 - low
    assert 2 * binom.cdf(below, num_values, 0.5) <= 0.05
    assert 2 * binom.cdf(below + 1, num_values, 0.5) > 0.05
