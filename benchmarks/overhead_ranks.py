"""The ranks of `benchmarks.overhead`: steps that record more and more, in turns.

    benchmarks.overhead_ranks JOB.json, by a supervisor

All arms run in one process, on one trainer: two processes differ by more than the overhead. An
item's `measure.steps` is its number of rounds; rank 0 notes each in the journal. The profiler is
among the arms of an item with `measure.profile_steps`: on a GPU it takes seconds in each round.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from engine.run.recording import Recording
from ppbench.config.case import Case, Supervision
from ppbench.run.job import PlannedRun
from ppbench.run.runtimes.runtime import Runtime
from ppbench.run.worker.measure import profiler_for
from ppbench.run.worker.rank import Worker, join_other_ranks, take_part

Arm = Literal["off", "flight", "on", "profiler"]
Durations = dict[Arm, int]

RECORDINGS: dict[Arm, Recording] = {
    "off": Recording.off,
    "flight": Recording.flight_only,
    "on": Recording.spans,
    "profiler": Recording.profiler_ranges,
}
ORDERS: tuple[tuple[Arm, ...], ...] = (
    ("off", "on", "flight"),
    ("flight", "off", "on"),
    ("on", "flight", "off"),
    ("off", "flight", "on"),
    ("on", "off", "flight"),
    ("flight", "on", "off"),
)
"""Orders of the arms in successive rounds, repeated. Every arm is twice at each place, and comes
twice after each arm, itself included: neither drift nor the state that an arm leaves favours one.
(Four rounds, a Williams design, are balanced within rounds, but not from one round to the next.)"""
ORDERS_WITH_PROFILER: tuple[tuple[Arm, ...], ...] = (
    ("off", "on", "flight", "profiler"),
    ("profiler", "flight", "on", "off"),
    ("off", "profiler", "on", "flight"),
    ("flight", "off", "profiler", "on"),
    ("on", "off", "flight", "profiler"),
    ("profiler", "flight", "off", "on"),
    ("on", "profiler", "off", "flight"),
    ("flight", "on", "profiler", "off"),
)
"""The same with the profiler's arm."""


def main(job_file: Path) -> None:
    """Measure every case of the job."""
    join_other_ranks(Supervision.here().patience_s)
    take_part(job_file, _run_all)


def _run_all(worker: Worker) -> None:
    for index, item in enumerate(worker.job.items):
        worker.note("case", index=index)
        member = worker.prepare(item.case)
        if member is not None:
            _run_rounds(worker, item, member.runtime, member.group)
            member.runtime.close()
        del member  # before its memory is freed
        worker.end_case()


def _run_rounds(
    worker: Worker, item: PlannedRun, runtime: Runtime, group: dist.ProcessGroup
) -> None:
    """Report every round but the first, which fills caches and loads the profiler."""
    for step in range(item.measure.warmup_steps):
        dist.barrier(group)
        runtime.step(step)
    orders = ORDERS_WITH_PROFILER if item.measure.profile_steps else ORDERS
    for index in range(item.measure.steps + 1):
        order = orders[index % len(orders)]
        slowest = _slowest(_run_round(item.case, runtime, group, index, order), group)
        if index > 0:
            worker.note("round", **{f"{arm}_ns": slowest[arm] for arm in slowest})


def _run_round(
    case: Case, runtime: Runtime, group: dist.ProcessGroup, index: int, order: tuple[Arm, ...]
) -> Durations:
    """Return the nanoseconds that this rank's step took in each arm."""
    durations: Durations = {}
    for position, arm in enumerate(order):
        # The batch is the same for all arms of a round, and never prefetched. A loader with
        # processes would start them anew, which takes most of the step: there each arm gets the
        # next batch.
        step = index * len(order) + position if case.data_num_workers else 2 * index
        if arm == "profiler":
            with profiler_for(case.device):
                durations[arm] = _duration_ns(runtime, step, RECORDINGS[arm], group)
            gc.collect()  # of the profiler's garbage, not in another arm's step
        else:
            durations[arm] = _duration_ns(runtime, step, RECORDINGS[arm], group)
    return durations


def _duration_ns(
    runtime: Runtime, step: int, recording: Recording, group: dist.ProcessGroup
) -> int:
    """Time the whole call with the gathering of spans, but without starting the profiler."""
    dist.barrier(group)
    began_ns = time.monotonic_ns()
    runtime.step(step, recording)
    return time.monotonic_ns() - began_ns


def _slowest(ours: Durations, group: dist.ProcessGroup) -> Durations:
    """Return each arm's time on the rank that took longest."""
    theirs: list[Durations] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(theirs, ours, group=group)
    return {arm: max(durations[arm] for durations in theirs) for arm in ours}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
