"""Clocks: marks are taken during steps, and read as nanoseconds after them.

    begin  step: mark, mark, ...  step: mark, mark, ...  end  read, read, ...

Taking a mark never synchronises. On the CPU a mark is the host's monotonic clock. On an accelerator
it is an event on the current stream; events are read when the steps are over, along a line through
two ties to the host clock: one made before them, one after them.

Two clocks never run at quite the same rate, and a moment read on both is known to within an error.
`Line` holds both, for events against the host and for ranks against rank 0 (`alignment.py`).
"""

from __future__ import annotations

import functools
import math
import time
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from engine.run import device as devices
from engine.run.events import EventPool

Mark = int | torch.Event

MAX_DRIFT_PPB = 1_000_000
"""The most that two clocks are taken to drift apart: NTP slews each by 500 ppm at most."""
_BILLION = 1_000_000_000
_NUM_TRIES = 5
_RESOLUTION_NS = 500  # of an event: CUDA Runtime API, cudaEventElapsedTime
_ROUNDING_NS = 3  # a clock tells whole nanoseconds; so do the middle of two ties and the answer


class Ping(NamedTuple):
    """A round trip: first and last on the clock of the rank that asks, the others on the peer's."""

    sent_ns: int
    received_ns: int
    answered_ns: int
    returned_ns: int


class Tie(NamedTuple):
    """A moment on two clocks: exact on the first, within `error_ns` on the second."""

    first_ns: int
    second_ns: int
    error_ns: int


@dataclass(frozen=True)
class Line:
    """Takes times from one clock to another, both ways."""

    first_ns: int
    second_ns: int  # the same moment on the second clock
    drift: float  # nanoseconds that the second clock gains in one of the first
    error_ns: int  # the most that an answer is off, between the ties that it was drawn through

    def to_second(self, first_ns: int) -> int:
        elapsed_ns = first_ns - self.first_ns
        return self.second_ns + elapsed_ns + round(elapsed_ns * self.drift)

    def to_first(self, second_ns: int) -> int:
        elapsed_ns = second_ns - self.second_ns
        return self.first_ns + elapsed_ns - round(elapsed_ns * self.drift / (1 + self.drift))


