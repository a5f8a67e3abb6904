"""Where one level ends and the next begins, among launches in the order of their commits.

    launches   o o o | o o . o | o o o      a cut lies between two launches of different commits
    cuts             3         7

How likely each cut is follows from the fit of two levels with one spread, all three of which are
integrated out: what is left is the sum of squares around the two means, to a power. No level needs
to be known in advance, and what is unsure of them makes the place less sure too. A test for each
place would only say where two levels differ, not where they meet.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ppbench.analysis.compare import Noise

LEAST_DEVIATION = 1e-9
"""Launches that agree to the last digit do so by rounding; they prove no more than this."""

Values = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]


def squares_around(values: Values, cuts: Places) -> Values:
    """For each cut, the sum of squares around the means of what is before it and behind it."""
    apart = values - values.mean()
    sums = np.concatenate([[0.0], np.cumsum(apart)])[cuts]
    squares = float(np.square(apart).sum())
    num = len(values)
    between = np.square(sums) * num / (cuts * (num - cuts))
    return np.asarray(np.maximum(squares - between, 0.0), dtype=float)


def cut_chances(
    values: Values, cuts: Places, weights: Values, noise: Noise | None = None
) -> Values:
    """How likely the level changes at each cut, given that it does at one of them; sums to 1.

    `weights` says how likely each is before anything is measured. Flat priors on both levels, and
    on the logarithm of the spread; a measured noise counts as so many launches that were seen.
    """
    freedom = 0 if noise is None else noise.freedom
    known = 0.0 if noise is None else freedom * noise.deviation**2
    least = len(values) * LEAST_DEVIATION**2
    squares = np.maximum(squares_around(values, cuts) + known, least)
    power = max(len(values) - 2 + freedom, 0) / 2
    logs = np.log(weights) - np.log(cuts * (len(values) - cuts)) / 2 - power * np.log(squares)
    chances = np.exp(logs - logs.max())
    return np.asarray(chances / chances.sum(), dtype=float)
