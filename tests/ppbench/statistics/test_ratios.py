"""Ratios by hand, intervals by scipy's test."""

import numpy as np
import pytest
import scipy.stats

from ppbench.statistics.significance import FEWEST_ROUNDS, paired_ratio


def test_the_estimate_is_the_median_of_the_means_of_all_pairs():
    estimate = paired_ratio([2, 2, 2, 8, 8, 8], [2, 2, 2, 1, 1, 1])
    # Logarithms to base 2: three 0 and three 3, so 6 means are 0, 9 are 1.5 and 6 are 3.
    assert estimate.estimate == pytest.approx(2**1.5)
    assert (estimate.low, estimate.high) == pytest.approx((1, 8))


def test_it_is_the_inverse_of_the_inverse_ratio():
    drawn = np.random.default_rng(0)
    on, off = drawn.lognormal(0.01, 0.05, 40), drawn.lognormal(0, 0.05, 40)
    there, back = paired_ratio(on, off), paired_ratio(off, on)
    assert there.estimate == pytest.approx(1 / back.estimate)
    assert (there.low, there.high) == pytest.approx((1 / back.high, 1 / back.low))


def test_one_disturbed_round_hardly_moves_it():
    quiet = [1.0, 1.01, 1.02, 1.03, 1.04] * 6
    one = paired_ratio(quiet, [1] * 30)
    other = paired_ratio([*quiet[:-1], 50], [1] * 30)
    assert one.estimate == pytest.approx(1.02, abs=1e-4)
    assert other.estimate == pytest.approx(one.estimate, abs=2e-3)


@pytest.mark.parametrize("num_rounds", [6, 7, 10, 31, 60, 200])
def test_the_interval_holds_what_a_signed_rank_test_does_not_reject(num_rounds):
    logs = np.random.default_rng(num_rounds).normal(0.01, 0.03, num_rounds)
    estimate = paired_ratio(np.exp(logs), np.ones(num_rounds))

    def p_value(ratio):
        return scipy.stats.wilcoxon(logs - np.log(ratio), method="exact").pvalue

    hair = 1e-9
    assert p_value(estimate.low * (1 + hair)) > 0.05 >= p_value(estimate.low * (1 - hair))
    assert p_value(estimate.high * (1 - hair)) > 0.05 >= p_value(estimate.high * (1 + hair))


def test_the_order_of_rounds_does_not_matter():
    assert paired_ratio([3, 1, 2, 6, 5, 4], [1] * 6) == paired_ratio([1, 2, 3, 4, 5, 6], [1] * 6)


def test_too_few_rounds_are_refused():
    few = [1.0] * (FEWEST_ROUNDS - 1)
    with pytest.raises(ValueError, match="5 and 5 rounds; expected as many of both, at least 6"):
        paired_ratio(few, few)
    with pytest.raises(ValueError, match="6 and 7 rounds"):
        paired_ratio([1] * 6, [1] * 7)
