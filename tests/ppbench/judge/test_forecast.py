"""What is forecast against what simulated comparisons find."""

import math

import numpy as np
import pytest

from ppbench.display.metrics import METRICS
from ppbench.judge.evidence import Evidence, Launches, Noise
from ppbench.judge.forecast import (
    MOST_LAUNCHES,
    found_by,
    launches_needed,
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
