"""Whether a head is faster or slower than its base, or the same, or whether that is open.

    same             the whole interval lies within x, the resolution: a test that finds nothing is
                     no evidence of equality
    faster, slower   else, the interval excludes no difference
    open             neither; the interval says within how much the sides are the same

At most 1 % of comparisons of equal sides end with a claim, over all looks together
(`ppbench.judge.looks`), corrected after Holm for the number of claims that are made together; and
as few of sides that differ by more than x are the same. So a claim takes an interval of 99 %, and
`same` one whose ends are each wrong in 1 %. What is shown is the interval of 95 %.

Steps are not tested against steps: those of one launch are correlated, and such a test alarms in
half of all comparisons of a commit with itself.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from ppbench.judge.differences import (
    CONFIDENCE,
    Difference,
    Ratio,
    ratio_of_logs,
    smallest_difference,
)
from ppbench.judge.estimates import (
    Doubt,
    Estimate,
    counted_launches,
    estimate,
    mean_difference,
)
from ppbench.judge.evidence import Discount, Evidence, Metric
from ppbench.judge.looks import ONE_LOOK, Looks

SPEED = "tokens_per_s"
"""The default figure."""
LEVEL = 0.0075
"""Spent on false claims, in either direction, over all looks.

Tests of few launches, whose disturbed ones do not count, add the rest of 1 %.
"""
_LARGEST_LOG = 700.0


class Verdict(StrEnum):
    """Head compared with base; `faster` is better, whatever the metric's own direction."""

    faster = "faster"
    slower = "slower"
    same = "same"
    open = "open"

    @property
    def is_claim(self) -> bool:
        return self in (Verdict.faster, Verdict.slower)


@dataclass(frozen=True)
class Change:
    """The comparison of two sides."""

    base: float | None  # medians over launches
    head: float | None
    verdict: Verdict
    num_base: int  # launches
    num_head: int
    resolution: float
    ratio: Ratio | None = None  # head / base, with 95 %; None without interval, or in points
    difference: Ratio | None = None  # head - base, of a metric in points
    p: float = 1.0  # corrected for looks and for the number of comparisons; below `LEVEL`: a claim
    ends: tuple[float, float] = (-math.inf, math.inf)  # each wrong in 1 %; on the scale of `exact`
    discounts: tuple[Discount, ...] = ()  # launches that do not count
    doubt: Doubt | None = None
    exact: Difference | None = None  # on the scale of the tests: logarithms, or points

    @property
    def is_decided(self) -> bool:
        return self.verdict is not Verdict.open

    @property
    def within(self) -> float:
        """Both ends lie within so much, relative or in points: `within 4 %`."""
        far = max(map(abs, self.ends))
        return far if self.difference is not None or far > _LARGEST_LOG else math.expm1(far)

    @property
    def has_interval(self) -> bool:
        """Whether the spread of launches is known, by themselves or from elsewhere."""
        return self.exact is not None and self.exact.freedom > 0

    @property
    def shown_otherwise(self) -> bool:
        """Whether base and head differ by another amount than the change says, visibly so."""
        if self.base is None or self.head is None:
            return False
        if self.ratio is not None:
            return abs(self.head / self.base / self.ratio.estimate - 1) > self.resolution
        if self.difference is not None:
            return abs(self.head - self.base - self.difference.estimate) > self.resolution
        return False

    def reversed(self) -> Change:
        """The same comparison with base and head exchanged."""
        other = {Verdict.faster: Verdict.slower, Verdict.slower: Verdict.faster}
        exact = self.exact and replace(self.exact, estimate=-self.exact.estimate)
        ratio, difference = self.ratio, self.difference
        sides: dict[Literal["base", "head"], Literal["base", "head"]]
        sides = {"base": "head", "head": "base"}
        return replace(
            self,
            base=self.head,
            head=self.base,
            num_base=self.num_head,
            num_head=self.num_base,
            verdict=other.get(self.verdict, self.verdict),
            ratio=ratio and Ratio(*(_inverse(x) for x in (ratio.estimate, ratio.high, ratio.low))),
            difference=difference
            and Ratio(-difference.estimate, -difference.high, -difference.low),
            discounts=tuple(replace(one, side=sides[one.side]) for one in self.discounts),
            ends=(-self.ends[1], -self.ends[0]),
            exact=exact,
        )


