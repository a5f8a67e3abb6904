"""Tells from the noise so far what more launches would decide.

A difference is decided where the deciding interval excludes none, or lies within the resolution.
With an error e of the estimate, that happens in 80 % of comparisons if (t + 0.84) e is at most the
distance that is left: the difference itself for a claim, or x less the difference for `same`.
"""

from __future__ import annotations

import math

from ppbench.judge.differences import FEWEST_LAUNCHES, smallest_difference, t_quantile
from ppbench.judge.evidence import Noise
from ppbench.judge.verdicts import LEVEL, Change

POWER = 0.8
MOST_LAUNCHES = 30
"""More launches than this are not worth the time for what they would show."""


def found_by(
    noise: Noise, num_launches: int, level: float = LEVEL, *, in_turns: bool = False
) -> float:
    """The change that 80 % of comparisons find with so many launches a side: 0.02 is 2 %.

    The noise is that of launches of one side, or `in_turns` of the difference of two sides in a
    launch; it is known to those comparisons too.
    """
    groups = 1 if in_turns else 2
    error = noise.deviation * math.sqrt(groups / num_launches)
    freedom = groups * (num_launches - 1) + noise.freedom
    return math.expm1(_distance(error, freedom, level))


def launches_to_find(noise: Noise, change: float, *, in_turns: bool = False) -> int | None:
    """The launches a side with which 80 % of comparisons find a change; None for too many."""
    nums = range(FEWEST_LAUNCHES, MOST_LAUNCHES + 1)
    return next((num for num in nums if found_by(noise, num, in_turns=in_turns) <= change), None)


def launches_needed(change: Change, *, num_tests: int = 1, most: int = MOST_LAUNCHES) -> int | None:
    """How many launches of each side would decide an open comparison, the present ones included.

    It assumes that launches go on to differ and to scatter as these do. None if that takes more
    than `most`, or if the scatter is unknown.
    """
    counted = min(change.num_base, change.num_head)
    exact = change.exact
    if exact is None or exact.freedom <= 0 or counted == 0:
        return None
    x = smallest_difference(change.resolution, in_points=change.difference is not None)
    ahead = abs(exact.estimate)
    for num in range(counted + 1, most + 1):
        error, freedom = exact.error * math.sqrt(counted / num), exact.freedom * num / counted
        is_claim = _distance(error, freedom, LEVEL / num_tests) <= ahead
        if is_claim or ahead + _distance(error, freedom, LEVEL) <= x:
            return num
    return None


def shown_by(change: Change, num_launches: int) -> float | None:
    """The least difference that so many launches of each side would show: 0.02 is 2 %.

    It assumes that launches go on to scatter as these do. None if the scatter is unknown.
    """
    counted, exact = min(change.num_base, change.num_head), change.exact
    if exact is None or exact.freedom <= 0 or counted == 0:
        return None
    error = exact.error * math.sqrt(counted / num_launches)
    distance = _distance(error, exact.freedom * num_launches / counted, LEVEL)
    return distance if change.difference is not None else math.expm1(distance)


def _distance(error: float, freedom: float, level: float) -> float:
    """The difference that is found at this level in 80 % of comparisons."""
    return (t_quantile(freedom, 1 - level / 2) + t_quantile(freedom, POWER)) * error
