"""Whether the launches of one side are faster or slower than those of another, case by case.

A verdict needs two things. The difference must be significant: Welch's test over launches, on
logarithms, corrected after Holm for the number of cases. And it must matter: the estimate lies
beyond the floor, which is 1 % or the machine's own noise. Two sides are the same only where the
whole interval lies inside the floor; a test that finds nothing is no evidence of equality.

Steps are not tested against steps: those of one launch are correlated, and such a test alarms in
half of all comparisons of a commit with itself. Nor is the interval a bootstrap's: with five
launches a side, its 95 % interval holds the true ratio in 88 % of cases, Welch's in 95 %
(`benchmarks/tracking.py` measures both).

The gate alarms on `slower` only: falsely in at most 1 % of comparisons of a commit with itself.
In either direction, 1.1 to 1.4 % of them have a false verdict where no noise was measured.

Five launches say little about the spread between them. A measured noise of the machine counts as
that many further launches (Smyth's moderated t, 2004), so that a change of 2 % is found in more
cases. Launches that scatter clearly more than that noise are judged without it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

import numpy as np

from ppbench.statistics.significance import (
    FEWEST_LAUNCHES,
    Difference,
    Group,
    Ratio,
    additive,
    group,
    is_larger,
    ratio_of_logs,
    smallest_difference,
    student,
    welch,
    without_rounding,
)

SPEED = "tokens_per_s"
"""The default figure."""
LEVEL = 0.02
"""Level of the two-sided test over all cases: 1 % for `slower`, 1 % for `faster`."""
LEVEL_WITH_NOISE = 0.01
"""Level with a measured noise: as many changes are found with half as many false alarms."""
FLOOR = 0.01
"""Smallest difference that matters: 1 %, or one percentage point."""
NOISIER = 0.05
"""Level of the test that launches scatter more than the measured noise."""


class Verdict(StrEnum):
    """Head compared with base; `faster` is better, whatever the metric's own direction."""

    faster = "faster"
    slower = "slower"
    same = "same"
    unclear = "unclear"
    insufficient = "insufficient"


@dataclass(frozen=True)
class Metric:
    """A figure of a launch."""

    name: str  # a column of `runs`
    higher_is_better: bool | None  # None: neither direction is better
    in_points: bool  # compared by difference, since it may be 0; else by ratio


@dataclass(frozen=True)
class Noise:
    """How much launches of the same commit differ."""

    deviation: float  # standard deviation, relative; of a metric in points, as a fraction
    num_launches: int  # in the estimate

    @property
    def freedom(self) -> int:
        return max(self.num_launches - 1, 0)


@dataclass(frozen=True)
class Pair:
    """The figures of a case's launches on both sides.

    A slowdown is how much longer the fixed reference beside a launch took than is usual on that
    machine: 0.12 is 12 % longer, NaN is unknown. They are in the order of the figures.
    """

    base: tuple[float, ...]
    head: tuple[float, ...]
    noise: Noise | None = None
    floor: float = FLOOR
    base_slowdowns: tuple[float, ...] | None = None
    head_slowdowns: tuple[float, ...] | None = None


class DiscountReason(StrEnum):
    """Why a launch counts for less than the others of its side."""

    apart = "apart"  # it lies far from the others, on the slow side
    reference = "reference"  # the fixed reference beside it was slow


@dataclass(frozen=True)
class Discount:
    """A launch that counts for less than the others of its side."""

    side: Literal["base", "head"]
    index: int  # in `Pair.base` or `Pair.head`
    weight: float  # 1 is that of an undisturbed launch
    reason: DiscountReason


@dataclass(frozen=True)
class Change:
    """The comparison of one case."""

    base: float | None  # medians
    head: float | None
    ratio: Ratio | None  # head / base; None where a figure is not positive
    p: float | None  # after Holm's correction
    verdict: Verdict
    num_base: int
    num_head: int
    floor: float  # the one used: the noise if that is larger than the one asked for
    difference: Ratio | None = None  # head - base, of a metric in points
    discounts: tuple[Discount, ...] = ()  # launches that count for less


