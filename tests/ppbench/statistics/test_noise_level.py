"""Deviations by hand, intervals and power by simulation."""

import math

import numpy as np
import pytest
import scipy.stats

from ppbench.display.metrics import METRICS
from ppbench.statistics.noise import detectable_change, measure_noise, power
from ppbench.statistics.verdicts import Noise, Pair, Verdict, compare


def test_the_deviation_is_relative_and_pooled_around_each_cases_own_mean():
    first = np.exp([0.0, 0.02])  # squares 2 * 0.01 ** 2, one degree of freedom
    second = 1000 * np.exp([0.0, 0.03, 0.06])  # 2 * 0.03 ** 2, two
    result = measure_noise([first, second])
    assert result.noise.deviation == pytest.approx(math.sqrt((2 * 0.01**2 + 2 * 0.03**2) / 3))
    assert result.noise.num_launches == 4


def test_a_fractions_deviation_is_in_fractions():
    assert measure_noise([[0.1, 0.12]], in_points=True).noise.deviation == pytest.approx(
        0.02 / math.sqrt(2)
    )
    assert measure_noise([[0.0, -0.01]], in_points=True).noise.deviation > 0


def test_its_interval_is_that_of_chi_square():
    result = measure_noise([np.exp(np.random.default_rng(0).normal(0, 0.01, 20))])
    quantiles = scipy.stats.chi2.ppf([0.975, 0.025], 19)
    expected = result.noise.deviation * np.sqrt(19 / quantiles)
    assert (result.low, result.high) == pytest.approx(expected)


def test_cases_of_one_launch_tell_nothing():
    assert measure_noise([[5.0], [1.0, 1.0, 1.0]]).noise == Noise(0.0, 3)
    with pytest.raises(ValueError, match="2 cases; expected at least one with two launches"):
        measure_noise([[5.0], []])


@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_figures_without_a_logarithm_are_refused(bad):
    with pytest.raises(ValueError, match="expected finite figures above 0"):
        measure_noise([[1.0, bad]])


def test_the_power_that_is_said_is_the_share_of_comparisons_that_find_it():
    num_launches, change = 5, 0.02
    noise, draw = Noise(0.01, 20), np.random.default_rng(num_launches)
    # The noise as it is estimated, but the launches with a deviation of exactly that.
    sides = draw.lognormal(0, 0.01, (2000, 2, num_launches))
    sides[:, 1] *= 1 + change
    verdicts = [
        compare(METRICS["step_ns"], [Pair(tuple(base), tuple(head), noise)])[0].verdict
        for base, head in sides
    ]
    result = np.mean([verdict is Verdict.slower for verdict in verdicts])
    assert power(noise, change, num_launches) == pytest.approx(result, abs=0.05)


def test_more_launches_find_smaller_changes_down_to_the_floor():
    noise = Noise(0.01, 20)
    changes = [detectable_change(noise, num) for num in (2, 3, 5, 10, 1000)]
    assert changes == sorted(changes, reverse=True)
    assert 0.01 < changes[-1] < 0.012
    assert power(noise, changes[2], 5) == pytest.approx(0.8, abs=0.01)


def test_without_noise_whatever_lies_beyond_the_floor_is_found():
    assert detectable_change(Noise(0.0, 5), 3) == pytest.approx(0.01, rel=1e-3)


def test_disturbed_launches_are_no_noise():
    draw, share = np.random.default_rng(4), 0.2
    launches = draw.lognormal(0, 0.008, (300, 20))
    slow = draw.random(launches.shape) < share
    launches *= np.where(slow, draw.uniform(1.1, 1.35, launches.shape), 1.0)
    known = [measure_noise([case], slow_sign=1).noise for case in launches]
    assert np.median([noise.deviation for noise in known]) == pytest.approx(0.008, rel=0.07)
    inverse = measure_noise([1 / launches[0]], slow_sign=-1).noise
    assert inverse.deviation == pytest.approx(known[0].deviation)
    assert measure_noise([launches[0]]).noise.deviation > 3 * known[0].deviation


def test_launches_that_do_not_count_are_not_counted():
    level = measure_noise([[1.0, 1.001, 1.002, 0.999, 1.3]], slow_sign=1)
    assert level.noise.num_launches == 4
    assert level.left_out == ((4,),)
    assert measure_noise([[5.0], [1.0, 1.3]], slow_sign=1).left_out == ((), ())
