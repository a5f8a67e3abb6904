"""A figure over commits: its launches, its levels, and the commits that changed it.

A series is one case on one fingerprint, since timings of two machines do not compare. Its points
are the commits that were measured or attempted. Commits in between, of which a repository may have
thousands, are only counted, with the point that follows them.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
from dataclasses import dataclass
from enum import StrEnum

from ppbench.judge.evidence import DiscountReason, Metric
from ppbench.judge.slowdowns import NOT_KNOWN, Slowdown, is_disturbed
from ppbench.statistics.change_points import FLOOR, Changes, Level, Step, find_changes

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


@dataclass(frozen=True)
class Launch:
    """A run; one that failed has a status and no figure."""

    run_id: str
    status: str
    value: float | None = None
    slowdown: Slowdown = NOT_KNOWN  # of its machine


@dataclass(frozen=True)
class Point:
    """A commit of a series, with its launches."""

    commit: str
    author_date: str | None = None  # ISO 8601
    subject: str | None = None
    launches: tuple[Launch, ...] = ()
    num_before: int = 0  # unmeasured commits since the point before it

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
    """A metric of one case on one fingerprint, oldest commit first."""

    metric: Metric
    case_id: str
    case: str  # in words
    fingerprint: str
    points: tuple[Point, ...]
    sweep_file: str = ""  # of its newest run
    machine: str = ""  # in words

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

    def _slowed(self, launch: Launch) -> bool:
        """Whether a figure does not count, since it is a time and its machine was slow."""
        is_time = bool(self.metric.slow_sign) and launch.value is not None
        return is_time and is_disturbed(launch.slowdown)

    @functools.cached_property
    def changes(self) -> Changes:
        """The steps, spikes and levels, by indexes of points."""
        figures = [
            [one.value for one in point.launches if one.value is not None and not self._slowed(one)]
            for point in self.points
        ]
        # An unmeasured commit is as likely to have made a change as a measured one.
        numbers = list(itertools.accumulate(1 + point.num_before for point in self.points))
        in_points, sign = self.metric.in_points, self.metric.slow_sign
        return find_changes(figures, numbers=numbers, in_points=in_points, slow_sign=sign)

    @functools.cached_property
    def discounts(self) -> dict[str, DiscountReason]:
        """The runs that something slowed, by id: they are in no level and no step."""
        found = {}
        for number, point in enumerate(self.points):
            place = 0  # among the launches of which changes were found
            for launch in point.launches:
                if self._slowed(launch):
                    found[launch.run_id] = DiscountReason.reference
                elif launch.value is not None:
                    if (number, place) in self.changes.apart:
                        found[launch.run_id] = DiscountReason.apart
                    place += 1
        return found

    @property
    def current(self) -> Level | None:
        """The level of the newest commit."""
        return self.changes.levels[-1] if self.changes.levels else None

    @property
    def state(self) -> State:
        if self.changes.steps:
            return State.changed
        if not self.num_measured:
            return State.failed
        if self.num_measured == 1:
            return State.alone
        if self.num_launches < FEWEST or self.current is None:
            return State.few
        # It is steady where the interval is no wider than the floor on both sides.
        low, high = self.current.interval or (0.0, math.inf)
        is_narrow = high - low <= 2 * FLOOR * (1.0 if self.metric.in_points else low)
        return State.steady if is_narrow else State.unclear

    def num_unmeasured_of(self, step: Step) -> int:
        """How many of the commits that may have made a change have no figure."""
        between = self.points[step.good + 1 : step.last + 1]
        return step.num_commits - sum(bool(point.figures) for point in between)

    def is_better(self, step: Step) -> bool | None:
        """Whether a change is for the better; None where the metric has no direction."""
        if self.metric.higher_is_better is None:
            return None
        return (step.size.estimate > 0) == self.metric.higher_is_better
