"""Runs a sweep: what is left of it, launch by launch; then what is known of all of it.

cases x launches --(minus runs in the store)--> items --job file--> workers --journal--> display
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from engine.model.presets import PRESETS
from ppbench.config.case import Case, Measure, Sweep
from ppbench.config.possible import local_files
from ppbench.errors import LaunchError, UsageError
from ppbench.run.environment import Commit, code_hash, read_commit, read_environment
from ppbench.run.job import Event, Item, Job, Journal, write_job
from ppbench.run.launch.local import LocalLaunch
from ppbench.run.progress import Display
from ppbench.store import Store, new_run_id

POLL_S = 0.2
MAX_FRUITLESS_STARTS = 2


@dataclass(frozen=True)
class Plan:
    """Everything a sweep should have in the store when it is done, and what is missing."""

    sweep: Sweep
    sweep_id: str
    commit: Commit | None
    items: tuple[Item, ...]
    missing: tuple[Item, ...]


def plan_sweep(sweep: Sweep, store: Store, is_rerun: bool) -> Plan:
    """Find out what there is to do. Writes nothing.

    A run counts as done when the newest row for the same workload, measurement, launch, commit with
    the same uncommitted changes, code and machine is `ok`.
    """
    check_devices(sweep)
    commit = read_commit(Path(sweep.file).resolve().parent)
    items = tuple(
        Item(case, measure, launch, _resume_key(case, measure, launch, commit))
        for launch in range(max(measure.launches for _, measure in sweep.cases))
        for case, measure in sweep.cases
        if launch < measure.launches
    )
    newest = store.runs(["resume_key", "status"]).drop_duplicates("resume_key", keep="last")
    done = set() if is_rerun else set(newest.loc[newest["status"] == "ok", "resume_key"])
    missing = tuple(item for item in items if item.resume_key not in done)
    return Plan(sweep, _sweep_id(sweep, items), commit, items, missing)


def check_devices(sweep: Sweep) -> None:
    """Raises UsageError when a case needs a device that is not there."""
    environment = read_environment()
    if any(case.device == "cuda" for case, _ in sweep.cases) and not environment.gpus:
        raise UsageError(
            f'{sweep.file}: device: "cuda" needs an NVIDIA GPU and its driver, and none was found '
            'here; use device = "cpu" or --set device=cpu'
        )


def _resume_key(case: Case, measure: Measure, launch: int, commit: Commit | None) -> str:
    environment = read_environment()
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


def _sweep_id(sweep: Sweep, items: tuple[Item, ...]) -> str:
    return _short_hash(sweep.name, sorted(item.resume_key for item in items))


def _short_hash(*facts: object) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def run_plan(plan: Plan, store: Store, display: Display) -> None:
    """Run what is missing. Every finished case is in the store when the next one begins.

    Raises LaunchError if the workers end without doing their work. On KeyboardInterrupt they are
    ended, and what is finished stays.
    """
    if not plan.missing:
        return
    display.begin(list(plan.missing), plan.sweep.axes)
    try:
        for launch in sorted({item.launch for item in plan.missing}):
            indices = [i for i, item in enumerate(plan.missing) if item.launch == launch]
            _run_launch(plan, indices, store, display)
    finally:
        display.end()


def _run_launch(plan: Plan, indices: list[int], store: Store, display: Display) -> None:
    """One start of the workers; `indices` are the positions of its items among what is missing."""
    sweep, items = plan.sweep, tuple(plan.missing[index] for index in indices)
    job = Job(str(store.folder), plan.sweep_id, sweep.name, sweep.file, plan.commit, items)
    folder = store.folder / "launches" / new_run_id()
    job_file = write_job(folder, job)
    launch = LocalLaunch(
        folder,
        ["ppbench.run.worker", str(job_file)],
        num_ranks=max(item.case.world_size for item in items),
        threads_per_rank=max(item.case.launch_threads_per_rank for item in items),
        max_restarts=len(items),
    )
    try:
        if not follow(launch, folder, lambda event: _show(event, indices, display)):
            log = "\n".join([*launch.last_lines(), f"All logs: {folder}"])
            raise LaunchError(f"the workers ended without finishing the sweep.\n{log}")
    finally:
        launch.stop()


def follow(launch: LocalLaunch, folder: Path, on_event: Callable[[Event], None]) -> bool:
    """Pass the journal's events on until the agent has ended; whether all work is done.

    Workers that die again and again before they have begun are not waited for.
    """
    journal = Journal(folder)
    has_begun = False
    while True:
        exit_code = launch.poll()
        for event in journal.new_events():
            has_begun = True
            on_event(event)
        if exit_code is not None:
            return exit_code == 0
        if not has_begun and launch.num_starts() > MAX_FRUITLESS_STARTS:
            return False
        time.sleep(POLL_S)


def _show(event: Event, indices: list[int], display: Display) -> None:
    match event["event"]:
        case "case":
            display.case_begins(indices[int(event["index"] or 0)])
        case "step":
            step, num_steps = int(event["step"] or 0), int(event["num_steps"] or 1)
            display.step_ends(step, num_steps, float(event["tokens_per_s"] or 0))
        case "row":
            index, status = indices[int(event["index"] or 0)], str(event["status"])
            display.case_ends(index, status, str(event["run_id"]), str(event["summary"]))


def runs_of(plan: Plan, store: Store) -> pd.DataFrame:
    """The newest row of each of the plan's items that has one, in the plan's order."""
    order = {item.resume_key: position for position, item in enumerate(plan.items)}
    keys = store.runs(["run_id", "resume_key"])
    keys = keys[keys["resume_key"].isin(order)].drop_duplicates("resume_key", keep="last")
    runs = store.table("runs", keys["run_id"])
    return runs.sort_values("resume_key", key=lambda keys: keys.map(order)).reset_index(drop=True)


def planned_cases(sweep: Sweep) -> pd.DataFrame:
    """What `--dry-run` shows: a row per case with its id, its settings and its measurement."""
    rows = [
        {"case_id": case.case_id, **case.settings(), **measure.settings()}
        for case, measure in sweep.cases
    ]
    return pd.DataFrame(rows)
