"""Launches that something slowed, told apart from the rest by their distance on the slow side.

    slow side
      ^                                          o   discounted: left out of mean and spread
      |                 o
      |
      |     o o   o                       o  o  o    kept: they scatter alike on both sides
      |        o                            o
      |       base                         head

Another job or a throttled host makes a launch slower, never faster, by much more than launches
differ. So the kept launches of a side are always its fastest. How many those are is decided by
likelihood: kept launches are normal around the mean of their side, with one spread for all sides,
and a discounted one may lie anywhere up to some `exp(APART)` spreads. The spread is integrated out
with a flat prior on its logarithm. Likelihoods of mixtures with a broad component for outliers are
due to Box and Tiao (1968); here the component is one-sided, and each launch belongs to one of the
two altogether, which leaves few enough cases to try them all.

Launches that differ between two levels, by an address or a frequency that is drawn anew, look as
if they were disturbed. A difference is then shown only where chance could hardly have shared the
two levels out in this way: `are_two_levels` says where it could.

The constants were chosen by simulation. `python -m benchmarks.verdicts false_claims` has the rates
that they lead to.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ppbench.judge.differences import Values

Counts = npt.NDArray[np.intp]

APART = 5.25
"""What it costs to discount a launch, as a logarithm of likelihood.

About 2 % of comparisons of ten normal launches discount one.
"""
APART_ALONE = 3.5
"""The same for the launches of one side by themselves, so that a side may scatter more."""
SHARE_KEPT = 0.5
"""Smallest share of the launches of each side, rounded down, and of all together, to be kept."""
FEWEST_KEPT = 2
"""Fewest launches of a side to be kept."""
INFLATION = 30.0
"""Raises the variance for each discounted launch, by this number over the square of all launches.

