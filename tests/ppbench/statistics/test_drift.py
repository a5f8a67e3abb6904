"""The drift between sessions in the difference of sides that share none."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from scipy import stats

from ppbench.display.metrics import METRICS
from ppbench.statistics.drift import pool_drifts, with_drift, without_drift
from ppbench.statistics.sessions import Drift, measure_drift
from ppbench.statistics.verdicts import Pair, Verdict, compare

SPEED = METRICS["tokens_per_s"]
STEADY = (1000.0, 1004.0, 997.0, 1002.0, 999.0)
SLOWER = tuple(0.95 * speed for speed in STEADY)


def drift(deviation: float, num_sessions: int, launch_deviation: float = 0.003) -> Drift:
    return Drift(deviation, 0.0, math.inf, launch_deviation, num_sessions, 5 * num_sessions)


def change_of(head: tuple[float, ...]):
    return compare(SPEED, [Pair(STEADY, head)])[0]


@pytest.mark.parametrize(
    ("head", "alone", "known", "verdict"),
    [
        (SLOWER, Verdict.slower, drift(0.05, 6), Verdict.unclear),  # larger than the change
        (SLOWER, Verdict.slower, drift(0.002, 40), Verdict.slower),
        (SLOWER, Verdict.slower, drift(0.01, 2), Verdict.unclear),  # two sessions say little
        (STEADY, Verdict.same, drift(0.0001, 40), Verdict.same),
        (STEADY, Verdict.same, drift(0.02, 40), Verdict.unclear),
    ],
)
def test_a_verdict_stands_only_while_the_drift_leaves_it(head, alone, known, verdict):
    change = change_of(head)
    wide = with_drift(SPEED, change, known, 2.0)
    assert (change.verdict, wide.verdict) == (alone, verdict)
    assert wide.ratio.estimate == pytest.approx(change.ratio.estimate)


def test_no_drift_or_a_shared_session_changes_nothing():
    change = change_of(SLOWER)
    assert with_drift(SPEED, change, drift(0.0, 9), 2.0) == change
    assert with_drift(SPEED, change, drift(0.05, 9), 0.0) == change


def test_the_interval_is_that_of_the_drift_alone_where_launches_do_not_differ():
    flat = compare(SPEED, [Pair((1000.0,) * 5, (950.0,) * 5)])[0]
    wide = with_drift(SPEED, flat, drift(0.01, 9), 2.0)
    half = stats.t.ppf(0.975, 8) * 0.01 * math.sqrt(2)
    assert math.log(wide.ratio.high / wide.ratio.estimate) == pytest.approx(half)


def test_intervals_with_drift_hold_the_truth_across_sessions():
    """Each side in one session of its own; the drift is known from eight others."""
    rng = np.random.default_rng(5)
    held = alone = 0
    for _ in range(200):
        levels = rng.normal(0, 0.01, 10)
        sessions = [np.exp(level + rng.normal(0, 0.004, 5)) for level in levels]
        known = measure_drift([each.tolist() for each in sessions[2:]])
        base, head = (tuple(each.tolist()) for each in sessions[:2])
        change = compare(SPEED, [Pair(base, head)])[0]
        wide = with_drift(SPEED, change, known, 2.0)
        held += wide.ratio.low <= 1 <= wide.ratio.high
        alone += change.ratio.low <= 1 <= change.ratio.high
    assert held / 200 > 0.92
    assert alone / 200 < 0.6  # launches alone promise far too much


def test_states_that_were_measured_in_the_same_sessions_count_once():
    pooled = pool_drifts([drift(0.01, 4), drift(0.03, 4)], 4)
    assert pooled.deviation == pytest.approx(math.sqrt((0.01**2 + 0.03**2) / 2))
    assert (pooled.num_sessions, pooled.num_launches) == (4, 40)
    assert pool_drifts([drift(0.01, 3), drift(0.01, 3)], 6).num_sessions == 5
    assert pool_drifts([], 3) is None


def _shared(rng: np.random.Generator, effect: float) -> tuple[tuple[float, ...], ...]:
    """Two sessions that differ by 4 %, of five launches a side that differ by 0.6 %."""
    levels = np.repeat([0.0, 0.04], 5)
    sides = (levels + side + rng.normal(0, 0.006, 10) for side in (0.0, np.log1p(effect)))
    return tuple(tuple(np.exp(side).tolist()) for side in sides)


def test_sides_that_share_their_sessions_are_compared_as_if_they_had_been_one():
    rng, sessions = np.random.default_rng(9), ((0,) * 5 + (1,) * 5,) * 2
    found = Counter()
    for _ in range(60):
        sides = _shared(rng, -0.02)
        levelled = without_drift(SPEED, sides, sessions)
        for name, (base, head) in (("raw", sides), ("level", levelled)):
            found[name, compare(SPEED, [Pair(base, head)])[0].verdict] += 1
    assert found["raw", Verdict.slower] < 20
    assert found["level", Verdict.slower] > 55


def test_what_sessions_add_is_removed_and_the_difference_stays():
    base, head = without_drift(
        SPEED, ((100.0, 100.0, 200.0, 200.0), (90.0, 90.0, 180.0, 180.0)), ((0, 0, 1, 1),) * 2
    )
    assert np.ptp(np.log(base)) == pytest.approx(0, abs=1e-12)
    assert np.mean(np.log(head)) - np.mean(np.log(base)) == pytest.approx(math.log(0.9))


def test_figures_without_a_logarithm_stay_as_they_are():
    sides = ((0.0, 1.0, 2.0, 3.0), (1.0, 2.0, 3.0, math.nan))
    kept = without_drift(SPEED, sides, ((0, 0, 1, 1),) * 2)
    assert kept[0] == sides[0]
    assert kept[1][:3] == sides[1][:3]
