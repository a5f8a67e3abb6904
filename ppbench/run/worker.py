"""Process entry of a rank: lives for a whole launch and runs case after case.

    python -m torch.distributed.run ... -m ppbench.run.worker JOB.json

A case with fewer ranks than the launch uses the first ones; the others wait. A rank that fails
leaves its error in the launch's folder and dies; the agent restarts all workers, rank 0 turns the
error into a row, and the next case begins.
"""

from __future__ import annotations

import gc
import os
import platform
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public

from engine.connection import Agreement, agree
from engine.model.data import DataError
from engine.model.partition import PartitionError
from engine.model.stage_module import ModelError
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import ScheduleError
from engine.plan.spans import COLUMNS, Span
from engine.run.alignment import Alignment, align, measure_offset
from engine.run.clock import Clock, clock_for
from engine.run.memory import MemoryPeaks, reset_process_peak
from engine.run.p2p import Fabric, TransferError
from engine.trainer import StepResult
from ppbench.analysis.stats import has_settled
from ppbench.config.case import EMULATED, Case, Measure
from ppbench.config.possible import check_file_unchanged
from ppbench.run.environment import read_environment
from ppbench.run.job import (
    PEER_LOST,
    Item,
    Job,
    Journal,
    read_job,
    take_rank_errors,
    write_rank_error,
)
from ppbench.run.rows import CaseResult, RankResult, close_run, write_result
from ppbench.run.runtimes.emulated import EmulatedRuntime
from ppbench.run.runtimes.engine import EngineRuntime, VerificationError, trainer_config
from ppbench.run.runtimes.runtime import Runtime
from ppbench.store import new_run_id

WAIT_FOREVER = timedelta(days=30)
"""Ranks outside a case wait for its end, however long it takes; the agent ends a broken launch."""


def main(job_file: Path) -> None:
    """Run what the journal says is left of the job."""
    _join_other_ranks()
    folder, job = job_file.parent, read_job(job_file)
    worker = _Worker(job, folder)
    try:
        for index in worker.remaining():
            worker.run_item(index)
    except Exception as error:
        write_rank_error(folder, dist.get_rank(), _status_of(error), error)
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # tearing communicators down waits for peers that wait for this rank
    dist.barrier()
    dist.destroy_process_group()


def _join_other_ranks() -> None:
    """Make the default process group, which carries control messages only.

    The agent keeps its store when it restarts the workers, and gloo would read the addresses of
    the dead ones from it; a prefix per restart keeps them apart (pytorch issue 135712).
    """
    environ = os.environ
    store = TCPStore(environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), is_master=False)
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "gloo",
        store=PrefixStore(f"ppbench-attempt-{attempt}", store),
        rank=int(environ["RANK"]),
        world_size=int(environ["WORLD_SIZE"]),
        timeout=WAIT_FOREVER,
    )


def _status_of(error: Exception) -> str:
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "t allocate memory" in text:
        return "oom"
    if isinstance(error, TransferError | dist.DistError) or "gloo/transport" in text:
        return PEER_LOST
    refused = (
        VerificationError,
        ProgramError,
        ScheduleError,
        ModelError,
        PartitionError,
        DataError,
    )
    return "invalid" if isinstance(error, refused) else "error"


