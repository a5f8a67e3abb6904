"""The drift between sessions, told apart from the noise between launches of one session.

    session     Monday         Tuesday        Wednesday
    launches    o  o o o       o o  oo        o o oo
    mean           |               |              |

Sessions share a boot, a temperature, a layout of memory. Launches of one session agree in all of
it, so that however many they are, they do not show how far another session's would lie. One-way
random effects: the mean square between sessions less that within them, over the number of launches
of each. Its interval is that of Ting, Burdick, Graybill, Jeyaratnam and Lu (1990, Journal of
Statistical Computation and Simulation 35) for a difference of mean squares, for which
Satterthwaite's degrees of freedom (1946) fail. For sessions of unequal size, the mean square is
that of their means, and the number the harmonic mean (Thomas and Hultquist 1978, Annals of
Statistics 6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppbench.judge.disturbances import places_apart
from ppbench.judge.differences import additive, group
from ppbench.statistics.step_times import CONFIDENCE


@dataclass(frozen=True)
class Drift:
    """The deviation of the levels of sessions, and that of launches within a session."""

    deviation: float  # between sessions, relative; of a metric in points, as a fraction
    low: float  # the ends of its 95 % interval
    high: float
    launch_deviation: float  # within a session
    num_sessions: int
    num_launches: int


def measure_drift(
    sessions: Sequence[Sequence[float]], *, in_points: bool = False, slow_sign: int = 0
) -> Drift | None:
    """Estimate the drift from the launches of each session, all of one commit and case.

    None with fewer than two sessions, or without a session of two launches. With a `slow_sign` (1
    if slower launches have higher figures, else -1), disturbed launches are left out.
    """
    values = [additive(each, in_points=in_points) for each in sessions if len(each)]
    groups = [group(np.delete(each, list(places_apart(each, slow_sign)))) for each in values]
    freedom = sum(each.freedom for each in groups)
    if len(groups) < 2 or freedom < 1:
        return None
    within = sum(each.squares for each in groups) / freedom
    size = len(groups) / sum(1 / each.num for each in groups)  # the harmonic mean
    between = size * float(np.var([each.mean for each in groups], ddof=1))
    # The interval of the difference of the two mean squares, by Ting and others.
    from scipy.special import chdtri, fdtri

    tail, own = (1 - CONFIDENCE) / 2, len(groups) - 1
    g1, h1 = (abs(1 - own / float(chdtri(own, at))) for at in (tail, 1 - tail))
    g2, h2 = (abs(1 - freedom / float(chdtri(freedom, at))) for at in (tail, 1 - tail))
    upper, lower = (float(fdtri(own, freedom, at)) for at in (1 - tail, tail))
    g12 = ((upper - 1) ** 2 - (g1 * upper) ** 2 - h2**2) / upper
    h12 = ((1 - lower) ** 2 - (h1 * lower) ** 2 - g2**2) / lower
    product, estimate = between * within, between - within
    below = (g1 * between) ** 2 + (h2 * within) ** 2 + g12 * product
    above = (h1 * between) ** 2 + (g2 * within) ** 2 + h12 * product
    low, high = estimate - math.sqrt(max(below, 0.0)), estimate + math.sqrt(max(above, 0.0))
    return Drift(
        deviation=math.sqrt(max(between - within, 0.0) / size),
        low=math.sqrt(max(low, 0.0) / size),
        high=math.sqrt(max(high, 0.0) / size),
        launch_deviation=math.sqrt(within),
        num_sessions=len(groups),
        num_launches=sum(each.num for each in groups),
    )
