"""Aligns the clocks of several hosts, by messages and collectives.

No message arrives before it was sent. So the end of rank a's action that makes a message, and the
start of rank b's action that needs it, bound the offset between them:

    offset_b - offset_a <= start_b - end_a          for every message from a to b; the least counts

Messages go both ways (forward and backward), so the offset lies in an interval. Within it the
smallest correction is taken: hosts keep time by NTP, and a clock that is consistent is not changed.
The error is the distance to the ends of the interval, which can be as long as messages waited.
A collective binds two replicas likewise, both ways: it ends on neither before it began on the
other. Ranks of one host share its clock, unless their messages contradict that.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Slack = Mapping[tuple[int, int], int]
"""(rank a, rank b) -> the least time in nanoseconds from the end of a's action to the start of the
action of b that needs it, each on its own clock."""
TOLERANCE_NS = 1_000
"""Traces count microseconds, and each process relates its clock to the date on its own."""


@dataclass(frozen=True)
class Clock:
    """The offset of a rank's clock from rank 0's, and its error."""

    offset_ns: int
    error_ns: int
    is_shared: bool


def clocks_of(hosts: Sequence[str | None], slack: Slack) -> list[Clock]:
    """Return a clock for each rank; ranks of unnamed hosts have one each."""
    names: list[Hashable] = [rank if host is None else host for rank, host in enumerate(hosts)]
    clocks, violated_ns = _solve(names, slack)
    if violated_ns > TOLERANCE_NS and len(set(names)) < len(names):
        clocks, _ = _solve(list(range(len(hosts))), slack)
    return clocks


def _solve(names: Sequence[Hashable], slack: Slack) -> tuple[list[Clock], int]:
    """Find an offset for each name, the first rank's being 0; return the ranks' clocks.

    The number is by how many nanoseconds messages still arrive too early.
    """
    numbers = {name: index for index, name in enumerate(dict.fromkeys(names))}
    clock_of = [numbers[name] for name in names]
    bounds = np.full((len(numbers), len(numbers)), np.inf)
    np.fill_diagonal(bounds, 0.0)
    within_ns = 0
    for (a, b), ns in slack.items():
        source, target = clock_of[a], clock_of[b]
        if source == target:
            within_ns = max(within_ns, -ns)
        else:
            bounds[source, target] = min(bounds[source, target], ns)
    # Around a cycle of messages the bounds must not add up to a negative number: if they do, the
    # clocks have drifted, or ranges were not recognized rightly. They are widened until they agree.
    widened_ns = 0.0
    while (worst := float(np.diag(_shortest(bounds)).min())) < 0:  # the most negative cycle
        step = -worst / len(bounds)
        bounds[np.isfinite(bounds) & ~np.eye(len(bounds), dtype=bool)] += step + 1
        widened_ns += step + 1
    violated_ns = max(within_ns, round(widened_ns))
    reach = _shortest(bounds)
    offsets = _least_correction(bounds)
    clocks = []
    for number in clock_of:
        low, high = -reach[number, 0], reach[0, number]
        far = max(high - offsets[number], offsets[number] - low, 0.0) if number else 0.0
        error_ns = round(far) if np.isfinite(far) else 0
        clocks.append(Clock(round(offsets[number]), error_ns + violated_ns, number == 0))
    return clocks, violated_ns


def _shortest(bounds: np.ndarray) -> np.ndarray:
    """Return all shortest paths (Floyd-Warshall); a negative cycle shows on the diagonal."""
    reach = bounds.copy()
    for via in range(len(reach)):
        reach = np.minimum(reach, reach[:, [via]] + reach[[via], :])
    return reach


def _least_correction(bounds: np.ndarray) -> np.ndarray:
    """Return offsets within the bounds, the first 0, with the least sum of absolute values."""
    from scipy.optimize import linprog

    count = len(bounds)
    if count == 1:
        return np.zeros(1)
    rows, limits = [], []
    for source in range(count):
        for target in range(count):
            if source != target and np.isfinite(bounds[source, target]):
                row = np.zeros(2 * count)
                row[target], row[source] = 1.0, -1.0
                rows.append(row)
                limits.append(bounds[source, target] / 1e3)
        for sign in (1.0, -1.0):  # the variable to minimise is at least the absolute value
            row = np.zeros(2 * count)
            row[source], row[count + source] = sign, -1.0
            rows.append(row)
            limits.append(0.0)
    free = [(0.0, 0.0)] + [(None, None)] * (count - 1) + [(0.0, None)] * count
    cost = np.r_[np.zeros(count), np.ones(count)]
    result = linprog(cost, A_ub=np.array(rows), b_ub=limits, bounds=free, method="highs")
    assert result.x is not None, result.message
    return np.asarray(result.x[:count], dtype=float) * 1e3
