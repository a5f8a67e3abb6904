"""A rank's process: lives for a whole launch and runs case after case.

    ppbench.run.worker JOB.json                   for a controller, by its supervisor
    ppbench.run.worker SWEEP.toml [OPTIONS]       without one, by a supervisor on every node

Cases are alive together, as many as fit into memory, and take turns. What does not fit comes in a
further group, which shares the first case with the one before:

    group 1   open A, B, C | round 0: A B C | round 1: C B A | ... | close B, C
    group 2   open D       | round k: A D   | ...                  | close D, A

A case with fewer ranks than the launch uses the first ones; the others wait. A rank that fails
writes its error to its node's folder and dies; the supervisor starts all ranks anew, rank 0 makes a
row of their files for the case whose turn it was, and the others begin anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import functools
import gc
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public

from engine.connection import agree, broadcast
from engine.exactness import InexactError
from engine.flight import FlightRecord, Phase
from engine.interfaces import InterfaceError
from engine.model.data import DataError
from engine.model.partition import PartitionError
from engine.model.stage_module import ModelError
from engine.plan.program import Program
from engine.plan.rules import ProgramError
from engine.plan.schedules.registry import ScheduleError
from engine.rank_store import store_of_ranks
from engine.run.clock import clock_for
from engine.run.heap import keep_freed_memory
from engine.run.memory import process_peak_bytes, reset_process_peak
from engine.run.p2p.channel import TransferError
from engine.run.p2p.fabric import Fabric
from engine.run.precision import force_ieee
from engine.run.streams import TooManyEdgesError
from ppbench.config.case import Case, Supervision
from ppbench.config.kinds import seconds_of
from ppbench.config.programs import check_file_unchanged
from ppbench.errors import ExitCode, PpbenchError, StoreError, chain_of
from ppbench.files import Lock
from ppbench.judge.differences import FEWEST_LAUNCHES
from ppbench.run.conductor import NO_MORE, VARIABLE, Conducted
from ppbench.run.failures.evidence import (
    PEER_LOST,
    STORE_FAILED,
    CrashReport,
    collect,
    fault_path,
    write_rank_error,
)
from ppbench.run.job import (
    Attempt,
    Event,
    EventName,
    Job,
    Journal,
    PlannedRun,
    is_asked_to_stop,
    kept_program,
    note_node_folders,
    read_job,
    read_state,
    wait_until_shown,
)
from ppbench.run.launch.local import GAVE_UP
from ppbench.run.machine.environment import ON_GPUS, read_environment
from ppbench.run.machine.node_folder import START_FOLDER, flight_path, folder_of_rank, number_of
from ppbench.run.machine.placement import needs_host_memory, on_cores
from ppbench.run.records import write_result
from ppbench.run.rounds import is_time_left, order_of
from ppbench.run.runtimes.emulated import EmulatedRuntime
from ppbench.run.runtimes.runtime import Factory, RankContext, RefusalError, trainer_config
from ppbench.run.sweep.headless import Headless
from ppbench.run.sweep.open_runs import RUNNING, close_open_runs
from ppbench.run.sweep.progress import PHASES, figures_text
from ppbench.run.verification.losses import DisagreementError
from ppbench.run.verification.ranks import Hands, verify
from ppbench.run.verification.record import Verified
from ppbench.run.worker.affinity import Cores
from ppbench.run.worker.measure import Arm, release_memory
from ppbench.run.worker.node import Node
from ppbench.run.worker.place import left_bytes, most_used_bytes, own_device, own_place
from ppbench.runtimes import ENGINE, load_factory
from ppbench.store import Store, new_run_id

WAIT_FOREVER = timedelta(days=30)
"""Ranks outside a case wait for its end, however long; the supervisor ends a broken launch."""
STOPPED = NO_MORE - 1
"""In place of a round's number: the ranks were asked to end."""
NUM_SPARE = 8
ROOM = 1.5
"""Times the memory that the largest case so far needed, which must be left to open another."""
_NO_MEMORY = (torch.OutOfMemoryError, MemoryError)
_NO_MEMORY_WORDS = ("t allocate memory", "out of memory", "ALLOC_FAILED")
"""Words by which generic exceptions report a failed allocation."""
_NO_PEER = (TransferError, dist.DistError)
_MISUSED = ("ncclInvalidUsage", "ncclInvalidArgument", "ncclUnhandledCudaError", "Duplicate GPU")
"""Words of NCCL for what is wrong on this rank: no peer is missing."""
_REFUSED = (
    InexactError,
    RefusalError,
    DisagreementError,
    ProgramError,
    ScheduleError,
    ModelError,
    PartitionError,
    DataError,
    TooManyEdgesError,
)


