"""Deviations by hand, their intervals by simulation."""

import math

import numpy as np
import pytest
import scipy.stats

from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import Evidence, Launches, Noise, Rounds
from ppbench.judge.noise import drift_of, noise_of_launches, noise_of_rounds
from ppbench.judge.verdicts import judge

STEP, SPEED, BUBBLE, MEMORY = (
    METRICS[name] for name in ("step_ns", "tokens_per_s", "bubble_fraction", "peak_memory_bytes")
)


def test_the_deviation_is_relative_and_pooled_around_each_groups_own_mean():
    first = np.exp([0.0, 0.02])  # squares 2 * 0.01 ** 2, one degree of freedom
    second = 1000 * np.exp([0.0, 0.03, 0.06])  # 2 * 0.03 ** 2, two
    result = noise_of_launches(STEP, [first, second])
    assert result.noise.deviation == pytest.approx(math.sqrt((2 * 0.01**2 + 2 * 0.03**2) / 3))
    assert result.noise.freedom == 3


def test_sessions_that_differ_by_3_percent_are_no_noise_of_launches():
    """The second half of FAULT 4: noise 1.63 % where launches differ by 0.27 %."""
    draw = np.random.default_rng(0)
    sessions = [np.exp(level + draw.normal(0, 0.0027, 5)) for level in (0.0, 0.03)]
    assert noise_of_launches(STEP, sessions).noise.deviation < 0.005
    assert np.std(np.log(np.concatenate(sessions)), ddof=1) > 0.015


def test_only_kept_launches_count():
    """The first half of FAULT 4: ten launches of which four were left out counted as ten."""
    level = noise_of_launches(STEP, [[1.0, 1.001, 1.002, 0.999, 1.3]])
    assert level.noise.freedom == 3
    assert level.left_out == ((4,),)
    assert noise_of_launches(STEP, [[5.0], [1.0, 1.3]]).left_out == ((), ())
    assert noise_of_launches(MEMORY, [[1.0, 1.001, 1.002, 0.999, 1.3]]).left_out == ((),)


def test_a_fractions_deviation_is_in_fractions():
    found = noise_of_launches(BUBBLE, [[0.1, 0.12]])
    assert found.noise.deviation == pytest.approx(0.02 / math.sqrt(2))
    assert noise_of_launches(BUBBLE, [[0.0, -0.01]]).noise.deviation > 0


def test_its_interval_is_that_of_chi_square():
    result = noise_of_launches(MEMORY, [np.exp(np.random.default_rng(0).normal(0, 0.01, 20))])
    quantiles = scipy.stats.chi2.ppf([0.975, 0.025], 19)
    expected = result.noise.deviation * np.sqrt(19 / quantiles)
    assert (result.low, result.high) == pytest.approx(expected)


@pytest.mark.parametrize("bad", [0.0, math.nan])
def test_figures_without_a_logarithm_are_refused(bad):
    with pytest.raises(ValueError, match="expected finite figures above 0"):
        noise_of_launches(STEP, [[1.0, bad]])


def test_disturbed_launches_are_no_noise():
    draw, share = np.random.default_rng(4), 0.2
    launches = draw.lognormal(0, 0.008, (300, 20))
    slow = draw.random(launches.shape) < share
    launches *= np.where(slow, draw.uniform(1.1, 1.35, launches.shape), 1.0)
    known = [noise_of_launches(STEP, [case]).noise for case in launches]
    assert np.median([noise.deviation for noise in known]) == pytest.approx(0.008, rel=0.07)
    inverse = noise_of_launches(SPEED, [1 / launches[0]]).noise
    assert inverse.deviation == pytest.approx(known[0].deviation)


# Rounds and starts


def launches_in_turns(draw, num, *, start, turn, num_rounds=40, level=0.0):
    found = []
    for _ in range(num):
        difference = level + draw.normal(0, start)
        base, head = np.exp(draw.normal([[0], [difference]], turn, (2, num_rounds)))
        found.append(Rounds(tuple(base.tolist()), tuple(head.tolist())))
    return found


def test_starts_and_rounds_are_told_apart():
    draw = np.random.default_rng(1)
    found = noise_of_rounds(STEP, [launches_in_turns(draw, 300, start=0.01, turn=0.03)])
    assert found.starts.deviation == pytest.approx(0.01, rel=0.1)
    trimmed = 1.07  # the trimmed mean of normal values deviates so much more than their mean
    assert found.rounds.deviation == pytest.approx(0.03 * math.sqrt(2) * trimmed, rel=0.05)
    assert 100 < found.starts.freedom <= 299


