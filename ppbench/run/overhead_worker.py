"""What measuring costs, one rank's side: steps that record more and more of themselves, in turns.

    python -m ppbench.run.launch.agent ... ppbench.run.overhead_worker JOB.json

In one process, on one trainer: two processes differ by more than what is to be measured. An item's
`measure.steps` is its number of rounds; rank 0 tells the journal of each.
"""

from __future__ import annotations

import gc
import sys
import time
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from engine.run.watch import BARE, NOTHING, RANGES, SPANS, Watch
from ppbench.config.case import Case
from ppbench.run.job import Item
from ppbench.run.lifetime import die_with_parent
from ppbench.run.meeting import join_other_ranks
from ppbench.run.profiling import profiler_for
from ppbench.run.runtimes.runtime import Runtime
from ppbench.run.worker import Worker, take_part

Arm = Literal["off", "flight", "on", "profiler"]
Durations = dict[Arm, int]

WATCHES: dict[Arm, Watch] = {"off": BARE, "flight": NOTHING, "on": SPANS, "profiler": RANGES}
ORDERS: tuple[tuple[Arm, Arm, Arm, Arm], ...] = (
    ("off", "on", "flight", "profiler"),
    ("profiler", "flight", "on", "off"),
    ("off", "profiler", "on", "flight"),
    ("flight", "off", "profiler", "on"),
    ("on", "off", "flight", "profiler"),
    ("profiler", "flight", "off", "on"),
    ("on", "profiler", "off", "flight"),
    ("flight", "on", "profiler", "off"),
)
"""One round each, then again from the start. Every arm is twice at each place, and comes twice
after each arm, itself included: neither drift nor what one leaves behind has a favourite. (Four
rounds, a Williams design, would do within rounds; from one round to the next they would not.)"""


def main(job_file: Path) -> None:
    """Measure every case of the job."""
    die_with_parent()
    join_other_ranks()
    take_part(job_file, _run_all)


def _run_all(worker: Worker) -> None:
    for index, item in enumerate(worker.job.items):
        worker.tell("case", index=index)
        _run_case(worker, item)
        worker.end_case()


def _run_case(worker: Worker, item: Item) -> None:
    member = worker.prepare(item.case)
    if member is not None:
        _run_rounds(worker, item, member.runtime, member.group)
        member.runtime.close()


def _run_rounds(worker: Worker, item: Item, runtime: Runtime, group: dist.ProcessGroup) -> None:
    """The first round, which fills caches and loads the profiler, is not told."""
    for step in range(item.measure.warmup_steps):
        dist.barrier(group)
        runtime.step(step)
    for index in range(item.measure.steps + 1):
        slowest = _slowest(_run_round(item.case, runtime, group, index), group)
        if index > 0:
            worker.tell("round", **{f"{arm}_ns": slowest[arm] for arm in slowest})


def _run_round(case: Case, runtime: Runtime, group: dist.ProcessGroup, index: int) -> Durations:
    """Nanoseconds that this rank's step took in each arm."""
    durations: Durations = {}
    for position, arm in enumerate(ORDERS[index % len(ORDERS)]):
        step = _step_of(case, index, position)
        if arm == "profiler":
            with profiler_for(case.device):
                durations[arm] = _duration_ns(runtime, step, WATCHES[arm], group)
            gc.collect()  # of what the profiler left, not in another arm's step
        else:
            durations[arm] = _duration_ns(runtime, step, WATCHES[arm], group)
    return durations


def _step_of(case: Case, index: int, position: int) -> int:
    """The same batch in all arms of a round, and never the one that the loader has at hand.

    Where the loader has processes, starting them anew would be most of the step: then every arm
    gets the next batch.
    """
    return index * len(ORDERS[0]) + position if case.data_num_workers else 2 * index


def _duration_ns(runtime: Runtime, step: int, watch: Watch, group: dist.ProcessGroup) -> int:
    """The whole call, the gathering of spans included. The profiler's start and end are not."""
    dist.barrier(group)
    began_ns = time.monotonic_ns()
    runtime.step(step, watch)
    return time.monotonic_ns() - began_ns


def _slowest(ours: Durations, group: dist.ProcessGroup) -> Durations:
    """Each arm's time on the rank that took longest."""
    theirs: list[Durations] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(theirs, ours, group=group)
    return {arm: max(durations[arm] for durations in theirs) for arm in ours}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