class _Worker:
    def __init__(self, job: Job, folder: Path) -> None:
        self._job, self._folder, self._journal = job, folder, Journal(folder)
        self._rank = dist.get_rank()
        self._fabrics: dict[tuple[str, bool], Fabric] = {}
        self._members: dict[int, dist.ProcessGroup] = {}

    def remaining(self) -> list[int]:
        """Indices of the items without a row; rank 0 first accounts for one that was cut short."""
        left: list[list[int]] = [self._account_for_the_past() if self._rank == 0 else []]
        dist.broadcast_object_list(left, src=0)
        return left[0]

    def _account_for_the_past(self) -> list[int]:
        events = list(self._journal.new_events())
        started = {int(e["index"] or 0): str(e["run_id"]) for e in events if e["event"] == "case"}
        finished = {int(e["index"] or 0) for e in events if e["event"] == "row"}
        errors = take_rank_errors(self._folder)
        for index, run_id in started.items():
            if index not in finished:
                status, summary = close_run(self._job, self._job.items[index], run_id, errors)
                self._journal.append(
                    "row", index=index, run_id=run_id, status=status, summary=summary
                )
                finished.add(index)
        return [index for index in range(len(self._job.items)) if index not in finished]

    def run_item(self, index: int) -> None:
        item, run_id = self._job.items[index], new_run_id()
        if self._rank == 0:
            self._journal.append("case", index=index, run_id=run_id)
        group, fabric = self._group_of(item.case.world_size), self._fabric_for(item)
        check_file_unchanged(item.case)
        agreement = agree(trainer_config(item.case), fabric)
        if self._rank < item.case.world_size:
            runtime = _runtime(item.case, agreement, fabric)
            journal = self._journal if self._rank == 0 else None
            result = _measure(item, runtime, fabric, group, journal)
            if result is not None:
                tokens_per_s = write_result(self._job, item, run_id, result)
                summary = f"{tokens_per_s:,.0f} tokens/s"
                self._journal.append(
                    "row", index=index, run_id=run_id, status="ok", summary=summary
                )
        _release_memory()
        dist.barrier()

    def _group_of(self, world_size: int) -> dist.ProcessGroup:
        """Control messages among the first ranks. Every rank asks, so that all make it together."""
        if world_size not in self._members:
            ranks = list(range(world_size))
            group = dist.new_group(ranks, backend="gloo", timeout=WAIT_FOREVER)
            self._members[world_size] = group
        return self._members[world_size]

    def _fabric_for(self, item: Item) -> Fabric:
        case = item.case
        torch.set_num_threads(case.launch_threads_per_rank)
        is_shared = read_environment().shares_gpus(case.device, case.world_size)
        key = (case.device, is_shared)
        if key not in self._fabrics:
            device = _device_of(case.device)
            self._fabrics[key] = Fabric(device, clock_for(device), is_shared)
        return self._fabrics[key]


def _runtime(case: Case, agreement: Agreement, fabric: Fabric) -> Runtime:
    if case.is_emulated:
        return EmulatedRuntime(case, agreement, fabric)
    return EngineRuntime(agreement.config, fabric)


def _device_of(kind: str) -> torch.device:
    if kind in ("cpu", EMULATED):
        return torch.device("cpu")
    num_devices = torch.cuda.device_count()
    if num_devices == 0:
        raise RuntimeError("the case asks for cuda, and torch sees no CUDA device here")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % num_devices)
    torch.cuda.set_device(device)
    return device


def _measure(
    item: Item,
    runtime: Runtime,
    fabric: Fabric,
    group: dist.ProcessGroup,
    journal: Journal | None,
) -> CaseResult | None:
    """Warm up, measure, then one more step for memory. The result is on rank 0."""
    if item.measure.verify:
        runtime.verify()
    _release_memory()
    reset_process_peak()
    ranks = tuple(range(item.case.world_size))
    steps = _Steps(runtime, group, item.measure, journal)
    steps.warm_up()
    before = measure_offset(fabric, ranks)
    steps.measure(fabric.clock)
    alignment = align(before, measure_offset(fabric, ranks))
    peaks = runtime.measure_memory(steps.num_done)
    facts = {**_memory_facts(runtime, peaks), **_clock_facts(alignment, steps.clock_error_ns)}
    ours = _rank_result({**runtime.rank_facts(), **facts}, alignment, steps)
    runtime.close()
    gathered: list[RankResult | None] = [None] * item.case.world_size
    dist.gather_object(ours, gathered if journal is not None else None, dst=0, group=group)
    if journal is None:
        return None
    results = [rank for rank in gathered if rank is not None]
    return CaseResult(results, runtime.run_facts(), steps.warmup_ns)


