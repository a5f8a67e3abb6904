"""Runs a sweep: what is left of it, launch by launch; then what is known of all of it.

cases x launches --(minus runs in the store)--> items --job file--> workers --journal--> display

Nothing that is finished is lost, whoever is killed when. A run exists once its row is in the store;
one that has begun and has none is closed with a row that says why: by the restarted rank 0, by this
controller, or by the next sweep into the store.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import json
import os
import platform
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from engine.model.presets import PRESETS
from ppbench.config.case import Case, Measure
from ppbench.config.possible import local_files
from ppbench.config.selection import EVERYTHING, Only
from ppbench.config.sweep import Sweep
from ppbench.error_text import MOST_OF_MESSAGE, limit_in, printable
from ppbench.errors import LaunchError, StoreError, UsageError
from ppbench.files import whole_file
from ppbench.repository import Commit, read_commit
from ppbench.run.closing import (
    RUNNING,
    close_abandoned,
    close_open_runs,
    running_note,
    take_marker,
)
from ppbench.run.environment import code_hash, read_environment, runtime_code
from ppbench.run.evidence import (
    claimed_node_folder,
    collect,
    forget,
    notes_on,
    place_for,
    store_error,
)
from ppbench.run.job import Event, Item, Job, Journal, read_progress, write_job
from ppbench.run.launch.local import WORKER, LocalLaunch, check_semaphores, preloaded_for
from ppbench.run.locks import Lock, held, who
from ppbench.run.private_folder import remove_dead
from ppbench.run.progress import Display
from ppbench.runtimes import ENGINE
from ppbench.store import Store, new_run_id, newest_of

POLL_S = 0.2
MAX_FRUITLESS_STARTS = 2


@dataclass(frozen=True)
class Plan:
    """Everything a sweep should have in the store when it is done, and what is missing."""

    sweep: Sweep
    sweep_id: str
    commit: Commit | None
    items: tuple[Item, ...]
    chosen: tuple[Item, ...]  # those that are asked for
    missing: tuple[Item, ...]  # of these, in the order in which they are to be run
    failed: dict[str, int]  # status -> how many runs ended so and are not run again


@dataclass(frozen=True)
class Choice:
    """Which of a sweep's runs to make, beside those that have none yet."""

    reruns: bool = False  # those that are done
    retries_failed: bool = False  # those that failed
    only: Only = EVERYTHING  # of all, those of some cases


FINAL = ("oom", "error", "timeout", "invalid")
"""Failures that are the case's own: it would fail again. A crash may have come from outside."""


def plan_sweep(sweep: Sweep, store: Store, choice: Choice) -> Plan:
    """Find out what there is to do. Writes nothing.

    A run counts as done when the newest row for the same workload, measurement, launch, commit with
    the same uncommitted changes, code and machine is `ok`, or tells of a failure that is the case's
    own.
    """
    check_devices(sweep)
    commit = read_commit(sweep.track.repo)
    items = items_of(sweep, commit)
    sweep_id = sweep_id_of(sweep, items)
    since = rerun_since(store, sweep_id) if choice.reruns else ""
    runs = newest_of(store.runs(["run_id", "resume_key", "status"]))
    keys = {item.resume_key for item in items}
    runs = runs[(runs["run_id"] > since) & runs["resume_key"].isin(keys)]
    readable = store.table("runs", runs["run_id"])["run_id"]  # what is damaged is made again
    runs = runs[runs["run_id"].isin(readable)]
    statuses = dict(zip(runs["resume_key"], runs["status"], strict=True))
    final = () if choice.retries_failed else FINAL
    chosen = set(choice.only.select(sweep.cases))
    wanted = [item for item in _shuffled(items) if (item.case, item.measure) in chosen]
    missing = [item for item in wanted if statuses.get(item.resume_key) not in ("ok", *final)]
    missing.sort(key=lambda item: (item.launch, item.resume_key in statuses))  # untried ones first
    failed = collections.Counter(statuses.get(item.resume_key) for item in wanted)
    return Plan(
        sweep,
        sweep_id,
        commit,
        items,
        tuple(wanted),
        tuple(missing),
        {status: failed[status] for status in final if failed[status]},
    )