def line_through(before: Tie, after: Tie) -> Line:
    """The clocks are taken to drift at one rate in between, of at most MAX_DRIFT_PPB.

    Two ties at hand tell the rate badly: a line that they make too steep is turned about its middle
    as far as that rate. That brings it no further from the true one, which is no steeper. Where the
    ties' errors do not explain so steep a line, one of the clocks has jumped or been slewed harder
    than that; what the line then misses the ties by is part of the error.
    """
    elapsed_ns = after.first_ns - before.first_ns
    gained_ns = after.second_ns - before.second_ns - elapsed_ns
    steepest = MAX_DRIFT_PPB / _BILLION
    missed_ns = math.ceil((abs(gained_ns) - steepest * abs(elapsed_ns)) / 2)
    error_ns = max(before.error_ns, after.error_ns)
    if 2 * missed_ns > before.error_ns + after.error_ns:
        error_ns += missed_ns
    return Line(
        (before.first_ns + after.first_ns) // 2,
        (before.second_ns + after.second_ns) // 2,
        min(max(gained_ns / max(elapsed_ns, 1), -steepest), steepest),
        # An error measured on one clock is a little longer on another that runs faster.
        -(-error_ns * _BILLION // (_BILLION - MAX_DRIFT_PPB)) + _ROUNDING_NS,
    )


class Clock(Protocol):
    """Takes marks during steps and turns them into nanoseconds after them."""

    def begin(self) -> None:
        """Called before each step; the first call since `end` may synchronise and frees marks."""

    def mark(self) -> Mark:
        """Now, on the current stream where there is one. Never blocks."""

    def end(self) -> None:
        """Called after the last step; blocks until every mark since the first `begin` is readable.

        They can be read until the next `begin`.
        """

    def read_ns(self, mark: Mark) -> int:
        """A mark on the host's monotonic clock, in nanoseconds."""

    @property
    def error_ns(self) -> int:
        """The most that `read_ns` is off, for the marks that are readable."""


class HostClock:
    """`time.monotonic_ns`: right wherever work is done when the call returns."""

    def begin(self) -> None:
        pass

    def mark(self) -> int:
        return time.monotonic_ns()

    def end(self) -> None:
        pass

    def read_ns(self, mark: Mark) -> int:
        assert isinstance(mark, int)
        return mark

    @property
    def error_ns(self) -> int:
        return 0


class Bracket(NamedTuple):
    """Host times between which something happened on the device."""

    before_ns: int
    after_ns: int

    @property
    def width_ns(self) -> int:
        return self.after_ns - self.before_ns

    def tie(self, device_ns: int, device_error_ns: int) -> Tie:
        """Tie it to the device's time: the host's is the middle, the error half the width."""
        half_ns = -(-self.width_ns // 2)
        return Tie(device_ns, self.after_ns - half_ns, half_ns + device_error_ns)


def line_of_events(before: Bracket, after: Bracket, elapsed_ms: float) -> Line:
    """Map nanoseconds since the first of two events, `elapsed_ms` apart, to the host's clock.

    Events tell time in steps of their own, and as a float32: it holds 24 bits of the milliseconds.
    Both count twice, for the mark that is read and for the second event.
    """
    elapsed_ns = _nanoseconds(elapsed_ms)
    reading_ns = _RESOLUTION_NS + (elapsed_ns >> 24) + 1
    return line_through(before.tie(0, reading_ns), after.tie(elapsed_ns, 2 * reading_ns))


def _nanoseconds(elapsed_ms: float) -> int:
    return round(elapsed_ms * 1e6)


class DeviceClock:
    """Events on the stream that is current when the mark is taken.

    They are made once and used again: all are read before the next are begun.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events = EventPool(functools.partial(devices.timed_event, device))
        self._anchor: torch.Event | None = None
        self._before: Bracket | None = None  # of steps that are being timed
        self._line = Line(0, 0, 0.0, 0)

    def begin(self) -> None:
        """Tie an event to the host clock, unless one is tied. That synchronises the device."""
        if self._before is None:
            self._events.give_back_all()
            self._anchor, self._before = self._tied_event()

    def mark(self) -> torch.Event:
        event = self._events.take()
        event.record()
        return event

    def end(self) -> None:
        """Tie another one, to see the drift. Synchronises the device.

        Where nothing was begun there is nothing to read: then it only synchronises.
        """
        if self._before is None:
            devices.wait_for_all(self._device)
            self._events.give_back_all()
            return
        event, after = self._tied_event()
        assert self._anchor is not None
        self._line = line_of_events(self._before, after, self._anchor.elapsed_time(event))
        self._before = None

    def read_ns(self, mark: Mark) -> int:
        """Host marks (taken by a channel that goes through the host) are read as they are."""
        if isinstance(mark, int):
            return mark
        assert self._anchor is not None
        return self._line.to_second(_nanoseconds(self._anchor.elapsed_time(mark)))

    @property
    def error_ns(self) -> int:
        return self._line.error_ns

    def _tied_event(self) -> tuple[torch.Event, Bracket]:
        """An event and the host times just before and after it: of several, the narrowest."""
        devices.wait_for_all(self._device)
        tries = []
        for _ in range(_NUM_TRIES):
            event = self._events.take()
            before_ns = time.monotonic_ns()
            event.record()
            event.synchronize()
            tries.append((event, Bracket(before_ns, time.monotonic_ns())))
        return min(tries, key=lambda tried: tried[1].width_ns)


def clock_for(device: torch.device) -> Clock:
    return DeviceClock(device) if devices.is_accelerator(device) else HostClock()
