"""One difference between two sides, with its standard error: of paired rounds, or of two groups.

    rounds of a launch --20 % trimmed, batches of neighbours--> its difference d, and the error s
    launches  d ± s, d ± s, ...  --weighted by 1 / (tau² + s²)--> difference, error, freedom

A launch's difference is the true one, plus what the start of its processes decided (tau), plus what
rounds scatter around it (s / error of the rounds' mean). The error of several launches is that of
their scatter around the weighted mean (Hartung and Knapp 2001; Sidik and Jonkman 2002), which holds
both without assuming either. A known tau counts like further launches (Smyth's moderated t, 2004),
unless these scatter clearly more; with it, one launch is enough. Without it, one is not: its rounds
share whatever that start decided.

Rounds are trimmed since another job slows single turns by far more than rounds differ. The errors
are those of batches of neighbouring rounds, which may be correlated, and which come in both orders.

Groups of single launches are compared by Student's test or Welch's, without those that something
slowed. Five launches say little about their spread, so that a known noise counts like more.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import numpy as np

from ppbench.judge.differences import (
    FEWEST_LAUNCHES,
    ROUNDING,
    Difference,
    Group,
    Values,
    additive,
    group,
    is_larger,
    student,
    student_or_welch,
    welch,
    without_rounding,
)
from ppbench.judge.disturbances import Side, are_two_levels, inflation, without_disturbed
from ppbench.judge.evidence import (
    Discount,
    DiscountReason,
    Evidence,
    Metric,
    Noise,
    Rounds,
)

NOISIER = 0.05
"""Level of the test that launches scatter more than the known noise."""
SHARED = 0.2
"""Level of the test that pairs share what a start decided: high, as few launches show it badly."""
LEAST_P_OF_NONE = 0.05
"""With a larger p, sides are not said to differ by any rule."""
SLOW_REFERENCE = 0.05
"""Slowdown of the reference beside a launch from which the launch does not count.

