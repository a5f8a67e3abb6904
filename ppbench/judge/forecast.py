"""Tells from the noise so far what more launches and rounds would decide.

A difference is decided where the deciding interval excludes none, or lies within the resolution.
With an error e of the estimate, that happens in 80 % of comparisons if (t + 0.84) e is at most the
distance that is left: the difference itself for a claim, or x less the difference for `same`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ppbench.judge.differences import smallest_difference, t_quantile
from ppbench.judge.estimates import FEWEST_ROUNDS
from ppbench.judge.evidence import RESOLUTION, Noise
from ppbench.judge.verdicts import LEVEL, Change

POWER = 0.8
MOST_LAUNCHES = 30
"""More launches than this are not worth the time for what they would show."""


def found_by(noise: Noise, num_launches: int, level: float = LEVEL) -> float:
    """The change that 80 % of comparisons find with so many launches a side: 0.02 is 2 %.

    The noise is that of launches of one side, and is known to those comparisons too.
    """
    error = noise.deviation * math.sqrt(2 / num_launches)
    freedom = 2 * (num_launches - 1) + noise.freedom
    return math.expm1(_distance(error, freedom, level))


@dataclass(frozen=True)
class Needed:
    """The launches that would decide a comparison, and the rounds of each if it is in turns."""

    num_launches: int
    num_rounds: int = 1


def launches_needed(change: Change, *, num_tests: int = 1, most: int = MOST_LAUNCHES) -> int | None:
    """How many launches of each side would decide an open comparison, the present ones included.

    It assumes that launches go on to differ and to scatter as these do. None if that takes more
    than `most`, or if the scatter is unknown.
    """
    counted = min(change.num_base, change.num_head)
    exact = change.exact
    if exact is None or exact.freedom <= 0 or counted == 0:
        return None
    in_points = change.difference is not None
    of_one = exact.error * math.sqrt(counted)
    for num in range(counted + 1, most + 1):
        error = of_one / math.sqrt(num)
        freedom = exact.freedom * num / counted
        if _is_decided(exact.estimate, error, freedom, change.resolution, in_points, num_tests):
            return num
    return None


def rounds_needed(
    difference: float,
    starts: Noise,
    rounds: Noise,
    *,
    resolution: float = RESOLUTION,
    most_launches: int = MOST_LAUNCHES,
    most_rounds: int = 200,
    cost_of_start: float = 10.0,
) -> Needed | None:
    """The launches, and rounds of each, that decide a difference in the shortest time.

    The difference is that of logarithms, and a start takes as long as `cost_of_start` rounds. None
    where no number up to `most_launches` decides it: starts of processes then differ by too much.
    """
    best: tuple[float, Needed] | None = None
    for num in range(1, most_launches + 1):
        for in_each in range(FEWEST_ROUNDS, most_rounds + 1, 2):
            cost = num * (in_each + cost_of_start)
            if best is not None and cost >= best[0]:
                break
            variance = starts.deviation**2 + rounds.deviation**2 / in_each
            freedom = starts.freedom + num - 1
            error = math.sqrt(variance / num)
            if _is_decided(difference, error, freedom, resolution, False, 1):
                best = cost, Needed(num, in_each)
                break
    return None if best is None else best[1]


def _is_decided(
    difference: float,
    error: float,
    freedom: float,
    resolution: float,
    in_points: bool,
    num_tests: int,
) -> bool:
    x, ahead = smallest_difference(resolution, in_points=in_points), abs(difference)
    is_claim = _distance(error, freedom, LEVEL / num_tests) <= ahead
    return is_claim or ahead + _distance(error, freedom, LEVEL) <= x


def _distance(error: float, freedom: float, level: float) -> float:
    """The difference that is found at this level in 80 % of comparisons."""
    return (t_quantile(freedom, 1 - level / 2) + t_quantile(freedom, POWER)) * error
