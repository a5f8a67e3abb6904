"""How sure it is that one case's figure is higher than another's, in three grades.

The rule, for a case and its rival, by the launches of both:

    decided      at least 3 launches of each; Welch's test on logarithms rejects equality at 2 %
                 (two-sided, so that the order is wrong in at most 1 %); the lead is over 1 %
    leaning      at least 2 launches of each; the same test at 20 %; the lead is over 1 %
                 or, with a single launch of either: the lead is over 5 %, and the 95 % intervals
                 of the medians over steps do not overlap
    not decided  everything else

A single launch never decides: its steps share whatever made that launch fast or slow, so that
their interval is too narrow. Two cases are equal if both have 3 launches and the whole 95 %
interval of their ratio lies within 1 %.

The best of several cases is decided only if it is decided against each of the others. The level
needs no correction for their number: the highest of several equal figures stands out from all
others less often than the higher of two (Gutmann & Maymin, "Is the selected population the best?",
Annals of Statistics 15, 1987). `tests/ppbench/statistics/test_ranking.py` simulates it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ppbench.statistics.noise import POWER
from ppbench.judge.differences import (
    FEWEST_LAUNCHES,
    Ratio,
    group,
    ratio_of_logs,
    t_quantile,
    welch,
)
from ppbench.statistics.verdicts import FLOOR, LEVEL

LEANING_LEVEL = 0.2
"""Level of the two-sided test for a leaning: its order is wrong in at most a tenth."""
LEAST_LEAD_OF_ONE_LAUNCH = 0.05
"""Launches of one case rarely differ by more, so a larger lead of single launches is a hint."""
MOST_LAUNCHES = 30
"""More launches of each case than this are not worth the time for the lead that they would show."""


class Grade(StrEnum):
    """How sure a lead is."""

    decided = "decided"
    leaning = "leaning"
    undecided = "not decided"


GRADES = tuple(Grade)
"""From the surest."""


@dataclass(frozen=True)
class Launches:
    """The figures of a case's launches, and the interval of their medians over steps, or NaN."""

    figures: tuple[float, ...]
    low: float = math.nan
    high: float = math.nan

    @property
    def median(self) -> float:
        return float(np.median(self.figures))


@dataclass(frozen=True)
class Lead:
    """A case's figure over that of another."""

    grade: Grade
    ratio: float  # of geometric means where there is an interval, else of medians
    interval: Ratio | None  # by launches; None where either side has fewer than 3
    is_equal: bool = False  # the whole interval lies within 1 %


def lead(case: Launches, rival: Launches) -> Lead:
    """Grade the lead of a case over a rival; below 1 the rival's figure is the higher one.

    All figures are positive.
    """
    fewest = min(len(case.figures), len(rival.figures))
    if fewest < 2:
        ratio = case.median / rival.median
        are_apart = case.low > rival.high  # not where an interval is NaN
        is_large = ratio > 1 + LEAST_LEAD_OF_ONE_LAUNCH
        return Lead(Grade.leaning if are_apart and is_large else Grade.undecided, ratio, None)
    difference = welch(*(group(np.log(side.figures)) for side in (case, rival)))
    floor, grade = math.log1p(FLOOR), Grade.undecided
    if difference.estimate > floor and difference.p < LEANING_LEVEL:
        is_sure = difference.p < LEVEL and fewest >= FEWEST_LAUNCHES
        grade = Grade.decided if is_sure else Grade.leaning
    ratio_by_launches = ratio_of_logs(difference)
    if fewest < FEWEST_LAUNCHES:
        return Lead(grade, ratio_by_launches.estimate, None)
    return Lead(grade, ratio_by_launches.estimate, ratio_by_launches, difference.is_within(floor))


def weakest(grades: Sequence[Grade]) -> Grade:
    """Return the least sure of some grades; `decided` for none."""
    return max(grades, key=GRADES.index, default=Grade.decided)


def launches_needed(case: Launches, rival: Launches) -> int | None:
    """Return how many launches of each show the present lead with a chance of 80 %.

    It assumes that launches go on to scatter as these do. None if more than `MOST_LAUNCHES` are
    needed, as for a lead of less than 1 %, or if the scatter is unknown.
    """
    sides = [group(np.log(side.figures)) for side in (case, rival)]
    freedom = sum(side.freedom for side in sides)
    ahead = abs(sides[0].mean - sides[1].mean)
    if freedom == 0 or ahead <= math.log1p(FLOOR):
        return None
    deviation = math.sqrt(sum(side.squares for side in sides) / freedom)
    from scipy.special import ndtr

    for num in range(FEWEST_LAUNCHES, MOST_LAUNCHES + 1):
        if deviation == 0:
            return num
        error = deviation * math.sqrt(2 / num)
        least = t_quantile(2 * (num - 1), 1 - LEVEL / 2) * error
        if float(ndtr((ahead - max(least, math.log1p(FLOOR))) / error)) >= POWER:
            return num
    return None