Whether it counts does not depend on its own figure, so that neither side is favoured.
"""
TRIMMED = 0.2
"""Share of the rounds of a launch that is trimmed at either end."""
FEWEST_ROUNDS = 4
"""Fewest rounds that show their own error: two batches of two."""
NOTHING = Noise(0.0, 0)


class Doubt(StrEnum):
    """Why sides whose interval is narrow enough have no verdict."""

    two_levels = "two_levels"  # chance may have shared out two levels of launches between the sides
    cautioned = "cautioned"  # a caution of their launches forbids a verdict
    lopsided = "lopsided"  # many more launches lie apart on one side: the change may make them so


@dataclass(frozen=True)
class Estimate:
    """The difference of head and base, of logarithms or in points, and what does not count in it.

    Its freedom is 0, and its interval infinite, where the spread of launches is unknown.
    """

    difference: Difference | None  # None without figures of both sides
    num_base: int  # launches, counted or not
    num_head: int
    discounts: tuple[Discount, ...] = ()
    doubt: Doubt | None = None


@dataclass(frozen=True)
class Level:
    """The difference of two sides in one launch, by its rounds."""

    estimate: float
    variance: float  # of a round, as far as it counts in the estimate; NaN if unknown
    freedom: float  # of the variance
    num_rounds: int


def estimate(metric: Metric, evidence: Evidence, num_tests: int = 1) -> Estimate:
    """The difference that the evidence shows, by rounds if there are any, else by launches.

    `num_tests` is how many such estimates are looked at together.
    """
    if evidence.paired:
        return _of_rounds(metric, evidence)
    return _of_launches(metric, evidence, num_tests)


# Rounds


@functools.lru_cache(maxsize=2**14)  # looks at more and more launches, and pairs of arms
def level_of(metric: Metric, rounds: Rounds) -> Level | None:
    """The difference in one launch; None without a round that has figures of both sides."""
    base, head = np.asarray(rounds.base, dtype=float), np.asarray(rounds.head, dtype=float)
    usable = np.isfinite(base) & np.isfinite(head)
    if not metric.in_points:
        usable &= (base > 0) & (head > 0)
    base, head = base[usable], head[usable]
    if not len(base):
        return None
    values = without_rounding(head - base if metric.in_points else np.log(head / base))
    return Level(*trimmed_mean(values), len(values))


def trimmed_mean(values: Values) -> tuple[float, float, float]:
    """The trimmed mean of a series, the variance of one value in it, and that one's freedom.

    The variance of the mean is that over the number of values. It is that of the winsorized series
    (Tukey and McLaughlin 1963, Yuen 1974), by means of batches of neighbours. It is NaN, with
    freedom 0, for fewer than `FEWEST_ROUNDS` values.
    """
    num = len(values)
    cut = math.floor(TRIMMED * num)
    ordered = np.sort(values)
    kept = num - 2 * cut
    mean = group(ordered[cut : num - cut]).mean
    if num < FEWEST_ROUNDS:
        return mean, math.nan, 0.0
    winsorized = np.clip(values, ordered[cut], ordered[num - cut - 1])
    size = 2 * max(1, round(num ** (1 / 3) / 2))  # even: the sides come first in turn
    num_batches = num // size
    batches = winsorized[num % size :].reshape(num_batches, size).mean(axis=1)
    of_one = size * group(batches).variance  # of one round, were rounds independent
    variance = of_one * num * (num - 1) / (kept * (kept - 1))
    return mean, variance, float(min(num_batches, kept) - 1)


def counted_launches(metric: Metric, evidence: Evidence) -> list[tuple[Rounds, Level]]:
    """Return the launches in turns that count, each with its difference.

    Launches that were stopped after a few rounds do not count where others are enough for a
    verdict, and have most of the rounds.
    """
    found = ((rounds, level_of(metric, rounds)) for rounds in evidence.paired)
    known = [(rounds, level) for rounds, level in found if level is not None]
    whole = [(rounds, level) for rounds, level in known if level.freedom > 0]
    num_rounds, num_whole = (sum(one.num_rounds for _, one in each) for each in (known, whole))
    has_enough = len(whole) >= FEWEST_LAUNCHES and 2 * num_whole > num_rounds
    return whole if has_enough else known


def _of_rounds(metric: Metric, evidence: Evidence) -> Estimate:
    levels = [level for _, level in counted_launches(metric, evidence)]
    num = len(levels)
    return Estimate(combined(levels, evidence.starts), num, num)


def combined(levels: Sequence[Level], starts: Noise | None = None) -> Difference | None:
    """The difference over launches; with a freedom of 0 where their spread is unknown.

    The launches' weights follow from their numbers of rounds and one variance of a round: those of
    variances that each launch has estimated for itself would fit its chance too.
    """
    if not levels:
        return None
    values = np.array([level.estimate for level in levels])
    nums = np.array([level.num_rounds for level in levels])
    freedom = len(levels) - 1
    rounds = noise_in_rounds(levels)
    if rounds is None:  # too few rounds in each launch; launches count alike
        mean, error, scatter = _weighted(values, np.ones(len(values)))
        if len(levels) < FEWEST_LAUNCHES:
            return Difference(mean, 0.0, 0.0)
        return Difference(mean, error * math.sqrt(scatter), freedom)
    variances = rounds.deviation**2 / nums
    if starts is not None and starts.freedom > 0:
        mean, error, scatter = _weighted(values, variances + starts.deviation**2)
        size = float(len(nums) / (1 / nums).sum())  # the harmonic mean
        known_freedom = _freedom_of_sum(
            (starts.deviation**2, starts.freedom), (rounds.deviation**2 / size, rounds.freedom)
        )
        if not is_larger(scatter, freedom, 1.0, known_freedom, NOISIER):
            pooled = (freedom * scatter + known_freedom) / (freedom + known_freedom)
            return Difference(mean, error * math.sqrt(pooled), freedom + known_freedom)
    if len(levels) < FEWEST_LAUNCHES:
        mean, error, _ = _weighted(values, variances)
        return Difference(mean, error, 0.0)
    beyond = max(0.0, group(values).variance - float(variances.mean()))
    mean, error, scatter = _weighted(values, variances + beyond)
    return Difference(mean, error * math.sqrt(scatter), freedom)


def noise_in_rounds(levels: Sequence[Level]) -> Noise | None:
    """The deviation of a round in a launch, pooled; None where no launch shows it."""
    known = [level for level in levels if level.freedom > 0]
    freedom = math.fsum(level.freedom for level in known)
    if not known:
        return None
    squares = math.fsum(level.freedom * level.variance for level in known)
    return Noise(math.sqrt(squares / freedom), freedom)


def _freedom_of_sum(*parts: tuple[float, float]) -> float:
    """Degrees of freedom of a sum of variances with their own (Satterthwaite 1946)."""
    total = math.fsum(variance for variance, _ in parts)
    if total == 0:
        return math.fsum(freedom for _, freedom in parts)
    return 1 / math.fsum(
        (variance / total) ** 2 / freedom for variance, freedom in parts if variance
    )


def _weighted(values: Values, variances: Values) -> tuple[float, float, float]:
    """The weighted mean, its error if these variances are right, and how much larger they are.

    The last is the mean square around the weighted mean, in units of these variances.
    """
    weights = 1 / np.maximum(variances, ROUNDING**2)
    own = group(values)
    mean = own.mean + float(weights @ (values - own.mean) / weights.sum())
    scatter = float(weights @ np.square(values - mean)) / max(len(values) - 1, 1)
    return mean, math.sqrt(1 / float(weights.sum())), scatter


# Several pairs


def mean_difference(
    metric: Metric, evidences: Sequence[Evidence], differences: Sequence[Difference | None]
) -> Difference | None:
    """The mean of the differences of several pairs of sides; None unless each has an error.

    Errors add up as those of independent pairs (Satterthwaite 1946). Pairs that took turns in the
    same launches may share what a start decided: where their means scatter more from launch to
    launch than that, this scatter is the error.
    """
    known = [each for each in differences if each is not None and each.freedom > 0]
    if not known or len(known) < len(differences):
        return None
    num = len(known)
    estimate = math.fsum(each.estimate for each in known) / num
    parts = [((each.error / num) ** 2, each.freedom) for each in known]
    variance = math.fsum(part for part, _ in parts)
    if variance == 0:
        return Difference(estimate, 0.0, math.fsum(each.freedom for each in known))
    mean = Difference(estimate, math.sqrt(variance), _freedom_of_sum(*parts))
    num_launches = {len(evidence.paired) for evidence in evidences}
    if num == 1 or len(num_launches) > 1 or num_launches <= {0, 1}:
        return mean
    levels = [[level_of(metric, rounds) for rounds in each.paired] for each in evidences]
    if any(level is None for own in levels for level in own):
        return mean
    means = [
        math.fsum(level.estimate for level in launch if level is not None) / num
        for launch in zip(*levels, strict=True)
    ]
    scatter = group(means)
    own = scatter.variance / scatter.num
    if is_larger(own, scatter.freedom, variance, mean.freedom, SHARED):
        return Difference(estimate, math.sqrt(own), scatter.freedom)
    return mean


# Launches of one side


def _of_launches(metric: Metric, evidence: Evidence, num_tests: int) -> Estimate:
    """Compare two groups, those of a metric that can be disturbed without disturbed launches.

    Launches beside which the reference was slow do not count, whatever their figures are; those
    without a reference do.
    """
    names: tuple[Literal["base", "head"], ...] = ("base", "head")
    sides = evidence.base, evidence.head
    nums = len(evidence.base.figures), len(evidence.head.figures)
    usual = [
        np.arange(len(side.figures))
        if side.slowdowns is None or not metric.can_be_disturbed
        else np.flatnonzero(~(np.asarray(side.slowdowns, dtype=float) >= SLOW_REFERENCE))
        for side in sides
    ]
    discounts = [
        Discount(name, place, DiscountReason.reference)
        for name, num, places in zip(names, nums, usual, strict=True)
        for place in sorted(set(range(num)) - set(places.tolist()))
    ]
    figures = np.array([figure for side in sides for figure in side.figures], dtype=float)
    is_usable = np.isfinite(figures).all() and (metric.in_points or bool((figures > 0).all()))
    if not is_usable or min(map(len, usual)) < FEWEST_LAUNCHES:
        return Estimate(None, *nums, tuple(discounts))
    values = [
        without_rounding(additive(side.figures, in_points=metric.in_points))[places]
        for side, places in zip(sides, usual, strict=True)
    ]
    sign, noise, doubt = metric.slow_sign or 1, evidence.noise, None
    slow = [sign * side for side in values]

    def kept(known: Noise) -> tuple[Side, ...]:
        if not metric.slow_sign:
            return tuple(Side(side, np.arange(len(side)), len(side)) for side in slow)
        return without_disturbed(slow, known.squares, known.freedom, num_tests)

    base, head = kept(noise or NOTHING)
    if noise is not None and _is_noisier(group(head.kept), group(base.kept), noise):
        noise, (base, head) = None, kept(NOTHING)
    known = noise or NOTHING
    num_discounted = base.num_discounted + head.num_discounted
    groups = group(sign * head.kept), group(sign * base.kept)
    if noise is not None:
        difference = student(*groups, noise.deviation**2, noise.freedom)
    else:
        difference = student_or_welch(*groups) if num_discounted else welch(*groups)
    factor = inflation(num_discounted, len(base.values) + len(head.values), known.freedom)
    difference = replace(difference, error=difference.error * math.sqrt(factor))
    faster, slower = (base, head) if difference.estimate * sign > 0 else (head, base)
    more, fewer = sorted((base.num_discounted, head.num_discounted), reverse=True)
    if more > fewer and (more - fewer) ** 2 >= 2 * (more + fewer):  # a sign test at 1/6
        doubt = Doubt.lopsided
    is_change = difference.p < LEAST_P_OF_NONE and metric.slow_sign != 0
    if is_change and are_two_levels(faster, slower, known.squares, known.freedom):
        doubt = Doubt.two_levels
    for name, places, side in zip(names, usual, (base, head), strict=True):
        apart = places[side.places[side.num_kept :]].tolist()
        discounts += [Discount(name, place, DiscountReason.apart) for place in apart]
    if evidence.drift is not None:
        difference = _with_variance(difference, evidence.drift, evidence.sessions_apart)
    discounts.sort(key=lambda discount: (discount.side, discount.index))
    return Estimate(difference, *nums, tuple(discounts), doubt)


def _with_variance(difference: Difference, drift: Noise, times: float) -> Difference:
    """A difference that has so many times the variance of a drift in it too (Satterthwaite)."""
    extra = drift.deviation**2 * times
    if extra == 0 or difference.freedom == 0:
        return difference
    own = difference.error**2
    total = own + extra
    freedom = _freedom_of_sum((own, difference.freedom), (extra, drift.freedom))
    return replace(difference, error=math.sqrt(total), freedom=freedom)


def _is_noisier(head: Group, base: Group, noise: Noise) -> bool:
    """Whether the launches of a side, or of both together, scatter more than the noise."""
    both = Group(head.freedom + base.freedom + 1, 0.0, head.squares + base.squares)
    spreads, level = (head, base, both), NOISIER / 3
    return any(
        is_larger(spread.variance, spread.freedom, noise.deviation**2, noise.freedom, level)
        for spread in spreads
    )
