"""Step times of one launch: whether they have settled, their outliers, their median.

Nothing here assumes a distribution. Step times are skewed to the right with a few outliers, which
would dominate means and standard deviations.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ppbench.judge.differences import CONFIDENCE

SETTLED_WITHIN = 0.05
LOOK_BACK = 2
MOST_DEVIATIONS = 3.5
LEAST_OUTLYING = 0.01
_NORMAL = 0.6745  # the median absolute deviation of a normal distribution, in standard deviations


def has_settled(step_ns: Sequence[int]) -> bool:
    """Whether steps have stopped getting faster, so that measuring may begin.

    They have when the fastest of the last `LOOK_BACK` steps is at most `SETTLED_WITHIN` faster than
    the fastest of those before. Minima are compared, so that a disturbed step does not count.
    """
    before, last = step_ns[:-LOOK_BACK], step_ns[-LOOK_BACK:]
    return bool(before) and min(last) >= (1 - SETTLED_WITHIN) * min(before)


def is_outlier(values: Sequence[float]) -> list[bool]:
    """Whether each value is an outlier: a modified z-score over `MOST_DEVIATIONS`, and 1 % off.

    Iglewicz and Hoaglin, How to Detect and Handle Outliers, 1993.
    """
    array = np.asarray(values, dtype=float)
    median = np.median(array)
    distance = np.abs(array - median)
    deviation = np.median(distance) / _NORMAL
    is_far = (distance > MOST_DEVIATIONS * deviation) & (distance > LEAST_OUTLYING * median)
    return [bool(far) for far in is_far]


def median_interval(
    values: npt.ArrayLike, confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """Interval of the median with at least this confidence: two of the values themselves.

    From order statistics: the number of values below the true median is binomial with 1/2. None for
    fewer values than such an interval needs (6 for 95 %). The values are taken as independent.
    """
    ordered = np.sort(np.asarray(values, dtype=float))
    most = (1 - confidence) / 2
    below, num_below = 0.0, 0
    for count in range(len(ordered) // 2):
        below += math.comb(len(ordered), count) / 2 ** len(ordered)
        if below > most:
            break
        num_below = count + 1
    if num_below == 0:
        return None
    return float(ordered[num_below - 1]), float(ordered[-num_below])