def main(arguments: Sequence[str]) -> None:
    """Run the remaining items of a job, or of a sweep that has no controller."""
    if START_FOLDER not in os.environ:
        command = "python -m ppbench.run.launch.supervisor --ranks-per-node N -m ppbench.run.worker"
        print(f"error: ppbench.run.worker: started without a supervisor; use {command} SWEEP.toml",
              file=sys.stderr, flush=True)  # fmt: skip
        sys.exit(ExitCode.usage)
    try:
        join_other_ranks(Supervision.here().patience_s)  # blocks until all are here
    except InterfaceError as error:  # this machine cannot be reached
        print(f"error: {error}", file=sys.stderr, flush=True)
        os._exit(GAVE_UP)
    gc.freeze()  # imported objects stay: collections need not visit them
    gc.enable()
    if arguments[0].endswith(".json"):
        take_part(Path(arguments[0]), _run_remaining)
    else:
        _run_headless(arguments)


def join_other_ranks(patience_s: float) -> None:
    """Make the default process group, which carries control messages only.

    Blocks until all ranks are here. Raises RuntimeError if one is not within the time given,
    InterfaceError if the store of the ranks is not named.
    """
    patience = timedelta(seconds=patience_s)
    store = store_of_ranks(patience)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store.set(f"here/{rank}", "yes")
    try:
        store.wait([f"here/{one}" for one in range(world_size)], patience)
    except dist.DistError as error:
        missing = [one for one in range(world_size) if not store.check([f"here/{one}"])]
        raise RuntimeError(
            f"rank {rank} of {world_size} waited {patience_s:g} s for the others; missing: "
            f"{', '.join(map(str, missing))}"
        ) from error
    dist.init_process_group(
        "gloo",
        store=PrefixStore("ppbench", store),
        rank=rank,
        world_size=world_size,
        timeout=WAIT_FOREVER,
    )


def _run_headless(arguments: Sequence[str]) -> None:
    headless: list[Headless] = []

    def plan() -> Job:  # on rank 0, for all
        headless.append(Headless(arguments))
        return headless[0].open(dist.get_world_size())

    try:
        job = broadcast(plan)
    except PpbenchError as error:
        if dist.get_rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        dist.barrier()  # no rank is killed before it is said
        os._exit(GAVE_UP)
    folder = Path(job.results) / "launches" / job.launch_id
    show = headless[0].show if headless else lambda _event: None
    if job.items:
        places: list[tuple[str, Path]] = [("", folder)] * dist.get_world_size()
        dist.all_gather_object(places, (platform.node(), folder_of_rank().parent))
        if headless:
            note_node_folders(folder, sorted(set(places)))
        _work(job, folder, _run_remaining, show)
    if headless:
        headless[0].close(job)
    dist.barrier()


def take_part(job_file: Path, work: Callable[[Worker], None]) -> None:
    """Do this rank's work for a controller's job, among the other ranks."""
    job = read_job(job_file)
    _work(job, job_file.parent, work, lambda _: None)
    dist.barrier()


def _run_remaining(worker: Worker) -> None:
    worker.run(worker.remaining())


def _work(
    job: Job, folder: Path, work: Callable[[Worker], None], on_event: Callable[[Event], None]
) -> None:
    """Do the work of this rank; an error is written to the node's folder and ends the process."""
    local = folder_of_rank()
    keep_freed_memory()
    # They are closed before an error is written, which takes some descriptors.
    spare = [os.open(os.devnull, os.O_RDONLY) for _ in range(NUM_SPARE)]
    try:
        worker = Worker(job, folder, local, on_event)
        work(worker)
        worker.close()
    except BaseException as error:  # a user's module may raise anything, SystemExit too
        for descriptor in spare:
            os.close(descriptor)
        with contextlib.suppress(OSError):  # no room: the log has it all the same
            write_rank_error(local, dist.get_rank(), error, status_of, f"{folder}/logs")
        traceback.print_exception(error)
        sys.stderr.flush()
        # Tearing communicators down would wait for peers that wait for this rank.
        os._exit(GAVE_UP if isinstance(error, StoreError) else 1)


