"""Writes a failure row for the run that was worked on when its ranks died.

Others that were alive beside it, and have no row, begin anew.

Rank 0 does so when the supervisor has started the ranks anew, the controller when they will not be
started again, and the next sweep into the same store for a launch that was killed as a whole.
"""

from __future__ import annotations

import dataclasses
import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from engine.plan.program import Program
from ppbench.config.case import Case
from ppbench.config.programs import check_file_unchanged, lowered_of
from ppbench.errors import StoreError, first_line
from ppbench.files import POLL_S, Lock
from ppbench.run.failures.evidence import CrashReport, collect, diagnose
from ppbench.run.job import (
    Event,
    Job,
    Journal,
    kept_program,
    noted_node_folders,
    read_job,
    read_state,
)
from ppbench.run.machine.node_folder import remove_node_folder
from ppbench.run.records import write_failure
from ppbench.store import Store

RUNNING = "running"
PATIENCE_S = 20.0
AGE_S = 3600.0
"""Age of a launch's folder from which on it may be removed."""


def close_open_runs(
    job: Job, folder: Path, nodes: Sequence[CrashReport], *, is_interrupted: bool = False
) -> list[Event]:
    """Write a row for the open run that was worked on; return its event, which is in the journal.

    `is_interrupted`: the runs were ended from outside. A run whose row was stored before its ranks
    died keeps it. Raises StoreError.
    """
    # A path in the job is relative to where its sweep was started.
    job = dataclasses.replace(job, results=str(folder.parents[1]))
    events: list[Event] = []
    state = read_state(folder)
    for begun in state.is_open:
        stored = Store(Path(job.results)).table("runs", [begun.run_id])
        item = job.items[begun.index]
        if len(stored):
            status, summary = str(stored["status"].iloc[0]), "its workers died after it was stored"
        elif begun.index != state.focus:
            Journal(folder).add({"event": "left", "index": begun.index, "run_id": begun.run_id})
            continue
        else:
            diagnosis = diagnose(
                nodes,
                lowered_of_launch(item.case, folder, begun.index),
                begun.index,
                item.measure.timeout_s,
                replicas=item.case.replicas,
                is_interrupted=is_interrupted,
            )
            write_failure(job, item, begun, diagnosis)
            status, summary = diagnosis.status, first_line(diagnosis.error)
        details: Event = {"run_id": begun.run_id, "status": status, "summary": summary}
        events.append({"event": "row", "index": begun.index, **details})
        Journal(folder).add(events[-1])
    return events


def lowered_of_launch(case: Case, folder: Path, index: int) -> Program | None:
    """Return None where the program cannot be built, or its file is gone or has changed."""
    try:
        check_file_unchanged(case)
        found = kept_program(folder, index) if case.is_automatic else None
        return lowered_of(case, found)
    except Exception:
        return None


def close_launch(folder: Path, *, is_interrupted: bool) -> list[Event]:
    """Close the open runs of a launch that no process works on; return their events.

    Its node folders on this machine are removed. One that still runs on another machine is left
    alone; what still runs here was killed, and is waited for. Raises StoreError.
    """
    marker = Lock(folder / RUNNING)
    if not take_marker(marker):
        return []
    events: list[Event] = []
    try:
        job = read_job(folder / "job.json")
    except (OSError, ValueError, TypeError, KeyError):  # killed before it was written
        pass
    else:
        folders = noted_node_folders(folder)
        nodes = [collect(local) for local in folders]
        events = close_open_runs(job, folder, nodes, is_interrupted=is_interrupted)
        for local in folders:
            remove_node_folder(local)
    marker.path.unlink(missing_ok=True)
    marker.release()
    return events


def close_abandoned(store: Store, ours: str | None = None) -> None:
    """Close the launches that were killed with their controller. Raises StoreError.

    On this machine no launch should be at work but `ours`, given by its note: the one that this
    process continues.
    """
    for marker in sorted((store.folder / "launches").glob(f"*/{RUNNING}")):
        if Lock(marker).holder() != ours:
            close_launch(marker.parent, is_interrupted=True)


def prune_launches(store: Store) -> None:
    """Remove the folders of launches that are over, unless a run that failed still needs its logs.

    One that another machine is about to begin has no marker yet: the last hour's are left alone.
    """
    before_s = time.time() - AGE_S
    for folder in sorted((store.folder / "launches").glob("*")):
        if folder.stat().st_mtime > before_s or (folder / RUNNING).exists():
            continue
        rows = [event for event in Journal(folder).new_events() if event["event"] == "row"]
        failed = [str(event["run_id"]) for event in rows if event["status"] != "ok"]
        if not failed or store.table("runs", failed).empty:
            shutil.rmtree(folder, ignore_errors=True)


def running_note(process: str) -> str:
    """Return the note in a launch's marker: the process that runs it, and its machine."""
    return f"{process} on {platform.node()}"


def take_marker(marker: Lock) -> bool:
    """Try to lock a launch's marker; return whether it is locked now. Raises StoreError.

    Processes of this machine that still hold it were killed: it waits for their end.
    """
    until_s = time.monotonic() + PATIENCE_S
    while not marker.try_to_hold():
        if not marker.holder().endswith(running_note("")):
            return False
        if time.monotonic() > until_s:
            raise StoreError(
                f"{marker.path}: {marker.holder()} still runs without its sweep; end it first"
            )
        time.sleep(POLL_S)
    return True
