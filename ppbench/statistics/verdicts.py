"""Whether the launches of one side are faster or slower than those of another, case by case.

A verdict needs two things. The difference must be significant: Welch's test over launches, on
logarithms, corrected after Holm for the number of cases. And it must matter: the estimate lies
beyond the floor, which is 1 % or the machine's own noise. Two sides are the same only where the
whole interval lies inside the floor; a test that finds nothing is no evidence of equality.

Launches that something slowed do not count, and are named: those far on the slow side of the others
(`ppbench.statistics.disturbances`), and those beside which the fixed reference was slow. The test
is then Student's, since two or three launches do not show a spread of their own; its variance is
raised, because the launches left were chosen by their values. One disturbed launch in ten took two
thirds of the power from Welch's test at 5 % of change, and takes 1 % of that from this one.

Steps are not tested against steps: those of one launch are correlated, and such a test alarms in
half of all comparisons of a commit with itself. Nor is the interval a bootstrap's: with five
launches a side, its 95 % interval holds the true ratio in 88 % of cases, Welch's in 95 %
(`benchmarks/tracking.py` measures both).

The gate alarms on `slower` only: falsely in at most 1 % of comparisons of a commit with itself, as
long as launches of both sides alternate, under every noise that was tried but one: where half of
the launches, by chance, are 3 % slower than the others, it is 1.1 %. In either direction, 1.1 to
1.9 % of them have a false verdict where no noise was measured.

Five launches say little about the spread between them. A measured noise of the machine counts as
that many further launches (Smyth's moderated t, 2004), so that a change of 2 % is found in more
cases. Launches that scatter clearly more than that noise are judged without it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from ppbench.statistics.disturbances import (
    Side,
    Values,
    are_two_levels,
    inflation,
    without_disturbed,
)
from ppbench.statistics.significance import (
    FEWEST_LAUNCHES,
    Difference,
    Group,
    Ratio,
    additive,
    group,
    is_larger,
    smallest_difference,
    student,
    welch,
    without_rounding,
)
from ppbench.statistics.step_times import CONFIDENCE

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
LEAST_P_OF_NONE = 0.05
"""With a larger p, sides are not said to differ by any rule."""
SLOW_REFERENCE = 0.05
"""Slowdown of the reference beside a launch from which the launch does not count.

