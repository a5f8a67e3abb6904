"""Levels against the closed form and a simulated walk; verdicts by simulated sequences."""

import math

import numpy as np
import pytest
import scipy.stats

from ppbench.display.metrics import METRICS
from ppbench.statistics.sequential import (
    LEVEL,
    SPENDING,
    Look,
    Looks,
    Stop,
    _levels,
    forecast,
    is_decided,
    judge,
    looks,
    rule_at,
)
from ppbench.statistics.verdicts import Noise, Pair, Verdict

STEP = METRICS["step_ns"]
SPEED = METRICS["tokens_per_s"]


def until_decided(seed, change=0.0, most=12, noise=None, metric=STEP):
    """The verdict, and the launches a side that it took."""
    draw, at = np.random.default_rng(seed), looks(most)
    base = draw.lognormal(0, 0.008, most)
    head = draw.lognormal(0, 0.008, most) * (1 + change)
    for look, num in enumerate(at):
        pair = Pair(tuple(base[:num]), tuple(head[:num]), noise)
        (result,) = judge(metric, [pair], look, at)
        if is_decided([result]):
            break
    return result.verdict, num


def test_one_looks_after_each_launch_from_the_third():
    assert looks(6) == (3, 4, 5, 6)
    assert looks(5, fewest=4) == (4, 5)
    assert looks(2) == (2,)


def test_the_level_spent_grows_to_the_whole_of_it():
    taken = [Looks(Look(place, looks(12)), Stop.most) for place in range(10)]
    spent = [each.level_spent for each in taken]
    assert spent == sorted(spent)
    assert spent[0] == pytest.approx(LEVEL * (3 / 12) ** SPENDING)
    assert spent[-1] == pytest.approx(LEVEL)
    assert taken[1].as_dict() == {
        "num_looks": 2,
        "launches": [3, 4],
        "max_launches": 12,
        "level_spent": spent[1],
        "is_decided": False,
        "stop": "most launches reached",
    }


def test_the_first_look_spends_its_share():
    first = _levels((3, 6, 12), 0.01)[0]
    assert first == pytest.approx(0.01 * (3 / 12) ** SPENDING)


def test_the_second_level_is_that_of_two_normal_sums():
    """Oracle: the two-dimensional normal distribution."""
    at = (4, 8)
    first, second = (-scipy.stats.norm.ppf(level / 2) for level in _levels(at, 0.05))
    both = scipy.stats.multivariate_normal([0, 0], [[1, math.sqrt(0.5)], [math.sqrt(0.5), 1]])
    ends = [(x, y) for x in (first, -first) for y in (second, -second)]
    inside = both.cdf(ends[0]) - both.cdf(ends[1]) - both.cdf(ends[2]) + both.cdf(ends[3])
    assert 1 - inside == pytest.approx(0.05, abs=1e-4)


def test_a_walk_crosses_with_the_chance_of_all_looks_together():
    at = looks(12)
    sums = np.random.default_rng(0).normal(size=(100_000, 12)).cumsum(axis=1)
    walks = sums[:, np.array(at) - 1] / np.sqrt(at)
    bounds = -scipy.stats.norm.ppf(np.array(_levels(at, 0.05)) / 2)
    assert np.mean((np.abs(walks) > bounds).any(axis=1)) == pytest.approx(0.05, abs=0.003)


@pytest.mark.parametrize("metric", [STEP, SPEED])
def test_a_large_change_takes_hardly_more_than_three_launches(metric):
    results = [until_decided(seed, 0.1, metric=metric) for seed in range(40)]
    verdict = Verdict.slower if metric is STEP else Verdict.faster
    assert {said for said, _ in results} == {verdict}
    assert np.mean([num for _, num in results]) <= 4


def test_without_a_change_sides_are_soon_the_same_and_at_most_1_percent_claim_one():
    num_sequences = 2000
    results = [until_decided(seed) for seed in range(num_sequences)]
    assert np.mean([num for _, num in results]) <= 8
    assert np.mean([verdict is Verdict.same for verdict, _ in results]) >= 0.8
    false = np.mean([verdict in (Verdict.slower, Verdict.faster) for verdict, _ in results])
    assert false <= 0.01 + 3 * (0.01 * 0.99 / num_sequences) ** 0.5


def test_the_same_within_2_percent_is_not_said_of_a_change_of_2_percent():
    results = [until_decided(seed, 0.02)[0] for seed in range(80)]
    assert results.count(Verdict.same) <= 4
    assert results.count(Verdict.slower) > 60


def test_a_quiet_change_below_the_floor_is_the_same_and_one_of_the_floor_is_a_change():
    draw, at = np.random.default_rng(0), looks(12)
    base, head = draw.lognormal(0, 2e-4, (2, 12))
    for change, verdict in ((0.003, Verdict.same), (0.007, Verdict.same), (0.012, Verdict.slower)):
        pair = Pair(tuple(base), tuple(head * (1 + change)))
        assert judge(STEP, [pair], len(at) - 1, at)[0].verdict is verdict


def test_an_estimate_of_most_of_the_floor_can_be_a_change():
    base = np.exp(np.linspace(-0.006, 0.006, 12))
    (change,) = judge(STEP, [Pair(tuple(base), tuple(base * 1.009))], 9, looks(12))
    assert (change.verdict, change.floor) == (Verdict.slower, 0.01)


def test_p_is_compared_with_the_level_of_all_looks():
    at = looks(12)
    base = np.exp(np.linspace(-0.01, 0.01, 5))
    pair = Pair(tuple(base), tuple(base * 1.02))
    (change,) = judge(STEP, [pair], 2, at)
    alone = scipy.stats.ttest_ind(np.log(base * 1.02), np.log(base), equal_var=False).pvalue
    assert change.p == pytest.approx(alone * LEVEL / rule_at(2, at).level)


def test_intervals_are_wider_than_those_of_a_single_look():
    pair = Pair((1.0, 1.01, 0.99), (1.02, 1.03, 1.01))
    (first,) = judge(STEP, [pair], 0, looks(12))
    (single,) = judge(STEP, [pair], 0, (3,))
    assert first.ratio.low < single.ratio.low < single.ratio.high < first.ratio.high


def test_all_verdicts_are_needed():
    base = (1.0, 1.001, 0.999)
    clear, unclear = Pair(base, (1.2, 1.201, 1.199)), Pair(base, (1.02, 1.0, 1.04))
    at = looks(12)
    assert is_decided(judge(STEP, [clear], 0, at))
    assert not is_decided(judge(STEP, [clear, unclear], 0, at))
    assert is_decided([])


def test_a_forecast_names_smaller_changes_for_more_launches():
    result = forecast(Noise(0.008, 20), looks(12), 0.01, 1)
    assert [num for num, _ in result] == list(range(3, 13))
    changes = [change for _, change in result]
    assert changes == sorted(changes, reverse=True)
    assert 0.01 < changes[-1] < 0.015
    assert forecast(Noise(0.008, 20), looks(12), 0.01, 10)[0][1] > changes[0]


def test_the_change_that_is_forecast_is_found_in_about_80_percent():
    num, change = forecast(Noise(0.008, 200), looks(8), 0.01, 1)[-1]
    found = [
        until_decided(seed, change, most=num, noise=Noise(0.008, 200))[0] is Verdict.slower
        for seed in range(150)
    ]
    assert 0.7 < np.mean(found) < 0.95
