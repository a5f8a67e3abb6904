"""An arm on one rank: a case that is alive, from its warm-up over its turns to its result.

    open    build | peak | warm-up | reference | clocks
    turn    ranks meet | step, step, step, ... | ranks meet          once in each round
                       [    node's samples     ]
    close   clocks | memory | reference | profile | results to rank 0

Other arms take their turns in between. Steps of a turn follow each other as in a training loop: no
barrier and no report comes between them, and a device is waited for after the last of them only.
Where steps overlap, and on a device, which is kept busy by what was issued before, the first step
of a turn is a lead-in: it is not measured, as it begins after a pause. Where no step can begin
before the one before it has ended, the first step is like any other. One more step is for memory,
and the reference (`fixed_work`) shows whether the machine was disturbed.

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
from engine.plan.program import steps_can_overlap
from engine.plan.spans import COLUMNS, Span
from engine.run import device as devices
from engine.run.alignment import align, measure_tie
from engine.run.heap import give_back_freed_memory
from engine.run.memory import process_peak_bytes, reset_process_peak
from engine.run.precision import float32_precision
from engine.run.recording import Recording
from engine.trainer import StepResult
from ppbench.analysis.transfers import Receive
from ppbench.run.job import PlannedRun
from ppbench.run.machine.environment import ON_GPUS
from ppbench.run.records import LOSS, CaseResult, NotFinite, RankResult
from ppbench.run.runtimes.runtime import RankContext, Runtime, clock_facts
from ppbench.run.verification.losses import key_of_training
from ppbench.run.verification.unsplit import first_loss
from ppbench.run.worker.fixed_work import Reference
from ppbench.run.worker.node import Node, Window
from ppbench.statistics.step_times import has_settled

OnStep = Callable[[int, int, float, float], None]
"""Called after each warm-up step: steps done, steps to do, its tokens per second, its seconds."""


class Arm:
    """A case on one of its ranks; all of them call each method together."""

    def __init__(
        self,
        item: PlannedRun,
        member: RankContext,
        node: Node,
        on_step: OnStep,
        others_bytes: int | None,
        results: Path,
    ) -> None:
        """`others_bytes` is the memory of this process that its other arms hold, if it is known."""
        self.item, self.member = item, member
        self._node, self._on_step, self._plan = node, on_step, item.measure
        self._replica, self._rank = divmod(dist.get_rank(), member.case.world_size)
        self._which = (self._replica,) if self._replica else ()  # of a receive
        self._others_bytes, self._results = others_bytes, results
        self._windows: list[Window] = []
        self._spans: list[Span] = []  # of the turns' steps
        self._early: set[Receive] = set()  # of those
        self._after_pause: list[int] = []  # the first step of each turn
        self._round_of: dict[int, int] = {}  # of each measured step
        self._clock_error_ns = 0  # of the device's clock on the host's, in the turns
        self._overlaps: bool | None = None  # whether steps can; not known before the first one
        self._losses: list[float | None] = []
        self._num_tokens: list[int] = []
        self._not_finite: NotFinite | None = None
        self._warmup_ns: list[int] = []

    def open(self) -> None:
        """Warm up; the arm can take its turns then."""
        member, flight = self.member, self.member.flight
        flight.enter(Phase.VERIFIES)
        self._training, self._expected_loss = "", None
        if dist.get_rank() == 0 and not member.case.is_emulated:
            self._training = key_of_training(member.case)
            known = self._results, self._training, member.config, member.fabric.device
            self._expected_loss = first_loss(*known)
        member.wait()  # ranks that share cores measure their peaks together
        flight.enter(Phase.PEAK)
        self._peak = member.runtime.peak()
        release_memory()
        reset_process_peak()
        self._warm_up()
        peak_bytes, others_bytes = process_peak_bytes(), self._others_bytes
        self._process_peak_bytes: int | None = None
        if peak_bytes is not None and others_bytes is not None:
            self._process_peak_bytes = peak_bytes - others_bytes
        self._reference = Reference(member.case, member.fabric.device, member.group)
        flight.enter(Phase.REFERENCE)
        # The measured steps are expected to take as long as the last warm-up step.
        self._reference.run(self._plan.steps * (self._warmup_ns[-1] if self._warmup_ns else 0))
        flight.enter(Phase.ALIGNS)
        self._tie = measure_tie(member.fabric, member.ranks)

    def turn(self, round_index: int, num_steps: int) -> tuple[float, float]:
        """Run so many steps one right after the other, after a lead-in where one is needed.

        Returns the seconds of a step and its tokens per second, as this rank saw them.
        """
        member, first = self.member, self._num_done
        begin = first + self._needs_lead_in()
        self._after_pause.append(first)
        self._round_of |= dict.fromkeys(range(begin, begin + num_steps), round_index)
        self._node.sample()
        member.wait()  # no window begins before the sample: an older one is of another arm's turn
        began_ns = time.monotonic_ns()
        results = member.runtime.steps(range(first, begin + num_steps))
        ended_ns = time.monotonic_ns()
        step_s = (ended_ns - began_ns) / len(results) / 1e9
        self._windows.append((began_ns, ended_ns))
        self._node.sample()
        member.wait()
        for number, result in enumerate(results, first):
            self._note(result)
            self._spans += result.spans
            self._early |= {(number, *action, *self._which) for action in result.early}
        self._clock_error_ns = max(self._clock_error_ns, member.fabric.clock.error_ns)
        self._look(has_weights=True)
        return step_s, results[-1].num_tokens / step_s

    def close(self, profiles: Path) -> CaseResult | None:
        """Free the arm; return its result on rank 0. Profiles, if any, are written to a folder."""
        member, flight, runtime = self.member, self.member.flight, self.member.runtime
        flight.enter(Phase.ALIGNS)
        alignment = align(self._tie, measure_tie(member.fabric, member.ranks))
        flight.enter(Phase.MEMORY)
        memory = runtime.measure_memory(self._num_done)
        memory_facts: dict[str, object] = {  # null where nothing is allocated
            "peak_memory_bytes": None,
            "predicted_peak_memory_bytes": None,
        }
        if memory is not None:
            memory_facts = {
                "peak_memory_bytes": memory.peak_bytes,
                "predicted_peak_memory_bytes": memory.predicted_peak_bytes,
                "active_bytes": memory.active_bytes,
                "reserved_bytes": memory.reserved_bytes,
                "in_flight_bytes": memory.in_flight_bytes,
                "outside_bytes": memory.outside_bytes,
                "process_peak_bytes": self._process_peak_bytes,
                **dataclasses.asdict(memory.at_peak),
            }
        rank_facts = {
            **runtime.rank_facts(),
            **memory_facts,
            **clock_facts(dist.get_rank(), alignment, self._clock_error_ns),
            **self._node.summary(self._windows, member.fabric.device, member.places),
            "peak_held_microbatches": runtime.peak_held,
            "hostname": platform.node(),
            "cores": None if member.cores is None else json.dumps(member.cores),
        }
        samples = [
            {**row, "time_ns": alignment.to_rank_0(int(str(row["time_ns"])))}
            for row in self._node.rows(self._windows)
        ]
        spans = alignment.apply(self._spans)
        levels = [] if memory is None else memory.timeline
        flight.enter(Phase.REFERENCE_AGAIN)
        self._reference.run(sum(end_ns - begin_ns for begin_ns, end_ns in self._windows))
        reference = self._reference.times()
        ours = RankResult(
            {**rank_facts, "reference_times_ns": json.dumps(reference.times_ns)},
            {name: [span[i] for span in spans] for i, name in enumerate(COLUMNS)},
            self._losses,
            self._num_tokens,
            samples,
            [(alignment.to_rank_0(time_ns), num_bytes) for time_ns, num_bytes in levels],
            self._peak,
            early=self._early,
            not_finite=self._not_finite,
            reference=reference,
            after_pause=self._after_pause,
            round_of=self._round_of,
        )
        if self._plan.profile_steps:
            flight.enter(Phase.PROFILES)
            first = self._num_done + 1  # after the step for memory
            numbers = range(first, first + self._plan.profile_steps)
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
        done = (results, facts, self._warmup_ns, runtime.lowered, flops)
        return CaseResult(*done, self._training, self._expected_loss, member.places)

    @property
    def _num_done(self) -> int:
        return len(self._losses)

    def _needs_lead_in(self) -> bool:
        """Whether a step after a pause differs from one that follows another at once."""
        case = self.member.case
        if case.device in ON_GPUS or case.replicas > 1 or not self._num_done:
            return True  # without a step before, the program is not known
        if case.train_clip_norm:  # ranks meet before the optimizer
            return False
        if self._overlaps is None:
            self._overlaps = steps_can_overlap(self.member.runtime.lowered)
        return self._overlaps

    def _warm_up(self) -> None:
        """Run the warm-up steps, and more of them while they get faster, up to the bound."""
        plan, member = self._plan, self.member
        while True:
            if self._num_done >= plan.warmup_steps:
                if not plan.has_adaptive_warmup or self._num_done >= plan.max_warmup_steps:
                    return
                goes_on = [not has_settled(self._warmup_ns)]  # rank 0 decides for all
                dist.broadcast_object_list(goes_on, src=0, group=member.group)
                if not goes_on[0]:
                    return
            member.wait()
            began_ns = time.monotonic_ns()
            result = member.runtime.step(self._num_done)
            self._note(result)
            member.wait()
            self._warmup_ns.append(time.monotonic_ns() - began_ns)
            self._look()
            step_s = self._warmup_ns[-1] / 1e9
            total = max(plan.warmup_steps, self._num_done)
            self._on_step(self._num_done, total, result.num_tokens / step_s, step_s)

    def _note(self, result: StepResult) -> None:
        self._losses.append(result.loss)
        self._num_tokens.append(result.num_tokens)

    def _look(self, *, has_weights: bool = False) -> None:
        """Note the first step in which a value of this rank is not finite; called between turns."""
        if self._not_finite is not None:
            return
        what, step = None, self._num_done - 1
        losses = enumerate(self._losses)
        bad = next((at for at, x in losses if x is not None and not math.isfinite(x)), None)
        if bad is not None:
            what, step = LOSS, bad
        elif find := getattr(self.member.runtime, "find_not_finite", None):
            what = find(has_weights=has_weights)
        if what is not None:
            where = f" of replica {self._replica}" if self._replica else ""
            self._not_finite = NotFinite(step, self._rank, f"{what}{where}")


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
