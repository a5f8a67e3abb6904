"""Verdicts of launches that are looked at again and again, until the answer is clear.

    launches a side     3       4       5       6     ...    12
    spent so far      0.09 %  0.14 %  0.20 %  0.27 %        0.75 %    on false claims

Each look is one more chance of a false claim, so each has a level of its own, and together they
spend a fixed one: by a power of the share of launches (Lan and DeMets 1983; Kim and DeMets 1987).
The levels follow by the recursion of Armitage, McPherson and Rowe (1969). They are those of normal
means with a known spread, and are used for the p-values of t tests (Jennison and Turnbull, Group
Sequential Methods, 2000, on the significance level approach). Intervals are repeated ones: those of
all looks hold the true ratio together, with 95 %. `benchmarks/tracking.py` measures both rates.

    slower, faster   significant, and the estimate is beyond half the floor. A change as large as
                     the floor is estimated below it in half of all cases, so that the whole floor
                     would never let such a change be found
    same             the interval lies within the floor; or it lies within 2 %, and no change is 3
                     times as likely as one of the floor's size (Wald 1945). Without the latter, a
                     change of 1 % would be called the same before it shows

No method finds every small change soon. With a deviation of 0.8 % between launches, 12 of them a
side show a change of 1 % in at most 68 % of cases if 1 % of claims may be false: that is the power
of the best test for a known deviation and a single look (Neyman and Pearson 1933), and 90 % takes
20 a side. Looking early costs some of that, and finds large changes with 3.

The looks are planned before the first launch, and each is at the first launches of a side, however
many there are. A measurement that was stopped and goes on thus takes the looks that it would have
taken.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np

from ppbench.statistics.noise import detectable_change
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.statistics.step_times import CONFIDENCE
from ppbench.statistics.verdicts import Change, Metric, Noise, Pair, Rule, Verdict, compare

LEVEL = 0.0075
"""Spent on false claims, faster or slower, over all looks.

Tests of few launches, whose disturbed ones do not count, add the rest of 1 %.
"""
SAME_WITHIN = 0.02
"""Difference within which two sides are the same."""
SHARE_OF_FLOOR = 0.5
"""Share of the floor that an estimate must exceed."""
ODDS = 3.0
"""How many times as likely as a change of the floor's size no change is, for `same` within 2 %."""
SPENDING = 1.5
"""Power of the share of launches in which the level is spent: above 1, later looks get more."""
MOST_LAUNCHES = 12
"""Launches of a side after which an open answer stays open, unless another number is asked for."""
_DECIDED = {Verdict.faster, Verdict.slower, Verdict.same}
_NUM_POINTS = 401
_WIDEST = 10.0  # standard deviations of the last sum
_CLOSE = 1e-9


def looks(most_launches: int, fewest: int = FEWEST_LAUNCHES) -> tuple[int, ...]:
    """The numbers of launches a side after which one looks: each from `fewest` on."""
    return tuple(range(fewest, most_launches + 1)) or (most_launches,)


def judge(metric: Metric, pairs: Sequence[Pair], look: int, looks: Sequence[int]) -> list[Change]:
    """Return the verdicts at a look, by its index; their error rates hold over all looks together.

    p is corrected, so that it is compared with the level of all looks.
    """
    rule = rule_at(look, looks)
    return [
        replace(change, p=None if change.p is None else min(1.0, change.p * LEVEL / rule.level))
        for change in compare(metric, pairs, rule)
    ]


def rule_at(look: int, looks: Sequence[int]) -> Rule:
    """The rule of a verdict at a look."""
    level = _levels(tuple(looks), LEVEL)[look]
    confidence = 1 - _levels(tuple(looks), 1 - CONFIDENCE)[look]
    return Rule(level, level, confidence, SHARE_OF_FLOOR, SAME_WITHIN, ODDS)


