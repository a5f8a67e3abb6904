"""Accounts for runs that have begun and have no row, because their ranks died.

By rank 0 when the agent has started the workers anew; by the controller when they will not be
started again; and for a launch that was killed as a whole by the next sweep into the same store.
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
from ppbench.config.possible import check_file_unchanged
from ppbench.errors import StoreError, first_line
from ppbench.run.durations import lowered_of
from ppbench.run.evidence import Evidence, collect, forget, judge, node_folders
from ppbench.run.job import Begun, Event, Job, Journal, read_job, read_progress
from ppbench.run.locks import POLL_S, Lock
from ppbench.run.private_folder import KEPT
from ppbench.run.rows import write_failure
from ppbench.store import Store

RUNNING = "running"
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Closed:
    """A run that was accounted for."""

    begun: Begun
    status: str
    summary: str

    @property
    def event(self) -> Event:
        """As the journal has it."""
        details: Event = {"run_id": self.begun.run_id, "status": self.status}
        return {"event": "row", "index": self.begun.index, **details, "summary": self.summary}


def close_open_runs(
    job: Job, folder: Path, nodes: Sequence[Evidence], *, is_interrupted: bool = False
) -> list[Closed]:
    """Give each a row, and the journal the news. `is_interrupted`: they were ended from outside.

    A run whose row was stored before its ranks died has that. Raises StoreError.
    """
    closed = []
    for begun in read_progress(folder).is_open:
        one = _close(job, begun, nodes, is_interrupted=is_interrupted)
        Journal(folder).add(one.event)
        closed.append(one)
    return closed


def _close(job: Job, begun: Begun, nodes: Sequence[Evidence], *, is_interrupted: bool) -> Closed:
    stored = Store(Path(job.results)).table("runs", [begun.run_id])
    if len(stored):
        status = str(stored["status"].iloc[0])
        return Closed(begun, status, "its workers died after it was stored")
    item = job.items[begun.index]
    judgement = judge(
        nodes,
        _lowered(item.case),
        begun.index,
        item.measure.timeout_s,
        is_interrupted=is_interrupted,
    )
    write_failure(job, item, begun, judgement)
    return Closed(begun, judgement.status, first_line(judgement.error))


def _lowered(case: Case) -> Program | None:
    """None where the program cannot be built, or is another by now: its file is gone or changed."""
    try:
        check_file_unchanged(case)
        return lowered_of(case)
    except Exception:
        return None


def close_abandoned(store: Store, ours: str | None = None) -> list[Closed]:
    """Account for launches that were killed with everything that could do it. Raises StoreError.

    Those of other machines that are still at work are left alone; on this one there should be none
    but `ours`, by its note: one that this process goes on with.
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
    """Who makes a launch, for its marker."""
    return f"{process} on {platform.node()}"


def take_marker(marker: Lock) -> bool:
    """Waits for processes of this machine: they were killed, and are about to be gone."""
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
        forget(local)
    shutil.rmtree(folder / KEPT, ignore_errors=True)
    return closed
