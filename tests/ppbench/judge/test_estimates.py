"""Differences over rounds and launches: by hand, by scipy, and by simulation."""

import math

import numpy as np
import pytest
import scipy.stats
from samples import sampled

from ppbench.display.metrics import METRICS
from ppbench.judge.estimates import combined, estimate, level_of, trimmed_mean
from ppbench.judge.evidence import (
    Evidence,
    Launches,
    Noise,
    Rounds,
)
from ppbench.judge.verdicts import Verdict, judge

STEP, SPEED = METRICS["step_ns"], METRICS["tokens_per_s"]


def turns(draw, num=24, *, difference=0.0, turn=0.03, start=0.005, slowed=0.0):
    noise = draw.normal(0, turn, (2, num))
    noise += np.where(draw.random((2, num)) < slowed, draw.uniform(0.1, 0.3, (2, num)), 0)
    noise[1] += difference + draw.normal(0, start)
    base, head = np.exp(noise)
    return Rounds(tuple(base.tolist()), tuple(head.tolist()))


def test_the_mean_of_rounds_is_scipys_trimmed_one():
    values = np.random.default_rng(0).normal(0, 1, 30)
    mean, _, freedom = trimmed_mean(values)
    assert mean == pytest.approx(scipy.stats.trim_mean(values, 0.2))
    assert freedom == 6  # seven batches of four


def test_the_variance_of_independent_rounds_is_yuens():
    draw = np.random.default_rng(1)
    found = [trimmed_mean(values)[1] / 40 for values in draw.normal(0, 1, (2000, 40))]
    means = [trimmed_mean(values)[0] for values in draw.normal(0, 1, (4000, 40))]
    assert np.mean(found) == pytest.approx(np.var(means), rel=0.06)
    values = draw.standard_t(3, 40)
    oracle = scipy.stats.ttest_ind(values, np.zeros(40), trim=0.2, equal_var=False)
    yuen = (np.mean(np.sort(values)[8:32]) / oracle.statistic) ** 2
    many = [trimmed_mean(draw.permutation(values))[1] / 40 for _ in range(1000)]
    assert np.mean(many) == pytest.approx(yuen, rel=0.06)


def test_correlated_neighbours_widen_the_error():
    draw = np.random.default_rng(2)
    plain = draw.normal(0, 1, (800, 60))
    pairs = np.repeat(draw.normal(0, 1, (800, 30)), 2, axis=1)
    spread = [np.mean([trimmed_mean(values)[1] for values in series]) for series in (plain, pairs)]
    assert spread[1] == pytest.approx(2 * spread[0], rel=0.15)


def test_an_order_that_favours_one_side_in_turn_does_not_widen_it():
    draw = np.random.default_rng(3)
    values = draw.normal(0, 0.01, 40)
    favoured = values + 0.03 * (-1.0) ** np.arange(40)
    assert trimmed_mean(favoured)[0] == pytest.approx(0, abs=0.012)
    assert trimmed_mean(favoured)[1] < 4 * trimmed_mean(values)[1]


def test_one_round_says_nothing_of_its_error_and_none_says_nothing():
    level = level_of(STEP, Rounds((100.0,), (110.0,)))
    assert level.estimate == pytest.approx(math.log(1.1))
    assert (math.isnan(level.variance), level.freedom) == (True, 0)
    assert level_of(STEP, Rounds((), ())) is None
    assert level_of(STEP, Rounds((math.nan, 1.0), (1.0, 0.0))) is None


def test_a_disturbed_round_does_not_count():
    quiet = [100.0, 100.4, 99.7, 100.2, 99.9, 100.1, 99.8, 100.3]
    head = [102.1, 102.3, 101.9, 101.8, 102.2, 102.0, 101.7, 102.4]
    head[5] *= 1.4
    found = estimate(STEP, Evidence(paired=(Rounds(tuple(quiet), tuple(head)),)))
    assert found.difference.estimate == pytest.approx(math.log(1.02), abs=2e-3)


def test_one_launch_decides_only_with_a_known_noise_of_starts():
    launch = turns(np.random.default_rng(4), 40, difference=0.05, turn=0.01, start=0.0)
    (alone,) = judge(STEP, [Evidence(paired=(launch,))])
    assert (alone.verdict, alone.has_interval) == (Verdict.open, False)
    assert alone.exact.estimate == pytest.approx(0.05, abs=0.01)
    for starts, verdict in ((0.003, Verdict.slower), (0.03, Verdict.open)):
        evidence = Evidence(paired=(launch,), starts=Noise(starts, 9))
        assert judge(STEP, [evidence])[0].verdict is verdict


def test_one_launch_never_claims_less_than_starts_differ_by_however_many_rounds_it_has():
    launch = turns(np.random.default_rng(5), 4000, difference=0.008, turn=0.01, start=0.0)
    (change,) = judge(STEP, [Evidence(paired=(launch,), starts=Noise(0.005, 200))])
    half = scipy.stats.norm.ppf(0.975) * 0.005
    assert math.log(change.ratio.high / change.ratio.low) / 2 == pytest.approx(half, rel=0.03)
    assert not change.verdict.is_claim


