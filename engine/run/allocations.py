"""Records what this rank allocates and frees, on the host's monotonic clock.

CPU: the allocation events of the profiler. They see the thread that runs the step and autograd's;
other threads' allocations are left out, as are their frees. Accelerators: the history of the
caching allocator, all threads; its times are the host's, when the work was issued.

Neither is stamped with the monotonic clock, and the offset to it is not constant: the system's
clock is being adjusted, and the profiler's is a linear fit to that. So both ends of the recording
are tied to it by allocations of our own, each bracketed by two readings of the monotonic clock. The
bracket of several is narrower than the lines of Python between a span's mark and the work in it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self, TypeVar

import torch
from torch._C._profiler import _ExtraFields_Allocation
from torch.profiler import ProfilerActivity, profile

from engine.run import device as devices

_Result = TypeVar("_Result")

_UNIT_BYTES = 512  # the caching allocator rounds up to these
_MARK_BYTES = 37 * _UNIT_BYTES
_NUM_MARKS = 8  # at each end


class MemoryChange(NamedTuple):
    """An allocation, or a free where `num_bytes` is negative; 0 for a free of unknown size."""

    time_ns: int
    address: int
    num_bytes: int


class _Mark(NamedTuple):
    """An allocation of our own happened between these, on the monotonic clock."""

    before_ns: int
    after_ns: int


@dataclass(frozen=True)
class Allocations:
    """Return the changes from `start_ns` on, in order; None where no history is kept."""

    start_ns: int
    changes: list[MemoryChange] | None
    in_flight_bytes: int | None = None  # most at once that was freed while a stream still used it


def record(device: torch.device, work: Callable[[], _Result]) -> tuple[_Result, Allocations]:
    """Run `work` and tell what it allocated and freed on the device."""
    is_accelerator = devices.is_accelerator(device)
    recorder: _History | _CpuProfile = _History(device) if is_accelerator else _CpuProfile()
    with recorder:
        first = _mark(device)
        result = work()
        last = _mark(device)
    changes = tied(recorder.changes, first, last)
    return result, Allocations(first[-1].before_ns, changes, recorder.in_flight_bytes)


def _mark(device: torch.device) -> list[_Mark]:
    marks = []
    for _ in range(_NUM_MARKS):
        before_ns = time.monotonic_ns()
        torch.empty(_MARK_BYTES, dtype=torch.uint8, device=device)
        marks.append(_Mark(before_ns, time.monotonic_ns()))
    return marks


def tied(
    changes: list[MemoryChange], first: list[_Mark], last: list[_Mark]
) -> list[MemoryChange] | None:
    """Return what lies between the marks, in monotonic time; None if they were not recorded.

    A mark counts to the moment of its allocation; its free follows at once.
    """
    at = [position for position, c in enumerate(changes) if c.num_bytes == _MARK_BYTES]
    if len(at) < len(first) + len(last):
        return None
    starts, ends = at[: len(first)], at[-len(last) :]
    start_ns, end_ns = changes[starts[0]].time_ns, changes[ends[-1]].time_ns
    start_offset_ns = _offset_ns(first, [changes[position].time_ns for position in starts])
    end_offset_ns = _offset_ns(last, [changes[position].time_ns for position in ends])
    slope = (end_offset_ns - start_offset_ns) / max(1, end_ns - start_ns)

    def moved(change: MemoryChange) -> MemoryChange:
        offset_ns = start_offset_ns + round(slope * (change.time_ns - start_ns))
        return change._replace(time_ns=change.time_ns + offset_ns)

    return [moved(change) for change in changes[starts[-1] + 2 : ends[0]]]


def _offset_ns(marks: list[_Mark], times_ns: list[int]) -> int:
    """Monotonic minus recorded time: the middle of what all marks allow."""
    pairs = list(zip(marks, times_ns, strict=True))
    lowest = max(mark.before_ns - time_ns for mark, time_ns in pairs)
    highest = min(mark.after_ns - time_ns for mark, time_ns in pairs)
    return (lowest + highest) // 2


class _CpuProfile:
    """Records while entered; the changes, by its own clock and in order, are there afterwards."""

    def __init__(self) -> None:
        self.changes: list[MemoryChange] = []
        self.in_flight_bytes: int | None = None  # see `Allocations`
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Self:
        self._profile.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._profile.__exit__(*raised)
        assert self._profile.profiler is not None
        results = self._profile.profiler.kineto_results
        assert results is not None
        events = list(results.experimental_event_tree())  # only it has addresses
        while events:
            event = events.pop()
            events += event.children
            _, fields = event.typed
            if isinstance(fields, _ExtraFields_Allocation) and fields.device.type == "cpu":
                self.changes.append(
                    MemoryChange(event.start_time_ns, fields.ptr, fields.alloc_size)
                )
        self.changes.sort(key=lambda change: change.time_ns)


class _History:
    """The caching allocator's history; without one (another allocator's backend) no changes."""

    def __init__(self, device: torch.device) -> None:
        self.changes: list[MemoryChange] = []
        self.in_flight_bytes: int | None = None
        self._device = device
        self._is_kept = devices.keeps_history(device)

    def __enter__(self) -> Self:
        if self._is_kept:
            devices.begin_history(self._device)
        return self

    def __exit__(self, *raised: object) -> None:
        if self._is_kept:
            trace = devices.end_history(self._device)
            self.changes = list(changes_of_trace(trace))
            self.in_flight_bytes = most_in_flight(trace)


def changes_of_trace(trace: Iterable[dict[str, object]]) -> Iterator[MemoryChange]:
    """The changes in an allocator's trace. Freed is what has been asked to be, as it counts."""
    return _entries(trace, {"alloc": 1, "free_requested": -1})


def most_in_flight(trace: Iterable[dict[str, object]]) -> int:
    """The most bytes at once that the program had freed and a stream still used.

    Such are messages on their way: the sender lets go of them at once, the allocator when the
    stream of their edge is done.
    """
    levels = itertools.accumulate(
        entry.num_bytes for entry in _entries(trace, {"free_requested": 1, "free_completed": -1})
    )
    return max(levels, default=0)


def _entries(
    trace: Iterable[dict[str, object]], signs: Mapping[str, int]
) -> Iterator[MemoryChange]:
    """The trace's entries of these actions, with the sign of each."""
    for entry in trace:
        sign = signs.get(str(entry["action"]))
        if sign is None:
            continue
        address, size, time_us = (entry[name] for name in ("addr", "size", "time_us"))
        assert isinstance(address, int)
        assert isinstance(size, int)
        assert isinstance(time_us, int)
        num_units = -(-size // _UNIT_BYTES)
        yield MemoryChange(time_us * 1000, address, sign * num_units * _UNIT_BYTES)
