"""Holds what was measured of two sides: rounds in turns, or launches of each side alone.

    launch 1    base head | head base | base head | ...     a round is a turn of each side
    launch 2    base head | head base | ...

What a start of the processes decides, it decides for both sides and for all rounds of that launch,
so that launches are the replicate above rounds. Launches that measured one side only, such as
attached trainings, have one figure each and are compared as two groups.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

RESOLUTION = 0.02
"""Difference within which two sides are the same: 2 %, or two percentage points."""
UNKNOWN = -1
"""The session of a launch whose time is not known."""


@dataclass(frozen=True)
class Metric:
    """A figure of a launch or of a turn."""

    name: str  # a column of `runs`
    higher_is_better: bool | None  # None: neither direction is better
    in_points: bool  # compared by difference, since it may be 0; else by ratio
    can_be_disturbed: bool = True  # by what else runs on the machine, as times are

    @property
    def slow_sign(self) -> int:
        """1 if a disturbed launch has a higher figure, -1 if a lower one, 0 if neither."""
        if self.higher_is_better is None or not self.can_be_disturbed:
            return 0
        return -1 if self.higher_is_better else 1


@dataclass(frozen=True)
class Noise:
    """A standard deviation that is known from elsewhere, and how well."""

    deviation: float  # relative; of a metric in points, as a fraction
    freedom: float  # degrees of freedom of its estimate

    @property
    def squares(self) -> float:
        """The sum of squares of as many launches."""
        return self.freedom * self.deviation**2


@dataclass(frozen=True)
class Launches:
    """The figures of launches that measured one side alone, in the order of time.

    A slowdown is how much longer the fixed reference beside a launch took than is usual on that
    machine: 0.12 is 12 % longer, NaN is unknown. Sessions are numbers; launches of one session
    share whatever drifts from day to day.
    """

    figures: tuple[float, ...] = ()
    slowdowns: tuple[float, ...] | None = None
    sessions: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Rounds:
    """The figures of both sides in the rounds of one launch, in the order of time."""

    base: tuple[float, ...]
    head: tuple[float, ...]


@dataclass(frozen=True)
class Evidence:
    """Everything that is known of a base and a head; rounds count where there are any."""

    base: Launches = field(default_factory=Launches)
    head: Launches = field(default_factory=Launches)
    paired: tuple[Rounds, ...] = ()  # one for each launch
    noise: Noise | None = None  # of launches of one side
    starts: Noise | None = None  # of the difference of two sides between starts of processes
    drift: Noise | None = None  # between sessions
    resolution: float = RESOLUTION
    cautions: tuple[str, ...] = ()  # of at least half of the launches of a side: no verdict

    def reversed(self) -> Evidence:
        """The same with base and head exchanged."""
        paired = tuple(Rounds(each.head, each.base) for each in self.paired)
        return replace(self, base=self.head, head=self.base, paired=paired)

    @property
    def sessions(self) -> frozenset[int]:
        """The sessions of all launches."""
        return frozenset((*(self.base.sessions or ()), *(self.head.sessions or ())))

    @property
    def sessions_apart(self) -> float:
        """How much of the variance between sessions is in the difference of the sides.

        It is the sum of the squared differences between the shares that sessions have in the sides:
        0 where both have the same, 2 where each was measured in a session of its own.
        """
        base, head = self.base.sessions or (), self.head.sessions or ()
        if not base or not head or UNKNOWN in self.sessions:
            return 0.0
        return math.fsum(
            (base.count(number) / len(base) - head.count(number) / len(head)) ** 2
            for number in self.sessions
        )


class DiscountReason(StrEnum):
    """Why a launch does not count."""

    apart = "apart"  # it lies far from the others, on the slow side
    reference = "reference"  # the fixed reference beside it was slow


@dataclass(frozen=True)
class Discount:
    """A launch of one side that does not count."""

    side: Literal["base", "head"]
    index: int  # of the launch
    reason: DiscountReason