Where some are left out by their values, the others look closer than they are.
"""


@dataclass(frozen=True)
class Side:
    """The launches of one side, from the fastest to the slowest: a larger value is slower."""

    values: Values
    places: npt.NDArray[np.intp]  # of the values as they were given
    num_kept: int

    @property
    def kept(self) -> Values:
        return self.values[: self.num_kept]

    @property
    def discounted(self) -> Values:
        return self.values[self.num_kept :]

    @property
    def num_discounted(self) -> int:
        return len(self.values) - self.num_kept


def without_disturbed(
    sides: Sequence[Values],
    known_squares: float = 0.0,
    known_freedom: float = 0,
    num_tests: int = 1,
) -> tuple[Side, ...]:
    """Find the launches of one side or two that nothing slowed; larger values are slower.

    The more tests are made together, the more launches lie apart by chance, so that discounting one
    costs more by the logarithm of their number. A measured noise counts as launches with these
    squares. Launches without any spread are no measure of how far another lies from them, so that
    none is discounted beside them.
    """
    orders = [np.argsort(side, kind="stable") for side in sides]
    ordered = [side[order] for side, order in zip(sides, orders, strict=True)]
    fewest = [max(FEWEST_KEPT, math.floor(SHARE_KEPT * len(side))) for side in ordered]
    nums = [
        np.arange(min(len(side), few), len(side) + 1)
        for side, few in zip(ordered, fewest, strict=True)
    ]
    spreads = [_squares(side)[num - 1] for side, num in zip(ordered, nums, strict=True)]
    for num, spread in zip(nums, spreads, strict=True):
        gain = _gain(spread + known_squares, int(num[-1]) - 1 + known_freedom)
        spread[gain < APART_ALONE * (num[-1] - num)] = np.inf
    squares = functools.reduce(np.add.outer, spreads) + known_squares
    kept = functools.reduce(np.add.outer, nums)
    num_all = int(kept.flat[-1])
    cost = APART + math.log(num_tests)
    gain = _gain(squares, num_all - len(sides) + known_freedom) - cost * (num_all - kept)
    gain[kept < SHARE_KEPT * num_all] = -np.inf
    best = np.unravel_index(int(gain.argmax()), gain.shape)
    num_kept = [int(num[place]) for num, place in zip(nums, best, strict=True)]
    return tuple(itertools.starmap(Side, zip(ordered, orders, num_kept, strict=True)))


def places_apart(values: Values, slow_sign: int) -> tuple[int, ...]:
    """The places of launches that something slowed, as far as their figures alone show."""
    if not slow_sign or len(values) < 2:
        return ()
    (side,) = without_disturbed([slow_sign * values])
    return tuple(sorted(side.places[side.num_kept :].tolist()))


def _gain(squares: Values, freedom: float) -> Values:
    """Logarithm of likelihood for each number kept, above that of keeping all, the last one."""
    if squares.flat[-1] == 0:
        return np.zeros_like(squares)
    with np.errstate(divide="ignore"):
        gain = freedom / 2 * np.log(squares.flat[-1] / squares)
    return np.where(squares > 0, gain, 0.0)


def _squares(ordered: Values) -> Values:
    """Sum of squares of the first value, of the first two, ..., each around its own mean."""
    offsets = ordered - ordered[0]
    nums = np.arange(1, len(ordered) + 1)
    squares = np.cumsum(np.square(offsets)) - np.square(np.cumsum(offsets)) / nums
    return np.asarray(np.maximum(squares, 0.0), dtype=float)


def inflation(num_discounted: int, num_launches: int, known_freedom: float = 0) -> float:
    """Return the factor of the variance of kept launches that makes up for their choice."""
    return 1 + INFLATION * num_discounted / (num_launches * (num_launches + known_freedom))


NEAR = 2.5
"""A launch is among others if it lies within so many deviations of the nearest of them."""
FOR_EACH = 4
"""Launches of a side, beyond the first, for each that may lie on the level of the slower side."""
DISTANT = 6.0
"""Deviations between two levels from which a disturbed launch may by chance lie on the other."""
BROKEN_OUT = 5.0
"""Deviations between two levels from which a launch on the other is not explained by noise."""


def are_two_levels(faster: Side, slower: Side, known_squares: float, known_freedom: float) -> bool:
    """Whether both sides have launches on both levels, so that chance may have shared them out.

    Of five launches a side, one disturbed one may lie on the level of the slower side: if launches
    fall on either level by chance, all five of one side and at most one of the other lie on the
    slow one in 0.7 % of comparisons at most. Two would be 2.2 %. Where the levels are so near that
    a disturbance would hardly have met the other, not even one is allowed; nor is a launch of the
    slower side on the fast level, where disturbances bring none.
    """
    squares = _squares(faster.kept)[-1] + _squares(slower.kept)[-1] + known_squares
    freedom = len(faster.kept) + len(slower.kept) - 2 + known_freedom
    deviation = math.sqrt(squares / freedom)
    distance = float(slower.kept.mean() - faster.kept.mean())
    low, high = slower.kept[0] - NEAR * deviation, slower.kept[-1] + NEAR * deviation
    num_slow = int(np.sum((faster.discounted >= low) & (faster.discounted <= high)))
    if num_slow and distance < DISTANT * deviation:
        return True
    if num_slow > (len(faster.values) - 1) // FOR_EACH:
        return True
    # The fastest launch of the slower side may lie apart from its own, among the others. With more
    # than five launches, chance hardly ever leaves a single one there.
    rest = slower.kept[1:]
    if len(rest) > FOR_EACH:
        return False
    own = _squares(faster.kept)[-1] + known_squares
    freedom = len(faster.values) + len(slower.values) - 2 + known_freedom
    without = own + _squares(rest)[-1]
    if without == 0 or freedom / 2 * math.log((own + _squares(slower.kept)[-1]) / without) < APART:
        return False
    kept = len(faster.kept) + len(rest) - 2 + known_freedom
    deviation = math.sqrt(without / kept)
    is_among = slower.kept[0] <= faster.kept[-1] + NEAR * deviation
    return bool(is_among) and distance >= BROKEN_OUT * deviation


NEIGHBOURS = 5
"""Launches before, and as many after, that show the level around a launch of a series."""
FEWEST_NEIGHBOURS = 3
FAR = 4.0
"""Deviations above both levels from which a launch of a series counts as disturbed."""
OF_A_LEVEL, OF_A_LEVEL_AT_END = 3, 2
"""Launches in a row that are no disturbance but a level, if they agree."""
_MOST_ROUNDS = 4


def disturbed_in_series(values: Values) -> npt.NDArray[np.bool_]:
    """Find the launches of a series that lie far above those before and those after.

              x                                        o o     two that agree at the end:
        o o o   o o o     x: disturbed           o o o         a new level

    Larger values are slower. Launches in a row that agree are a level, not disturbed. The levels
    around a launch are lower medians, and the deviation is that of the median of the distances
    between neighbours, so that neither follows other disturbed launches.
    """
    disturbed = np.zeros(len(values), dtype=bool)
    for _ in range(_MOST_ROUNDS):
        kept = np.flatnonzero(~disturbed)
        # The deviation of normal launches with this median distance between neighbours.
        far = math.inf
        if len(kept) >= FEWEST_NEIGHBOURS:
            far = FAR * float(np.median(np.abs(np.diff(values[kept])))) / _MEDIAN_DISTANCE
        found = values > _levels_around(values, kept) + far
        # Those that agree with others beside them are a level.
        edges = np.flatnonzero(np.diff(np.concatenate([[False], found, [False]]).astype(int)))
        for start, end in edges.reshape(-1, 2):
            row, is_at_end = values[start:end], start == 0 or end == len(values)
            agree = row <= row.min() + far
            beside = [values[place] for place in (start - 1, end) if 0 <= place < len(values)]
            is_continued = any(value >= row.min() - far for value in beside)
            if is_continued or agree.sum() >= (OF_A_LEVEL_AT_END if is_at_end else OF_A_LEVEL):
                found[start:end] = ~agree
        if (found == disturbed).all():
            break
        disturbed = found
    return disturbed


_MEDIAN_DISTANCE = 0.6745 * math.sqrt(2)


def _levels_around(values: Values, kept: Counts) -> Values:
    """The higher one of the levels before and after each launch; infinite where none is known."""
    padding = np.full(NEIGHBOURS, np.inf)
    padded = np.concatenate([padding, values[kept], padding])
    places = np.arange(len(values))
    first_after = np.searchsorted(kept, places, side="right")
    num_before = np.searchsorted(kept, places)
    before = padded[num_before[:, None] + np.arange(NEIGHBOURS)]
    after = padded[first_after[:, None] + np.arange(NEIGHBOURS, 2 * NEIGHBOURS)]
    levels = np.maximum(_lower_medians(before), _lower_medians(after))
    return np.where(np.isneginf(levels), np.inf, levels)


def _lower_medians(windows: Values) -> Values:
    """The lower median of each window; minus infinity with too few neighbours, which are finite."""
    nums = np.isfinite(windows).sum(axis=1)
    middle = np.maximum(nums - 1, 0) // 2
    medians = np.take_along_axis(np.sort(windows, axis=1), middle[:, None], axis=1)[:, 0]
    return np.where(nums >= FEWEST_NEIGHBOURS, medians, -np.inf)
