"""Times on a GPU: marks, spans, streams, and how far the host runs ahead.

    python -m benchmarks.gpu.clock [marks] [synchronisation] [streams] [ahead] [spans] [turns]
        [overhead]

`marks`: a mark lies between two host times, with the device idle before and waited for after. A
kernel sleeps 5 ms by its multiprocessor's own counter, whose frequency varies: the duration is the
host's, of a row of kernels over their number. `synchronisation`: torch raises where the host waits
for the GPU in a turn of steps. `streams`: with fewer hardware queues than streams
(`CUDA_DEVICE_MAX_CONNECTIONS`), a kernel that waits holds up those behind it on other streams.
`ahead`: the host keeps the GPU busy, and is no further ahead than it is asked to. `spans` are
compared with the wall time of a step, and with its kernels as torch's profiler sees them. `turns`:
steps follow each other at once. `overhead` compares turns of steps with spans and without.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.claims import Goal
from benchmarks.gpu.device import BUSY, config_on, run_checks, sleep, trainer_on, unknown, wait_for
from benchmarks.loop import in_turns, sides
from benchmarks.overhead import steps_in_turns
from benchmarks.ranks import on_ranks
from benchmarks.rows import NO_STARTS, Row
from engine.device_variables import prepare
from engine.plan.action import Op
from engine.plan.schedules.registry import SCHEDULES
from engine.plan.spans import Lane, Span
from engine.run.clock import clock_for
from engine.run.recording import Recording
from engine.run.streams import MOST_EDGES, Streams
from engine.trainer import StepResult, Trainer

# Marks

NUM_MARKS, MARKS_PER_STEP = 2000, 100
SLEEP_S, SLEEPS_PER_ROUND, NUM_SLEEP_ROUNDS = 0.005, 20, 10


class Mark(NamedTuple):
    """A mark as it was read, between the host times around it, and the clock's error."""

    before_ns: int
    read_ns: int
    after_ns: int
    error_ns: int

    @property
    def beyond_ns(self) -> int:
        """How far it was read outside of these times and its error."""
        return max(self.before_ns - self.read_ns, self.read_ns - self.after_ns, 0) - self.error_ns


def marks(device: torch.device) -> Iterator[Row]:
    """Compare marks with the host's clock, and sleeps by marks with sleeps by the host."""
    taken = take_marks(device, NUM_MARKS)
    beyond = [mark.beyond_ns for mark in taken]
    worst = f"the worst by {max(beyond):,} ns" if max(beyond) > 0 else ""
    name = f"of {len(taken):,} marks, those beyond their error"
    yield Row.exact(name, sum(one > 0 for one in beyond), Goal(None, 0), note=worst)
    largest = max(mark.error_ns for mark in taken) / 1000
    yield Row.exact("the error that a mark states, at most", largest, Goal(0, 100), "µs")
    cycles = 10_000_000
    for _ in range(3):  # the clock of the device rises
        began = time.perf_counter()
        sleep(cycles, device)
        wait_for(device)
        cycles = max(1, round(cycles * 0.1 / (time.perf_counter() - began)))  # at last of 0.1 s
    cycles = max(1, round(cycles * SLEEP_S / 0.1))
    off = [abs(_sleeps(cycles, device) - 1) for _ in range(NUM_SLEEP_ROUNDS)]
    name = "a sleep of 5 ms, read by events over the host's time, off by"
    yield Row.median(name, off, "", Goal(None, 0.005))


def take_marks(device: torch.device, num_marks: int) -> list[Mark]:
    """Each with the device idle before it; some in each step of the clock."""
    clock, found = clock_for(device), list[Mark]()
    while len(found) < num_marks:
        clock.begin()
        taken = []
        for _ in range(min(MARKS_PER_STEP, num_marks - len(found))):
            before_ns = time.monotonic_ns()
            mark = clock.mark()
            wait_for(device)
            taken.append((before_ns, mark, time.monotonic_ns()))
        clock.end()
        found += [Mark(b, clock.read_ns(mark), a, clock.error_ns) for b, mark, a in taken]
    return found


def _sleeps(cycles: int, device: torch.device) -> float:
    """The median sleep of a row by events, over the mean by the host."""
    clock, taken = clock_for(device), []
    clock.begin()
    began = time.perf_counter()
    taken.append(clock.mark())
    for _ in range(SLEEPS_PER_ROUND):
        sleep(cycles, device)
        taken.append(clock.mark())
    wait_for(device)
    host_s = (time.perf_counter() - began) / SLEEPS_PER_ROUND
    clock.end()
    read = [clock.read_ns(mark) for mark in taken]
    took = [(end - begin) / 1e9 for begin, end in itertools.pairwise(read)]
    return statistics.median(took) / host_s


# What waits for the device


def synchronisation(device: torch.device) -> Iterator[Row]:
    """Issue two steps of each schedule in a row, their reading left aside."""
    for schedule in SCHEDULES:
        trainer = trainer_on(device, schedule, 4)
        with forbidden(device) as errors:
            issued = [trainer.issue(step) for step in (2, 3)]
        if not errors:  # else a step has been left half issued
            trainer.read(issued)
        trainer.close()
        name = f"hidden synchronisations in two steps of {schedule} in a row"
        yield Row.exact(name, len(errors), Goal(None, 0), note="; ".join(errors))