def compare(metric: Metric, pairs: Sequence[Pair]) -> list[Change]:
    """Compare each pair, with Holm's correction for their number."""
    differences = [_difference(metric, pair) for pair in pairs]
    tested = [difference for difference in differences if difference is not None]
    corrected = iter(holm([difference.p for difference in tested]))
    return [
        _change(metric, pair, difference, None if difference is None else next(corrected))
        for pair, difference in zip(pairs, differences, strict=True)
    ]


def holm(chances: Sequence[float]) -> list[float]:
    """p-values corrected for the number of tests (Holm 1979), in the order given."""
    order = sorted(range(len(chances)), key=lambda place: chances[place])
    corrected = [0.0] * len(chances)
    highest = 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, chances[place] * (len(chances) - rank)))
        corrected[place] = highest
    return corrected


def effective_floor(floor: float, noise: Noise | None) -> float:
    return floor if noise is None else max(floor, noise.deviation)


def _difference(metric: Metric, pair: Pair) -> Difference | None:
    """Head minus base, in logarithms or fractions; None with too few launches, or no logarithm."""
    head, base = _group(metric, pair.head), _group(metric, pair.base)
    if head is None or base is None:
        return None
    return difference_of(head, base, pair.noise)


def difference_of(one: Group, other: Group, noise: Noise | None) -> Difference:
    """One mean less another; a noise counts as further launches, unless these scatter more."""
    if noise is None or _is_noisier(one, other, noise):
        return welch(one, other)
    return student(one, other, noise.deviation**2, noise.freedom)


def _group(metric: Metric, side: Sequence[float]) -> Group | None:
    if len(side) < FEWEST_LAUNCHES or not all(math.isfinite(value) for value in side):
        return None
    if not metric.in_points and min(side) <= 0:
        return None
    return group(without_rounding(additive(side, in_points=metric.in_points)))


def _is_noisier(head: Group, base: Group, noise: Noise) -> bool:
    """Whether the launches of a side, or of both together, scatter more than the noise."""
    both = Group(head.freedom + base.freedom + 1, 0.0, head.squares + base.squares)
    return any(
        is_larger(side.variance, side.freedom, noise.deviation**2, noise.freedom, NOISIER)
        for side in (head, base, both)
    )


def _change(metric: Metric, pair: Pair, difference: Difference | None, p: float | None) -> Change:
    floor = effective_floor(pair.floor, pair.noise)
    return Change(
        base=float(statistics.median(pair.base)) if pair.base else None,
        head=float(statistics.median(pair.head)) if pair.head else None,
        ratio=_ratio(metric, pair, difference),
        p=p,
        verdict=_verdict(metric, pair, difference, p),
        num_base=len(pair.base),
        num_head=len(pair.head),
        floor=floor,
        difference=None if difference is None or not metric.in_points else difference.interval,
    )


def _ratio(metric: Metric, pair: Pair, difference: Difference | None) -> Ratio | None:
    if difference is None:
        return None
    if not metric.in_points:
        return ratio_of_logs(difference)
    if min(*pair.base, *pair.head) <= 0:
        return None
    return ratio_of_logs(welch(group(np.log(pair.head)), group(np.log(pair.base))))


def _verdict(metric: Metric, pair: Pair, difference: Difference | None, p: float | None) -> Verdict:
    if difference is None or p is None:
        return Verdict.insufficient
    floor = effective_floor(pair.floor, pair.noise)
    limit = smallest_difference(floor, in_points=metric.in_points)
    if difference.is_within(limit):
        return Verdict.same
    level = LEVEL if pair.noise is None else LEVEL_WITH_NOISE
    if p >= level or abs(difference.estimate) <= limit:
        return Verdict.unclear
    is_better = (difference.estimate > 0) == metric.higher_is_better
    return Verdict.faster if is_better else Verdict.slower
