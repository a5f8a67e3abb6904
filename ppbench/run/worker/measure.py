"""Measures one case, on one rank: warm-up, measured steps, and the node's samples meanwhile.

    warm-up | reference | clocks | measured steps | clocks | memory | reference | profile
                                  [ node's samples ]

All ranks of the case run this together; only the measured steps are timed. One more step is for
memory, and the reference (`fixed_work`) shows whether the machine was disturbed.

A profile is a kernel-level Chrome trace of a few steps under torch's profiler. It shows the kernels
of each action, and slows the step down. So its steps are extra ones, and nothing else is measured
in them.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import math
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from engine.flight import Phase
from engine.plan.spans import COLUMNS, Span
from engine.run import device as devices
from engine.run.alignment import align, measure_offset
from engine.run.heap import give_back_freed_memory
from engine.run.memory import reset_process_peak
from engine.run.precision import float32_precision
from engine.run.recording import Recording
from engine.trainer import StepResult
from ppbench.analysis.transfers import Receive
from ppbench.config.case import Measure
from ppbench.run.job import PlannedRun
from ppbench.run.machine.environment import ON_GPUS
from ppbench.run.records import LOSS, CaseResult, NotFinite, RankResult
from ppbench.run.runtimes.reference import unsplit_loss
from ppbench.run.runtimes.runtime import Inspected, RankContext, Runtime, clock_facts
from ppbench.run.verification.losses import has_known_first_loss
from ppbench.run.worker.fixed_work import Reference
from ppbench.run.worker.node import Node, Window
from ppbench.statistics.step_times import has_settled

OnStep = Callable[[int, int, float, float], None]
"""Called after each step with the steps done, all steps, its tokens per second and its seconds."""


def measure(
    item: PlannedRun, member: RankContext, node: Node, on_step: OnStep, profiles: Path
) -> CaseResult | None:
    """Run the case; return its result on rank 0. Profiles, if any, are written to a folder."""
    runtime, flight = member.runtime, member.flight
    flight.enter(Phase.VERIFIES)
    expected_loss = None
    if dist.get_rank() == 0 and has_known_first_loss(member.case):
        expected_loss = unsplit_loss(member.config, member.fabric.device)
    member.wait()  # ranks that share cores measure their peaks together
    flight.enter(Phase.PEAK)
    peak = runtime.peak()
    release_memory()
    reset_process_peak()
    steps = _Steps(member, item.measure, on_step)
    steps.warm_up()
    reference = Reference(member.case, member.fabric.device, member.group)
    flight.enter(Phase.REFERENCE)
    # The measured steps are expected to take as long as the last warm-up step.
    reference.run(item.measure.steps * (steps.warmup_ns[-1] if steps.warmup_ns else 0))
    flight.enter(Phase.ALIGNS)
    before = measure_offset(member.fabric, member.ranks)
    window = steps.measure(node)
    flight.enter(Phase.ALIGNS)
    alignment = align(before, measure_offset(member.fabric, member.ranks))
    summary = node.summary(window, member.fabric.device, member.places)
    flight.enter(Phase.MEMORY)
    memory = runtime.measure_memory(steps.num_done)
    memory_facts: dict[str, object] = {  # null where nothing is allocated
        "peak_memory_bytes": None,
        "predicted_peak_memory_bytes": None,
    }
    if memory is not None:
        # The second is the process's high-water mark before it was last reset.
        marks = (memory.process_peak_bytes, reference.process_peak_bytes)
        memory_facts = {
            "peak_memory_bytes": memory.peak_bytes,
            "predicted_peak_memory_bytes": memory.predicted_peak_bytes,
            "active_bytes": memory.active_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "in_flight_bytes": memory.in_flight_bytes,
            "outside_bytes": memory.outside_bytes,
            "process_peak_bytes": max((m for m in marks if m is not None), default=None),
            **dataclasses.asdict(memory.at_peak),
        }
    rank_facts = {
        **runtime.rank_facts(),
        **memory_facts,
        **clock_facts(dist.get_rank(), alignment, steps.clock_error_ns),
        **dataclasses.asdict(summary),
        "peak_held_microbatches": runtime.peak_held,
        "hostname": platform.node(),
        "cores": None if member.cores is None else json.dumps(member.cores),
    }
    samples = [
        {**row, "time_ns": alignment.to_rank_0(int(str(row["time_ns"])))}
        for row in node.rows(window)
    ]
    spans = alignment.apply(steps.spans)
    levels = [] if memory is None else memory.timeline
    flight.enter(Phase.REFERENCE_AGAIN)
    reference.run(window.end_ns - window.begin_ns)
    ours = RankResult(
        {**rank_facts, "reference_times_ns": json.dumps(reference.times().times_ns)},
        {name: [span[i] for span in spans] for i, name in enumerate(COLUMNS)},
        steps.losses,
        steps.num_tokens,
        samples,
        summary,
        [(alignment.to_rank_0(time_ns), num_bytes) for time_ns, num_bytes in levels],
        peak,
        early=steps.early,
        not_finite=steps.not_finite,
        reference=reference.times(),
    )
    if item.measure.profile_steps:
        flight.enter(Phase.PROFILES)
        first = steps.num_done + 1  # after the step for memory
        numbers = range(first, first + item.measure.profile_steps)
        profile_steps(runtime, member.case.device, numbers, member.group, profiles)
    runtime.close()
    flight.enter(Phase.GATHERS)
    gathered: list[RankResult | None] = [None] * len(member.ranks)
    is_first = dist.get_rank() == 0
    dist.gather_object(ours, gathered if is_first else None, dst=0, group=member.group)
    if not is_first:
        return None
    results = [result for result in gathered if result is not None]
    flops = runtime.flop_facts()
    precision = None if member.case.is_emulated else float32_precision()
    facts = {**runtime.run_facts(), "float32_precision": precision}
    done = (results, facts, steps.warmup_ns, flops, runtime.lowered, expected_loss)
    return CaseResult(*done, member.places)


class _Steps:
    """Runs a case's steps and keeps their results; all ranks of the case run in lockstep."""

    def __init__(self, member: RankContext, plan: Measure, on_step: OnStep) -> None:
        self._member, self._plan, self._on_step = member, plan, on_step
        self._replica, self._rank = divmod(dist.get_rank(), member.case.world_size)
        self._which = (self._replica,) if self._replica else ()  # of a receive
        self.warmup_ns: list[int] = []
        self.spans: list[Span] = []  # of the measured steps
        self.early: set[Receive] = set()  # of those
        self.clock_error_ns = 0  # of the device's clock on the host's, in those
        self.losses: list[float | None] = []
        self.not_finite: NotFinite | None = None
        self.num_tokens: list[int] = []

    @property
    def num_done(self) -> int:
        return len(self.losses)

    def warm_up(self) -> None:
        """Run the warm-up steps, and more of them while they get faster, up to the bound."""
        plan = self._plan
        while True:
            if self.num_done >= plan.warmup_steps:
                if not plan.has_adaptive_warmup or self.num_done >= plan.max_warmup_steps:
                    return
                goes_on = [not has_settled(self.warmup_ns)]  # rank 0 decides for all
                dist.broadcast_object_list(goes_on, src=0, group=self._member.group)
                if not goes_on[0]:
                    return
            began_ns = time.monotonic_ns()
            result = self._step()
            self._member.wait()
            self.warmup_ns.append(time.monotonic_ns() - began_ns)
            self._look(result)

    def measure(self, node: Node) -> Window:
        """Run the measured steps; return their window. Blocks until all ranks have run them."""
        clock = self._member.fabric.clock
        window = node.begin()
        for _ in range(self._plan.steps):
            number, result = self.num_done, self._step()
            self._look(result)
            self.spans += result.spans
            self.early |= {(number, *action, *self._which) for action in result.early}
            self.clock_error_ns = max(self.clock_error_ns, clock.error_ns)
        node.end(window)
        self._member.wait()
        self._look(result, has_weights=True)
        return window

    def _look(self, result: StepResult, *, has_weights: bool = False) -> None:
        """Note the first step in which a value of this rank is not finite; called between steps."""
        if self.not_finite is not None:
            return
        what = None
        if result.loss is not None and not math.isfinite(result.loss):
            what = LOSS
        elif isinstance(self._member.runtime, Inspected):
            what = self._member.runtime.find_not_finite(has_weights=has_weights)
        if what is not None:
            where = f" of replica {self._replica}" if self._replica else ""
            self.not_finite = NotFinite(self.num_done - 1, self._rank, f"{what}{where}")

    def _step(self) -> StepResult:
        self._member.wait()
        result = self._member.runtime.step(self.num_done)
        self.losses.append(result.loss)
        self.num_tokens.append(result.num_tokens)
        ends_ns, starts_ns = ([s.end_ns for s in result.spans], [s.start_ns for s in result.spans])
        duration_s = (max(ends_ns) - min(starts_ns)) / 1e9
        total = max(self._plan.warmup_steps, len(self.warmup_ns)) + self._plan.steps
        self._on_step(self.num_done, total, result.num_tokens / duration_s, duration_s)
        return result


def release_memory() -> None:
    """Free unused memory, so that it does not show in the next peaks."""
    gc.collect()
    give_back_freed_memory()
    devices.empty_cache()


def profiler_for(device: str) -> profile:
    """Return torch's profiler at its lowest overhead: operators, and a device's kernels."""
    activities = [ProfilerActivity.CPU]
    if device in ON_GPUS:
        activities.append(getattr(ProfilerActivity, device.upper()))
    return profile(activities=activities)


def profile_steps(
    runtime: Runtime, device: str, steps: range, group: dist.ProcessGroup, folder: Path
) -> None:
    """Run these steps and write `folder/rank<r>.json.gz`.

    Each step is a range "step 13", each action in it a range of its name. Blocks until every rank
    of the group is there.
    """
    with profiler_for(device) as profiler:
        for step in steps:
            dist.barrier(group)
            with record_function(f"step {step}"):
                runtime.step(step, Recording.profiler_ranges)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz"))
