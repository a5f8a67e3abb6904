"""Differences and ratios of groups of launches, with intervals: Student, Welch.

Launches are compared by means and variances, not ranks: the figure of a launch is a median over its
steps already, so outliers are gone, and with five launches a side a rank test cannot reach 1 %. The
tests take numbers that differ by addition: logarithms, or fractions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]

CONFIDENCE = 0.95
"""The confidence of the intervals that are shown."""
FEWEST_LAUNCHES = 3
"""Fewest launches of a side for a verdict: with fewer, their spread is hardly known."""
ROUNDING = 1e-12
"""Logarithms and fractions that differ by less are equal: their last digits are rounding."""
UNEQUAL = 0.01
"""Level of the test that one group scatters more than the other."""


@dataclass(frozen=True)
class Group:
    """The number, mean and spread of some launches."""

    num: int
    mean: float
    squares: float  # the sum of squared distances from the mean

    @property
    def freedom(self) -> int:
        return self.num - 1

    @property
    def variance(self) -> float:
        """The variance of a launch; 0, for unknown, where there is only one."""
        return self.squares / self.freedom if self.freedom else 0.0


@dataclass(frozen=True)
class Difference:
    """One mean less another, with its standard error."""

    estimate: float
    error: float
    freedom: float  # degrees of freedom of the error

    @property
    def p(self) -> float:
        """Chance of a difference at least as large, either way, between equal groups."""
        if self.error == 0 or self.freedom == 0:
            return 1.0 if abs(self.estimate) < ROUNDING or self.freedom == 0 else 0.0
        from scipy.special import stdtr  # loaded only where there are launches to compare

        return 2 * float(stdtr(self.freedom, -abs(self.estimate) / self.error))

    def ends(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """The interval of the true difference; infinite where the error is unknown."""
        if self.freedom == 0:
            return -math.inf, math.inf
        half = t_quantile(self.freedom, (1 + confidence) / 2) * self.error
        return self.estimate - half, self.estimate + half

    def interval(self, confidence: float = CONFIDENCE) -> Ratio:
        """The estimate with the ends of its interval, still as a difference."""
        return Ratio(self.estimate, *self.ends(confidence))


def additive(figures: Sequence[float], *, in_points: bool) -> Values:
    """Figures on the scale of the tests: their logarithms, or with `in_points` themselves.

    Raises ValueError for figures that are not finite, or have no logarithm.
    """
    values = np.asarray(figures, dtype=float)
    if not (np.isfinite(values).all() and (in_points or (values > 0).all())):
        expected = "finite figures" if in_points else "finite figures above 0"
        raise ValueError(f"launches with {values.tolist()}; expected {expected}")
    return values if in_points else np.log(values)


def without_rounding(values: Values) -> Values:
    """Logarithms or fractions, those equal that differ from the smallest by rounding alone."""
    return np.where(values - values.min() < ROUNDING, values.min(), values)


def smallest_difference(floor: float, *, in_points: bool) -> float:
    """A relative floor (with `in_points` a fraction) on the scale of the tests."""
    return floor if in_points else math.log1p(floor)


def group(values: Sequence[float] | Values) -> Group:
    """Summarise values; equal values have exactly their own mean and no spread."""
    array = np.sort(np.asarray(values, dtype=float))  # sorted: sums do not depend on the order
    offsets = array - array[0]
    mean = float(offsets.mean())
    return Group(len(array), float(array[0]) + mean, float(np.square(offsets - mean).sum()))


def welch(one: Group, other: Group) -> Difference:
    """Compare two means, each side with its own spread (Welch 1947); two launches a side."""
    parts = [side.variance / side.num for side in (one, other)]
    spread = sum(parts)
    estimate = one.mean - other.mean
    if spread == 0:
        return Difference(estimate, 0.0, one.freedom + other.freedom)
    shares = [part / spread for part in parts]  # squares of tiny spreads would underflow
    freedom = 1 / sum(
        share**2 / side.freedom for share, side in zip(shares, (one, other), strict=True) if share
    )
    return Difference(estimate, math.sqrt(spread), freedom)


def student(
    one: Group, other: Group, known_variance: float = 0.0, known_freedom: float = 0
) -> Difference:
    """Compare two means with one spread, pooled with a variance that is known from elsewhere.

    A known variance counts like as many launches as it has degrees of freedom: Smyth's moderated t
    (2004). One launch a side is enough.
    """
    freedom = one.freedom + other.freedom + known_freedom
    squares = one.squares + other.squares + known_freedom * known_variance
    variance = squares / freedom if freedom else 0.0
    error = math.sqrt(variance * (1 / one.num + 1 / other.num))
    return Difference(one.mean - other.mean, error, freedom)


def student_or_welch(one: Group, other: Group) -> Difference:
    """Student's test, or Welch's where spreads differ and it finds less.

    With two launches that agree by chance, Welch's alone would find far too much.
    """
    narrow, wide = sorted((one, other), key=lambda side: side.variance)
    pooled = student(one, other)
    if not is_larger(wide.variance, wide.freedom, narrow.variance, narrow.freedom):
        return pooled
    return max(pooled, welch(one, other), key=lambda difference: difference.p)


def is_larger(
    variance: float, freedom: float, than: float, than_freedom: float, level: float = UNEQUAL
) -> bool:
    """Whether one variance is larger than another beyond chance: the F test, one-sided."""
    if freedom == 0 or than_freedom == 0 or variance <= than:
        return False
    if than == 0:
        return True
    from scipy.special import fdtrc

    return float(fdtrc(freedom, than_freedom, variance / than)) < level


def t_quantile(freedom: float, chance: float) -> float:
    """Quantile of Student's distribution."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, chance))


@dataclass(frozen=True)
class Ratio:
    """An estimate with the ends of its 95 % interval."""

    estimate: float
    low: float
    high: float


def ratio_of_logs(difference: Difference, confidence: float = CONFIDENCE) -> Ratio:
    """The ratio that a difference of logarithms means; an end may be 0 or infinite."""
    with np.errstate(over="ignore"):
        return Ratio(*np.exp([difference.estimate, *difference.ends(confidence)]).tolist())


def chi_square(freedom: float, chance: float) -> float:
    """Quantile of the chi-square distribution."""
    from scipy.special import chdtri

    return float(chdtri(freedom, 1 - chance))
