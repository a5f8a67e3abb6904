"""How many times as long one thing takes as another, measured in rounds of both.

Each round gives one ratio of two steps that were neighbours in time, so that what slows the machine
for longer than a round slows both. Their median and its interval assume no distribution: step times
have long tails, which a mean and a t interval would follow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
FEWEST_ROUNDS = 6
"""Of fewer values not even the extremes hold the median between them with a confidence of 95 %."""


@dataclass(frozen=True)
class Ratio:
    """A median with the ends of its interval."""

    median: float
    low: float
    high: float


def paired_ratio(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = CONFIDENCE
) -> Ratio:
    """The median over rounds of numerator / denominator.

    Its interval ends at two of the ratios (David & Nagaraja, Order Statistics, section 7.1). Raises
    ValueError when the sequences differ in length, or are too short for the confidence.
    """
    ratios = sorted(n / d for n, d in zip(numerators, denominators, strict=True))
    outside = _num_outside(len(ratios), confidence)
    half = len(ratios) // 2
    return Ratio((ratios[half] + ratios[~half]) / 2, ratios[outside], ratios[~outside])


def _num_outside(num_values: int, confidence: float) -> int:
    """How many of the sorted values lie outside the interval at each end.

    With k outside, the median is beyond an end when a fair coin, thrown once for each value, shows
    heads at most k times; for both ends together that may happen with 1 - confidence.
    """
    allowed, num_outside, num_ways = (1 - confidence) / 2, -1, 1
    while num_ways / 2**num_values <= allowed:
        num_outside += 1
        num_ways += math.comb(num_values, num_outside + 1)
    if num_outside < 0:
        raise ValueError(f"{num_values} values are too few for a confidence of {confidence:.0%}")
    return num_outside