def status_of(error: BaseException, message: str) -> str:
    """Return the status of a run that this error, or one of its causes, has ended."""
    if isinstance(error, StoreError):
        return STORE_FAILED
    if any(isinstance(cause, _NO_MEMORY) for cause in chain_of(error, has_contexts=False)):
        return "oom"
    if any(words in message for words in _NO_MEMORY_WORDS):
        return "oom"
    is_misused = any(words in message for words in _MISUSED)
    has_no_peer = any(isinstance(cause, _NO_PEER) for cause in chain_of(error))
    if (has_no_peer and not is_misused) or "gloo/transport" in message:
        return PEER_LOST
    return "invalid" if isinstance(error, _REFUSED) else "error"


@dataclass
class Open:
    """A case that is alive, or was; a rank that has no part in it has no arm."""

    item: PlannedRun
    begun: Attempt
    arm: Arm | None
    verified: Verified
    device: torch.device
    is_whole: bool = True  # it has had, or will have, all its turns


class NotedFlight(FlightRecord):
    """The rank's record; what a display shows of it is noted in the journal too."""

    def __init__(self, path: Path, rank: int, note: Callable[..., None]) -> None:
        super().__init__(path, rank)
        self._note_event = note

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        if phase in PHASES:
            self._note_event("phase", what=PHASES[phase])


