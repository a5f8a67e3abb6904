"""A picture of throughput against memory: what was found, the front, and the limit.

    tokens/s │          ●━━━━●        points are configurations; the line goes from each point of
             │     ●━━━━┛    ┊        the front to the next, up where more memory begins to help
             │  ●━━┛         ┊ limit
             └────────────────── memory

The page places the points as parts of HTML, in percent of the picture's width and height, so that
it fits every width, prints, and needs no script.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.display.units import size, size_unit
from ppbench.report.charts.forest import round_step
from ppbench.report.charts.memory import pareto_front

_PADDING = 0.06  # of the range, on each side
_MOST_TICKS = 5


@dataclass(frozen=True)
class Point:
    """A configuration: the memory of its fullest rank, its throughput, and its words."""

    memory_bytes: int
    tokens_per_s: float
    name: str
    kind: str  # "chosen", "baseline", "proposed" or "found": how the page draws it


@dataclass(frozen=True)
class Spot:
    """A point's place in percent from the left and from the bottom, and its words."""

    left: float
    bottom: float
    name: str
    text: str
    kind: str


@dataclass(frozen=True)
class Frontier:
    """The picture; `line` is the front as the `points` of an SVG polyline, from the top left."""

    spots: tuple[Spot, ...]
    line: str
    memory_ticks: tuple[tuple[float, str], ...]
    speed_ticks: tuple[tuple[float, str], ...]
    memory_unit: str
    limit: float | None
    limit_text: str


@dataclass(frozen=True)
class _Axis:
    """Values from end to end of the picture."""

    low: float
    high: float

    def place(self, value: float) -> float:
        return round(100 * (value - self.low) / (self.high - self.low), 2)

    def ticks(self, unit: float = 1.0) -> tuple[tuple[float, str], ...]:
        """The places and texts of round values in a unit."""
        low, high = self.low / unit, self.high / unit
        step = round_step((high - low) / _MOST_TICKS)
        values = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
        return tuple((self.place(value * unit), f"{value:,.10g}") for value in values)


def frontier(points: Sequence[Point], limit_bytes: int | None) -> Frontier:
    """Draw points; the front goes through those that no other equals with as little memory."""
    memory = _axis(
        [point.memory_bytes for point in points] + [limit_bytes or 0] * bool(limit_bytes)
    )
    speed = _axis([point.tokens_per_s for point in points])
    unit, unit_bytes = size_unit(max(point.memory_bytes for point in points))
    spots = tuple(
        Spot(
            memory.place(point.memory_bytes),
            speed.place(point.tokens_per_s),
            point.name,
            f"{point.tokens_per_s:,.0f} tokens/s, {size(point.memory_bytes)}",
            point.kind,
        )
        for point in points
    )
    return Frontier(
        spots,
        _line(points, memory, speed),
        memory.ticks(unit_bytes),
        speed.ticks(),
        unit,
        None if limit_bytes is None else memory.place(limit_bytes),
        "" if limit_bytes is None else f"limit {size(limit_bytes)}",
    )


def _line(points: Sequence[Point], memory: _Axis, speed: _Axis) -> str:
    """Steps: a throughput holds from the memory that it needs on."""
    front = pareto_front(
        [point.memory_bytes for point in points], [point.tokens_per_s for point in points]
    )
    places = [
        (memory.place(point.memory_bytes), round(100 - speed.place(point.tokens_per_s), 2))
        for point in (points[index] for index in front)
    ]
    corners = [place for (_, y), (x, _) in itertools.pairwise(places) for place in [(x, y)]]
    steps = [place for pair in itertools.zip_longest(places, corners) for place in pair if place]
    if places:
        steps.append((100.0, places[-1][1]))
    return " ".join(f"{x:g},{y:g}" for x, y in steps)


def _axis(values: Sequence[float]) -> _Axis:
    low, high = min(values), max(values)
    margin = (high - low or abs(high) or 1.0) * _PADDING
    return _Axis(max(0.0, low - margin), high + margin)
