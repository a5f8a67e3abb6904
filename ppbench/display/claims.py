"""A change in plain words, as a claim states it: «slower by 5.1 % [4.2, 6.0]», «not shown: ...».

Only what is significant and beyond the floor is stated as a change; all else is not shown, with the
reason.
"""

from __future__ import annotations

import math

from ppbench.display.changes import change_text, verdict_text
from ppbench.display.units import counted
from ppbench.statistics.drift import additive_interval
from ppbench.statistics.replication import extent
from ppbench.statistics.significance import FEWEST_LAUNCHES, smallest_difference
from ppbench.statistics.verdicts import Change, Metric, Verdict


def claim_words(metric: Metric, change: Change, detectable: float | None = None) -> str:
    """A change in words; `detectable` is the one that 80 % of such comparisons find."""
    match change.verdict:
        case Verdict.faster | Verdict.slower:
            return f"{verdict_text(metric, change.verdict)} by {_size(metric, change)}"
        case Verdict.same:
            within = _amount(metric, _within(metric, change))
            return f"not shown: any change is within {within} ({change_text(metric, change)})"
        case Verdict.insufficient:
            return (
                f"not shown: {_launches(change)}, and a verdict takes {FEWEST_LAUNCHES} a side"
                f"{_of_so_few(metric, change)}"
            )
        case Verdict.unclear:
            return f"not shown: {change_text(metric, change)} is not clear of noise" + (
                "" if detectable is None else f"; {detectable_words(metric, change, detectable)}"
            )


def detectable_words(metric: Metric, change: Change, detectable: float) -> str:
    """Which change so many launches find."""
    found = _amount(metric, detectable)
    return f"{_launches(change)} find {found} in 80 % of comparisons"


def _of_so_few(metric: Metric, change: Change) -> str:
    text = change_text(metric, change)
    return "" if text == "–" else f" ({text} between them; steps of one launch are no replicates)"


def _within(metric: Metric, change: Change) -> float:
    """The floor, or the least tenth of a percent that holds an interval beyond it."""
    most = extent(metric, change)
    if most <= smallest_difference(change.floor, in_points=metric.in_points):
        return change.floor
    return math.ceil(1000 * (most if metric.in_points else math.expm1(most))) / 1000


def _launches(change: Change) -> str:
    if change.num_base == change.num_head:
        return f"{counted(change.num_base, 'launch')} a side"
    return f"{change.num_base} and {counted(change.num_head, 'launch')}"


def _amount(metric: Metric, fraction: float) -> str:
    size = f"{fraction * 100:.2g}"
    if not metric.in_points:
        return f"{size} %"
    return f"{size} point" if size == "1" else f"{size} points"


def _size(metric: Metric, change: Change) -> str:
    """`5.1 % [4.2, 6.0]`, counted in the direction of the change."""
    interval = additive_interval(metric, change)
    assert interval is not None  # it is significant
    sign = 1 if interval.estimate > 0 else -1
    ends = [interval.low, interval.high][::sign]
    sizes = [
        sign * (end if metric.in_points else _relative(end)) for end in (interval.estimate, *ends)
    ]
    unit = " points" if metric.in_points else " %"
    estimate, low, high = (f"{size * 100:z.1f}" for size in sizes)
    return f"{estimate}{unit} [{low}, {high}]"


def _relative(difference: float) -> float:
    """A difference of logarithms as a fraction."""
    return math.expm1(difference) if difference < 700 else math.inf