class Worker:
    """This rank, from the first case of a launch to the last."""

    def __init__(
        self, job: Job, folder: Path, local: Path, on_event: Callable[[Event], None]
    ) -> None:
        """Collect the files left by the ranks of an earlier start, and begin anew. Collective.

        `folder` is the launch's, which rank 0 alone writes to; `local` that of this start here.
        """
        self.job, self._folder, self._journal = job, folder, Journal(folder)
        self._rank, self._on_event = dist.get_rank(), on_event
        self._fabrics: dict[tuple[str, bool], Fabric] = {}
        self._groups: dict[int, dist.ProcessGroup] = {}
        self._limit_s = 0.0  # of the case
        self._most_needed = 0  # bytes, by any case of this launch
        self._opens = time.monotonic()  # the cases of a group; at first with all of the start
        self._conducted = Conducted.from_environment() if self._rank == 0 else None
        self._start = broadcast(
            new_run_id
            if self._conducted is None
            else functools.partial(self._conducted.start_of, job.items[0].launch)
        )
        read_environment()  # while this process may use all cores: it is bound to some later
        self._cores = Cores()
        self._marker = Lock(folder / RUNNING)
        if self._rank == 0:
            self._marker.try_to_hold(shared=True)  # until this process is gone
        # Every node's crash report, on rank 0; nothing elsewhere.
        is_first = os.environ["LOCAL_RANK"] == "0"
        ours = collect(local.parent, before=number_of(local)) if is_first else None
        theirs: list[CrashReport | None] = [None] * dist.get_world_size()
        dist.gather_object(ours, theirs if self._rank == 0 else None, dst=0)
        self._evidence = [report for report in theirs if report is not None]
        faulthandler.enable(fault_path(local, self._rank).open("w"))
        record = flight_path(local, self._rank)
        try:
            self.flight = NotedFlight(record, self._rank, self.note)
        except OSError as error:
            raise StoreError(
                f"{record}: cannot be written: {error.strerror}; make room there"
            ) from error
        self.flight.enter(Phase.WAITS)
        self._node = Node(local.parent, own_place(item.case for item in job.items))

    def remaining(self) -> list[tuple[int, int]]:
        """Return the items to run, each with the number of its attempt; close open runs first.

        Items that failed come again after all others, as often as their case allows.
        """

        def look() -> list[tuple[int, int]]:
            for event in close_open_runs(self.job, self._folder, self._evidence):
                self._on_event(event)
            progress = read_state(self._folder)
            untried = [i for i in range(len(self.job.items)) if i not in progress.statuses]
            failed = [
                index
                for index, status in progress.statuses.items()
                if status not in ("ok", "invalid")
                and progress.attempts[index] <= self.job.items[index].measure.retry
            ]
            return [(index, progress.attempts.get(index, 0) + 1) for index in untried + failed]

        return broadcast(look)

    def run(self, left: Sequence[tuple[int, int]]) -> None:
        """Make these runs, each an item and the number of its attempt, in groups. Collective."""
        reset_process_peak()
        first_bytes, next_round = process_peak_bytes(), 0
        shared: Open | None = None
        while left:
            if self._rank == 0 and self.job.is_shown_first:
                wait_until_shown(self._folder)
            self._ask("open")
            self._opens = self._opens or time.monotonic()
            group = [] if shared is None else [shared]
            num_before = len(group)
            for index, attempt in left:
                if len(group) > num_before and not self._has_room(group[-1].device):
                    break
                group.append(self._open(index, attempt, first_bytes))
            left = left[len(group) - num_before :]
            turns = [own.item.measure.turns for own in group]
            num_planned, number, began = max(map(len, turns)), 0, time.monotonic()
            planned = group, num_planned, began
            while (round_index := self._next_round(*planned, number, next_round + number)) >= 0:
                for place in order_of(len(group), number):
                    sizes = turns[place]
                    if number < len(sizes) or number >= num_planned:
                        where = number, max(len(sizes), number + 1)
                        size = sizes[number % len(sizes)]
                        self._turn(group[place], round_index, size, where)
                number += 1
            next_round += number
            if round_index == STOPPED:
                left = []
                for own in group:
                    own.is_whole = number >= num_planned
            shared, self._opens = group[0] if left else None, 0.0
            self._ask("close")
            for own in group[1:] if left else group:
                self._close(own)

    def _ask(self, wants: str) -> None:
        """Wait for the turn of this set of processes, if there are others."""
        if VARIABLE in os.environ:
            self._node.rest()
            broadcast(lambda: self._conducted and self._conducted.ask(wants))

    def _next_round(
        self, group: Sequence[Open], num_planned: int, began: float, number: int, following: int
    ) -> int:
        """Wait for the next round, after so many that began at that time. Collective.

        Returns its number, which is the following one unless a conductor says which; `NO_MORE`
        or `STOPPED` at the end.
        """

        def decide() -> int:
            if number and is_asked_to_stop(self._folder):
                return STOPPED
            if self._conducted is not None:
                return self._conducted.ask("round" if number < num_planned else "more")
            if number < num_planned:
                return following
            budgets = [seconds_of(own.item.measure.budget) for own in group]
            times = time.monotonic() - began, began - self._opens, min(budgets)
            is_later = group[-1].item.launch >= FEWEST_LAUNCHES
            goes_on = all(budgets) and is_time_left(number, *times, is_later=is_later)
            return following if goes_on else NO_MORE

        if VARIABLE in os.environ:
            self._node.rest()
        return broadcast(decide)

    def _open(self, index: int, attempt: int, first_bytes: int | None) -> Open:
        """Make a case alive, and warm it up."""
        item, begun = self.job.items[index], Attempt(index, broadcast(new_run_id), attempt)
        self._node.look_after()
        self._begin_case(index)
        self.note("case", index=index, run_id=begun.run_id)

        def note_step(step: int, num_steps: int, tokens_per_s: float, step_s: float) -> None:
            """Report to the controller, between steps, how fast rank 0 saw the last one."""
            speed = {"tokens_per_s": tokens_per_s, "step_s": step_s}
            self.note("step", step=step, num_steps=num_steps, **speed)

        program = None
        if item.case.is_automatic:
            program = broadcast(functools.partial(kept_program, self._folder, index))
        prepare = functools.partial(self.prepare, program=program)
        hands = Hands(prepare, self._release, self._limit)
        results = Path(self.job.results)
        self.flight.enter(Phase.VERIFIES)
        verified = verify(results, item.case, item.measure, hands, program)
        self._begin_case(index)
        reset_process_peak()
        now_bytes, others_bytes = process_peak_bytes(), None
        if now_bytes is not None and first_bytes is not None:
            others_bytes = max(0, now_bytes - first_bytes)
        device = own_device(item.case.device)
        before_bytes = most_used_bytes(device)
        member, arm = prepare(item.case), None
        if member is not None:
            arm = Arm(item, member, self._node, note_step, others_bytes, results)
            arm.open()
            self._most_needed = max(self._most_needed, most_used_bytes(device) - before_bytes)
        self.end_case()
        return Open(item, begun, arm, verified, device)

    def _turn(self, own: Open, round_index: int, num_steps: int, where: tuple[int, int]) -> None:
        """Let a case run some steps; `where` is the number of its turn, and how many it has."""
        self._enter(own)
        if own.arm is not None:
            step_s, tokens_per_s = own.arm.turn(round_index, num_steps)
            speed = {"tokens_per_s": tokens_per_s, "step_s": step_s}
            turn, num_turns = where
            self.note("turn", index=own.begun.index, turn=turn, num_turns=num_turns, **speed)
        self._release(has_memory=False)
        self.flight.end_case()

    def _close(self, own: Open) -> None:
        """Store a case's run, and free it."""
        self._enter(own)
        if own.arm is not None:
            profiles = Store(Path(self.job.results)).profiles_of(own.begun.run_id)
            result = own.arm.close(profiles)
            own.arm = None
            if result is not None:
                self.flight.enter(Phase.STORES)
                facts = {**result.facts, "process_start": self._start}
                result = dataclasses.replace(result, facts=facts, verified=own.verified)
                status = "ok" if own.is_whole else "interrupted"
                run = write_result(self.job, own.item, own.begun, result, status)
                details = {"status": status, "summary": figures_text(run)}
                index, run_id = own.begun.index, own.begun.run_id
                self.note("row", index=index, run_id=run_id, **details)
        self.end_case()

    def _enter(self, own: Open) -> None:
        """Make a case the one that has its turn: its time limit, threads and cores."""
        self.note("focus", index=own.begun.index)
        self._begin_case(own.begun.index)
        torch.set_num_threads(own.item.case.launch_threads_per_rank)
        if own.arm is not None:
            own.arm.member.fabric.limit(self._limit_s)
            if own.arm.member.cores is not None:
                self._cores.bind(own.arm.member.cores)

    def _begin_case(self, index: int) -> None:
        """Note the case in the flight record; its time limit begins."""
        self._limit_s = self.job.items[index].measure.timeout_s
        self.flight.begin_case(index, self._limit_s)

    def _has_room(self, device: torch.device) -> bool:
        """Whether every rank has room for another case like the largest so far."""
        everyone = torch.tensor(int(left_bytes(device) > ROOM * self._most_needed))
        dist.all_reduce(everyone, dist.ReduceOp.MIN)
        return bool(everyone)

    def _limit(self, limit_s: float) -> None:
        """Let the case take so many seconds from now, and the devices' own transfers as many."""
        self.flight.limit(limit_s)
        self._limit_s = limit_s

    def note(self, event: EventName, **details: str | float | None) -> None:
        """Note an event in the journal, on rank 0."""
        if self._rank == 0:
            noted: Event = {"event": event, **details}
            self._journal.add(noted)
            self._on_event(noted)

    def prepare(self, case: Case, program: Program | None = None) -> RankContext | None:
        """Build this rank's part of a case, None where it has none.

        `program` is what a case with schedule auto runs.

        Collective: every rank of the launch calls it, and waits for the others afterwards.
        """
        self.flight.enter(Phase.CONNECTS)
        if case.num_processes not in self._groups:  # of the first ranks, for control messages
            ranks = list(range(case.num_processes))
            group = dist.new_group(ranks, backend="gloo", timeout=WAIT_FOREVER)
            self._groups[case.num_processes] = group
        group = self._groups[case.num_processes]
        torch.set_num_threads(case.launch_threads_per_rank)
        places = self._node.places[: case.num_processes]
        places = places if case.device in ON_GPUS else on_cores(places)
        key = (case.device, needs_host_memory(places))
        if key not in self._fabrics:
            device = own_device(case.device)
            self._fabrics[key] = Fabric(device, clock_for(device), key[1])
        fabric = self._fabrics[key]
        fabric.limit(self._limit_s)
        check_file_unchanged(case)
        cores = None  # this rank's own, if the case asks for them and its node has enough
        if self._rank < case.num_processes:
            local_rank = int(os.environ["LOCAL_RANK"])
            first = self._rank - local_rank
            here = self._node.places[first : first + int(os.environ["LOCAL_WORLD_SIZE"])]
            here = here[: case.num_processes - first]
            cores = self._cores.of_rank(case, local_rank, here)
            if cores is not None:
                self._cores.bind(cores)
        config = dataclasses.replace(trainer_config(case), program=program)
        agreement = agree(config, fabric)
        if case.runtime != ENGINE and case.num_processes == 1:  # it may need a communicator
            fabric.connect([], tuple(range(case.world_size)), ())
        if self._rank >= case.num_processes:
            return None
        self.flight.enter(Phase.BUILDS)
        factory: Factory = (
            EmulatedRuntime if case.is_emulated else cast("Factory", load_factory(case.runtime))
        )
        runtime = factory(case, agreement, fabric, self.flight)
        force_ieee()  # after all code of the model has been imported
        return RankContext(
            *(case, runtime, fabric, group, self.flight, agreement.config), cores, places
        )

    def end_case(self) -> None:
        """Free what a case has left, and wait for the ranks that had a part in it."""
        self._release()
        self.flight.end_case()

    def _release(self, *, has_memory: bool = True) -> None:
        """Free a case's memory and cores, and wait for the ranks that ran it."""
        if has_memory:
            release_memory()
        self._cores.release()
        self.flight.enter(Phase.WAITS)
        dist.barrier()

    def close(self) -> None:
        """Free the communicators: there are no more cases."""
        if self._conducted is not None:
            self._conducted.close()
        for fabric in self._fabrics.values():
            fabric.close()
        self._node.close()
