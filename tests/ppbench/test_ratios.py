"""Ratios by hand, intervals by scipy."""

import pytest
import scipy.stats

from ppbench.analysis.ratios import FEWEST_ROUNDS, Ratio, paired_ratio


def test_each_round_is_a_ratio_of_its_own():
    off = [100, 200, 50, 1000, 10, 20]
    on = [101, 204, 50, 1100, 30, 18]  # 1.01, 1.02, 1, 1.1, 3, 0.9
    found = paired_ratio(on, off)
    assert found.median == pytest.approx(1.015)
    assert (found.low, found.high) == (0.9, 3.0)


def test_one_disturbed_round_moves_neither_median_nor_interval():
    quiet = paired_ratio([1.0, 1.01, 1.02, 1.03, 1.04] * 6, [1] * 30)
    disturbed = paired_ratio(
        [1.0, 1.01, 1.02, 1.03, 1.04] * 5 + [1, 1.01, 1.02, 1.03, 50], [1] * 30
    )
    assert quiet == disturbed
    assert quiet.median == 1.02


@pytest.mark.parametrize(
    ("num_values", "first", "last"),
    [(6, 1, 6), (9, 2, 8), (20, 6, 15), (30, 10, 21), (100, 40, 61)],
)
def test_the_interval_ends_at_the_known_order_statistics(num_values, first, last):
    found = paired_ratio(range(1, num_values + 1), [1] * num_values)
    assert found == Ratio((num_values + 1) / 2, first, last)


@pytest.mark.parametrize("num_values", [*range(8, 41), 1000, 2000])
def test_intervals_are_those_of_scipy(num_values):
    values = list(range(1, num_values + 1))
    theirs = scipy.stats.quantile_test(values).confidence_interval(0.95)
    ours = paired_ratio(values, [1] * len(values))
    assert (ours.low, ours.high) == (theirs.low, theirs.high)


def test_the_order_of_rounds_does_not_matter():
    assert paired_ratio([3, 1, 2, 6, 5, 4], [1] * 6) == paired_ratio([1, 2, 3, 4, 5, 6], [1] * 6)


def test_too_few_rounds_are_refused():
    with pytest.raises(ValueError, match="5 rounds are too few; at least 6"):
        paired_ratio([1] * (FEWEST_ROUNDS - 1), [1] * (FEWEST_ROUNDS - 1))
    with pytest.raises(ValueError):
        paired_ratio([1] * 6, [1] * 7)
