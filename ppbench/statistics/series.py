"""A figure over commits: its launches, its levels, and the commits that changed it.

A series is one case on one fingerprint, since timings of two machines do not compare. Its points
are the commits that were measured or attempted. Commits in between, of which a repository may have
thousands, are only counted, with the point that follows them.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from ppbench.statistics.change_points import (
    ChangePoint,
    Level,
    change_points,
    disturbed_launches,
    levels,
)
from ppbench.statistics.significance import Ratio
from ppbench.statistics.verdicts import FLOOR, Metric

FEWEST = 4
"""Fewest launches that can show a change: two before and two after."""


class State(StrEnum):
    """The result of a series."""

    changed = "changed"
    steady = "steady"
    unclear = "unclear"  # no change was found, but one beyond the floor may be hidden
    few = "too few launches"
    alone = "one commit"
    failed = "did not run"
    dirty = "uncommitted only"


@dataclass(frozen=True)
class Launch:
    """A run; one that failed has a status and no figure."""

    run_id: str
    status: str
    value: float | None = None


@dataclass(frozen=True)
class Point:
    """A commit of a series, with its launches."""

    commit: str
    author_date: str | None = None  # ISO 8601
    subject: str | None = None
    launches: tuple[Launch, ...] = ()
    num_before: int = 0  # unmeasured commits since the point before it
    is_known: bool = True  # to the repository; else it is ordered by its date
    changes: str = ""  # hash of uncommitted changes; such a point is in no level

    @property
    def figures(self) -> tuple[float, ...]:
        return tuple(launch.value for launch in self.launches if launch.value is not None)

    @property
    def failures(self) -> tuple[Launch, ...]:
        return tuple(launch for launch in self.launches if launch.value is None)

    @property
    def value(self) -> float | None:
        """The median of its launches."""
        return statistics.median(self.figures) if self.figures else None

    @property
    def middle(self) -> Launch | None:
        """The median launch (the lower of the two middle ones)."""
        measured = [launch for launch in self.launches if launch.value is not None]
        ordered = sorted(measured, key=lambda launch: launch.value or 0.0)
        return ordered[(len(ordered) - 1) // 2] if ordered else None


@dataclass(frozen=True)
class Series:
    """One case on one fingerprint, oldest commit first."""

    case_id: str
    case: str  # in words
    fingerprint: str
    points: tuple[Point, ...]
    dirty: tuple[Point, ...] = ()  # of work trees with uncommitted changes
    sweep_file: str = ""  # of its newest run
    machine: str = ""  # in words
    num_behind: int = 0  # unmeasured commits since the last point
    floor: float = FLOOR

    @property
    def num_measured(self) -> int:
        """Commits with a figure."""
        return sum(bool(point.figures) for point in self.points)

    @property
    def num_launches(self) -> int:
        return sum(len(point.figures) for point in self.points)

    @property
    def num_failures(self) -> int:
        return sum(len(point.failures) for point in self.points)

    @property
    def num_unmeasured(self) -> int:
        return sum(point.num_before for point in self.points)

    def before(self, place: int) -> int | None:
        """Index of the last point before `place` that has a figure."""
        return next((n for n in range(place - 1, -1, -1) if self.points[n].figures), None)


@dataclass(frozen=True)
class Step:
    """A change of level, made by one of the commits after `good`, up to `last`."""

    good: int  # indexes of points
    first: int  # the likeliest, where the new level begins
    last: int
    num_commits: int  # candidates
    num_unmeasured: int  # candidates without a figure
    ratio: Ratio | None  # after / before; None of a metric in points
    difference: Ratio | None  # after - before, of a metric in points
    p: float
    is_better: bool | None  # None: the metric has no direction

    @property
    def size(self) -> Ratio:
        """The relative change, or in points the difference as a fraction; 0 is no change."""
        return _size(self.ratio, self.difference)


@dataclass(frozen=True)
class SeriesAnalysis:
    """A series with its steps, levels and state."""

    series: Series
    steps: tuple[Step, ...]
    levels: tuple[Level, ...]  # `first` and `last` are indexes of points
    state: State

    @property
    def current(self) -> Level | None:
        """The level of the newest commit."""
        estimated = [level for level in self.levels if level.estimate is not None]
        return estimated[-1] if estimated else None


def analyse(series: Series, metric: Metric) -> SeriesAnalysis:
    """Find the steps of a series and the levels between them."""
    figures, places = _with_gaps(series.points)
    points, sign = metric.in_points, metric.slow_sign
    changes = change_points(figures, series.floor, in_points=points, slow_sign=sign)
    steps = tuple(_step(series.points, places, change, metric) for change in changes)
    drawn = levels(figures, changes, series.floor, in_points=points, slow_sign=sign)
    placed = tuple(_placed(level, places) for level in drawn if level.num_launches)
    state = _state(series, steps, placed, metric)
    return SeriesAnalysis(series, steps, placed, state)


def disturbed_runs(series: Series, metric: Metric) -> list[str]:
    """The ids of the runs that count neither for levels nor for steps: something slowed them."""
    figures = [point.figures for point in series.points]
    sign = metric.slow_sign
    found = disturbed_launches(figures, in_points=metric.in_points, slow_sign=sign)
    measured = [
        [launch.run_id for launch in point.launches if launch.value is not None]
        for point in series.points
    ]
    return [measured[point][place] for point, place in found]


def _with_gaps(points: Sequence[Point]) -> tuple[list[tuple[float, ...]], list[int]]:
    """The figures of every commit, measured or not, and the index of each point among them.

    An unmeasured commit is as likely to have made a change as a measured one.
    """
    figures: list[tuple[float, ...]] = []
    places = []
    for number, point in enumerate(points):
        figures += [()] * (point.num_before if number else 0)
        places.append(len(figures))
        figures.append(point.figures)
    return figures, places


def _step(
    points: Sequence[Point], places: Sequence[int], point: ChangePoint, metric: Metric
) -> Step:
    good, last = places.index(point.earliest - 1), places.index(point.latest)
    num_measured = sum(bool(between.figures) for between in points[good + 1 : last + 1])
    num_commits = point.latest - point.earliest + 1
    is_more = _size(point.ratio, point.difference).estimate > 0
    return Step(
        good=good,
        first=places.index(point.index),
        last=last,
        num_commits=num_commits,
        num_unmeasured=num_commits - num_measured,
        ratio=point.ratio,
        difference=point.difference,
        p=point.p,
        is_better=None if metric.higher_is_better is None else is_more == metric.higher_is_better,
    )


def _size(ratio: Ratio | None, difference: Ratio | None) -> Ratio:
    if ratio is not None:
        return Ratio(ratio.estimate - 1, ratio.low - 1, ratio.high - 1)
    assert difference is not None
    return difference


def _placed(level: Level, places: Sequence[int]) -> Level:
    first = bisect.bisect_left(places, level.first)
    last = bisect.bisect_right(places, level.last) - 1
    return Level(first, last, level.num_launches, level.estimate, level.interval)


def _state(series: Series, steps: Sequence[Step], drawn: Sequence[Level], metric: Metric) -> State:
    if steps:
        return State.changed
    if not series.num_measured:
        return State.failed if series.points else State.dirty
    if series.num_measured == 1:
        return State.alone
    if series.num_launches < FEWEST:
        return State.few
    return State.steady if _is_narrow(drawn[0], series.floor, metric) else State.unclear


def _is_narrow(level: Level, floor: float, metric: Metric) -> bool:
    """Whether the interval of a level is no wider than the floor on both sides."""
    if level.interval is None:
        return False
    low, high = level.interval
    return high - low <= 2 * floor * (1.0 if metric.in_points else low)
