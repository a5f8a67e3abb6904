"""By how much two groups of launches differ, and how sure that is: tests after Student and Welch.

Means and variances, not ranks: the figure of a launch is a median over its steps already, so what
is far out in a step is gone, and with five launches a side a rank test cannot say less than 1 % at
all. What a test takes are numbers that differ by addition: logarithms, or fractions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ppbench.analysis.stats import CONFIDENCE

UNEQUAL = 0.01
"""The level of the test that finds one group to scatter more than the other."""


@dataclass(frozen=True)
class Group:
    """What a test needs to know of some launches."""

    num: int
    mean: float
    squares: float  # the sum of squared distances from the mean

    @property
    def freedom(self) -> int:
        return self.num - 1

    @property
    def variance(self) -> float:
        """Of one launch; of a single one, nothing is known and 0 is said."""
        return self.squares / self.freedom if self.freedom else 0.0


@dataclass(frozen=True)
class Difference:
    """One mean less another, with its standard error."""

    estimate: float
    error: float
    freedom: float  # that the error is known with

    @property
    def p(self) -> float:
        """How often as large a difference, either way, comes from groups that do not differ."""
        if self.error == 0 or self.freedom == 0:
            return 1.0 if self.estimate == 0 or self.freedom == 0 else 0.0
        from scipy.special import stdtr  # loaded only where there are launches to compare

        return 2 * float(stdtr(self.freedom, -abs(self.estimate) / self.error))

    def ends(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Between which the true difference lies; infinitely far where nothing tells the error."""
        if self.freedom == 0:
            return -math.inf, math.inf
        half = t_quantile(self.freedom, (1 + confidence) / 2) * self.error
        return self.estimate - half, self.estimate + half


def group(values: Sequence[float] | npt.NDArray[np.float64]) -> Group:
    """Equal values have their own mean and no spread, exactly."""
    array = np.sort(np.asarray(values, dtype=float))  # sorted: sums do not depend on the order
    apart = array - array[0]
    mean = float(apart.mean())
    return Group(len(array), float(array[0]) + mean, float(np.square(apart - mean).sum()))


def welch(one: Group, other: Group) -> Difference:
    """One less the other, each with a spread of its own (Welch 1947). Two launches a side."""
    parts = [side.variance / side.num for side in (one, other)]
    spread = sum(parts)
    estimate = one.mean - other.mean
    if spread == 0:
        return Difference(estimate, 0.0, one.freedom + other.freedom)
    shares = [part / spread for part in parts]  # of tiny spreads, the squares would vanish
    freedom = 1 / sum(
        share**2 / side.freedom for share, side in zip(shares, (one, other), strict=True) if share
    )
    return Difference(estimate, math.sqrt(spread), freedom)


def student(
    one: Group, other: Group, known_variance: float = 0.0, known_freedom: int = 0
) -> Difference:
    """One less the other, both with one spread, pooled with what is known of it from elsewhere.

    A variance that is known with some degrees of freedom counts as so many launches do: as in
    Smyth's moderated t (2004). One launch a side will do.
    """
    freedom = one.freedom + other.freedom + known_freedom
    squares = one.squares + other.squares + known_freedom * known_variance
    variance = squares / freedom if freedom else 0.0
    error = math.sqrt(variance * (1 / one.num + 1 / other.num))
    return Difference(one.mean - other.mean, error, freedom)


def is_larger(
    variance: float, freedom: int, than: float, than_freedom: int, level: float = UNEQUAL
) -> bool:
    """Whether one variance is larger than another beyond chance: the F test, one-sided."""
    if freedom == 0 or than_freedom == 0 or variance <= than:
        return False
    if than == 0:
        return True
    from scipy.special import fdtrc

    return float(fdtrc(freedom, than_freedom, variance / than)) < level


def t_quantile(freedom: float, chance: float) -> float:
    """Below which a value of Student's distribution lies with this chance."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, chance))