def is_decided(changes: Sequence[Change]) -> bool:
    """Whether every verdict is one that further launches are not needed for."""
    return all(change.verdict in _DECIDED for change in changes)


def forecast(
    noise: Noise, looks: Sequence[int], floor: float, num_cases: int
) -> list[tuple[int, float]]:
    """For each look, the launches a side and the change that 80 % of comparisons find by then.

    It counts that look alone, and so is a little too large.
    """
    return [
        (num, detectable_change(noise, num, floor, num_cases, rule_at(look, looks)))
        for look, num in enumerate(looks)
    ]


class Stop(StrEnum):
    """Why no more launches are made."""

    decided = "decided"
    most = "most launches reached"
    failed = "launches failed"


@dataclass(frozen=True)
class Look:
    """One look of those that were planned, at the first launches of either side."""

    place: int
    planned: tuple[int, ...]  # launches a side at each look

    @property
    def num_launches(self) -> int:
        return self.planned[self.place]

    def judge(self, metric: Metric, pairs: Sequence[Pair]) -> list[Change]:
        """The verdicts at this look; error rates hold over all looks."""
        return judge(metric, pairs, self.place, self.planned)


@dataclass(frozen=True)
class Looks:
    """The looks that were taken, and why the last of them was the last."""

    last: Look
    stop: Stop

    @property
    def num_taken(self) -> int:
        return self.last.place + 1

    @property
    def num_launches(self) -> int:
        """Launches of each side at the last look."""
        return self.last.num_launches

    @property
    def most_launches(self) -> int:
        return self.last.planned[-1]

    @property
    def is_decided(self) -> bool:
        return self.stop is Stop.decided

    @property
    def level_spent(self) -> float:
        """The chance of a false claim that the looks so far have spent, of `LEVEL`."""
        share = self.num_launches / self.most_launches
        return float(LEVEL * share**SPENDING)

    def values_of(self, change: Change) -> dict[str, object]:
        """What a table says of one change, beside the change itself."""
        return {
            "num_looks": self.num_taken,
            "level_spent": self.level_spent,
            "is_decided": is_decided([change]),
        }

    def as_dict(self) -> dict[str, object]:
        """The looks, as JSON has them."""
        return {
            "num_looks": self.num_taken,
            "launches": list(self.last.planned[: self.num_taken]),
            "max_launches": self.most_launches,
            "level_spent": self.level_spent,
            "is_decided": self.is_decided,
            "stop": str(self.stop),
        }


@functools.cache
def _levels(looks: tuple[int, ...], total: float) -> tuple[float, ...]:
    """Two-sided level of each look, so that all of them spend the total in proportion to launches.

    The sum of the launches so far walks at random. Where no look has stopped it, its distribution
    is carried from look to look as masses on a grid.
    """
    from scipy.special import ndtr

    levels: list[float] = []
    sums, masses, before = np.zeros(1), np.ones(1), 0.0
    for previous, num in itertools.pairwise((0, *looks)):
        time = num / looks[-1]  # the share of the launches at this look
        spent = total * (time**SPENDING - (previous / looks[-1]) ** SPENDING)
        deviation = math.sqrt(time - before)
        low, bound = 0.0, _WIDEST  # the distance from 0 that the next sum exceeds with this chance
        while bound - low > _CLOSE:
            middle = (low + bound) / 2
            beyond = ndtr((sums - middle) / deviation) + ndtr((-middle - sums) / deviation)
            low, bound = (middle, bound) if float(beyond @ masses) > spent else (low, middle)
        levels.append(2 * float(ndtr(-bound / math.sqrt(time))))
        grid, width = np.linspace(-bound, bound, _NUM_POINTS, retstep=True)
        densities = np.exp(-np.square((grid[:, None] - sums) / deviation) / 2)
        masses = densities @ masses * (float(width) / (deviation * math.sqrt(2 * math.pi)))
        masses[[0, -1]] /= 2
        sums, before = grid, time
    return tuple(levels)
