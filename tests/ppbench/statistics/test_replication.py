"""What measuring again says of a claim: held, not shown, contradicted."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from ppbench.display.metrics import METRICS
from ppbench.statistics.replication import Outcome, bound, judge_again, overall
from ppbench.statistics.significance import Ratio
from ppbench.statistics.verdicts import Change, Pair, Verdict, compare

SPEED, BUBBLE = METRICS["tokens_per_s"], METRICS["bubble_fraction"]


def change(low: float, high: float, verdict: Verdict, num: int = 30) -> Change:
    """A change of speed whose interval is symmetric, so much as many launches know."""
    estimate = (low * high) ** 0.5
    return Change(
        1000.0, 1000.0 * estimate, Ratio(estimate, low, high), 0.0, verdict, num, num, 0.01
    )


SLOWER = change(0.94, 0.96, Verdict.slower)
FASTER = change(1.04, 1.06, Verdict.faster)
SAME = change(0.997, 1.003, Verdict.same)
UNCLEAR = change(0.93, 1.05, Verdict.unclear)


@pytest.mark.parametrize(
    ("claimed", "again", "outcome"),
    [
        (SLOWER, SLOWER, Outcome.held),
        (SLOWER, change(0.97, 0.98, Verdict.slower), Outcome.held),
        (SLOWER, SAME, Outcome.contradicted),
        (SLOWER, FASTER, Outcome.contradicted),
        (SLOWER, UNCLEAR, Outcome.not_shown),
        (SLOWER, change(0.985, 0.995, Verdict.unclear), Outcome.not_shown),
        (SLOWER, change(1.002, 1.04, Verdict.unclear), Outcome.contradicted),
        (FASTER, SAME, Outcome.contradicted),
        (FASTER, SLOWER, Outcome.contradicted),
        (FASTER, UNCLEAR, Outcome.not_shown),
        (SAME, SAME, Outcome.held),
        (SAME, SLOWER, Outcome.contradicted),
        (SAME, FASTER, Outcome.contradicted),
        (SAME, UNCLEAR, Outcome.not_shown),
        (UNCLEAR, SLOWER, Outcome.not_shown),
        (SLOWER, None, Outcome.not_shown),
    ],
)
def test_claims_are_judged_by_the_new_launches(claimed, again, outcome):
    assert judge_again(SPEED, claimed, again) is outcome


def test_a_same_whose_one_percent_end_reaches_the_floor_contradicts_nothing():
    almost = change(0.9903, 1.006, Verdict.same)
    assert judge_again(SPEED, SLOWER, almost) is Outcome.not_shown
    assert judge_again(SPEED, FASTER, change(0.995, 1.005, Verdict.same)) is Outcome.contradicted


def test_figures_in_points_are_judged_alike_and_less_is_better():
    more = Change(0.2, 0.25, None, 0.0, Verdict.slower, 9, 9, 0.01, Ratio(0.05, 0.04, 0.06))
    none = replace(more, verdict=Verdict.same, difference=Ratio(0.0, -0.002, 0.002))
    less = replace(more, verdict=Verdict.faster, difference=Ratio(-0.05, -0.06, -0.04))
    outcomes = [judge_again(BUBBLE, more, again) for again in (more, none, less)]
    assert outcomes == [Outcome.held, Outcome.contradicted, Outcome.contradicted]


def test_too_few_launches_contradict_nothing():
    few = Change(1000.0, 1000.0, None, None, Verdict.insufficient, 1, 1, 0.01)
    assert judge_again(SPEED, SLOWER, few) is Outcome.not_shown


def test_the_one_sided_end_is_that_of_students_distribution():
    end = bound(SPEED, SAME, 1, 0.01)
    half = np.log(1.003) - np.log((0.997 * 1.003) ** 0.5)
    ratio = stats.t.ppf(0.99, 29) / stats.t.ppf(0.975, 29)
    assert end == pytest.approx(np.log((0.997 * 1.003) ** 0.5) + half * ratio)


def test_any_contradicted_claim_contradicts_all_and_any_open_one_leaves_them_open():
    held, open_, contradicted = Outcome.held, Outcome.not_shown, Outcome.contradicted
    assert overall([held, held]) is held
    assert overall([held, open_]) is open_
    assert overall([open_, contradicted, held]) is contradicted
    assert overall([]) is open_


def _changes(rng: np.random.Generator, effect: float, num: int) -> list[Change]:
    """Comparisons of five launches a side that differ by 0.6 %, with a true effect."""
    base, head = (np.exp(rng.normal(level, 0.006, (num, 5))) for level in (0.0, np.log1p(effect)))
    pairs = (Pair(tuple(b), tuple(h)) for b, h in zip(base.tolist(), head.tolist(), strict=True))
    return [compare(SPEED, [pair])[0] for pair in pairs]


@pytest.mark.parametrize(("effect", "least_held"), [(-0.0101, 0.0), (-0.03, 0.9)])
def test_a_true_claim_is_contradicted_in_one_percent_at_most(effect, least_held):
    rng = np.random.default_rng(11)
    found = [c for c in _changes(rng, -0.03, 150) if c.verdict is Verdict.slower]
    again = _changes(rng, effect, len(found))
    counts = Counter(judge_again(SPEED, c, a) for c, a in zip(found, again, strict=True))
    most = stats.binom.ppf(0.999, len(found), 0.01)
    assert counts[Outcome.contradicted] <= most
    assert counts[Outcome.held] >= least_held * len(found)


def test_a_claim_of_nothing_is_hardly_ever_held():
    rng = np.random.default_rng(12)
    found = [c for c in _changes(rng, -0.03, 150) if c.verdict is Verdict.slower]
    again = _changes(rng, 0.0, len(found))
    counts = Counter(judge_again(SPEED, c, a) for c, a in zip(found, again, strict=True))
    assert counts[Outcome.held] <= stats.binom.ppf(0.999, len(found), 0.01)
    assert counts[Outcome.contradicted] >= 0.2 * len(found)
