"""Whether a claim holds when it is measured again.

A claim says that a figure is better or worse by more than the floor, the smallest change that
matters, or that it changed by less than that. Of what is measured again only its own launches
count: the claimed ones were chosen because they showed something.

    held           the new launches have the same verdict: `slower` again, or `same` again
    contradicted   of a change: less than the floor changed in the claimed direction, or nothing, or
                   it changed in the other direction; of `same`: it changed by more than the floor
    not shown      neither

Contradicted needs 99 % confidence: a one-sided interval at 1 %, divided by the number of claims
that are judged together, ends on the other side of the floor. So a true claim, which is one of at
least the floor, is contradicted in at most 1 % of cases whatever its size, and a claim of nothing
is held only where the new launches give a false alarm too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import StrEnum

from ppbench.statistics.drift import additive_interval, least_freedom
from ppbench.statistics.significance import smallest_difference, t_quantile
from ppbench.statistics.step_times import CONFIDENCE
from ppbench.statistics.verdicts import Change, Metric, Verdict

LEVEL_OF_CONTRADICTION = 0.01
"""Largest chance that a true claim is contradicted."""
CHANGES = (Verdict.faster, Verdict.slower)


class Outcome(StrEnum):
    """What measuring again says of a claim."""

    held = "held"
    not_shown = "not shown"
    contradicted = "contradicted"


def judge_again(
    metric: Metric, claimed: Change, again: Change | None, num_claims: int = 1
) -> Outcome:
    """Judge one claim by what was measured again; None where nothing was."""
    if again is None or claimed.verdict not in (*CHANGES, Verdict.same):
        return Outcome.not_shown
    if again.verdict is claimed.verdict:
        return Outcome.held
    return (
        Outcome.contradicted if _excludes(metric, claimed, again, num_claims) else Outcome.not_shown
    )


def _excludes(metric: Metric, claimed: Change, again: Change, num_claims: int) -> bool:
    level = LEVEL_OF_CONTRADICTION / num_claims
    floor = smallest_difference(claimed.floor, in_points=metric.in_points)
    if claimed.verdict is Verdict.same:  # either end may lie beyond
        low, high = (bound(metric, again, sign, level) for sign in (-1, 1))
        most = max(floor, extent(metric, claimed))
        return low is not None and high is not None and (low > most or high < -most)
    sign = 1 if (claimed.verdict is Verdict.faster) == metric.higher_is_better else -1
    end = bound(metric, again, sign, level)
    return end is not None and sign * end < floor


def extent(metric: Metric, change: Change) -> float:
    """The farther end of a change's interval from no change, on the additive scale."""
    interval = additive_interval(metric, change)
    return math.inf if interval is None else max(abs(interval.low), abs(interval.high))


def bound(metric: Metric, change: Change, sign: int, level: float) -> float | None:
    """The end of a one-sided interval, above for a `sign` of 1, on the additive scale.

    It is read from the change's 95 % interval with the fewest degrees of freedom that the test may
    have had, which makes it too wide rather than too narrow.
    """
    interval = additive_interval(metric, change)
    freedom = least_freedom(change)
    if interval is None or freedom < 1:
        return None
    half = (interval.high - interval.estimate) if sign > 0 else (interval.estimate - interval.low)
    if not math.isfinite(half):
        return None
    wider = t_quantile(freedom, 1 - level) / t_quantile(freedom, (1 + CONFIDENCE) / 2)
    return interval.estimate + sign * half * wider


def overall(outcomes: Sequence[Outcome]) -> Outcome:
    """The outcome of several claims: any that is contradicted, then any that is not shown."""
    for outcome in (Outcome.contradicted, Outcome.not_shown):
        if outcome in outcomes:
            return outcome
    return Outcome.held if outcomes else Outcome.not_shown
