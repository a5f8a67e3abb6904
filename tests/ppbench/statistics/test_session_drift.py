"""Drift by hand, its interval by simulation."""

import math

import numpy as np
import pytest

from ppbench.statistics.sessions import measure_drift


def sessions(seed, drift, num_sessions=6, num_launches=4, deviation=0.008):
    draw = np.random.default_rng(seed)
    levels = draw.normal(0, drift, (num_sessions, 1))
    return np.exp(levels + draw.normal(0, deviation, (num_sessions, num_launches)))


def test_the_estimate_is_that_of_the_analysis_of_variance():
    """Means 0.01, 0.03 and 0.05: variance 0.0004; within, 0.0002 of each of two launches."""
    drift = measure_drift([np.exp([0.0, 0.02]), np.exp([0.02, 0.04]), np.exp([0.04, 0.06])])
    assert drift.launch_deviation == pytest.approx(math.sqrt(0.0002))
    assert drift.deviation == pytest.approx(math.sqrt(0.0004 - 0.0002 / 2))
    assert (drift.num_sessions, drift.num_launches) == (3, 6)


def test_sessions_that_agree_better_than_their_launches_have_no_drift():
    drift = measure_drift([[0.99, 1.01], [1.01, 0.99], [0.99, 1.01]])
    assert drift.deviation == drift.low == 0
    assert drift.launch_deviation > 0


@pytest.mark.parametrize("groups", [[], [[1.0, 1.1, 1.2]], [[1.0], [1.1], [1.2]], [[], [1.0, 1.1]]])
def test_one_session_or_single_launches_tell_nothing(groups):
    assert measure_drift(groups) is None


@pytest.mark.parametrize("drift", [0.0, 0.004, 0.02])
def test_the_interval_holds_the_drift_in_95_percent(drift):
    results = [measure_drift(sessions(seed, drift).tolist()) for seed in range(400)]
    holds = np.mean([each.low <= drift <= each.high for each in results])
    assert holds > 0.925
    assert np.mean([each.launch_deviation for each in results]) == pytest.approx(0.008, rel=0.05)


def test_sessions_of_different_sizes_are_weighed_alike():
    draw = np.random.default_rng(0)
    found = []
    for _ in range(300):
        levels = draw.normal(0, 0.01, 5)
        groups = [
            np.exp(level + draw.normal(0, 0.008, num))
            for level, num in zip(levels, (1, 2, 3, 8, 8), strict=True)
        ]
        drift = measure_drift(groups)
        found.append(drift.low <= 0.01 <= drift.high)
    assert np.mean(found) > 0.92


def test_a_disturbed_launch_is_no_drift():
    calm = sessions(3, 0.0, num_launches=6)
    disturbed = calm.copy()
    disturbed[2, 1] *= 1.25
    result = measure_drift(disturbed.tolist(), slow_sign=1)
    assert result.deviation < 0.005
    assert measure_drift(disturbed.tolist()).launch_deviation > 3 * result.launch_deviation


def test_fractions_drift_in_fractions_and_the_unit_of_others_does_not_matter():
    groups = sessions(1, 0.01)
    here, there = measure_drift(groups), measure_drift(1e9 * groups)
    assert there.deviation == pytest.approx(here.deviation)
    points = measure_drift(np.log(groups), in_points=True)
    assert points.deviation == pytest.approx(here.deviation)
