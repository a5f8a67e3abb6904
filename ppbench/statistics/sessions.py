"""The drift between sessions, told apart from the noise between launches of one session."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppbench.statistics.significance import additive, group


@dataclass(frozen=True)
class Drift:
    """The deviation of the levels of sessions, and that of launches within a session."""

    deviation: float  # between sessions, relative; of a metric in points, as a fraction
    low: float  # the ends of its 95 % interval; `high` may be infinite
    high: float
    launch_deviation: float  # within a session
    num_sessions: int
    num_launches: int


def measure_drift(sessions: Sequence[Sequence[float]], *, in_points: bool = False) -> Drift | None:
    """Estimate the drift from the launches of each session, all of one commit and case.

    None with fewer than two sessions, or without a session of two launches.
    """
    groups = [group(additive(each, in_points=in_points)) for each in sessions if len(each)]
    freedom = sum(each.freedom for each in groups)
    if len(groups) < 2 or freedom < 1:
        return None
    nums = np.array([each.num for each in groups], dtype=float)
    means = np.array([each.mean for each in groups])
    within = sum(each.squares for each in groups) / freedom
    between = float(nums @ np.square(means - nums @ means / nums.sum())) / (len(groups) - 1)
    size = (nums.sum() - np.square(nums).sum() / nums.sum()) / (len(groups) - 1)
    variance = max(between - within, 0.0) / float(size)
    return Drift(
        math.sqrt(variance), 0.0, math.inf, math.sqrt(within), len(groups), int(nums.sum())
    )
