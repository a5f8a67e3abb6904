"""The clock of events: marks within their error, and a kernel of known duration.

A mark is taken between two host times, with the device idle before and waited for after. A kernel
sleeps 5 ms by its multiprocessor's own counter. Its frequency varies, so that the duration
is the host's: a row of kernels, waited for once, over their number.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.gpu.findings import Bound, Finding
from engine.run import device as devices
from engine.run.clock import clock_for

NUM_MARKS = 2000
MARKS_PER_STEP = 100
SLEEP_S = 0.005
SLEEPS_PER_ROUND = 20
NUM_ROUNDS = 10


@dataclass(frozen=True)
class Marks:
    """Marks as they were read, between the host times around them, and the clock's error."""

    before_ns: tuple[int, ...]
    read_ns: tuple[int, ...]
    after_ns: tuple[int, ...]
    error_ns: tuple[int, ...]


@dataclass(frozen=True)
class Measurements:
    marks: Marks
    sleep_read_s: tuple[float, ...]  # of a kernel, by events; the median of each round
    sleep_host_s: tuple[float, ...]  # of a kernel, by the host, in the same round


def judge(measured: Measurements) -> list[Finding]:
    ratios = [
        read / host for read, host in zip(measured.sleep_read_s, measured.sleep_host_s, strict=True)
    ]
    off = statistics.median(abs(ratio - 1) for ratio in ratios)
    return [
        *judge_marks(measured.marks),
        Finding.of(
            "clock",
            "a sleep of 5 ms, read by events over the host's time, off by",
            off,
            Bound(at_most=0.005),
            error=(max(ratios) - min(ratios)) / 2 / len(ratios) ** 0.5,
            note=f"the median of {len(ratios)} rounds",
        ),
    ]


def judge_marks(marks: Marks) -> list[Finding]:
    rows = list(zip(marks.before_ns, marks.read_ns, marks.after_ns, marks.error_ns, strict=True))
    if len(rows) < NUM_MARKS:
        why = f"{len(rows)} marks were taken; {NUM_MARKS} are needed"
        return [Finding.undecided("clock", "marks within their error", why)]
    beyond = [max(before - read, read - after, 0) - error for before, read, after, error in rows]
    return [
        Finding.of(
            "clock",
            f"of {len(rows):,} marks, those beyond their error",
            sum(one > 0 for one in beyond),
            Bound(at_most=0),
            note=f"the worst by {max(0, *beyond):,} ns" if max(beyond) > 0 else "",
        ),
        Finding.of(
            "clock",
            "the error that a mark states, at most",
            max(marks.error_ns) / 1000,
            Bound(at_least=0, at_most=100),
            unit="µs",
        ),
    ]


def measure(device: torch.device) -> Measurements:
    cycles = _cycles_of(SLEEP_S, device)
    rounds = [_sleep_round(cycles, device) for _ in range(NUM_ROUNDS)]
    read, host = zip(*rounds, strict=True)
    return Measurements(take_marks(device, NUM_MARKS), read, host)


def take_marks(device: torch.device, num_marks: int) -> Marks:
    """Each with the device idle before it; some in each step of the clock."""
    clock = clock_for(device)
    rows: list[tuple[int, int, int, int]] = []
    while len(rows) < num_marks:
        clock.begin()
        taken = []
        for _ in range(min(MARKS_PER_STEP, num_marks - len(rows))):
            before_ns = time.monotonic_ns()
            mark = clock.mark()
            wait_for(device)
            taken.append((before_ns, mark, time.monotonic_ns()))
        clock.end()
        rows += [(b, clock.read_ns(mark), a, clock.error_ns) for b, mark, a in taken]
    return Marks(*map(tuple, zip(*rows, strict=True)))


def _sleep_round(cycles: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a sleep by events, the median of a round; and by the host, its mean."""
    clock, marks = clock_for(device), []
    clock.begin()
    began = time.perf_counter()
    marks.append(clock.mark())
    for _ in range(SLEEPS_PER_ROUND):
        sleep(cycles, device)
        marks.append(clock.mark())
    wait_for(device)
    host_s = (time.perf_counter() - began) / SLEEPS_PER_ROUND
    clock.end()
    read = [clock.read_ns(mark) for mark in marks]
    took = [(end - begin) / 1e9 for begin, end in itertools.pairwise(read)]
    return statistics.median(took), host_s


def _cycles_of(seconds: float, device: torch.device) -> int:
    """The cycles that a kernel sleeps for so long: tried with some, after the clock has risen."""
    cycles = 10_000_000
    for _ in range(3):
        began = time.perf_counter()
        sleep(cycles, device)
        wait_for(device)
        took_s = time.perf_counter() - began
        cycles = max(1, round(cycles * 0.1 / took_s))  # at last of 0.1 s
    return max(1, round(cycles * seconds / 0.1))


def sleep(cycles: int, device: torch.device) -> None:
    """Let the device sleep; the CPU for as many nanoseconds."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch's
    else:
        time.sleep(cycles / 1e9)


def wait_for(device: torch.device) -> None:
    """Block until the device has done all that was issued."""
    if device.type != "cpu":
        devices.wait_for_all(device)