def _inverse(value: float) -> float:
    return math.inf if value == 0 else 1 / value


def judge(metric: Metric, evidences: Sequence[Evidence], looks: Looks = ONE_LOOK) -> list[Change]:
    """Judge each of some comparisons that are made together, at the present look."""
    found = [estimate(metric, evidence, len(evidences)) for evidence in evidences]
    return _judged(metric, [[evidence] for evidence in evidences], found, looks)


def judge_means(
    metric: Metric, families: Sequence[Sequence[Evidence]], looks: Looks = ONE_LOOK
) -> list[Change]:
    """Judge the mean change over each family: pairs of sides that differ in the same setting.

    Every pair counts alike, whatever it was measured with. The families are judged together.
    """
    found = []
    for evidences in families:
        estimates = [estimate(metric, evidence) for evidence in evidences]
        numbers = [min(each.num_base, each.num_head) for each in estimates]
        difference = mean_difference(metric, evidences, [each.difference for each in estimates])
        found.append(Estimate(difference, min(numbers), min(numbers)))
    return _judged(metric, families, found, looks)


def _judged(
    metric: Metric,
    families: Sequence[Sequence[Evidence]],
    found: Sequence[Estimate],
    looks: Looks,
) -> list[Change]:
    """Judge estimates that are looked at together; each is of one family of evidence."""
    differences = [each.difference for each in found]
    known = [each for each in differences if each is not None and each.freedom > 0]
    level = looks.level(LEVEL)
    confidence = 1 - looks.level(1 - CONFIDENCE)
    corrected = iter(holm([each.p for each in known]))
    changes = []
    for evidences, each in zip(families, found, strict=True):
        base, head = _medians(metric, evidences)
        resolution = max(evidence.resolution for evidence in evidences)
        change = Change(
            base,
            head,
            Verdict.open,
            each.num_base,
            each.num_head,
            resolution,
            discounts=each.discounts,
            exact=each.difference,
        )
        difference = each.difference
        if difference is not None and difference.freedom > 0:
            if metric.in_points:
                change = replace(change, difference=difference.interval(confidence))
            else:
                change = replace(change, ratio=ratio_of_logs(difference, confidence))
            p = min(1.0, next(corrected) * LEVEL / level)
            ends = difference.ends(1 - looks.level(2 * LEVEL))
            x = smallest_difference(resolution, in_points=metric.in_points)
            verdict, doubt = Verdict.open, None
            if -x <= ends[0] and ends[1] <= x:
                verdict = Verdict.same
            elif p < LEVEL:
                is_better = (difference.estimate > 0) == bool(metric.higher_is_better)
                verdict = Verdict.faster if is_better else Verdict.slower
            is_hidden = verdict.is_claim and each.doubt is Doubt.two_levels
            if is_hidden or (verdict is Verdict.same and each.doubt is Doubt.lopsided):
                verdict, doubt = Verdict.open, each.doubt
            if any(evidence.cautions for evidence in evidences):
                verdict, doubt = Verdict.open, Doubt.cautioned
            change = replace(change, p=p, ends=ends, verdict=verdict, doubt=doubt)
        changes.append(change)
    return changes


def _medians(metric: Metric, evidences: Sequence[Evidence]) -> tuple[float | None, float | None]:
    """The median figures of base and head over launches; None where a side has none.

    The figure of a launch in turns is the median of its rounds.
    """
    sides: dict[Literal["base", "head"], list[float]] = {"base": [], "head": []}
    for evidence in evidences:
        launches = [rounds for rounds, _ in counted_launches(metric, evidence)]
        for name, figures in sides.items():
            in_turns = [
                statistics.median(filter(math.isfinite, getattr(rounds, name)))
                for rounds in launches
            ]
            figures.extend(in_turns or filter(math.isfinite, getattr(evidence, name).figures))
    base, head = (float(statistics.median(own)) if own else None for own in sides.values())
    return base, head


def holm(chances: Sequence[float]) -> list[float]:
    """p-values corrected for the number of tests (Holm 1979), in the order given."""
    order = sorted(range(len(chances)), key=lambda place: chances[place])
    corrected = [0.0] * len(chances)
    highest = 0.0
    for rank, place in enumerate(order):
        highest = max(highest, min(1.0, chances[place] * (len(chances) - rank)))
        corrected[place] = highest
    return corrected
