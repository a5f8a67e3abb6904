"""Figures as metrics: the direction in which they are better, and how they are compared."""

from __future__ import annotations

from ppbench.display.fields import Direction, field_of
from ppbench.judge.evidence import Metric


def metric_of(column: str) -> Metric:
    """Return a figure of `runs` as a metric; a bubble, which may be 0, is compared in points."""
    direction = field_of(column).direction
    is_better = None if direction is Direction.neither else direction is Direction.higher
    return Metric(
        column,
        higher_is_better=is_better,
        in_points=column.startswith("bubble_"),
        can_be_disturbed=not column.endswith("_bytes"),
    )


METRICS = {
    name: metric_of(name)
    for name in ("tokens_per_s", "bubble_fraction", "peak_memory_bytes", "step_ns")
}
"""The metrics that have verdicts, by their columns."""
