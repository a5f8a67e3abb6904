"""Writes a failure row for every run that has begun and has no row, because its ranks died.

Rank 0 does so when the agent has started the workers anew, the controller when they will not be
started again, and the next sweep into the same store for a launch that was killed as a whole.
"""

from __future__ import annotations

import dataclasses
import platform
import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.plan.program import Program
from ppbench.config.case import Case
from ppbench.config.programs import check_file_unchanged, lowered_of
from ppbench.errors import StoreError, first_line
from ppbench.files import POLL_S, Lock
from ppbench.run.failures.evidence import CrashReport, collect, diagnose, node_folders
from ppbench.run.job import Attempt, Event, Job, Journal, read_job, read_state
from ppbench.run.machine.private_folder import KEPT, remove_folder
from ppbench.run.records import write_failure
from ppbench.run.verification.exchange import FOLDER
from ppbench.store import Store

RUNNING = "running"
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Closed:
    """A run that was open and has a row now."""

    begun: Attempt
    status: str
    summary: str

    @property
    def event(self) -> Event:
        """Return the event for the journal."""
        details: Event = {"run_id": self.begun.run_id, "status": self.status}
        return {"event": "row", "index": self.begun.index, **details, "summary": self.summary}


def close_open_runs(
    job: Job, folder: Path, nodes: Sequence[CrashReport], *, is_interrupted: bool = False
) -> list[Closed]:
    """Write a row and an event for each open run; `is_interrupted`: it was ended from outside.

    A run whose row was stored before its ranks died keeps that. Raises StoreError.
    """
    closed = []
    for begun in read_state(folder).is_open:
        one = _close(job, begun, nodes, is_interrupted=is_interrupted)
        Journal(folder).add(one.event)
        closed.append(one)
    return closed


def _close(
    job: Job, begun: Attempt, nodes: Sequence[CrashReport], *, is_interrupted: bool
) -> Closed:
    stored = Store(Path(job.results)).table("runs", [begun.run_id])
    if len(stored):
        status = str(stored["status"].iloc[0])
        return Closed(begun, status, "its workers died after it was stored")
    item = job.items[begun.index]
    judgement = diagnose(
        nodes,
        _lowered(item.case),
        begun.index,
        item.measure.timeout_s,
        is_interrupted=is_interrupted,
    )
    write_failure(job, item, begun, judgement)
    return Closed(begun, judgement.status, first_line(judgement.error))


def _lowered(case: Case) -> Program | None:
    """Return None where the program cannot be built, or its file is gone or has changed."""
    try:
        check_file_unchanged(case)
        return lowered_of(case)
    except Exception:
        return None


def close_abandoned(store: Store, ours: str | None = None) -> list[Closed]:
    """Close the open runs of launches that were killed with their controller. Raises StoreError.

    Launches of other machines that are still at work are left alone; on this machine there should
    be none except `ours`, given by its note: one that this process goes on with.
    """
    closed: list[Closed] = []
    for marker in sorted((store.folder / "launches").glob(f"*/{RUNNING}")):
        lock = Lock(marker)
        if lock.holder() != ours and take_marker(lock):
            closed += _close_launch(marker.parent)
            marker.unlink(missing_ok=True)
            lock.release()
    return closed


def running_note(process: str) -> str:
    """Return the note in a launch's marker: which process makes it."""
    return f"{process} on {platform.node()}"


def take_marker(marker: Lock) -> bool:
    """Whether the marker is held now. Raises StoreError.

    Waits for processes of this machine: they were killed, and are about to be gone.
    """
    until_s = time.monotonic() + PATIENCE_S
    while not marker.try_to_hold():
        if not marker.holder().endswith(running_note("")):
            return False
        if time.monotonic() > until_s:
            raise StoreError(
                f"{marker.path}: {marker.holder()} works on without its sweep; end it first"
            )
        time.sleep(POLL_S)
    return True


def _close_launch(folder: Path) -> Iterable[Closed]:
    try:
        job = read_job(folder / "job.json")
    except (OSError, ValueError, TypeError, KeyError):  # killed before it was written, or older
        return []
    folders = node_folders(job.launch_id, folder)
    nodes = [collect(local, folder) for local in folders]
    # A path in the job is relative to where that sweep was started.
    here = dataclasses.replace(job, results=str(folder.parents[1]))
    closed = close_open_runs(here, folder, nodes, is_interrupted=True)
    for local in folders:
        remove_folder(local)
    for left in (KEPT, FOLDER):
        shutil.rmtree(folder / left, ignore_errors=True)
    return closed