Whether it counts does not depend on its own figure, so that neither side is favoured.
"""

Places = npt.NDArray[np.intp]


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
    can_be_disturbed: bool = True  # by what else runs on the machine, as times are

    @property
    def slow_sign(self) -> int:
        """1 if a disturbed launch has a higher figure, -1 if a lower one, 0 if neither."""
        if self.higher_is_better is None or not self.can_be_disturbed:
            return 0
        return -1 if self.higher_is_better else 1


@dataclass(frozen=True)
class Noise:
    """How much launches of the same commit differ."""

    deviation: float  # standard deviation, relative; of a metric in points, as a fraction
    num_launches: int  # in the estimate

    @property
    def freedom(self) -> int:
        return max(self.num_launches - 1, 0)

    @property
    def squares(self) -> float:
        """The sum of squares of as many launches."""
        return self.freedom * self.deviation**2


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
    """Why a launch does not count."""

    apart = "apart"  # it lies far from the others, on the slow side
    reference = "reference"  # the fixed reference beside it was slow


@dataclass(frozen=True)
class Discount:
    """A launch that does not count."""

    side: Literal["base", "head"]
    index: int  # in `Pair.base` or `Pair.head`
    reason: DiscountReason


class Doubt(StrEnum):
    """Why sides whose interval is narrow enough have no verdict."""

    two_levels = "two_levels"  # chance may have shared out two levels of launches between the sides
    lopsided = "lopsided"  # many more launches lie apart on one side: the change may make them so


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
    discounts: tuple[Discount, ...] = ()  # launches that do not count
    doubt: Doubt | None = None


@dataclass(frozen=True)
class Rule:
    """What a verdict takes."""

    level: float = LEVEL
    level_with_noise: float = LEVEL_WITH_NOISE
    confidence: float = CONFIDENCE  # of the interval
    share_of_floor: float = 1.0  # that the estimate of a change exceeds
    same_within: float = 0.0  # the sides are the same within this too, if it is above the floor,
    odds: float = 1.0  # and no change is so many times as likely as one of the floor


RULE = Rule()
"""For launches that are looked at once."""


def compare(metric: Metric, pairs: Sequence[Pair], rule: Rule = RULE) -> list[Change]:
    """Compare each pair, with Holm's correction for their number."""
    sides = [_sides(metric, pair) for pair in pairs]
    num = sum(each is not None for each in sides)
    results = [
        None if each is None else _compared(metric, pair, each, num)
        for pair, each in zip(pairs, sides, strict=True)
    ]
    corrected = iter(holm([result.p for result in results if result is not None]))
    return [
        _change(metric, pair, result, None if result is None else next(corrected), rule)
        for pair, result in zip(pairs, results, strict=True)
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


def difference_of(one: Group, other: Group, noise: Noise | None) -> Difference:
    """One mean less another; a noise counts as further launches, unless these scatter more."""
    if noise is None or _is_noisier(one, other, noise):
        return welch(one, other)
    return student(one, other, noise.deviation**2, noise.freedom)


def _is_noisier(head: Group, base: Group, noise: Noise) -> bool:
    """Whether the launches of a side, or of both together, scatter more than the noise."""
    both = Group(head.freedom + base.freedom + 1, 0.0, head.squares + base.squares)
    return any(
        is_larger(side.variance, side.freedom, noise.deviation**2, noise.freedom, NOISIER)
        for side in (head, base, both)
    )


@dataclass(frozen=True)
class _Compared:
    """Two sides without their disturbed launches, and the difference between them."""

    base: Side  # on the scale of the tests; a larger value is slower
    head: Side
    difference: Difference  # head minus base, in logarithms or fractions
    discounts: tuple[Discount, ...] = ()
    are_two_levels: bool = False  # which chance may have shared out between the sides
    is_lopsided: bool = False  # more launches lie apart on one side than chance explains

    @property
    def p(self) -> float:
        return 1.0 if self.are_two_levels else self.difference.p


@dataclass(frozen=True)
class _Sides:
    """The figures of two sides on the scale of the tests, without those of a slow reference."""

    base: Values
    head: Values
    places: tuple[Places, Places]  # of the figures in the pair


def _sides(metric: Metric, pair: Pair) -> _Sides | None:
    """Read two sides; None with too few undisturbed launches, or without a logarithm."""
    places = _places(metric, pair)
    base, head = _values(metric, pair.base), _values(metric, pair.head)
    if min(map(len, places)) < FEWEST_LAUNCHES or base is None or head is None:
        return None
    return _Sides(base[places[0]], head[places[1]], places)


def _compared(metric: Metric, pair: Pair, sides: _Sides, num_tests: int) -> _Compared:
    if metric.slow_sign:
        return _robust(metric, pair, sides, num_tests)
    base, head = _as_they_are(sides.base), _as_they_are(sides.head)
    difference = difference_of(group(sides.head), group(sides.base), pair.noise)
    return _Compared(base, head, difference, tuple(_discounts(pair, sides, base, head)))


def _places(metric: Metric, pair: Pair) -> tuple[Places, Places]:
    """Places of the launches that count on each side, before their figures are looked at.

    A metric that nothing can disturb, such as memory, has all its launches.
    """
    if not metric.can_be_disturbed:
        return np.arange(len(pair.base)), np.arange(len(pair.head))
    return _usual(pair.base, pair.base_slowdowns), _usual(pair.head, pair.head_slowdowns)


def _slowed(metric: Metric, pair: Pair) -> tuple[Discount, ...]:
    """The launches whose reference was slow, where too few others are left for a verdict."""
    base, head = _places(metric, pair)
    sides: tuple[tuple[Literal["base", "head"], int, Places], ...] = (
        ("base", len(pair.base), base),
        ("head", len(pair.head), head),
    )
    return tuple(
        Discount(name, place, DiscountReason.reference)
        for name, num, usual in sides
        for place in range(num)
        if place not in usual
    )


def _usual(figures: Sequence[float], slowdowns: Sequence[float] | None) -> Places:
    """Places of the launches whose reference was not slow; those without a reference count."""
    if slowdowns is None:
        return np.arange(len(figures))
    if len(slowdowns) != len(figures):
        raise ValueError(f"{len(slowdowns)} slowdowns of {len(figures)} launches; expected as many")
    return np.flatnonzero(~(np.asarray(slowdowns, dtype=float) >= SLOW_REFERENCE))


def _values(metric: Metric, side: Sequence[float]) -> Values | None:
    """Figures on the scale of the tests; None where one of them has no value on it."""
    if not side or not all(math.isfinite(value) for value in side):
        return None
    if not metric.in_points and min(side) <= 0:
        return None
    return without_rounding(additive(side, in_points=metric.in_points))


def _as_they_are(values: Values) -> Side:
    return Side(values, np.arange(len(values)), len(values))


def _robust(metric: Metric, pair: Pair, sides: _Sides, num_tests: int) -> _Compared:
    """Compare two sides whose disturbed launches do not count."""
    sign = metric.slow_sign
    values = sign * sides.base, sign * sides.head
    (base, head), noise = _without_disturbed(values, pair.noise, num_tests)
    difference = _difference(group(sign * head.kept), group(sign * base.kept), noise, base, head)
    faster, slower = (base, head) if difference.estimate * sign > 0 else (head, base)
    known = (0.0, 0) if noise is None else (noise.squares, noise.freedom)
    may_differ = difference.p < LEAST_P_OF_NONE
    doubts = may_differ and are_two_levels(faster, slower, *known), _is_lopsided(base, head)
    discounts = tuple(_discounts(pair, sides, base, head))
    return _Compared(base, head, difference, discounts, *doubts)


def _is_lopsided(base: Side, head: Side) -> bool:
    """Whether more launches lie apart on one side than on the other: a sign test at 1/6."""
    more, fewer = sorted((base.num_discounted, head.num_discounted), reverse=True)
    return more > fewer and (more - fewer) ** 2 >= 2 * (more + fewer)


def _without_disturbed(
    values: tuple[Values, Values], noise: Noise | None, num_tests: int
) -> tuple[tuple[Side, ...], Noise | None]:
    """Discount launches, with the noise unless those that are kept scatter more."""
    if noise is not None:
        sides = without_disturbed(values, noise.squares, noise.freedom, num_tests)
        if not _is_noisier(group(sides[1].kept), group(sides[0].kept), noise):
            return sides, noise
    return without_disturbed(values, num_tests=num_tests), None


def _difference(
    one: Group, other: Group, noise: Noise | None, base: Side, head: Side
) -> Difference:
    """One mean less another; with discounted launches, both sides have one spread.

    Where one side scatters clearly more, it is Welch's test if that finds less.
    """
    num_discounted = base.num_discounted + head.num_discounted
    if noise is None and not num_discounted:
        return welch(one, other)
    variance, freedom = (0.0, 0) if noise is None else (noise.deviation**2, noise.freedom)
    result = student(one, other, variance, freedom)
    narrow, wide = sorted((one, other), key=lambda side: side.variance)
    if noise is None and is_larger(wide.variance, wide.freedom, narrow.variance, narrow.freedom):
        result = max(result, welch(one, other), key=lambda difference: difference.p)
    factor = inflation(num_discounted, len(base.values) + len(head.values), freedom)
    return replace(result, error=result.error * math.sqrt(factor))


def _discounts(pair: Pair, sides: _Sides, base: Side, head: Side) -> Iterator[Discount]:
    """The launches that do not count, in their order."""
    yield from _of_side("base", len(pair.base), sides.places[0], base)
    yield from _of_side("head", len(pair.head), sides.places[1], head)


def _of_side(
    name: Literal["base", "head"], num: int, usual: Places, side: Side
) -> Iterator[Discount]:
    apart = set(usual[side.places[side.num_kept :]].tolist())
    for place in range(num):
        if place in apart:
            yield Discount(name, place, DiscountReason.apart)
        elif place not in usual:
            yield Discount(name, place, DiscountReason.reference)


def _change(
    metric: Metric, pair: Pair, result: _Compared | None, p: float | None, rule: Rule
) -> Change:
    ratio = difference = None
    if result is not None:
        interval = _interval(result.difference, rule)
        difference = interval if metric.in_points else None
        ratio = _ratio_in_points(metric, result, rule) if metric.in_points else _exp(interval)
    return Change(
        base=float(statistics.median(pair.base)) if pair.base else None,
        head=float(statistics.median(pair.head)) if pair.head else None,
        ratio=ratio,
        p=p,
        verdict=_verdict(metric, pair, result, p, rule),
        num_base=len(pair.base),
        num_head=len(pair.head),
        floor=effective_floor(pair.floor, pair.noise),
        difference=difference,
        discounts=_slowed(metric, pair) if result is None else result.discounts,
        doubt=None if result is None else _doubt(metric, pair, result, rule),
    )


def _interval(difference: Difference, rule: Rule) -> Ratio:
    return Ratio(difference.estimate, *difference.ends(rule.confidence))


def _exp(interval: Ratio) -> Ratio:
    """The ratio that a difference of logarithms means; an end may be 0 or infinite."""
    with np.errstate(over="ignore"):
        return Ratio(*np.exp([interval.estimate, interval.low, interval.high]).tolist())


def _ratio_in_points(metric: Metric, result: _Compared, rule: Rule) -> Ratio | None:
    head, base = (side.kept * (metric.slow_sign or 1) for side in (result.head, result.base))
    if min(*base, *head) <= 0:
        return None
    return _exp(_interval(welch(group(np.log(head)), group(np.log(base))), rule))


def _verdict(
    metric: Metric, pair: Pair, result: _Compared | None, p: float | None, rule: Rule
) -> Verdict:
    if result is None or p is None:
        return Verdict.insufficient
    floor, estimate = effective_floor(pair.floor, pair.noise), result.difference.estimate
    in_points, share = metric.in_points, rule.share_of_floor
    ends = _interval(result.difference, rule)
    if _is_within(ends, floor, in_points=in_points):
        return Verdict.unclear if result.is_lopsided else Verdict.same
    level = rule.level if pair.noise is None else rule.level_with_noise
    if p < level and abs(estimate) > smallest_difference(share * floor, in_points=in_points):
        is_better = (estimate > 0) == metric.higher_is_better
        return Verdict.faster if is_better else Verdict.slower
    is_same = (
        not result.is_lopsided
        and _is_within(ends, max(floor, rule.same_within), in_points=in_points)
        and _odds(result.difference, smallest_difference(floor, in_points=in_points)) >= rule.odds
    )
    return Verdict.same if is_same else Verdict.unclear


def _doubt(metric: Metric, pair: Pair, result: _Compared, rule: Rule) -> Doubt | None:
    """Why there is no verdict that the difference alone would give."""
    if not (result.are_two_levels or result.is_lopsided):
        return None
    alone = replace(result, are_two_levels=False, discounts=(), is_lopsided=False)
    verdict = _verdict(metric, pair, alone, alone.p, rule)
    if verdict is Verdict.same:
        return Doubt.lopsided if result.is_lopsided else None
    return Doubt.two_levels if result.are_two_levels and verdict is not Verdict.unclear else None


def _odds(difference: Difference, change: float) -> float:
    """How many times as likely the estimate is without a change as with one of that size."""
    if difference.error == 0:
        return math.inf if abs(difference.estimate) < change / 2 else 0.0
    exponent = change * (change / 2 - abs(difference.estimate)) / difference.error**2
    return math.exp(min(max(exponent, -_LARGEST), _LARGEST))


_LARGEST = 700.0  # of an exponent


def _is_within(interval: Ratio, floor: float, *, in_points: bool) -> bool:
    limit = smallest_difference(floor, in_points=in_points)
    return -limit <= interval.low and interval.high <= limit
