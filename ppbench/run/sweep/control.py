"""Runs the missing cases of a sweep, launch by launch.

missing runs --job file--> workers --journal--> display

No finished run is lost, whichever process is killed and when. A run exists once its row is in the
store; one that has begun and has none is closed with a row that says why: by the restarted rank 0,
by this controller, or by the next sweep into the store.

Commands and notebooks call `run_sweep`. It prints notes only; progress is shown by a display that
the caller passes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import platform
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppbench.config.conditions import parse_only
from ppbench.config.feasibility import notes_on_stages
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import Sweep, note_unmet
from ppbench.console import note
from ppbench.display.cases import FAILED_FINALLY
from ppbench.display.commands import command as ppbench_command
from ppbench.display.units import counted
from ppbench.errors import (
    MOST_OF_MESSAGE,
    LaunchError,
    StoreError,
    SweepInterruptedError,
    first_line,
    printable,
)
from ppbench.files import Lock
from ppbench.results import Results
from ppbench.run.failures.evidence import store_error
from ppbench.run.job import (
    Event,
    Job,
    Journal,
    PlannedRun,
    ask_to_stop,
    note_node_folders,
    read_state,
    write_job,
)
from ppbench.run.launch.local import GAVE_UP, WORKER, Begin, Supervisor, preloaded_for
from ppbench.run.machine.environment import default_device, why_gpus_are_not_seen
from ppbench.run.machine.node_folder import make_node_folder, remove_node_folder
from ppbench.run.sweep.automatic import Found, find_programs, hand_over
from ppbench.run.sweep.open_runs import RUNNING, close_launch, running_note
from ppbench.run.sweep.plan import (
    Choice,
    SweepPlan,
    exclusive_plan,
    forget_rerun,
    note_rerun,
    note_sweep,
    rerun_since,
    runs_of,
)
from ppbench.run.sweep.progress import Display
from ppbench.store import Store, check_writable, new_run_id

POLL_S = 0.2
GRACE_S = 20.0
"""Time for ranks that were asked to stop, to end their round and to store what they have."""
MAX_FRUITLESS_STARTS = 2


Policy = Callable[[pd.DataFrame], Collection[str]]
"""Given the runs so far, says which cases, by id, have a part in the next launch; none: it ends."""


def run_plan(
    plan: SweepPlan,
    store: Store,
    display: Display,
    *,
    reruns: bool = False,
    policy: Policy | None = None,
) -> None:
    """Run the missing cases, or those of them that a policy wants, launch by launch.

    Every finished run is in the store when the next launch begins. Raises LaunchError if the
    workers end without finishing any, StoreError if results cannot be stored. On KeyboardInterrupt
    the workers are ended, and finished runs are kept.
    """
    if reruns:
        note_rerun(plan, store)
    found: Found = {}
    began, said, num_launches = new_run_id(), set[str](), 0
    with Supervisor(plan.sweep.supervision.variables()) as supervisor:
        for part in _parts(plan, store, policy):
            if cases := [item.case for item in part if item.case.is_automatic]:
                with display.doing("finding the programs of schedule auto"):
                    find_programs(cases, plan.sweep.facts, store.folder, found)
            display.begin(part, plan.sweep.axes)
            try:
                for launch in sorted({item.launch for item in part}):
                    hopeless = hopeless_cases(plan, store, began) if num_launches > 1 else {}
                    num_launches += 1
                    for case_id in hopeless.keys() - said:
                        note(f"{hopeless[case_id]}; its further launches are left out")
                    said |= hopeless.keys()
                    indices = [
                        index
                        for index, item in enumerate(part)
                        if item.launch == launch and item.case.case_id not in hopeless
                    ]
                    # The ranks are started anew when the supervisor itself has died, as long as
                    # each start finishes some runs.
                    while indices:
                        job = job_of(plan, [part[index] for index in indices], store, display)
                        statuses = _run_job(job, indices, store, display, supervisor, found)
                        indices = [at for place, at in enumerate(indices) if place not in statuses]
            finally:
                display.end()
    forget_rerun(plan, store)


def hopeless_cases(plan: SweepPlan, store: Store, since: str) -> dict[str, str]:
    """The cases whose newest two launches since a run id failed in one way, with what is said."""
    runs = runs_of(plan, store)
    runs = runs[runs["run_id"] > since].sort_values("run_id")
    hopeless = {}
    for case_id, of_case in runs.groupby("case_id"):
        last = of_case.tail(2)
        # Numbers, such as ids of processes, differ from launch to launch.
        errors = {re.sub(r"\d+", "#", first_line(str(error))) for error in last["error"]}
        if len(last) == 2 and last["status"].isin(FAILED_FINALLY).all() and len(errors) == 1:
            error = first_line(str(last["error"].iloc[-1]))
            hopeless[str(case_id)] = f"case {case_id} has failed twice in the same way: {error}"
    return hopeless


def _parts(plan: SweepPlan, store: Store, policy: Policy | None) -> Iterator[list[PlannedRun]]:
    """All missing runs at once, or launch by launch those that the policy wants."""
    if policy is None:
        yield list(plan.missing)
        return
    for launch in sorted({item.launch for item in plan.missing}):
        wanted = policy(runs_of(plan, store))
        if not wanted:
            return
        of_launch = (item for item in plan.missing if item.launch == launch)
        if part := [item for item in of_launch if item.case.case_id in wanted]:
            yield part


def job_of(plan: SweepPlan, items: Sequence[PlannedRun], store: Store, display: Display) -> Job:
    """Return the job of a launch of these items."""
    return Job(
        new_run_id(),
        str(store.folder),
        plan.sweep_id,
        plan.sweep.name,
        plan.sweep.file,
        plan.commit,
        tuple(items),
        is_shown_first=display.is_waited_for,
    )


def _run_job(
    job: Job,
    indices: list[int],
    store: Store,
    display: Display,
    supervisor: Supervisor,
    found: Found,
) -> dict[int, str]:
    """Run one launch; return the status of each item that has a row when it has ended.

    `indices` are the places of the job's items on the display, `found` the programs of schedule
    auto.
    """
    folder = store.folder / "launches" / job.launch_id
    has_turns = False

    def show(event: Event) -> None:
        nonlocal has_turns
        has_turns = has_turns or event["event"] == "turn"
        index = event.get("index")
        display.show(event if index is None else {**event, "index": indices[int(index)]})
        if event["event"] == "row" and job.is_shown_first:
            Journal(folder).add({"event": "shown"})

    program = [WORKER, str(write_job(folder, job))]
    hand_over(job, folder, found)
    if len(statuses := read_state(folder).statuses) == len(job.items):  # none has a program
        for event in Journal(folder).new_events():
            show(event)
        return statuses
    local = make_node_folder(job.launch_id)
    note_node_folders(folder, [(platform.node(), local)])
    marker = Lock(folder / RUNNING)
    marker.try_to_hold(shared=True, note=running_note(f"process {os.getpid()}"))
    stopped: KeyboardInterrupt | None = None
    try:
        max_restarts = sum(2 + item.measure.retry for item in job.items)
        begin_ranks(supervisor, folder, program, job.items, max_restarts, local)
        try:
            follow(supervisor, folder, show, local)
        except KeyboardInterrupt:
            if has_turns:
                note("stopping after this round, which is kept; once more stops at once")
                ask_to_stop(folder)
                follow(supervisor, folder, show, local, time.monotonic() + GRACE_S)
            raise
    except KeyboardInterrupt as error:
        stopped = error
    except BaseException:  # the next sweep closes the launch
        supervisor.stop()
        if not is_there(folder):  # no other sweep would find it
            remove_node_folder(local)
        raise
    if supervisor.exit_code is None:  # it was interrupted, or starts ranks in vain
        supervisor.stop()
    lines = [] if stopped else supervisor.last_lines()
    marker.release()
    for event in close_launch(folder, is_interrupted=stopped is not None):
        show(event)
    if stopped is not None:
        raise stopped
    if statuses := read_state(folder).statuses:
        return statuses
    log = printable("\n".join([*(line[:MOST_OF_MESSAGE] for line in lines), f"All logs: {folder}"]))
    raise LaunchError(f"the workers ended without finishing the sweep.\n{log}")


def num_ranks_of(items: Iterable[PlannedRun]) -> int:
    """Return how many ranks the largest case needs, all replicas together; 1 without cases."""
    return max((item.case.num_processes for item in items), default=1)


def begin_ranks(
    supervisor: Supervisor,
    folder: Path,
    program: Sequence[str],
    items: Sequence[PlannedRun],
    max_restarts: int,
    node_folder: Path,
) -> None:
    """Have a supervisor start as many ranks as the largest case needs."""
    num_threads = max(item.case.launch_threads_per_rank for item in items)
    begin = Begin(
        str(folder),
        str(node_folder),
        num_ranks_of(items),
        max_restarts,
        module=program[0],
        arguments=list(program[1:]),
        variables={"OMP_NUM_THREADS": str(num_threads), **supervisor.variables},
    )
    supervisor.begin(begin, preloaded_for(item.case.model_preset for item in items))


def follow(
    supervisor: Supervisor,
    folder: Path,
    on_event: Callable[[Event], None],
    local: Path,
    until_s: float = math.inf,
) -> bool:
    """Pass events on until the launch is over; return whether all work is done.

    `until_s` is the time, on the monotonic clock, to which the launch is followed at most.

    Workers that die again and again before they have begun are not started again. Raises StoreError
    when the ranks cannot store their results.
    """
    journal, has_begun = Journal(folder), False
    while True:
        exit_code = supervisor.poll()
        for event in journal.new_events():
            on_event(event)
            has_begun = has_begun or event["event"] == "case"
        if not is_there(folder):
            raise StoreError(
                f"{folder.parents[1]}: was deleted or renamed while the sweep ran; the runs that "
                "it held are gone with it, and the ranks were stopped. Put it back, or start the "
                "sweep again"
            )
        if exit_code == GAVE_UP and (problem := store_error(local)):
            raise StoreError(problem)
        if exit_code is not None:
            return exit_code == 0
        if time.monotonic() > until_s:
            return False
        if not has_begun and supervisor.num_starts() > MAX_FRUITLESS_STARTS:
            return False
        time.sleep(POLL_S)


def is_there(folder: Path) -> bool:
    """Whether this is still the folder of the launch.

    If it is renamed, the supervisor may make one of its name again, for the next start's logs.
    """
    return (folder / "job.json").is_file()


@dataclass(frozen=True, eq=False)
class SweepResult:
    """Every run of a sweep that is in the store, those of earlier calls included."""

    plan: SweepPlan
    store: Store

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """A row per run, in the order of the sweep file; failed ones too."""
        return runs_of(self.plan, self.store)

    @property
    def results(self) -> Results:
        """The same runs with their steps, ranks and spans, as `ppbench.load` has them."""
        return Results(self.store, self.frame)

    @property
    def is_ok(self) -> bool:
        """Whether every run that was asked for is in the store and succeeded."""
        good = set(self.frame.loc[self.frame["status"] == "ok", "resume_key"])
        return good.issuperset(item.resume_key for item in self.plan.chosen)

    @property
    def is_emulated(self) -> bool:
        return any(case.is_emulated for case, _ in self.plan.sweep.cases)

    def __repr__(self) -> str:
        sweep, num_ok = self.plan.sweep, int((self.frame["status"] == "ok").sum())
        return f"SweepResult({sweep.name}: {num_ok} of {len(self.plan.items)} runs are ok)"


def sweep(
    file: str | Path,
    *,
    results: str | Path = "results",
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    rerun: bool = False,
    retry_failed: bool = False,
    display: Display | None = None,
) -> SweepResult:
    """Measure the missing cases of a sweep file into the folder `results`.

    `overrides` are `KEY=VALUE` as for `--set`, `only` as for `--only`. Raises UsageError for cases
    that cannot be run, SweepInterruptedError when it is stopped from the keyboard; finished runs
    are kept. A run that fails has a row that says why.
    """
    path, choice = Path(file), Choice(rerun, retry_failed, parse_only(only, default_device()))
    read = read_sweep(path, list(overrides), default_device())
    check_writable(Path(results), "--results")
    note_sweep_file(dataclasses.replace(read, cases=choice.only.select(read.cases)))
    return run_sweep(read, Store(Path(results)), choice, display)


def note_sweep_file(read: Sweep) -> None:
    """Note the conditions that match no case, and the stages without parameters."""
    note_unmet(read)
    unseen = why_gpus_are_not_seen()
    if unseen is not None and any(case.device == "cpu" for case, _ in read.cases):
        note(f"note: these cases run on the CPU. {unseen}")
    for text in notes_on_stages((case for case, _ in read.cases), read.facts):
        note(f"note: {text}")


def run_sweep(
    read: Sweep,
    store: Store,
    choice: Choice,
    display: Display | None = None,
    command: str | None = None,
    *,
    policy: Policy | None = None,
) -> SweepResult:
    """Run the missing cases of a sweep that has been read, or those of them that a policy wants.

    When the workers cannot go on, a note says so, and finished runs are kept. Raises
    SweepInterruptedError, which says how to go on if `command` is the whole command of this sweep.
    """
    display = display or Display()  # which shows nothing

    def note_holder(holder: str) -> None:
        note(
            f"waiting for {holder or 'another sweep'}, which measures into the same results; "
            "two at once would disturb each other, or do the same twice"
        )

    plan: SweepPlan | None = None  # until the store is this sweep's
    try:
        with contextlib.ExitStack() as held:
            with display.doing("planning the sweep"):
                plan = held.enter_context(exclusive_plan(read, store, choice, note_holder))
            if choice.reruns and policy is not None:  # it begins anew
                plan = dataclasses.replace(plan, since=rerun_since(store, plan.sweep_id))
            display.plans(plan, store)
            num_failed, num_chosen = sum(plan.failed.values()), len(plan.chosen)
            num_done = num_chosen - len(plan.missing) - num_failed
            if num_done and policy is not None:
                note(f"{counted(num_done, 'run')} of earlier launches count")
            elif num_done:
                note(f"{num_done} of {num_chosen} runs are done already; --rerun runs them again")
            if plan.failed:
                kinds = ", ".join(f"{count} {status}" for status, count in plan.failed.items())
                note(f"{num_failed} failed before ({kinds}); --retry-failed runs them again")
            note_sweep(plan, store, command)
            run_plan(plan, store, display, reruns=choice.reruns, policy=policy)
    except LaunchError as error:
        note(f"error: {error}")
        assert plan is not None
    except KeyboardInterrupt:
        if plan is None:
            raise SweepInterruptedError("stopped before the sweep began") from None
        num_done = int((runs_of(plan, store)["status"] == "ok").sum())
        share = f"{num_done} of {len(plan.items)} runs"
        if policy is not None:  # which decides how many there are
            share = counted(num_done, "run")
        text = f"stopped; {share} done, and kept"
        if command is not None:
            page = ppbench_command("report", results=store.folder)
            text += f". Go on with: {command}\nReport on what is done with: {page}"
        raise SweepInterruptedError(text) from None
    if policy is not None:  # what it did not want was not asked for
        made = set(runs_of(plan, store)["resume_key"])
        chosen = tuple(item for item in plan.chosen if item.resume_key in made)
        plan = dataclasses.replace(plan, chosen=chosen)
    return SweepResult(plan, store)


def choice_options(choice: Choice) -> list[str]:
    """Return the command line options that make this choice."""
    words = ["--rerun"] * choice.reruns + ["--retry-failed"] * choice.retries_failed
    return words + [word for one in choice.only.each for word in ("--only", str(one))]
