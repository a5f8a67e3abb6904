"""Process entry of a rank: lives for a whole launch and runs case after case.

    python -m torch.distributed.run ... -m ppbench.run.worker JOB.json

A case with fewer ranks than the launch uses the first ones; the others wait. A rank that fails
leaves its error in the launch's folder and dies; the agent restarts all workers, rank 0 turns the
error into a row, and the next case begins.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public

from engine.connection import Agreement, agree, broadcast
from engine.model.data import DataError
from engine.model.partition import PartitionError
from engine.model.stage_module import ModelError
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import ScheduleError
from engine.run.clock import clock_for
from engine.run.p2p import Fabric, TransferError
from ppbench.config.case import EMULATED, Case
from ppbench.config.possible import check_file_unchanged
from ppbench.run.environment import read_environment
from ppbench.run.job import (
    PEER_LOST,
    EventName,
    Job,
    Journal,
    read_job,
    take_rank_errors,
    write_rank_error,
)
from ppbench.run.measuring import Member, measure, release_memory
from ppbench.run.node import Node
from ppbench.run.rows import close_run, write_result
from ppbench.run.runtimes.emulated import EmulatedRuntime
from ppbench.run.runtimes.engine import EngineRuntime, VerificationError, trainer_config
from ppbench.run.runtimes.runtime import Runtime
from ppbench.store import Store, new_run_id

WAIT_FOREVER = timedelta(days=30)
"""Ranks outside a case wait for its end, however long it takes; the agent ends a broken launch."""


def main(job_file: Path) -> None:
    """Run what the journal says is left of the job."""
    take_part(job_file, _run_remaining)


def _run_remaining(worker: Worker) -> None:
    for index in worker.remaining():
        worker.run_item(index)


def take_part(job_file: Path, work: Callable[[Worker], None]) -> None:
    """Join the launch's other ranks, do the work, and part from them.

    An error is left in the launch's folder, and ends the process.
    """
    _join_other_ranks()
    folder = job_file.parent
    worker = Worker(read_job(job_file), folder)
    try:
        work(worker)
        worker.close()
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


class Worker:
    """This rank, from the first case of a launch to the last."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self._folder, self._journal = job, folder, Journal(folder)
        self._rank = dist.get_rank()
        self._fabrics: dict[tuple[str, bool], Fabric] = {}
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._node = Node(folder)

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
                status, summary = close_run(self.job, self.job.items[index], run_id, errors)
                self._journal.append(
                    "row", index=index, run_id=run_id, status=status, summary=summary
                )
                finished.add(index)
        return [index for index in range(len(self.job.items)) if index not in finished]

    def run_item(self, index: int) -> None:
        item, run_id = self.job.items[index], broadcast(new_run_id)
        self.tell("case", index=index, run_id=run_id)
        member = self.prepare(item.case)
        if member is not None:
            profiles = Store(Path(self.job.results)).profiles_of(run_id)
            result = measure(item, member, self._node, self._tell_step, profiles)
            if result is not None:
                tokens_per_s = write_result(self.job, item, run_id, result)
                summary = f"{tokens_per_s:,.0f} tokens/s"
                self.tell("row", index=index, run_id=run_id, status="ok", summary=summary)
        self.end_case()

    def tell(self, event: EventName, **details: str | float | None) -> None:
        """Note an event in the journal, on rank 0."""
        if self._rank == 0:
            self._journal.append(event, **details)

    def _tell_step(self, step: int, num_steps: int, tokens_per_s: float) -> None:
        """Tell the controller, between steps, how fast rank 0 saw the last one."""
        self.tell("step", step=step, num_steps=num_steps, tokens_per_s=tokens_per_s)

    def prepare(self, case: Case) -> Member | None:
        """This rank's part of a case, None where it has none.

        Collective: every rank of the launch calls it, and `end_case` after it.
        """
        group, fabric = self._group_of(case.world_size), self._fabric_for(case)
        check_file_unchanged(case)
        agreement = agree(trainer_config(case), fabric)
        if self._rank >= case.world_size:
            return None
        return Member(case, _runtime(case, agreement, fabric), fabric, group)

    def end_case(self) -> None:
        """Wait for the ranks that ran the case."""
        release_memory()
        dist.barrier()

    def close(self) -> None:
        """There are no more cases."""
        self._node.close()

    def _group_of(self, world_size: int) -> dist.ProcessGroup:
        """Control messages among the first ranks. Every rank asks, so that all make it together."""
        if world_size not in self._groups:
            ranks = list(range(world_size))
            group = dist.new_group(ranks, backend="gloo", timeout=WAIT_FOREVER)
            self._groups[world_size] = group
        return self._groups[world_size]

    def _fabric_for(self, case: Case) -> Fabric:
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


if __name__ == "__main__":
    main(Path(sys.argv[1]))
