"""How many times as long one thing takes as another, measured in rounds of both.

Each round gives one ratio of two steps that were neighbours in time, so that what slows the machine
for longer than a round slows both. Were there no difference, either step might as well have been
the slower one: the logarithms of the ratios lie symmetrically about the true one, however long the
tails of the step times are. For that Hodges and Lehmann's estimate (1963) and the interval of
Wilcoxon's signed-rank test need a third fewer rounds than the plain median, which would do without
the symmetry, and a t interval would follow the tails.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppbench.analysis.differences import Difference, group, welch
from ppbench.analysis.stats import CONFIDENCE

FEWEST_LAUNCHES = 3
"""Of fewer launches the spread between them is hardly known."""
FEWEST_ROUNDS = 6
"""Of fewer ratios not even the extremes hold the true one between them with 95 %."""


@dataclass(frozen=True)
class Ratio:
    """An estimate with the ends of its 95 % interval."""

    estimate: float
    low: float
    high: float


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """numerator / denominator over all rounds: the median of the means of all pairs of rounds.

    Means of logarithms. The interval ends at two of them (Hollander, Wolfe & Chicken, Nonparametric
    Statistical Methods, section 3.3). Raises ValueError when the sequences differ in length, or
    have fewer than `FEWEST_ROUNDS`.
    """
    if len(numerators) != len(denominators) or len(numerators) < FEWEST_ROUNDS:
        raise ValueError(
            f"{len(numerators)} and {len(denominators)} rounds; expected as many of both, at "
            f"least {FEWEST_ROUNDS}"
        )
    logs = np.log(np.asarray(numerators, dtype=float) / np.asarray(denominators, dtype=float))
    first, second = np.triu_indices(len(logs))
    means = np.sort((logs[first] + logs[second]) / 2)
    outside = _num_outside(len(logs))
    ends = np.median(means), means[outside], means[-1 - outside]
    estimate, low, high = (float(np.exp(end)) for end in ends)
    return Ratio(estimate, low, high)


def launch_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """numerator / denominator of figures of separate launches, which no round pairs.

    The ratio of geometric means, with Welch's interval on the logarithms: the launches of one side
    may scatter more than those of the other. Raises ValueError for fewer than `FEWEST_LAUNCHES`.
    """
    if min(len(numerators), len(denominators)) < FEWEST_LAUNCHES:
        raise ValueError(
            f"{len(numerators)} and {len(denominators)} launches; expected at least "
            f"{FEWEST_LAUNCHES} of each"
        )
    return ratio_of_logs(welch(*(group(np.log(side)) for side in (numerators, denominators))))


def ratio_of_logs(difference: Difference) -> Ratio:
    """What a difference of logarithms says of the ratio; an end may be 0 or infinite."""
    with np.errstate(over="ignore"):
        return Ratio(*np.exp([difference.estimate, *difference.ends()]).tolist())


@functools.cache
def _num_outside(num_rounds: int) -> int:
    """How many of the sorted means lie outside the interval at each end.

    As many as the largest sum of ranks that a signed-rank test rejects: with k outside, the true
    ratio is beyond an end when the ranks with one sign sum up to k at most.
    """
    chances = np.ones(1)
    for rank in range(1, num_rounds + 1):  # a fair coin decides whether it counts
        with_rank = np.concatenate([np.zeros(rank), chances])
        chances = (with_rank + np.pad(chances, (0, rank))) / 2
    return int(np.sum(np.cumsum(chances) <= (1 - CONFIDENCE) / 2)) - 1
