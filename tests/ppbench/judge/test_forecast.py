"""What is forecast against what simulated comparisons find."""

import math

import numpy as np
import pytest

from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import Evidence, Launches, Noise, Rounds
from ppbench.judge.forecast import (
    MOST_LAUNCHES,
    Needed,
    found_by,
    launches_needed,
    rounds_needed,
)
from ppbench.judge.verdicts import Verdict, judge

STEP, MEMORY = METRICS["step_ns"], METRICS["peak_memory_bytes"]


@pytest.mark.parametrize("num", [3, 4, 8])
def test_the_change_that_is_forecast_is_found_in_about_80_percent(num):
    draw, noise = np.random.default_rng(num), Noise(0.008, 30)
    change = found_by(noise, num)
    found = []
    for _ in range(600):
        base, head = (tuple(draw.lognormal(0, 0.008, num)) for _ in range(2))
        head = tuple(value * (1 + change) for value in head)
        known = Noise(0.008 * math.sqrt(draw.chisquare(30) / 30), 30)
        sides = Launches(base), Launches(head)
        evidence = Evidence(*sides, noise=known, resolution=0.001)
        found.append(judge(MEMORY, [evidence])[0].verdict)
    assert found.count(Verdict.slower) / len(found) == pytest.approx(0.8, abs=0.05)


def test_more_launches_find_smaller_changes_and_without_noise_any_is_found():
    changes = [found_by(Noise(0.01, 20), num) for num in (2, 3, 5, 10, 1000)]
    assert changes == sorted(changes, reverse=True)
    assert found_by(Noise(0.0, 5), 3) == 0
    assert found_by(Noise(0.01, 20), 5, level=0.001) > changes[2]


def change_of(spread, ahead, num=3):
    base = np.exp(spread * np.linspace(-1, 1, num))
    evidence = Evidence(Launches(tuple(base)), Launches(tuple(base * (1 + ahead))))
    return judge(STEP, [evidence])[0]


def test_more_scatter_needs_more_launches_and_a_difference_at_the_resolution_too_many():
    quiet, noisy = (launches_needed(change_of(spread, 0.05)) for spread in (0.012, 0.02))
    assert 3 < quiet < noisy <= MOST_LAUNCHES
    assert launches_needed(change_of(0.02, 0.0)) > 3  # until it is the same
    assert launches_needed(change_of(0.05, 0.012)) is None
    assert launches_needed(change_of(0.01, 0.05, num=2)) is None  # of unknown spread
    assert launches_needed(change_of(0.012, 0.05), num_tests=20) > quiet


def test_launches_and_rounds_that_are_forecast_decide_in_about_80_percent():
    starts, rounds, draw = Noise(0.004, 20), Noise(0.06, 200), np.random.default_rng(0)
    needed = rounds_needed(0.03, starts, rounds)
    found = []
    for _ in range(300):
        launches = []
        for _ in range(needed.num_launches):
            noise = draw.normal(0, 0.06 / 1.07, needed.num_rounds) + draw.normal(0, 0.004) + 0.03
            launches.append(Rounds((1.0,) * len(noise), tuple(np.exp(noise))))
        evidence = Evidence(paired=tuple(launches), starts=starts)
        found.append(judge(STEP, [evidence])[0].verdict)
    assert found.count(Verdict.slower) / len(found) == pytest.approx(0.8, abs=0.08)
    assert found.count(Verdict.faster) == 0


def test_one_launch_is_enough_where_starts_differ_by_little_and_none_where_by_too_much():
    rounds = Noise(0.03, 200)
    assert rounds_needed(0.05, Noise(0.003, 20), rounds).num_launches == 1
    assert rounds_needed(0.05, Noise(0.02, 20), rounds).num_launches >= 3
    assert rounds_needed(0.019, Noise(0.03, 20), rounds) is None


def test_dear_starts_are_traded_for_rounds():
    few, many = (
        rounds_needed(0.02, Noise(0.005, 20), Noise(0.05, 200), cost_of_start=cost)
        for cost in (200.0, 1.0)
    )
    assert isinstance(few, Needed)
    assert few.num_launches < many.num_launches
    assert few.num_rounds > many.num_rounds