class _Steps:
    """Runs a case's steps and keeps what they leave; all ranks of the case in lockstep."""

    def __init__(
        self,
        runtime: Runtime,
        group: dist.ProcessGroup,
        measure: Measure,
        journal: Journal | None,
    ) -> None:
        """`journal` is rank 0's, None on the others."""
        self._runtime, self._group, self._plan, self._journal = runtime, group, measure, journal
        self.warmup_ns: list[int] = []
        self.spans: list[Span] = []  # of the measured steps
        self.clock_error_ns = 0  # of the device's clock on the host's, in those
        self.losses: list[float | None] = []
        self.num_tokens: list[int] = []

    @property
    def num_done(self) -> int:
        return len(self.losses)

    def warm_up(self) -> None:
        """At least as many steps as asked for, and on while they get faster, up to the bound."""
        while self.num_done < self._plan.warmup_steps or self._goes_on():
            began_ns = time.monotonic_ns()
            self._step()
            dist.barrier(self._group)
            self.warmup_ns.append(time.monotonic_ns() - began_ns)

    def _goes_on(self) -> bool:
        """Rank 0 decides for all."""
        plan = self._plan
        if not plan.has_adaptive_warmup or self.num_done >= plan.max_warmup_steps:
            return False
        told = [not has_settled(self.warmup_ns)]
        dist.broadcast_object_list(told, src=0, group=self._group)
        return told[0]

    def measure(self, clock: Clock) -> None:
        """The measured steps. Blocks until all ranks have done them."""
        for _ in range(self._plan.steps):
            self.spans += self._step().spans
            self.clock_error_ns = max(self.clock_error_ns, clock.error_ns)
        dist.barrier(self._group)

    def _step(self) -> StepResult:
        dist.barrier(self._group)
        result = self._runtime.step(self.num_done)
        self.losses.append(result.loss)
        self.num_tokens.append(result.num_tokens)
        if self._journal is not None:
            self._report(self._journal, result)
        return result

    def _report(self, journal: Journal, result: StepResult) -> None:
        """Tell the controller, between steps, how fast rank 0 saw the last one."""
        ends_ns, starts_ns = ([s.end_ns for s in result.spans], [s.start_ns for s in result.spans])
        duration_ns = max(ends_ns) - min(starts_ns)
        total = max(self._plan.warmup_steps, len(self.warmup_ns)) + self._plan.steps
        tokens_per_s = result.num_tokens / (duration_ns / 1e9)
        journal.append("step", step=self.num_done, num_steps=total, tokens_per_s=tokens_per_s)


def _release_memory() -> None:
    """What came before must not show in the peaks of what comes next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _memory_facts(runtime: Runtime, peaks: MemoryPeaks | None) -> dict[str, object]:
    return {
        "peak_memory_bytes": None if peaks is None else peaks.peak_bytes,
        "reserved_bytes": None if peaks is None else peaks.reserved_bytes,
        "process_peak_bytes": None if peaks is None else peaks.process_peak_bytes,
        "peak_held_microbatches": runtime.peak_held,
    }


def _clock_facts(alignment: Alignment, clock_error_ns: int) -> dict[str, object]:
    """`clock_error_ns`: of the device's clock on this rank's host."""
    shared = "rank 0" if dist.get_rank() == 0 else "shared with rank 0"
    return {
        "clock": shared if alignment.is_shared else "aligned by pings",
        "clock_offset_ns": alignment.offset_ns,
        "clock_drift_ppb": alignment.drift_ppb,
        "clock_error_ns": alignment.error_ns + clock_error_ns,
    }


def _rank_result(facts: dict[str, object], alignment: Alignment, steps: _Steps) -> RankResult:
    spans = alignment.apply(steps.spans)
    columns: dict[str, list[object]] = {
        name: [span[i] for span in spans] for i, name in enumerate(COLUMNS)
    }
    facts = {**facts, "hostname": platform.node()}
    return RankResult(facts, columns, steps.losses, steps.num_tokens)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
