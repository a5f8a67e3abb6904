"""Clocks of several hosts made one, from what the trace itself tells: messages.

No message arrives before it was sent. So what rank a did for a message before rank b could go on
bounds how far b's clock is ahead of a's:

    offset_b - offset_a <= start_b - end_a          of every message from a to b; the least counts

Messages go both ways (forward and backward), so the offset lies in an interval. Within that, the
least correction is taken: hosts keep time by NTP, and one that is consistent as it is stays as it
is. How far that may be off is how far the interval reaches, which can be as long as messages
waited. Ranks of one host share its clock, unless their messages contradict that.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Slack = Mapping[tuple[int, int], int]
"""(rank a, rank b) -> the least nanoseconds from the end of what a did to the start of what b did
with it, each on its own clock."""
TOLERANCE_NS = 1_000
"""Traces tell microseconds, and each process ties its clock to the date by itself."""


@dataclass(frozen=True)
class Clock:
    """How far a rank's clock was ahead of rank 0's, and how far off that may be."""

    offset_ns: int
    error_ns: int
    is_shared: bool


def clocks_of(hosts: Sequence[str | None], slack: Slack) -> list[Clock]:
    """A clock for each rank; ranks of unnamed hosts have one each."""
    names: list[Hashable] = [rank if host is None else host for rank, host in enumerate(hosts)]
    found = _solve(names, slack)
    if found.violated_ns > TOLERANCE_NS and len(set(names)) < len(names):
        found = _solve(list(range(len(hosts))), slack)
    return found.clocks


@dataclass(frozen=True)
class _Solution:
    clocks: list[Clock]
    violated_ns: int  # by which messages arrive too early all the same


def _solve(names: Sequence[Hashable], slack: Slack) -> _Solution:
    """One offset for each name; the first rank's is 0."""
    numbers = {name: index for index, name in enumerate(dict.fromkeys(names))}
    clock_of = [numbers[name] for name in names]
    bounds = np.full((len(numbers), len(numbers)), np.inf)
    np.fill_diagonal(bounds, 0.0)
    within_ns = 0
    for (a, b), ns in slack.items():
        one, other = clock_of[a], clock_of[b]
        if one == other:
            within_ns = max(within_ns, -ns)
        else:
            bounds[one, other] = min(bounds[one, other], ns)
    violated_ns = max(within_ns, _relax(bounds))
    reach = _shortest(bounds)
    offsets = _least_correction(bounds)
    clocks = []
    for number in clock_of:
        low, high = -reach[number, 0], reach[0, number]
        far = max(high - offsets[number], offsets[number] - low, 0.0) if number else 0.0
        error_ns = round(far) if np.isfinite(far) else 0
        clocks.append(Clock(round(offsets[number]), error_ns + violated_ns, number == 0))
    return _Solution(clocks, violated_ns)


def _relax(bounds: np.ndarray) -> int:
    """Widen bounds that contradict each other by as much as it takes; by how much that was.

    Around a circle of messages the bounds must not add up to less than nothing: where they do, the
    clocks have drifted, or ranges are not what they seem. Changes `bounds`.
    """
    widened_ns = 0.0
    while (worst := _most_negative_circle(bounds)) < 0:
        step = -worst / len(bounds)
        bounds[np.isfinite(bounds) & ~np.eye(len(bounds), dtype=bool)] += step + 1
        widened_ns += step + 1
    return round(widened_ns)


def _most_negative_circle(bounds: np.ndarray) -> float:
    return float(np.diag(_shortest(bounds)).min())


def _shortest(bounds: np.ndarray) -> np.ndarray:
    """All shortest paths (Floyd and Warshall); a negative circle shows on the diagonal."""
    reach = bounds.copy()
    for via in range(len(reach)):
        reach = np.minimum(reach, reach[:, [via]] + reach[[via], :])
    return reach


def _least_correction(bounds: np.ndarray) -> np.ndarray:
    """Offsets within the bounds, the first 0, whose absolute values add up to the least."""
    from scipy.optimize import linprog

    count = len(bounds)
    if count == 1:
        return np.zeros(1)
    rows, limits = [], []
    for one in range(count):
        for other in range(count):
            if one != other and np.isfinite(bounds[one, other]):
                row = np.zeros(2 * count)
                row[other], row[one] = 1.0, -1.0
                rows.append(row)
                limits.append(bounds[one, other] / 1e3)
        for sign in (1.0, -1.0):  # what is minimised is at least the absolute value
            row = np.zeros(2 * count)
            row[one], row[count + one] = sign, -1.0
            rows.append(row)
            limits.append(0.0)
    free = [(0.0, 0.0)] + [(None, None)] * (count - 1) + [(0.0, None)] * count
    cost = np.r_[np.zeros(count), np.ones(count)]
    answer = linprog(cost, A_ub=np.array(rows), b_ub=limits, bounds=free, method="highs")
    assert answer.x is not None, answer.message
    return np.asarray(answer.x[:count], dtype=float) * 1e3
