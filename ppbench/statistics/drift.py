"""What the drift between sessions adds to a comparison whose sides share no session, or not alike.

Sides that are measured in turn share their sessions: the drift is in both, and not in their
difference. Sides of different sessions differ by the drift too, whose variance is added to that of
the launches. Each variance is an estimate with degrees of freedom of its own, so the interval and
the test take those of the sum, after Satterthwaite (Biometrics Bulletin 2, 1946). Two sessions have
one degree of freedom, and say little: the interval is then as wide as that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ppbench.statistics.sessions import Drift
from ppbench.judge.differences import (
    Difference,
    Ratio,
    additive,
    ratio_of_logs,
    smallest_difference,
    t_quantile,
)
from ppbench.statistics.step_times import CONFIDENCE
from ppbench.statistics.verdicts import LEVEL_WITH_NOISE, Change, Metric, Verdict

_IN_TAIL = (1 + CONFIDENCE) / 2


def pool_drifts(drifts: Sequence[Drift], num_sessions: int) -> Drift | None:
    """The drift that several states of the code have shown, weighted by their sessions.

    `num_sessions` is that of the sessions of all together: states that were measured in the same
    ones say the same twice. None without a drift.
    """
    if not drifts:
        return None
    if len(drifts) == 1:
        return drifts[0]
    weights = [drift.num_sessions - 1 for drift in drifts]
    launches = [drift.num_launches - drift.num_sessions for drift in drifts]
    low, high, deviation = (
        _root_mean([getattr(drift, name) for drift in drifts], weights)
        for name in ("low", "high", "deviation")
    )
    return Drift(
        deviation,
        low,
        high,
        _root_mean([drift.launch_deviation for drift in drifts], launches),
        min(num_sessions, sum(weights) + 1),
        sum(drift.num_launches for drift in drifts),
    )


def _root_mean(deviations: Sequence[float], weights: Sequence[int]) -> float:
    squares = [
        weight * deviation**2
        for weight, deviation in zip(weights, deviations, strict=True)
        if weight
    ]
    return math.sqrt(sum(squares) / sum(weights))


def with_drift(
    metric: Metric, change: Change, drift: Drift, apart: float, num_pairs: int = 1
) -> Change:
    """A change with the drift between sessions in its interval, its p and its verdict.

    `apart` is how many times the drift's variance is in the difference, at most 2, and `num_pairs`
    how many comparisons were tested together.
    """
    # The change as a difference, of logarithms or fractions.
    interval = change.difference if metric.in_points else change.ratio
    if interval is not None and not metric.in_points:
        ends = (interval.estimate, interval.low, interval.high)
        interval = Ratio(*(math.log(end) if end > 0 else -math.inf for end in ends))
    extra = drift.deviation**2 * apart
    if interval is None or extra == 0 or not math.isfinite(interval.high - interval.low):
        return change
    # The variance of the launches is read from their interval; its test had at least the degrees of
    # freedom of the smaller side.
    sides = (("base", change.num_base), ("head", change.num_head))
    left_out = [str(discount.side) for discount in change.discounts]
    own_freedom = max(min(num - left_out.count(side) for side, num in sides) - 1, 1)
    half = (interval.high - interval.low) / 2
    own = (half / t_quantile(own_freedom, _IN_TAIL)) ** 2
    total = own + extra
    freedom = total**2 / (own**2 / own_freedom + extra**2 / (drift.num_sessions - 1))
    difference = Difference(interval.estimate, math.sqrt(total), freedom)
    p = max(change.p or 0.0, min(1.0, difference.p * num_pairs))
    is_lost = (
        not difference.is_within(smallest_difference(change.floor, in_points=metric.in_points))
        if change.verdict is Verdict.same
        else change.verdict in (Verdict.faster, Verdict.slower) and p >= LEVEL_WITH_NOISE
    )
    return dataclasses.replace(
        change,
        p=p,
        verdict=Verdict.unclear if is_lost else change.verdict,
        ratio=change.ratio if metric.in_points else ratio_of_logs(difference),
        difference=difference.interval() if metric.in_points else None,
    )


def without_drift(
    metric: Metric,
    sides: tuple[Sequence[float], Sequence[float]],
    sessions: tuple[Sequence[int], Sequence[int]],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """The figures of two sides that share their sessions, all moved to one level.

    What a session adds is on both sides alike, and would count as noise between launches. Its
    centre, the mean of the two medians of the sides, is removed; distances within a side grow by
    the freedom that this takes, one for each session but the first. Figures that have no logarithm
    are returned as they are.
    """
    figures = np.array([*sides[0], *sides[1]], dtype=float)
    is_base = np.arange(len(figures)) < len(sides[0])
    numbers = np.array([*sessions[0], *sessions[1]])
    known, num = set(numbers.tolist()), len(figures)
    usable = np.isfinite(figures).all() and (metric.in_points or bool((figures > 0).all()))
    if not usable or num - 1 - len(known) < 1:
        return tuple(sides[0]), tuple(sides[1])
    values = additive(figures.tolist(), in_points=metric.in_points).copy()
    centres = np.empty(num)
    for number in known:
        inside = numbers == number
        medians = [np.median(values[inside & side]) for side in (is_base, ~is_base)]
        centres[inside] = np.mean(medians)
    values += np.mean(centres) - centres
    # Distances grow for a test that does not know that freedom was taken from them.
    left, tail = num - 1 - len(known), 1 - LEVEL_WITH_NOISE
    grown = math.sqrt((num - 2) / left) * t_quantile(left, tail) / t_quantile(num - 2, tail)
    for side in (is_base, ~is_base):
        level = values[side].mean()
        values[side] = level + (values[side] - level) * grown
    moved = values if metric.in_points else np.exp(values)
    return tuple(moved[is_base].tolist()), tuple(moved[~is_base].tolist())