def items_of(sweep: Sweep, commit: Commit | None) -> tuple[Item, ...]:
    """Every run of the sweep, launch by launch, in the order of its file."""
    planned = [
        (case, measure, launch)
        for launch in range(max(measure.launches for _, measure in sweep.cases))
        for case, measure in sweep.cases
        if launch < measure.launches
    ]
    references = {of: _references(*of, commit) for of in sweep.cases}
    return tuple(
        Item(case, measure, launch, key, position, references[case, measure])
        for position, (case, measure, launch) in enumerate(planned)
        for key in [_resume_key(case, measure, launch, commit)]
    )


def _references(case: Case, measure: Measure, commit: Commit | None) -> tuple[str, ...]:
    """Resume keys of the engine's runs that another runtime's must agree with, of all launches."""
    if case.runtime == ENGINE or case.is_emulated:
        return ()
    same = dataclasses.replace(case, runtime=ENGINE)
    return tuple(_resume_key(same, measure, launch, commit) for launch in range(measure.launches))


def _shuffled(items: tuple[Item, ...]) -> list[Item]:
    """Launch by launch, each in a random order of its own: drift favours no case."""
    ordered = []
    for launch, of_launch in itertools.groupby(items, lambda item: item.launch):
        some = list(of_launch)
        random.Random(f"{some[0].measure.order_seed}:{launch}").shuffle(some)  # noqa: S311  # no secret
        ordered += _references_first(some) if launch == 0 else some
    return ordered


def _references_first(items: list[Item]) -> list[Item]:
    """The engine's case at the first place of its likes of other runtimes, which change with it.

    Their losses are compared with its own (`agreement`).
    """
    ordered = list(items)
    places = {(item.case, item.measure): at for at, item in enumerate(items)}
    first: dict[tuple[Case, Measure], int] = {}
    for at, item in enumerate(items):
        first.setdefault((dataclasses.replace(item.case, runtime=ENGINE), item.measure), at)
    for reference, at in first.items():
        own = places.get(reference, at)
        ordered[at], ordered[own] = items[own], items[at]
    return ordered


def note_rerun(plan: Plan, store: Store) -> None:
    """Remember since when all runs are made again, until that is done. Raises StoreError."""
    since = rerun_since(store, plan.sweep_id)
    with whole_file(_rerun_note(store, plan.sweep_id)) as file:
        file.write(since.encode())


def forget_rerun(plan: Plan, store: Store) -> None:
    _rerun_note(store, plan.sweep_id).unlink(missing_ok=True)


def rerun_since(store: Store, sweep_id: str) -> str:
    """The run id after which runs count, when all are to be made again: when that was first asked.

    A re-run that was stopped goes on when it is asked for again.
    """
    try:
        return _rerun_note(store, sweep_id).read_text()
    except OSError:
        return new_run_id()


def _rerun_note(store: Store, sweep_id: str) -> Path:
    return store.folder / "locks" / f"rerun-{sweep_id}"


def check_devices(sweep: Sweep) -> None:
    """Raises UsageError when a case needs a device that is not there."""
    environment = read_environment()
    if any(case.device == "cuda" for case, _ in sweep.cases) and not environment.gpus:
        raise UsageError(
            f'{sweep.file}: device: "cuda" needs an NVIDIA GPU and its driver, and none was found '
            'here; use device = "cpu" or --set device=cpu'
        )


def _resume_key(case: Case, measure: Measure, launch: int, commit: Commit | None) -> str:
    environment, of_runtime = read_environment(), runtime_code(case.runtime)
    return _short_hash(
        case.case_id,
        measure.warmup_steps,
        measure.max_warmup_steps,
        measure.steps,
        measure.verify,
        measure.profile_steps,
        launch,
        None if commit is None else (commit.commit, commit.changes),
        environment.fingerprint(case.device, case.world_size, case.launch_threads_per_rank),
        _content_of(case.data_source),
        [_stamps_in(name) for name in (case.model_preset, case.data_tokenizer)],
        code_hash(),
        *([case.settings()] if case.emulated_costs else []),  # its times are no part of the id
        *([] if of_runtime is None else [of_runtime]),
    )


@functools.cache
def _content_of(source: str) -> list[str]:
    """Hashes of local files: another text under the same name is another workload."""
    hashes = []
    for path in local_files(source):
        with path.open("rb") as file:
            hashes.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashes


