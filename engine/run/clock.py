"""When things happened: marks taken during a step, read as nanoseconds after it.

Taking a mark never synchronises. On the CPU a mark is the host's monotonic clock, which all
processes of one machine share. On CUDA it is an event on the current stream; events are read when
the step is over, relative to an anchor that was tied to the host clock before it began.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch

Mark = int | torch.cuda.Event


class Clock(Protocol):
    """Takes marks during a step and turns them into nanoseconds after it."""

    def begin_step(self) -> None:
        """Called before each step; may synchronise."""

    def mark(self) -> Mark:
        """Now, on the current stream where there is one. Never blocks."""

    def end_step(self) -> None:
        """Called after each step; blocks until every mark taken is readable."""

    def read_ns(self, mark: Mark) -> int:
        """A mark of the last step on the host's monotonic clock, in nanoseconds."""


class HostClock:
    """`time.monotonic_ns`: right wherever work is done when the call returns."""

    def begin_step(self) -> None:
        pass

    def mark(self) -> int:
        return time.monotonic_ns()

    def end_step(self) -> None:
        pass

    def read_ns(self, mark: Mark) -> int:
        assert isinstance(mark, int)
        return mark


class CudaClock:
    """CUDA events on the stream that is current when the mark is taken."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor = torch.cuda.Event(enable_timing=True)
        self._anchor_ns = 0

    def begin_step(self) -> None:
        """Tie an event to the host clock. Synchronises the device (once, before the step)."""
        torch.cuda.synchronize(self._device)
        self._anchor.record(torch.cuda.current_stream(self._device))
        self._anchor.synchronize()
        self._anchor_ns = time.monotonic_ns()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def end_step(self) -> None:
        """Synchronises the device (once, after the step)."""
        torch.cuda.synchronize(self._device)

    def read_ns(self, mark: Mark) -> int:
        """Host marks (taken by a channel that goes through the host) are read as they are."""
        if isinstance(mark, int):
            return mark
        elapsed_ms: float = self._anchor.elapsed_time(mark)
        return self._anchor_ns + round(elapsed_ms * 1e6)


class IssueClock:
    """Marks when the host issues work, be it done then or not; all else is another clock's.

    Memory is allocated when work is issued: on CUDA, spans of the device's own times would not tell
    which action it was for.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def begin_step(self) -> None:
        self._clock.begin_step()

    def mark(self) -> int:
        return time.monotonic_ns()

    def end_step(self) -> None:
        self._clock.end_step()

    def read_ns(self, mark: Mark) -> int:
        return self._clock.read_ns(mark)


class FakeClock:
    """Hands out the given times in order: tests of timing become exact."""

    def __init__(self, times_ns: Sequence[int]) -> None:
        self._times = iter(times_ns)

    def begin_step(self) -> None:
        pass

    def mark(self) -> int:
        return next(self._times)

    def end_step(self) -> None:
        pass

    def read_ns(self, mark: Mark) -> int:
        assert isinstance(mark, int)
        return mark


def clock_for(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
