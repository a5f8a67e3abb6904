"""Plans a sweep: which runs it consists of, and which of them the store does not have yet.

A run is identified by its resume key: a hash of all that it is measured by: the workload, the
measurement, the number of its launch, the machine, the code that measures, the sources of a
factory, the files that are read, and the tracked commit. Each plan reads all of it anew.

Where the tracked repository is the one that ppbench itself runs from, its commits are commits of
ppbench: changes of the measuring code are in the hash of that code, and other changes of ppbench
change no figure. So only the files beside its code are in the key, and a reworded docstring makes
no finished run undone. Commands that measure one commit after another still ask for runs of each
commit (`EACH_COMMIT`).
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from engine import device_variables
from ppbench.config.case import Case, Measure
from ppbench.config.conditions import EVERYTHING, Conditions
from ppbench.config.sweep import Sweep
from ppbench.display.cases import FAILED_FINALLY
from ppbench.errors import RepositoryError, UsageError
from ppbench.files import hold_lock, lock_note, whole_file
from ppbench.git import Commit, Repository, read_commit
from ppbench.run.conductor import VARIABLE, first_launch
from ppbench.run.job import PlannedRun
from ppbench.run.machine.environment import (
    ON_GPUS,
    fingerprint_here,
    read_environment,
    runtime_code,
    why_gpus_are_not_seen,
)
from ppbench.run.machine.inputs import hashes_of_text, identity_of_model
from ppbench.run.machine.measuring_code import ROOT, SOLVING, code_hash
from ppbench.run.sweep.open_runs import close_abandoned, prune_launches
from ppbench.runtimes import ENGINE, check_can_train
from ppbench.store import Store, new_run_id, newest_of, write_sweep_note

EACH_COMMIT = "PPBENCH_EACH_COMMIT"
"""Environment variable, set where commits are measured: runs of other commits do not count."""
NO_WORKLOAD = (
    *("engine", "ppbench", "tests", "benchmarks", "docs"),
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md"),
)
"""Places in ppbench's own repository that no case reads: texts, and its code, whose measuring part
`code_hash` covers."""


@dataclass(frozen=True)
class SweepPlan:
    """All runs of a sweep, and those that the store does not have yet."""

    sweep: Sweep
    sweep_id: str
    commit: Commit | None
    items: tuple[PlannedRun, ...]
    chosen: tuple[PlannedRun, ...]  # those of the chosen cases
    missing: tuple[PlannedRun, ...]  # the chosen ones to be run, in this order
    failed: dict[str, int]  # status -> number of runs with it that are not run again
    since: str = ""  # only runs with later ids count


@dataclass(frozen=True)
class Choice:
    """The runs of a sweep to make, besides those that have not been made yet."""

    reruns: bool = False  # also those that are done
    retries_failed: bool = False  # also those that failed
    only: Conditions = EVERYTHING  # the cases to which all this is limited


def plan_sweep(
    sweep: Sweep,
    store: Store,
    choice: Choice,
    lock: Callable[[str], None] = lambda _: None,
) -> SweepPlan:
    """Find out which runs are missing. Writes nothing.

    A run is done when the newest row with its resume key is `ok`, or has failed for a reason of the
    case's own. `lock` is called with the sweep's id before the store is read.
    """
    check_devices(sweep)
    commit = read_commit(sweep.track.repo)
    items = items_of(sweep, commit)
    sweep_id = sweep_id_of(sweep, items, _measured_alone(commit))
    lock(sweep_id)
    since = rerun_since(store, sweep_id) if choice.reruns else ""
    runs = _rows_of(items, commit, store)
    runs = runs[runs["run_id"] > since]
    readable = store.table("runs", runs["run_id"])["run_id"]  # a damaged run is made again
    runs = runs[runs["run_id"].isin(readable)]
    statuses = dict(zip(runs["resume_key"], runs["status"], strict=True))
    final = () if choice.retries_failed else FAILED_FINALLY
    cases = set(choice.only.select(sweep.cases))
    # Each launch is in random order, so that drift favours no case.
    shuffled: list[PlannedRun] = []
    for launch, of_launch in itertools.groupby(items, lambda item: item.launch):
        order = list(of_launch)
        random.Random(f"{order[0].measure.order_seed}:{launch}").shuffle(order)  # noqa: S311  # no secret
        if launch == 0:
            # The engine's case comes before the first run of the same workload by any runtime: the
            # losses of the others are compared with its own (`verification.losses`).
            places = {(item.case, item.measure): at for at, item in enumerate(order)}
            first: dict[tuple[Case, Measure], int] = {}
            for at, item in enumerate(order):
                first.setdefault((dataclasses.replace(item.case, runtime=ENGINE), item.measure), at)
            drawn = tuple(order)
            for reference, at in first.items():
                own = places.get(reference, at)
                order[at], order[own] = drawn[own], drawn[at]
        shuffled += order
    begin = first_launch()  # a set of processes makes no launch of another one
    chosen = [
        item for item in shuffled if (item.case, item.measure) in cases and item.launch >= begin
    ]
    missing = [item for item in chosen if statuses.get(item.resume_key) not in ("ok", *final)]
    missing.sort(key=lambda item: (item.launch, item.resume_key in statuses))  # untried ones first
    counts = collections.Counter(statuses.get(item.resume_key) for item in chosen)
    failed = {status: counts[status] for status in final if counts[status]}
    return SweepPlan(sweep, sweep_id, commit, items, tuple(chosen), tuple(missing), failed)


def _rows_of(items: tuple[PlannedRun, ...], commit: Commit | None, store: Store) -> pd.DataFrame:
    """Return the newest row of each planned run: its id, key and status.

    A failure at another state of the repository does not count: its cause may be code that does not
    measure.
    """
    runs = store.runs(["run_id", "resume_key", "status", "commit", "changes"])
    runs = runs[runs["resume_key"].isin({item.resume_key for item in items})]
    if commit is not None:
        is_ours = runs["commit"].eq(commit.commit) & runs["changes"].eq(commit.changes)
        is_of_any = runs["status"].eq("ok") & (_measured_alone(commit) is None)
        runs = runs[is_ours | is_of_any]
    return newest_of(runs)


def runs_of(plan: SweepPlan, store: Store) -> pd.DataFrame:
    """Return the newest row of each of the plan's runs that has one, in the plan's order."""
    order = {item.resume_key: position for position, item in enumerate(plan.items)}
    ids = _rows_of(plan.items, plan.commit, store)["run_id"]
    runs = store.table("runs", ids[ids > plan.since])
    return runs.sort_values("resume_key", key=lambda keys: keys.map(order)).reset_index(drop=True)


def items_of(sweep: Sweep, commit: Commit | None) -> tuple[PlannedRun, ...]:
    """Return every run of the sweep, launch by launch, in the order of its file."""
    planned = [
        (case, measure, launch)
        for launch in range(max(measure.launches for _, measure in sweep.cases))
        for case, measure in sweep.cases
        if launch < measure.launches
    ]
    tracked: object = None  # the state of the tracked repository, as far as it distinguishes runs
    if commit is not None:
        own = _own_repository(sweep.track.repo)
        tracked = commit.commit, commit.changes
        if own is not None:
            tracked = own.hash_of_files(commit, excluded=NO_WORKLOAD)
    for remembered in (code_hash, runtime_code, read_environment):
        remembered.cache_clear()
    of_text, of_model = map(functools.cache, (hashes_of_text, identity_of_model))

    def key_of(case: Case, measure: Measure, launch: int) -> str:
        of_runtime = runtime_code(case.runtime)
        return _short_hash(
            case.case_id,
            measure.of_figures(),
            launch,
            tracked,
            fingerprint_here(case.device, case.num_processes, case.launch_threads_per_rank),
            of_text(case.data_source),
            [of_model(name) for name in (case.model_preset, case.data_tokenizer)],
            code_hash(),
            *([code_hash(SOLVING)] if case.is_automatic else []),
            *([case.settings()] if case.emulated_costs else []),  # its times are no part of the id
            *([] if of_runtime is None else [of_runtime]),
        )

    return tuple(
        PlannedRun(case, measure, launch, key_of(case, measure, launch), position)
        for position, (case, measure, launch) in enumerate(planned)
    )


def _own_repository(folder: Path) -> Repository | None:
    """Return the repository around a folder if ppbench runs from it."""
    try:
        repository = Repository.around(folder)
    except RepositoryError:
        return None
    return repository if repository.root.resolve() == ROOT.resolve() else None


def _measured_alone(commit: Commit | None) -> Commit | None:
    """Return the commit if runs of others do not count as its own."""
    return commit if EACH_COMMIT in os.environ else None


def note_sweep(plan: SweepPlan, store: Store, command: str | None) -> None:
    """Note that this sweep begins, and which runs it has. Raises StoreError."""
    keys = (item.resume_key for item in plan.items)
    text = plan.sweep.said.source.text
    write_sweep_note(store.folder, plan.sweep_id, new_run_id(), keys, command, text)


def note_rerun(plan: SweepPlan, store: Store) -> None:
    """Note the start of a rerun of all runs, until it is done. Raises StoreError."""
    since = rerun_since(store, plan.sweep_id)
    with whole_file(_rerun_note(store, plan.sweep_id)) as file:
        file.write(since.encode())


def forget_rerun(plan: SweepPlan, store: Store) -> None:
    _rerun_note(store, plan.sweep_id).unlink(missing_ok=True)


def rerun_since(store: Store, sweep_id: str) -> str:
    """Return the run id after which runs count when all are to be made again.

    It dates from the first request: a rerun that was stopped continues when it is asked for again.
    """
    try:
        return _rerun_note(store, sweep_id).read_text()
    except OSError:
        return new_run_id()


def _rerun_note(store: Store, sweep_id: str) -> Path:
    return store.folder / "locks" / f"rerun-{sweep_id}"


def check_devices(sweep: Sweep) -> None:
    """Raise UsageError when a case needs a device that this machine lacks, or cannot measure on."""
    check_can_train()
    if (problem := problem_of_devices(sweep)) is not None:
        raise UsageError(problem)


def problem_of_devices(sweep: Sweep) -> str | None:
    """Why this machine lacks a device of a case, or cannot measure on it; None where it can."""
    environment = read_environment()
    if all(case.device not in ON_GPUS for case, _ in sweep.cases):
        return None
    if (problem := device_variables.refused(os.environ)) is not None:
        return f"{sweep.file}: device: {problem}"
    has_gpu = environment.gpus or environment.rocm  # AMD's GPUs are torch's to find
    if any(case.device == "cuda" for case, _ in sweep.cases) and not has_gpu:
        problem = why_gpus_are_not_seen() or (
            '"cuda" needs an NVIDIA GPU and its driver, or torch for ROCm, and neither was found '
            'here; use device = "cpu" or --set device=cpu'
        )
        return f"{sweep.file}: device: {problem}"
    return None


def sweep_id_of(sweep: Sweep, items: tuple[PlannedRun, ...], commit: Commit | None = None) -> str:
    """Return a short hash of a sweep and all its runs; of a commit too if it alone is measured."""
    is_own = commit is not None and _own_repository(sweep.track.repo) is not None
    state = [(commit.commit, commit.changes)] if commit is not None and is_own else []
    return _short_hash(sweep.name, sorted(item.resume_key for item in items), *state)


def _short_hash(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


@contextlib.contextmanager
def exclusive_plan(
    sweep: Sweep,
    store: Store,
    choice: Choice,
    on_wait: Callable[[str], None],
    ours: str | None = None,
) -> Iterator[SweepPlan]:
    """Plan the sweep while holding the machine's and the sweep's lock.

    Until the context ends, no other sweep measures on this machine into the same store, and none
    makes the same runs on another machine; it waits for one that does. Open runs of a killed sweep
    are closed; `ours` is the note of the launch that this process continues. A sweep that has its
    turns from a conductor holds no lock: whoever conducts it does.
    """
    if VARIABLE in os.environ:
        yield plan_sweep(sweep, store, choice)
        return
    check_devices(sweep)  # before it waits
    path = store.folder / "locks" / f"host-{platform.node()}.lock"
    with hold_lock(path, lock_note(f"sweep {sweep.name}"), on_wait):
        close_abandoned(store, ours)
        prune_launches(store)
        with contextlib.ExitStack() as held:

            def lock(sweep_id: str) -> None:
                path = store.folder / "locks" / f"sweep-{sweep_id}.lock"
                held.enter_context(hold_lock(path, lock_note(f"sweep {sweep.name}"), on_wait))

            yield plan_sweep(sweep, store, choice, lock)


def planned_cases(sweep: Sweep) -> pd.DataFrame:
    """Return the rows of `--dry-run`: each case's id, settings and measurement."""
    rows = [
        {"case_id": case.case_id, **case.settings(), **measure.settings()}
        for case, measure in sweep.cases
    ]
    return pd.DataFrame(rows)