@functools.cache
def _stamps_in(folder: str) -> list[tuple[str, int, int]]:
    """Sizes and times of a checkpoint's files, which are too large to hash; empty if no folder."""
    if folder in PRESETS or not Path(folder).is_dir():
        return []
    paths = sorted(path for path in Path(folder).iterdir() if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]


def sweep_id_of(sweep: Sweep, items: tuple[Item, ...]) -> str:
    """Short hash of the sweep's name and all its runs."""
    return _short_hash(sweep.name, sorted(item.resume_key for item in items))


def _short_hash(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


@contextlib.contextmanager
def alone(
    sweep: Sweep,
    store: Store,
    choice: Choice,
    on_wait: Callable[[str], None],
    ours: str | None = None,
) -> Iterator[Plan]:
    """What there is to do, while nobody else does it.

    Until this is left, no other sweep measures on this machine into the same store, and none makes
    the same runs on another machine. Waits for one that does. What is left of one that was killed
    is accounted for; `ours` is the note of a launch that this process goes on with.
    """
    path = store.folder / "locks" / f"host-{platform.node()}.lock"
    with held(path, who(f"sweep {sweep.name}"), on_wait):
        close_abandoned(store, ours)
        remove_dead()  # after what this store's launches have left was collected
        commit = read_commit(sweep.track.repo)
        sweep_id = sweep_id_of(sweep, items_of(sweep, commit))
        path = store.folder / "locks" / f"sweep-{sweep_id}.lock"
        with held(path, who(f"sweep {sweep.name}"), on_wait):
            yield plan_sweep(sweep, store, choice)


def run_plan(plan: Plan, store: Store, display: Display, *, reruns: bool = False) -> None:
    """Run what is missing. Every finished case is in the store when the next one begins.

    Raises LaunchError if the workers end without doing their work, StoreError if it cannot be
    stored. On KeyboardInterrupt they are ended, and what is finished stays.
    """
    if plan.missing:
        check_semaphores()
        for note in notes_on(place_for(_num_ranks(plan.missing))):
            print(f"note: {note}", file=sys.stderr, flush=True)
    if reruns:
        note_rerun(plan, store)
    display.begin(list(plan.missing), plan.sweep.axes)
    try:
        for launch in sorted({item.launch for item in plan.missing}):
            indices = [i for i, item in enumerate(plan.missing) if item.launch == launch]
            _run_launch(plan, indices, store, display)
    finally:
        display.end()
    forget_rerun(plan, store)


def _run_launch(plan: Plan, indices: list[int], store: Store, display: Display) -> None:
    """One launch's items; `indices` are their positions among what is missing.

    The workers are started anew when the agent itself has died, as long as that leads on.
    """
    left = indices
    while left:
        show = functools.partial(show_event, left, display)
        statuses = _run_job(job_of(plan, left, store), store, show)
        left = [index for position, index in enumerate(left) if position not in statuses]


def job_of(plan: Plan, indices: list[int], store: Store) -> Job:
    """A launch's; `indices` are the positions of its items among what is missing."""
    return Job(
        new_run_id(),
        str(store.folder),
        plan.sweep_id,
        plan.sweep.name,
        plan.sweep.file,
        plan.commit,
        tuple(plan.missing[index] for index in indices),
    )


def _run_job(job: Job, store: Store, on_event: Callable[[Event], None]) -> dict[int, str]:
    """One start of the agent; the status of each item that has a row when it has ended."""
    folder = store.folder / "launches" / job.launch_id
    with claimed_node_folder(job.launch_id, _num_ranks(job.items), folder / RUNNING) as local:
        return _run_job_in(folder, local, job, on_event)


def _num_ranks(items: Iterable[Item]) -> int:
    return max((item.case.world_size for item in items), default=1)


def _run_job_in(
    folder: Path, local: Path, job: Job, on_event: Callable[[Event], None]
) -> dict[int, str]:
    """`folder` is the launch's in the store, `local` on this machine."""
    job_file = write_job(folder, job)
    marker = Lock(folder / RUNNING)
    marker.try_to_hold(shared=True, note=running_note(f"process {os.getpid()}"))
    launch = LocalLaunch(
        folder,
        [WORKER, str(job_file)],
        num_ranks=_num_ranks(job.items),
        threads_per_rank=max(item.case.launch_threads_per_rank for item in job.items),
        max_restarts=sum(2 + item.measure.retry for item in job.items),
        preloaded=preloaded_for(item.case.model_preset for item in job.items),
    )
    try:
        follow(launch, folder, on_event, local)
    except KeyboardInterrupt:
        launch.stop()
        _close(job, folder, local, marker, on_event, is_interrupted=True)
        raise
    finally:
        launch.stop()
        if not folder.is_dir():  # no other sweep would find out about it
            forget(local)
    _close(job, folder, local, marker, on_event, is_interrupted=False)
    if statuses := read_progress(folder).statuses:
        return statuses
    raise LaunchError(_why_none_ended(launch, folder))


def _why_none_ended(launch: LocalLaunch, folder: Path) -> str:
    """The limit that the workers met, on one line; else the end of their log."""
    lines = launch.last_lines()
    if limit := limit_in("\n".join(lines)):
        return f"the workers could not be started: {limit}. All logs: {folder}"
    log = printable("\n".join([*(line[:MOST_OF_MESSAGE] for line in lines), f"All logs: {folder}"]))
    return f"the workers ended without finishing the sweep.\n{log}"


def _close(
    job: Job,
    folder: Path,
    local: Path,
    marker: Lock,
    on_event: Callable[[Event], None],
    *,
    is_interrupted: bool,
) -> None:
    """Account for what is open when the workers are gone; the launch is then over."""
    marker.release()
    take_marker(marker)  # rank 0 has it as well, until it is gone
    nodes = [collect(local, folder)]
    for closed in close_open_runs(job, folder, nodes, is_interrupted=is_interrupted):
        on_event(closed.event)
    forget(local)
    marker.path.unlink(missing_ok=True)
    marker.release()


def follow(
    launch: LocalLaunch, folder: Path, on_event: Callable[[Event], None], local: Path
) -> bool:
    """Pass the journal's events on until the agent has ended; whether all work is done.

    Workers that die again and again before they have begun are not waited for. Raises StoreError
    when the ranks cannot store what they measure.
    """
    journal = Journal(folder)
    has_begun = False
    while True:
        exit_code = launch.poll()
        for event in journal.new_events():
            has_begun = True
            on_event(event)
        if not folder.is_dir():
            raise StoreError(_of_lost_results(folder))
        if problem := store_error(local):
            raise StoreError(problem)
        if exit_code is not None:
            return exit_code == 0
        if not has_begun and launch.num_starts() > MAX_FRUITLESS_STARTS:
            return False
        time.sleep(POLL_S)


def _of_lost_results(folder: Path) -> str:
    """`folder` is a launch's, in a store that is gone."""
    return (
        f"{folder.parents[1]}: was deleted or renamed while the sweep ran; the runs that it held "
        "are gone with it, and the ranks were stopped. Put it back, or start the sweep again"
    )


def show_event(indices: list[int], display: Display, event: Event) -> None:
    """`indices` are the positions of the job's items among all that the display knows."""
    match event["event"]:
        case "case":
            display.case_begins(indices[int(event["index"] or 0)])
        case "step":
            step, num_steps = int(event["step"] or 0), int(event["num_steps"] or 1)
            speed, step_s = float(event["tokens_per_s"] or 0), float(event.get("step_s") or 0)
            display.step_ends(step, num_steps, speed, step_s)
        case "row":
            index, status = indices[int(event["index"] or 0)], str(event["status"])
            display.case_ends(index, status, str(event["run_id"]), str(event["summary"]))


def runs_of(plan: Plan, store: Store) -> pd.DataFrame:
    """The newest row of each of the plan's items that has one, in the plan's order."""
    order = {item.resume_key: position for position, item in enumerate(plan.items)}
    keys = store.runs(["run_id", "resume_key", "status"])
    runs = store.table("runs", newest_of(keys[keys["resume_key"].isin(order)])["run_id"])
    return runs.sort_values("resume_key", key=lambda keys: keys.map(order)).reset_index(drop=True)


def planned_cases(sweep: Sweep) -> pd.DataFrame:
    """What `--dry-run` shows: a row per case with its id, its settings and its measurement."""
    rows = [
        {"case_id": case.case_id, **case.settings(), **measure.settings()}
        for case, measure in sweep.cases
    ]
    return pd.DataFrame(rows)
