"""Process entry of a rank: lives for a whole launch and runs case after case.

    python -m torch.distributed.run ... -m ppbench.run.worker JOB.json

A case with fewer ranks than the launch uses the first ones; the others wait. A rank that fails
leaves its error in its node's folder and dies; the agent restarts all workers, rank 0 turns what
they left into a row, and the next case begins.
"""

from __future__ import annotations

import faulthandler
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
from engine.flight import FlightRecord, Phase
from engine.model.data import DataError
from engine.model.partition import PartitionError
from engine.model.stage_module import ModelError
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import ScheduleError
from engine.run.clock import clock_for
from engine.run.p2p import Fabric, TransferError
from ppbench.config.case import EMULATED, Case
from ppbench.config.possible import check_file_unchanged
from ppbench.errors import StoreError
from ppbench.run.closing import close_open_runs
from ppbench.run.environment import read_environment
from ppbench.run.evidence import (
    PEER_LOST,
    STORE_FAILED,
    Evidence,
    collect,
    fault_path,
    node_folder,
    write_rank_error,
)
from ppbench.run.job import Begun, EventName, Job, Journal, read_job, read_progress
from ppbench.run.lifetime import die_with_parent
from ppbench.run.measuring import Member, measure, release_memory
from ppbench.run.node import Node
from ppbench.run.rows import write_result
from ppbench.run.runtimes.emulated import EmulatedRuntime
from ppbench.run.runtimes.engine import EngineRuntime, VerificationError, trainer_config
from ppbench.run.runtimes.runtime import Runtime
from ppbench.run.watchdog import flight_path
from ppbench.store import Store, new_run_id

WAIT_FOREVER = timedelta(days=30)
"""Ranks outside a case wait for its end, however long it takes; the watchdog ends a broken one."""


def main(job_file: Path) -> None:
    """Run what the journal says is left of the job."""
    take_part(job_file, _run_remaining)


def _run_remaining(worker: Worker) -> None:
    for index, attempt in worker.remaining():
        worker.run_item(index, attempt)


def take_part(job_file: Path, work: Callable[[Worker], None]) -> None:
    """Join the launch's other ranks, do the work, and part from them.

    An error is left in the node's folder, and ends the process.
    """
    die_with_parent()
    _join_other_ranks()
    job = read_job(job_file)
    local = node_folder(job.launch_id)
    try:
        worker = Worker(job, job_file.parent, local)
        work(worker)
        worker.close()
    except BaseException as error:  # whatever a user's module raises, to end the process as well
        write_rank_error(local, dist.get_rank(), _status_of(error), error)
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


def _status_of(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, StoreError):
        return STORE_FAILED
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

    def __init__(self, job: Job, folder: Path, local: Path) -> None:
        """`folder` is the launch's, which rank 0 alone writes to; `local` its folder on this node.

        Collective. What the ranks of an earlier start have left is collected first.
        """
        self.job, self._folder, self._journal = job, folder, Journal(folder)
        self._rank = dist.get_rank()
        self._fabrics: dict[tuple[str, bool], Fabric] = {}
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._evidence = self._collect(local)
        local.mkdir(parents=True, exist_ok=True)
        faulthandler.enable(fault_path(local, self._rank).open("w"))
        self.flight = FlightRecord(flight_path(local, self._rank), self._rank)
        self.flight.enter(Phase.WAITS)
        self._node = Node(local, self._rank)

    def _collect(self, local: Path) -> list[Evidence]:
        """What every node's ranks left when they died, on rank 0; nothing elsewhere."""
        is_first_of_node = os.environ["LOCAL_RANK"] == "0"
        ours = collect(local, self._folder) if is_first_of_node else None
        theirs: list[Evidence | None] = [None] * dist.get_world_size()
        dist.gather_object(ours, theirs if self._rank == 0 else None, dst=0)
        dist.barrier()  # nobody writes anew before all is read
        return [one for one in theirs if one is not None]

    def remaining(self) -> list[tuple[int, int]]:
        """The items to run, with which try of each it is; rank 0 first accounts for what was open.

        Items that failed come again after all others, as often as their case allows.
        """
        left: list[list[tuple[int, int]]] = [self._find_remaining() if self._rank == 0 else []]
        dist.broadcast_object_list(left, src=0)
        return left[0]

    def _find_remaining(self) -> list[tuple[int, int]]:
        close_open_runs(self.job, self._folder, self._evidence)
        progress = read_progress(self._folder)
        untried = [i for i in range(len(self.job.items)) if i not in progress.statuses]
        again = [
            index
            for index, status in progress.statuses.items()
            if status not in ("ok", "invalid")
            and progress.attempts[index] <= self.job.items[index].measure.retry
        ]
        return [(index, progress.attempts.get(index, 0) + 1) for index in untried + again]

    def run_item(self, index: int, attempt: int) -> None:
        """One run, from its beginning to its row. Collective."""
        item, begun = self.job.items[index], Begun(index, broadcast(new_run_id), attempt)
        self.flight.begin_case(index, item.measure.timeout_s)
        self.tell("case", index=index, run_id=begun.run_id)
        member = self.prepare(item.case)
        if member is not None:
            profiles = Store(Path(self.job.results)).profiles_of(begun.run_id)
            result = measure(item, member, self._node, self._tell_step, profiles)
            if result is not None:
                self.flight.enter(Phase.STORES)
                tokens_per_s = write_result(self.job, item, begun, result)
                details = {"status": "ok", "summary": f"{tokens_per_s:,.0f} tokens/s"}
                self.tell("row", index=index, run_id=begun.run_id, **details)
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
        self.flight.enter(Phase.CONNECTS)
        group, fabric = self._group_of(case.world_size), self._fabric_for(case)
        check_file_unchanged(case)
        agreement = agree(trainer_config(case), fabric)
        if self._rank >= case.world_size:
            return None
        self.flight.enter(Phase.BUILDS)
        runtime = _runtime(case, agreement, fabric, self.flight)
        return Member(case, runtime, fabric, group, self.flight)

    def end_case(self) -> None:
        """Wait for the ranks that ran the case."""
        release_memory()
        self.flight.enter(Phase.WAITS)
        dist.barrier()
        self.flight.end_case()

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


def _runtime(case: Case, agreement: Agreement, fabric: Fabric, flight: FlightRecord) -> Runtime:
    if case.is_emulated:
        return EmulatedRuntime(case, agreement, fabric, flight)
    return EngineRuntime(agreement.config, fabric, flight)


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
