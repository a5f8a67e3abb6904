"""The noise between launches of one commit, and the smallest change detectable in it.

Launches that something slowed are left out, as comparisons leave them out. Over several cases,
squares are pooled around each case's own mean, on logarithms, so that only the spread counts and
not the level. The range or the largest difference would grow with the number of launches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppbench.judge.disturbances import places_apart
from ppbench.judge.differences import additive, group, t_quantile
from ppbench.statistics.step_times import CONFIDENCE
from ppbench.statistics.verdicts import FLOOR, RULE, Noise, Rule, effective_floor

POWER = 0.8
_NUM_SPREADS = 400
_MOST_CHANGE = 10.0
_CLOSE = 1e-4


@dataclass(frozen=True)
class NoiseLevel:
    """The deviation between launches with the ends of its 95 % interval."""

    noise: Noise
    low: float
    high: float
    left_out: tuple[tuple[int, ...], ...] = ()  # of each case: places of launches that lie apart


def measure_noise(
    cases: Sequence[Sequence[float]], *, in_points: bool = False, slow_sign: int = 0
) -> NoiseLevel:
    """Estimate the noise from the figures of each case's launches, all of one commit.

    The deviation is relative; with `in_points`, that of a fraction. With a `slow_sign` (1 if slower
    launches have higher figures, else -1), disturbed launches are left out. With several cases,
    `num_launches` is that of a single case with the same degrees of freedom. The interval is that
    of a normal distribution's deviation, by chi-square. Raises ValueError without a case of two
    launches, and for figures that have no logarithm.
    """
    values = [additive(case, in_points=in_points) for case in cases]
    left_out = tuple(places_apart(case, slow_sign) for case in values)
    groups = [
        group(np.delete(case, list(apart)))
        for case, apart in zip(values, left_out, strict=True)
        if len(case) > 1
    ]
    if not groups:
        raise ValueError(f"{len(cases)} cases; expected at least one with two launches")
    freedom = sum(case.freedom for case in groups)
    squares = sum(case.squares for case in groups)
    low, high = (math.sqrt(squares / _chi_square(freedom, end)) for end in _ENDS)
    noise = Noise(math.sqrt(squares / freedom), freedom + 1)
    return NoiseLevel(noise, low, high, left_out)


def noise_of(cases: Sequence[Sequence[float]]) -> Noise | None:
    """The noise of launches around the mean of each case; None where none has two."""
    return measure_noise(cases).noise if any(len(own) > 1 for own in cases) else None


def detectable_change(
    noise: Noise,
    num_launches: int,
    floor: float = FLOOR,
    num_cases: int = 1,
    rule: Rule = RULE,
) -> float:
    """The change that 80 % of comparisons with that many launches a side detect: 0.02 is 2 %.

    `compare` detects it with this noise if it is significant at Holm's strictest level of
    `num_cases`, and beyond the rule's share of the floor.
    """
    low, high = 0.0, _MOST_CHANGE
    while high - low > _CLOSE * high and high > _CLOSE**2:
        middle = (low + high) / 2
        is_found = power(noise, middle, num_launches, floor, num_cases, rule) >= POWER
        low, high = (low, middle) if is_found else (middle, high)
    return high


def power(
    noise: Noise,
    change: float,
    num_launches: int,
    floor: float = FLOOR,
    num_cases: int = 1,
    rule: Rule = RULE,
) -> float:
    """Chance that a relative change is detected with that many launches a side.

    For each spread that those launches may show, it is the chance that the estimate lies beyond the
    floor and the significance limit of that spread; the result is the mean over the spreads.
    """
    limit = math.log1p(rule.share_of_floor * effective_floor(floor, noise))
    if noise.deviation == 0:
        return float(math.log1p(change) > limit)
    own, known = 2 * (num_launches - 1), noise.freedom
    error = noise.deviation * math.sqrt(2 / num_launches)
    chances = (np.arange(_NUM_SPREADS) + 0.5) / _NUM_SPREADS
    spreads = np.array([_chi_square(own, chance) for chance in chances]) if own else np.zeros(1)
    pooled = np.sqrt((spreads + known) / (own + known))
    significant = (
        t_quantile(own + known, 1 - rule.level_with_noise / num_cases / 2) * pooled * error
    )
    beyond = (math.log1p(change) - np.maximum(significant, limit)) / error
    from scipy.special import ndtr

    return float(ndtr(beyond).mean())


_ENDS = ((1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2)


def _chi_square(freedom: int, chance: float) -> float:
    """Quantile of the chi-square distribution."""
    from scipy.special import chdtri

    return float(chdtri(freedom, 1 - chance))
