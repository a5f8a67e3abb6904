"""Intervals of changes on one scale per metric: a forest plot, as shares of a strip's width.

    low ├───────●───────┤ high        0 and the resolution's band are on every strip

The page places the marks as parts of HTML rather than by plotly: each strip is a cell of a table,
so that it fits every width, prints, and is read aloud with the texts beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.display.units import round_step
from ppbench.judge.evidence import Metric
from ppbench.judge.verdicts import Change

_MOST_TICKS = 4
_WIDEST = 2.5
"""Estimates that fit between zero and the end of a strip; wider intervals are cut, and say so."""
_LEAST = 2.0  # of the band's width
_PADDING = 1.08


@dataclass(frozen=True)
class Scale:
    """The values from end to end of a picture; for a metric's strips in percent or points."""

    low: float
    high: float
    band: float = 0.0

    def share(self, value: float) -> float:
        """The place of a value in percent of the width, from 0 to 100."""
        place = 100 * (value - self.low) / (self.high - self.low)
        return round(min(max(place, 0.0), 100.0), 2)

    def round_values(self, most: int, unit: float = 1.0) -> list[float]:
        """Round values of a unit, about as many as `most`."""
        low, high = self.low / unit, self.high / unit
        step = float(round_step((high - low) / most))
        return [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places and texts of round values."""
        values = self.round_values(_MOST_TICKS)
        return [(self.share(value), f"{value:+.6g}" if value else "0") for value in values]


@dataclass(frozen=True)
class Mark:
    """An interval on its strip, in percent of the width."""

    estimate: float
    low: float
    width: float
    is_cut_low: bool
    is_cut_high: bool


def scale_of(metric: Metric, changes: Sequence[Change]) -> Scale:
    """Return the scale that fits the changes of a metric; zero is on it."""
    intervals = [found for change in changes if (found := interval_of(metric, change))]
    band = 100 * max((change.resolution for change in changes), default=0.0)
    far = max([abs(estimate) for estimate, _, _ in intervals] or [0.0])
    most = max(_WIDEST * far, _LEAST * band)
    lows = [max(low, -most) for _, low, _ in intervals]
    highs = [min(high, most) for _, _, high in intervals]
    low, high = min([*lows, -_LEAST * band]), max([*highs, _LEAST * band])
    return Scale(low * _PADDING, high * _PADDING, band)


def mark_of(metric: Metric, change: Change, scale: Scale) -> Mark | None:
    """Return the mark of a change; None where it was not tested."""
    found = interval_of(metric, change)
    if found is None:
        return None
    estimate, low, high = found
    first, last = scale.share(low), scale.share(high)
    return Mark(
        scale.share(estimate),
        first,
        round(last - first, 2),
        low < scale.low,
        high > scale.high,
    )


def interval_of(metric: Metric, change: Change) -> tuple[float, float, float] | None:
    """Estimate, low and high in percent, or in points; None where the change was not tested."""
    ratio, same = (change.difference, 0.0) if metric.in_points else (change.ratio, 1.0)
    if ratio is None:
        return None
    return tuple(100 * (end - same) for end in (ratio.estimate, ratio.low, ratio.high))  # type: ignore[return-value]  # of three
