"""How many times as long one thing takes as another, measured in rounds of both.

Each round gives one ratio of two steps that were neighbours in time, so that what slows the machine
for longer than a round slows both. Their median and its interval assume no distribution: step times
have long tails, which a mean and a t interval would follow.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.analysis.stats import median_interval

FEWEST_ROUNDS = 6
"""Of fewer values not even the extremes hold the median between them with a confidence of 95 %."""


@dataclass(frozen=True)
class Ratio:
    """A median with the ends of its interval."""

    median: float
    low: float
    high: float


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """The median over rounds of numerator / denominator, with its 95 % interval.

    Raises ValueError when the sequences differ in length, or have fewer than `FEWEST_ROUNDS`.
    """
    ratios = [n / d for n, d in zip(numerators, denominators, strict=True)]
    interval = median_interval(ratios)
    if interval is None:
        raise ValueError(f"{len(ratios)} rounds are too few; at least {FEWEST_ROUNDS}")
    return Ratio(statistics.median(ratios), *interval)
