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
from engine.run.clock import clock_for
from engine.run.memory import MemoryUse, reset_process_peak
from engine.run.p2p import Fabric, TransferError
from engine.trainer import StepResult
from ppbench.config.case import EMULATED, Case
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
            result = _measure(item, runtime, group, self._journal if self._rank == 0 else None)
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
    item: Item, runtime: Runtime, group: dist.ProcessGroup, journal: Journal | None
) -> CaseResult | None:
    """Warm up, measure, then one more step for memory. The result is on rank 0."""
    if item.measure.verify:
        runtime.verify()
    _release_memory()
    reset_process_peak()
    num_warmup, num_steps = item.measure.warmup_steps, item.measure.steps
    spans: list[Span] = []
    losses: list[float | None] = []
    num_tokens: list[int] = []
    for step in range(num_warmup + num_steps):
        dist.barrier(group)
        result = runtime.step(step)
        losses.append(result.loss)
        num_tokens.append(result.num_tokens)
        if step >= num_warmup:
            spans += result.spans
        if journal is not None:
            _report_step(journal, item, step, result)
    dist.barrier(group)
    memory = runtime.measure_memory(num_warmup + num_steps)
    ours = _rank_result(runtime, memory, spans, losses, num_tokens)
    runtime.close()
    gathered: list[RankResult | None] = [None] * item.case.world_size
    dist.gather_object(ours, gathered if journal is not None else None, dst=0, group=group)
    if journal is None:
        return None
    return CaseResult([rank for rank in gathered if rank is not None], runtime.run_facts())


def _release_memory() -> None:
    """What came before must not show in the peaks of what comes next."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _report_step(journal: Journal, item: Item, step: int, result: StepResult) -> None:
    """Tell the controller, between steps, how fast rank 0 saw the last one."""
    ends_ns, starts_ns = ([s.end_ns for s in result.spans], [s.start_ns for s in result.spans])
    duration_ns = max(ends_ns) - min(starts_ns)
    total = item.measure.warmup_steps + item.measure.steps
    tokens_per_s = result.num_tokens / (duration_ns / 1e9)
    journal.append("step", step=step + 1, num_steps=total, tokens_per_s=tokens_per_s)


def _rank_result(
    runtime: Runtime,
    memory: MemoryUse | None,
    spans: list[Span],
    losses: list[float | None],
    num_tokens: list[int],
) -> RankResult:
    facts = {
        **runtime.rank_facts(),
        "peak_memory_bytes": None if memory is None else memory.peak_bytes,
        "reserved_bytes": None if memory is None else memory.reserved_bytes,
        "process_peak_bytes": None if memory is None else memory.process_peak_bytes,
        "hostname": platform.node(),
        "peak_held_microbatches": runtime.peak_held,
    }
    columns: dict[str, list[object]] = {
        name: [span[i] for span in spans] for i, name in enumerate(COLUMNS)
    }
    return RankResult(facts, columns, losses, num_tokens)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
