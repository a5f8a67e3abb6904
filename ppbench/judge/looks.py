"""Levels of tests that are looked at again and again, so that their error rates hold together.

    share of the budget      0.25     0.33     0.42     0.50    ...    1.00
    level spent so far      0.13 %   0.19 %   0.27 %   0.35 %   ...    1.00 %

Each look is one more chance of a false claim, so each has a level of its own, and together they
spend a fixed one, by a power of the share of the budget (Lan and DeMets 1983; Kim and DeMets 1987).
The levels follow by the recursion of Armitage, McPherson and Rowe (1969). They are those of normal
means with a known spread, and are used for the p-values of t tests (Jennison and Turnbull, Group
Sequential Methods, 2000, on the significance level approach). Intervals are repeated ones: those of
all looks hold the true difference together.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from ppbench.judge.differences import Values

SPENDING = 1.5
"""Power of the share of the budget in which a level is spent: above 1, later looks get more."""
LATER_SHARE = 1 / 20
"""Share of a budget for which a launch after the first look measures.

Few launches say little about their spread, so that many short ones decide more than a few long ones
in which rounds scatter less.
"""
_NUM_POINTS = 401
_WIDEST = 10.0  # standard deviations of the last sum
_CLOSE = 1e-9


@dataclass(frozen=True)
class Looks:
    """The numbers of launches or rounds after which one has looked and looks now, of a budget.

    The last is the present look. A budget that is larger than what will be measured costs nothing
    but power.
    """

    counts: tuple[int, ...]
    most: int

    @property
    def last(self) -> int:
        """The number at the present look."""
        return self.counts[-1]

    @property
    def shares(self) -> tuple[float, ...]:
        """The shares of the budget."""
        return tuple(count / self.most for count in self.counts)

    def level(self, total: float) -> float:
        """The two-sided level of the present look, where all looks together spend the total."""
        return total if self.shares == (1.0,) else _walk(self.shares, total).level

    def spent(self, total: float) -> float:
        """How much of a total level the looks so far have spent."""
        return float(total * self.shares[-1] ** SPENDING)


ONE_LOOK = Looks((1,), 1)


@dataclass(frozen=True, eq=False)
class _Walk:
    """The sum of what was measured until a look walks at random, where no look has stopped it."""

    share: float
    level: float
    sums: Values
    masses: Values


@functools.cache
def _walk(shares: tuple[float, ...], total: float) -> _Walk:
    """The walk until the last of these looks, with that look's level."""
    from scipy.special import ndtr

    before = _Walk(0.0, 0.0, np.zeros(1), np.ones(1))
    if len(shares) > 1:
        before = _walk(shares[:-1], total)
    share = shares[-1]
    if not before.share < share <= 1:
        raise ValueError(f"looks at shares {shares}; expected shares that rise to at most 1")
    spent = total * (share**SPENDING - before.share**SPENDING)
    deviation = math.sqrt(share - before.share)
    low, bound = 0.0, _WIDEST  # the distance from 0 that the sum exceeds with this chance
    while bound - low > _CLOSE:
        middle = (low + bound) / 2
        beyond = ndtr((before.sums - middle) / deviation) + ndtr(
            (-middle - before.sums) / deviation
        )
        low, bound = (middle, bound) if float(beyond @ before.masses) > spent else (low, middle)
    grid, width = np.linspace(-bound, bound, _NUM_POINTS, retstep=True)
    densities = np.exp(-np.square((grid[:, None] - before.sums) / deviation) / 2)
    masses = densities @ before.masses * (float(width) / (deviation * math.sqrt(2 * math.pi)))
    masses[[0, -1]] /= 2
    return _Walk(share, 2 * float(ndtr(-bound / math.sqrt(share))), grid, masses)