def test_equal_launches_are_combined_by_students_t_of_their_means():
    draw = np.random.default_rng(6)
    levels = [level_of(STEP, turns(draw)) for _ in range(5)]
    difference = combined(levels)
    oracle = scipy.stats.ttest_1samp([level.estimate for level in levels], 0)
    assert difference.p == pytest.approx(oracle.pvalue)
    assert difference.freedom == 4


def test_a_launch_of_fewer_rounds_weighs_less():
    draw = np.random.default_rng(7)
    many = [turns(draw, 40, start=0.0) for _ in range(4)]
    few = turns(draw, 4, difference=0.04, start=0.0)
    difference = combined([level_of(STEP, each) for each in (*many, few)], Noise(0.001, 50))
    means = [level_of(STEP, each).estimate for each in (*many, few)]
    assert difference.estimate == pytest.approx(np.average(means, weights=[40] * 4 + [4]), rel=0.05)


def test_launches_that_scatter_more_than_known_starts_are_judged_by_themselves():
    draw = np.random.default_rng(8)
    launches = tuple(turns(draw, turn=0.005, start=0.03) for _ in range(6))
    known = estimate(STEP, Evidence(paired=launches, starts=Noise(0.001, 20)))
    assert known.difference == estimate(STEP, Evidence(paired=launches)).difference


@pytest.mark.parametrize(
    ("start", "turn", "slowed", "is_known"),
    sampled(
        (*kind, is_known)
        for is_known in (True, False)
        for kind in ((0.005, 0.03, 0.2), (0.005, 0.03, 0.0), (0.03, 0.08, 0.0))
    ),
)
def test_intervals_hold_the_true_difference_in_95_percent(start, turn, slowed, is_known):
    draw, held = np.random.default_rng(9), []
    for _ in range(500):
        launches = tuple(
            turns(draw, 16, difference=0.02, turn=turn, start=start, slowed=slowed)
            for _ in range(4)
        )
        known = Noise(start * math.sqrt(draw.chisquare(15) / 15), 15) if is_known else None
        (change,) = judge(STEP, [Evidence(paired=launches, starts=known)])
        held.append(change.ratio.low <= math.exp(0.02) <= change.ratio.high)
    assert np.mean(held) == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 500))


def test_a_launch_that_was_stopped_after_two_rounds_does_not_count_yet():
    draw = np.random.default_rng(10)
    whole = tuple(turns(draw) for _ in range(3))
    begun = Rounds((1.0, 1.0), (1.5, 1.6))
    found = estimate(STEP, Evidence(paired=(*whole, begun)))
    assert found == estimate(STEP, Evidence(paired=whole))


# Sessions

STEADY = (1000.0, 1004.0, 997.0, 1002.0, 999.0)
SLOWER = tuple(0.95 * speed for speed in STEADY)


def in_sessions(base, head, base_sessions, head_sessions, drift=None):
    return Evidence(
        Launches(base, sessions=base_sessions),
        Launches(head, sessions=head_sessions),
        drift=drift,
    )


@pytest.mark.parametrize(
    ("head", "drift", "verdict"),
    [
        (SLOWER, None, Verdict.slower),
        (SLOWER, Noise(0.05, 5), Verdict.open),  # larger than the change
        (SLOWER, Noise(0.002, 39), Verdict.slower),
        (SLOWER, Noise(0.01, 1), Verdict.open),  # two sessions say little
        (STEADY, Noise(0.0001, 39), Verdict.same),
        (STEADY, Noise(0.02, 39), Verdict.open),
    ],
)
def test_a_verdict_across_sessions_stands_only_while_the_drift_leaves_it(head, drift, verdict):
    (change,) = judge(SPEED, [in_sessions(STEADY, head, (0,) * 5, (1,) * 5, drift)])
    assert change.verdict is verdict
    shared = in_sessions(STEADY, head, (0,) * 5, (0,) * 5, drift)
    assert judge(SPEED, [shared])[0].verdict is not Verdict.open


def test_the_drift_is_in_the_difference_by_the_shares_of_sessions():
    assert in_sessions(STEADY, STEADY, (0,) * 5, (1,) * 5).sessions_apart == 2
    assert in_sessions(STEADY, STEADY, (0, 0, 1, 1, 1), (1, 1, 1, 0, 0)).sessions_apart == 0
    half = in_sessions(STEADY[:2], STEADY[:2], (0, 1), (0, 0))
    assert half.sessions_apart == pytest.approx(0.5**2 + 0.5**2)
    assert in_sessions(STEADY, STEADY, (0,) * 5, (-1,) * 5).sessions_apart == 0


def test_the_interval_is_that_of_the_drift_alone_where_launches_do_not_differ():
    flat = in_sessions((1000.0,) * 5, (950.0,) * 5, (0,) * 5, (1,) * 5, Noise(0.01, 8))
    (change,) = judge(SPEED, [flat])
    half = scipy.stats.t.ppf(0.975, 8) * 0.01 * math.sqrt(2)
    assert math.log(change.ratio.high / change.ratio.estimate) == pytest.approx(half)
