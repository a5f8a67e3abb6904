"""Whether the launches of one side are faster or slower than those of another, case by case.

A verdict needs two things. The difference must be significant: Welch's test over launches, on
logarithms, corrected after Holm for the number of cases. And it must matter: the estimate lies
beyond the floor, which is 1 % or the machine's own noise. Two sides are the same only where the
whole interval lies inside the floor; a test that finds nothing is no evidence of equality.

Launches that something slowed do not count, and are named: those far on the slow side of the others
(`ppbench.judge.disturbances`), and those beside which the fixed reference was slow. The test
is then Student's, since two or three launches do not show a spread of their own; its variance is
raised, because the launches left were chosen by their values.

Steps are not tested against steps: those of one launch are correlated, and such a test alarms in
half of all comparisons of a commit with itself.

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
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from ppbench.judge.disturbances import (
    Side,
    Values,
    are_two_levels,
    inflation,
    without_disturbed,
)
from ppbench.judge.differences import (
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
    student_or_welch,
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
    usual = [_usual(metric, pair) for pair in pairs]
    values = [_values(metric, *each) for each in zip(pairs, usual, strict=True)]
    num = sum(each is not None for each in values)
    results = [
        None if each is None else _compared(metric, pair.noise, each, num)
        for pair, each in zip(pairs, values, strict=True)
    ]
    corrected = iter(holm([result.p for result in results if result is not None]))
    return [
        _change(metric, pair, places, result, None if result is None else next(corrected), rule)
        for pair, places, result in zip(pairs, usual, results, strict=True)
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
    are_two_levels: bool = False  # which chance may have shared out between the sides
    is_lopsided: bool = False  # more launches lie apart on one side than chance explains

    @property
    def p(self) -> float:
        return 1.0 if self.are_two_levels else self.difference.p


def _usual(metric: Metric, pair: Pair) -> tuple[Places, Places]:
    """Places of the launches of each side that count, before their figures are looked at.

    Those beside which the reference was slow do not; those without a reference do. A metric that
    nothing can disturb, such as memory, has all its launches.
    """
    sides = ((pair.base, pair.base_slowdowns), (pair.head, pair.head_slowdowns))
    base, head = (
        np.arange(len(figures))
        if slowdowns is None or not metric.can_be_disturbed
        else np.flatnonzero(~(np.asarray(slowdowns, dtype=float) >= SLOW_REFERENCE))
        for figures, slowdowns in sides
    )
    return base, head


def _values(
    metric: Metric, pair: Pair, usual: tuple[Places, Places]
) -> tuple[Values, Values] | None:
    """The launches that count on the scale of the tests; None where they are too few.

    None also where a figure of a side, whether it counts or not, has no value on that scale.
    """
    sides = pair.base, pair.head
    if min(map(len, usual)) < FEWEST_LAUNCHES or not all(
        map(math.isfinite, (*pair.base, *pair.head))
    ):
        return None
    if not metric.in_points and min(map(min, sides)) <= 0:
        return None
    base, head = (
        without_rounding(additive(side, in_points=metric.in_points))[places]
        for side, places in zip(sides, usual, strict=True)
    )
    return base, head


def _compared(
    metric: Metric, noise: Noise | None, values: tuple[Values, Values], num_tests: int
) -> _Compared:
    """Compare two sides, of a metric that can be disturbed without their disturbed launches.

    With discounted launches, both sides have one spread. The noise counts unless the launches that
    are kept scatter more.
    """
    sign = metric.slow_sign
    if not sign:
        base, head = (Side(side, np.arange(len(side)), len(side)) for side in values)
        return _Compared(base, head, difference_of(group(values[1]), group(values[0]), noise))
    slow = sign * values[0], sign * values[1]
    if noise is not None:
        base, head = without_disturbed(slow, noise.squares, noise.freedom, num_tests)
        if _is_noisier(group(head.kept), group(base.kept), noise):
            noise = None
    if noise is None:
        base, head = without_disturbed(slow, num_tests=num_tests)
    squares, freedom = (0.0, 0) if noise is None else (noise.squares, noise.freedom)
    num_discounted = base.num_discounted + head.num_discounted
    groups = group(sign * head.kept), group(sign * base.kept)
    if noise is not None:
        difference = student(*groups, noise.deviation**2, freedom)
    else:
        difference = student_or_welch(*groups) if num_discounted else welch(*groups)
    factor = inflation(num_discounted, len(base.values) + len(head.values), freedom)
    difference = replace(difference, error=difference.error * math.sqrt(factor))
    faster, slower = (base, head) if difference.estimate * sign > 0 else (head, base)
    may_differ = difference.p < LEAST_P_OF_NONE
    more, fewer = sorted((base.num_discounted, head.num_discounted), reverse=True)
    return _Compared(
        base,
        head,
        difference,
        may_differ and are_two_levels(faster, slower, squares, freedom),
        more > fewer and (more - fewer) ** 2 >= 2 * (more + fewer),  # a sign test at 1/6
    )


def _change(
    metric: Metric,
    pair: Pair,
    usual: tuple[Places, Places],
    result: _Compared | None,
    p: float | None,
    rule: Rule,
) -> Change:
    ratio = difference = doubt = None
    if result is not None and metric.in_points:
        difference = result.difference.interval(rule.confidence)
        head, base = (side.kept * (metric.slow_sign or 1) for side in (result.head, result.base))
        if min(*base, *head) > 0:
            logs = welch(group(np.log(head)), group(np.log(base)))
            ratio = ratio_of_logs(logs, rule.confidence)
    elif result is not None:
        ratio = ratio_of_logs(result.difference, rule.confidence)
    if result is not None and (result.are_two_levels or result.is_lopsided):
        # Why there is no verdict that the difference alone would give.
        alone = replace(result, are_two_levels=False, is_lopsided=False)
        verdict = _verdict(metric, pair, alone, alone.p, rule)
        if verdict is Verdict.same:
            doubt = Doubt.lopsided if result.is_lopsided else None
        elif result.are_two_levels and verdict is not Verdict.unclear:
            doubt = Doubt.two_levels
    # The launches that do not count, in their order.
    discounts: list[Discount] = []
    sides: tuple[tuple[Literal["base", "head"], int, Places, Side | None], ...] = (
        ("base", len(pair.base), usual[0], None if result is None else result.base),
        ("head", len(pair.head), usual[1], None if result is None else result.head),
    )
    for name, num, places, side in sides:
        far: set[int] = (
            set() if side is None else set(places[side.places[side.num_kept :]].tolist())
        )
        for place in range(num):
            if place in far:
                discounts.append(Discount(name, place, DiscountReason.apart))
            elif place not in places:
                discounts.append(Discount(name, place, DiscountReason.reference))
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
        discounts=tuple(discounts),
        doubt=doubt,
    )


def _verdict(
    metric: Metric, pair: Pair, result: _Compared | None, p: float | None, rule: Rule
) -> Verdict:
    if result is None or p is None:
        return Verdict.insufficient
    difference, floor = result.difference, effective_floor(pair.floor, pair.noise)
    limit, wider, share = (
        smallest_difference(size, in_points=metric.in_points)
        for size in (floor, max(floor, rule.same_within), rule.share_of_floor * floor)
    )
    if difference.is_within(limit, rule.confidence):
        return Verdict.unclear if result.is_lopsided else Verdict.same
    level = rule.level if pair.noise is None else rule.level_with_noise
    if p < level and abs(difference.estimate) > share:
        is_better = (difference.estimate > 0) == metric.higher_is_better
        return Verdict.faster if is_better else Verdict.slower
    if result.is_lopsided or not difference.is_within(wider, rule.confidence):
        return Verdict.unclear
    # How many times as likely the estimate is without a change as with one of the floor's size.
    if difference.error == 0:
        odds = math.inf if abs(difference.estimate) < limit / 2 else 0.0
    else:
        exponent = limit * (limit / 2 - abs(difference.estimate)) / difference.error**2
        odds = math.exp(min(max(exponent, -700.0), 700.0))
    return Verdict.same if odds >= rule.odds else Verdict.unclear
