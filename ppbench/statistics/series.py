"""A figure over commits: its launches, its levels, and the commits that changed it.

A series is one case on one fingerprint, since timings of two machines do not compare. Its points
are the commits that were measured or attempted. Commits in between, of which a repository may have
thousands, are only counted, with the point that follows them.
"""

from __future__ import annotations

import bisect
import math
import statistics
from dataclasses import dataclass, replace
from enum import StrEnum

from ppbench.judge.differences import Ratio
from ppbench.judge.evidence import DiscountReason, Metric
from ppbench.judge.slowdowns import NOT_KNOWN, Slowdown, is_disturbed
from ppbench.statistics.change_points import FLOOR, ChangePoint, Level, find_changes

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
    slowdown: Slowdown = NOT_KNOWN  # of its machine

    @property
    def is_slowed(self) -> bool:
        """Whether its machine was disturbed, whatever its figure."""
        return self.value is not None and is_disturbed(self.slowdown)


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

    def before(self, place: int) -> Point | None:
        """The last point before `place` that has a figure."""
        return next((point for point in reversed(self.points[:place]) if point.figures), None)


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
    is_spike: bool = False  # its commit alone: the next one undid it

    @property
    def size(self) -> Ratio:
        """The relative change, or in points the difference as a fraction; 0 is no change."""
        if self.ratio is not None:
            ratio = self.ratio
            return Ratio(ratio.estimate - 1, ratio.low - 1, ratio.high - 1)
        assert self.difference is not None
        return self.difference


@dataclass(frozen=True)
class SeriesAnalysis:
    """A series with its steps, spikes, levels and state."""

    series: Series
    steps: tuple[Step, ...]  # that last
    spikes: tuple[Step, ...]
    levels: tuple[Level, ...]  # `first` and `last` are indexes of points
    state: State
    discounts: dict[str, DiscountReason]  # of runs that something slowed: in no level, no step

    @property
    def current(self) -> Level | None:
        """The level of the newest commit."""
        estimated = [level for level in self.levels if level.estimate is not None]
        return estimated[-1] if estimated else None


def analyse(series: Series, metric: Metric) -> SeriesAnalysis:
    """Find the steps and spikes of a series and the levels between them."""
    # The figures of every commit, measured or not, and the index of each point among them: an
    # unmeasured commit is as likely to have made a change as a measured one.
    figures: list[tuple[float, ...]] = []
    counting: dict[int, tuple[Launch, ...]] = {}
    places = []
    for number, point in enumerate(series.points):
        figures += [()] * (point.num_before if number else 0)
        places.append(len(figures))
        # Of a metric of time, launches whose machine was slow do not count.
        measured = (launch for launch in point.launches if launch.value is not None)
        own = tuple(one for one in measured if not (metric.slow_sign and one.is_slowed))
        counting[len(figures)] = own
        figures.append(tuple(launch.value or 0.0 for launch in own))
    in_points, sign = metric.in_points, metric.slow_sign
    changes = find_changes(figures, series.floor, in_points=in_points, slow_sign=sign)

    def step_of(change: ChangePoint, *, is_spike: bool) -> Step:
        """The step that a change makes, by indexes of points."""
        first, last = places.index(change.index), places.index(change.latest)
        good = first - 1 if is_spike else places.index(change.earliest - 1)
        between = series.points[good + 1 : last + 1]
        num_commits = change.latest - change.earliest + 1
        step = Step(
            good=good,
            first=first,
            last=last,
            num_commits=num_commits,
            num_unmeasured=num_commits - sum(bool(point.figures) for point in between),
            ratio=change.ratio,
            difference=change.difference,
            p=change.p,
            is_better=None,
            is_spike=is_spike,
        )
        if metric.higher_is_better is None:
            return step
        return replace(step, is_better=(step.size.estimate > 0) == metric.higher_is_better)

    steps = tuple(step_of(change, is_spike=False) for change in changes.points)
    placed = tuple(
        replace(
            level,
            first=bisect.bisect_left(places, level.first),
            last=bisect.bisect_right(places, level.last) - 1,
        )
        for level in changes.levels
        if level.num_launches
    )
    if steps:
        state = State.changed
    elif not series.num_measured:
        state = State.failed if series.points else State.dirty
    elif series.num_measured == 1:
        state = State.alone
    elif series.num_launches < FEWEST:
        state = State.few
    else:  # steady where the interval is no wider than the floor on both sides
        low, high = placed[0].interval or (0.0, math.inf)
        is_narrow = high - low <= 2 * series.floor * (1.0 if in_points else low)
        state = State.steady if is_narrow else State.unclear
    apart = {counting[commit][place].run_id for commit, place in changes.apart}
    discounts = {
        launch.run_id: DiscountReason.apart if launch.run_id in apart else DiscountReason.reference
        for point in series.points
        for launch in point.launches
        if launch.run_id in apart or (metric.slow_sign and launch.is_slowed)
    }
    spikes = tuple(step_of(change, is_spike=True) for change in changes.spikes)
    return SeriesAnalysis(series, steps, spikes, placed, state, discounts)
