"""Runs a sweep without a controller: rank 0 plans it, holds its locks and reports its progress.

    python -m ppbench.run.launch.supervisor --nodes N ... -m ppbench.run.worker SWEEP.toml [OPTIONS]

One start makes one launch, the first with missing runs. It continues when the supervisors restart
the ranks; when they give up, the same command, started again, continues it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from ppbench.config.conditions import parse_only
from ppbench.config.reader import read_sweep
from ppbench.errors import UsageError
from ppbench.files import Lock
from ppbench.run.job import Event, Job, Journal, read_job, read_state, write_job
from ppbench.run.machine.environment import default_device
from ppbench.run.sweep.automatic import Found, find_programs, hand_over
from ppbench.run.sweep.control import job_of, num_ranks_of
from ppbench.run.sweep.open_runs import RUNNING, running_note
from ppbench.run.sweep.plan import (
    Choice,
    exclusive_plan,
    forget_rerun,
    note_rerun,
    note_sweep,
)
from ppbench.run.sweep.progress import PlainDisplay
from ppbench.store import Store, check_writable


class Headless:
    """Rank 0's side of a sweep without a controller; it sends the other ranks the job."""

    def __init__(self, arguments: Sequence[str]) -> None:
        """Read the command line. Raises UsageError."""
        parser = argparse.ArgumentParser(prog="ppbench.run.worker", allow_abbrev=False)

        def refuse(message: str) -> NoReturn:
            what = f"ppbench.run.worker: {message}"
            raise UsageError(f"{what}; expected SWEEP.toml and options")

        parser.error = refuse  # type: ignore[method-assign]
        parser.add_argument("file", type=Path)
        parser.add_argument("--results", type=Path, default=Path("results"))
        parser.add_argument("--rerun", action="store_true")
        parser.add_argument("--retry-failed", action="store_true")
        for option in ("--set", "--only"):
            parser.add_argument(option, action="append", default=[], metavar="KEY=VALUE")
        self._given = parser.parse_args(arguments)
        self._store = Store(self._given.results)
        self._held = contextlib.ExitStack()
        self._display = PlainDisplay(Console(stderr=True))

    def open(self, num_ranks: int) -> Job:
        """Return the launch to make, or to go on with; without items if there is nothing to do.

        Blocks while another sweep measures on this machine into the same store. Raises UsageError,
        StoreError.
        """
        given, store = self._given, self._store
        read = read_sweep(given.file, given.set, default_device())
        check_writable(given.results, "--results")
        choice = Choice(given.rerun, given.retry_failed, parse_only(given.only, default_device()))
        job: Job | None = None
        for marker in (store.folder / "launches").glob(f"*/{RUNNING}"):
            if Lock(marker).holder() == _supervisor():  # the ranks were restarted
                self._hold(marker)
                job = read_job(marker.with_name("job.json"))
                break
        plan = self._plan = self._held.enter_context(
            exclusive_plan(
                read,
                store,
                choice,
                lambda holder: _say(f"waiting for {holder or 'another sweep'}"),
                _supervisor(),
            )
        )
        found: Found = {}
        if job is None:  # the first launch that has a run missing
            first = plan.missing[0].launch if plan.missing else 0
            indices = [i for i, item in enumerate(plan.missing) if item.launch == first]
            job = job_of(plan, [plan.missing[i] for i in indices], store, self._display)
            cases = [item.case for item in job.items if item.case.is_automatic]
            find_programs(cases, read.facts, store.folder, found)
            if indices:
                write_job(self.folder_of(job), job)
                hand_over(job, self.folder_of(job), found)
                self._hold(self.folder_of(job) / RUNNING)
        needed = num_ranks_of(job.items)
        if needed > num_ranks:
            raise UsageError(
                f"{given.file}: a case needs {needed} ranks, and {num_ranks} were started; "
                "start more nodes or more processes on each, or leave it out with --only"
            )
        note_sweep(plan, store, command=None)
        if given.rerun:
            note_rerun(plan, store)
        self._display.begin(list(job.items), read.axes)
        if found:
            for event in Journal(self.folder_of(job)).new_events():  # of cases without a program
                self.show(event)
        return job

    def _hold(self, marker: Path) -> None:
        self._marker = Lock(marker)
        self._marker.try_to_hold(shared=True, note=_supervisor())

    def folder_of(self, job: Job) -> Path:
        return self._store.folder / "launches" / job.launch_id

    def show(self, event: Event) -> None:
        self._display.show(event)

    def close(self, job: Job) -> None:
        """End the launch: report its result and the number of runs left."""
        if job.items:
            progress = read_state(self.folder_of(job))
            num_ok = sum(status == "ok" for status in progress.statuses.values())
            _say(f"{num_ok} of {len(job.items)} runs of this launch are ok; see: ppbench report")
            self._marker.path.unlink(missing_ok=True)
        ours = {item.launch for item in job.items}
        if left := sum(item.launch not in ours for item in self._plan.missing):
            _say(f"{left} runs of further launches are left: start the same command again")
        else:
            forget_rerun(self._plan, self._store)
        self._held.close()


def _supervisor() -> str:
    """Return a unique name of this node's supervisor: its process id and when it was started."""
    parent = os.getppid()
    began = ""
    with contextlib.suppress(OSError):
        began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return running_note(f"supervisor {parent} of {began}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