@contextlib.contextmanager
def forbidden(device: torch.device) -> Iterator[list[str]]:
    """Add to a list what makes the host wait for a GPU meanwhile; nothing else can be told.

    The marks of a turn are begun with a synchronisation by design: `Clock.begin`.
    """
    errors: list[str] = []
    if device.type != "cuda":
        yield errors
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield errors
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        errors.append(str(error).splitlines()[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")


def streams(device: torch.device) -> Iterator[Row]:
    """Let one kernel sleep, and as many as a rank may have edges, each on a stream of its own."""
    prepare(os.environ)
    number = MOST_EDGES if device.type == "cuda" else 1
    cycles = 20_000_000 if device.type == "cuda" else 1_000_000  # some 10 ms
    lent = Streams(device) if device.type == "cuda" else None

    def sleeping(num: int) -> float:
        wait_for(device)
        began = time.perf_counter()
        for index in range(num):
            with contextlib.nullcontext() if lent is None else lent.of_edge(index):
                sleep(cycles, device)
        wait_for(device)
        return time.perf_counter() - began

    turns = in_turns({"one": lambda: sleeping(1), "all": lambda: sleeping(number)}, range(8))
    name = f"{number} kernels that sleep, one on each stream, over one of them"
    yield Row.ratio(name, [sides(turns, "one", "all")], Goal(None, 1.2), starts=NO_STARTS)


def ahead(device: torch.device) -> Iterator[Row]:
    """Issue a step of many computations, and see how many are done when all are issued."""
    trainer = trainer_on(device, "1f1b", 32 if device.type == "cuda" else 4, times_size=BUSY)
    batch = trainer.batch(2)
    wait_for(device)
    began = time.perf_counter()
    trainer.runner.run(2, batch, Recording.flight_only)
    issued_s = time.perf_counter() - began
    wait_for(device)
    done_s = time.perf_counter() - began
    trainer.runner.end_step(2)
    most, num = trainer.config.issue_ahead, trainer.lowered.num_computations
    trainer.close()
    name = "computations that the GPU had not done when the host had issued all"
    note = f"at most {most} are asked for; by time, as if all took as long"
    value = (done_s - issued_s) / (done_s / num)
    yield Row.exact(name, value, Goal(1, 1.5 * most), note=note)


# Spans


def spans(device: torch.device) -> Iterator[Row]:
    """Compare the computations of a step by their spans with its wall time and its kernels."""
    trainer = trainer_on(device, "1f1b", 8, times_size=BUSY)
    shares = []
    for step in range(2, 10):
        wait_for(device)
        began = time.perf_counter()
        own = trainer.step(step).spans
        shares.append(_seconds(own) / (time.perf_counter() - began))
    profiled_s, kernels_s = _profiled(trainer, 10, device)
    trainer.close()
    name = "computations by their spans, over the wall time of a step on one rank"
    yield Row.median(name, shares, "", Goal(0.8, 1.005))
    name = "time in kernels, over computations by their spans"
    if kernels_s:
        note = "spans contain their kernels, and host gaps between them"
        yield Row.exact(name, kernels_s / profiled_s, Goal(0.7, 1.01), note=note)
    else:
        yield unknown(name, "the profiler saw no kernels")


def _seconds(own: list[Span]) -> float:
    """The time in computations."""
    return sum(s.end_ns - s.start_ns for s in own if s.lane is Lane.COMPUTE) / 1e9


def _profiled(trainer: Trainer, step: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a step's computations by spans, and in its kernels."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        own = trainer.step(step).spans
        wait_for(device)
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name != "CPU" and not event.is_user_annotation
    ]
    return _seconds(own), covered(kernels) / 1e6


def covered(ranges: list[tuple[float, float]]) -> float:
    """The length of what at least one of the ranges covers."""
    length, until = 0.0, float("-inf")
    for begin, end in sorted(ranges):
        length += max(0.0, end - max(begin, until))
        until = max(until, end)
    return length


def turns(device: torch.device) -> Iterator[Row]:
    """Run turns of steps with spans, and look at the gaps between steps."""
    trainer, gaps = trainer_on(device, "1f1b", 4), list[float]()
    for first in range(2, 98, 12):
        gaps += _gaps(trainer.steps(range(first, first + 12)))
    trainer.close()
    name = "gap between a step's optimizer and the next step, over the period of steps"
    yield Row.median(name, gaps, "", Goal(None, 0.05))
    overlaps = sum(gap < 0 for gap in gaps)
    yield Row.exact("steps that begin before the one before has ended", overlaps, Goal(None, 0))


def _gaps(results: list[StepResult]) -> Iterator[float]:
    """The gaps between steps of a turn, each over the time from a step's begin to the next's."""
    for before, after in itertools.pairwise(results):
        (end_ns,) = (span.end_ns for span in before.spans if span.op is Op.OPT)
        begin_ns, next_ns = (
            min(span.start_ns for span in result.spans if span.lane is Lane.COMPUTE)
            for result in (before, after)
        )
        yield (next_ns - end_ns) / (next_ns - begin_ns)


def overhead(device: torch.device) -> Iterator[Row]:
    """Compare steps with spans with bare ones, as `benchmarks.overhead` does."""
    config, arms = config_on(device, "1f1b", 8), ["bare", "spans"]
    launches = [
        on_ranks(1, device.type, steps_in_turns, config, arms, 12, is_shared=True)[0]
        for _ in range(3)
    ]
    rounds = [sides(each, "bare", "spans") for each in launches]
    yield Row.ratio("a step with spans over a bare one", rounds, Goal(None, 1.01))


PARTS = {"marks": marks, "synchronisation": synchronisation, "streams": streams, "ahead": ahead}
PARTS |= {"spans": spans, "turns": turns, "overhead": overhead}

if __name__ == "__main__":
    run_checks("gpu.clock", __doc__, PARTS)