def test_starts_are_pooled_around_each_groups_own_mean():
    draw = np.random.default_rng(2)
    groups = [
        launches_in_turns(draw, 60, start=0.004, turn=0.01, level=level) for level in (0.0, 0.05)
    ]
    assert noise_of_rounds(STEP, groups).starts.deviation == pytest.approx(0.004, rel=0.2)


def test_rounds_that_hide_what_starts_differ_by_leave_it_badly_known():
    draw = np.random.default_rng(3)
    clear = noise_of_rounds(STEP, [launches_in_turns(draw, 10, start=0.02, turn=0.01)]).starts
    hidden = noise_of_rounds(STEP, [launches_in_turns(draw, 10, start=0.0, turn=0.1)]).starts
    assert clear.freedom > 8
    assert hidden.deviation > 0
    assert hidden.freedom < 3


def test_a_single_launch_shows_the_noise_of_rounds_alone():
    draw = np.random.default_rng(4)
    found = noise_of_rounds(STEP, [launches_in_turns(draw, 1, start=0.01, turn=0.03)])
    assert found.starts is None
    assert found.rounds is not None
    assert noise_of_rounds(STEP, [[Rounds((1.0,), (1.0,))]]).rounds is None


# Drift


def sessions(seed, drift, num_sessions=6, num_launches=4, deviation=0.008):
    draw = np.random.default_rng(seed)
    levels = draw.normal(0, drift, (num_sessions, 1))
    return np.exp(levels + draw.normal(0, deviation, (num_sessions, num_launches)))


def drift_in(groups, metric=STEP):
    return drift_of(metric, [groups], len(groups))


def test_the_drift_is_that_of_the_analysis_of_variance():
    """Means 0.01, 0.03 and 0.05: variance 0.0004; within, 0.0002 of each of two launches."""
    drift = drift_in([np.exp([0.0, 0.02]), np.exp([0.02, 0.04]), np.exp([0.04, 0.06])])
    assert drift.deviation == pytest.approx(math.sqrt(0.0004 - 0.0002 / 2))
    assert drift == Noise(drift.deviation, 2)


def test_sessions_that_agree_better_than_their_launches_have_no_drift():
    drift = drift_in([[0.99, 1.01], [1.01, 0.99], [0.99, 1.01]])
    assert drift == Noise(0.0, 2)


@pytest.mark.parametrize("drift", [0.01, 0.02])
def test_the_mean_of_estimates_is_the_drift(drift):
    found = [drift_in(sessions(seed, drift).tolist()) for seed in range(400)]
    assert np.mean([each.deviation**2 for each in found]) == pytest.approx(drift**2, rel=0.2)


def test_sessions_of_different_sizes_are_weighed_alike():
    draw = np.random.default_rng(0)
    found = []
    for _ in range(300):
        levels = draw.normal(0, 0.01, 5)
        groups = [
            np.exp(level + draw.normal(0, 0.008, num))
            for level, num in zip(levels, (1, 2, 3, 8, 8), strict=True)
        ]
        found.append(drift_in(groups).deviation ** 2)
    assert np.mean(found) == pytest.approx(0.01**2, rel=0.2)


def test_a_disturbed_launch_is_no_drift():
    groups = sessions(3, 0.0, num_launches=6)
    groups[2, 1] *= 1.25
    assert drift_in(groups.tolist()).deviation < 0.005


def test_states_that_were_measured_in_the_same_sessions_count_once():
    states = [sessions(seed, 0.01, num_sessions=4) for seed in (1, 2)]
    alone = [drift_in(state) for state in states]
    pooled = drift_of(STEP, states, 4)
    assert pooled.deviation == pytest.approx(
        math.sqrt(np.mean([each.deviation**2 for each in alone]))
    )
    assert pooled.freedom == 3
    assert drift_of(STEP, states, 8).freedom == 6
    assert drift_of(STEP, [], 3) is None
    assert drift_of(STEP, [states[0], [[1.0]]], 4) == alone[0]


def test_intervals_with_drift_hold_the_truth_across_sessions():
    """Each side in one session of its own; the drift is known from eight others."""
    draw = np.random.default_rng(5)
    held = alone = 0
    for _ in range(200):
        levels = draw.normal(0, 0.01, 10)
        groups = [np.exp(level + draw.normal(0, 0.004, 5)) for level in levels]
        known = drift_in([each.tolist() for each in groups[2:]])
        base, head = (tuple(each.tolist()) for each in groups[:2])
        sides = Launches(base, sessions=(0,) * 5), Launches(head, sessions=(1,) * 5)
        wide, narrow = (judge(SPEED, [Evidence(*sides, drift=drift)])[0] for drift in (known, None))
        held += wide.ratio.low <= 1 <= wide.ratio.high
        alone += narrow.ratio.low <= 1 <= narrow.ratio.high
    assert held / 200 > 0.92
    assert alone / 200 < 0.6  # launches alone promise far too much
