"""The messages between the controller and its workers: a job file and a journal.

The job file lists the runs. The journal is a file of JSON lines that rank 0 appends to; the
controller follows it for its display, and restarted workers read it to know which runs are left.
Before and after the ranks, the controller appends to it too. Both are in one folder per launch,
beside the workers' logs.

    results/launches/<launch_id>/job.json
                                 journal.jsonl
                                 program-0.json       of run 0, where its schedule is auto
                                 running              exists, locked, while runs are left
                                 stop                 exists when its ranks are to end
                                 supervisor.log       what their supervisor printed
                                 logs/                standard output and error of each rank
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from engine.plan.program import Program, from_json, to_json
from ppbench.config.case import Case, Measure
from ppbench.errors import StoreError
from ppbench.files import POLL_S, whole_file
from ppbench.git import Commit

Event = dict[str, str | int | float | None]
EventName = Literal["case", "phase", "step", "focus", "turn", "left", "row", "round"]


@dataclass(frozen=True)
class PlannedRun:
    """One run of a sweep: a case, how it is measured, and which launch of it this is."""

    case: Case
    measure: Measure
    launch: int
    resume_key: str
    position: int = 0  # among all runs of the sweep, in the order of its file


@dataclass(frozen=True)
class Job:
    """One launch's runs, and the values that are the same in all their rows."""

    launch_id: str
    results: str
    sweep_id: str
    sweep_name: str
    sweep_file: str
    commit: Commit | None
    items: tuple[PlannedRun, ...]
    is_shown_first: bool = False  # whether each row is shown before the next case begins


def write_job(folder: Path, job: Job) -> Path:
    """Write the job file of a launch; return its path. Raises StoreError."""
    path = folder / "job.json"
    with whole_file(path) as file:
        file.write(json.dumps(dataclasses.asdict(job)).encode())
    return path


def read_job(path: Path) -> Job:
    data = json.loads(path.read_text())
    items = tuple(
        PlannedRun(
            Case(**_frozen(item.pop("case"))), Measure(**item.pop("measure")), **_frozen(item)
        )
        for item in data.pop("items")
    )
    commit = data.pop("commit")
    return Job(**data, items=items, commit=None if commit is None else Commit(**commit))


def _frozen(data: dict[str, Any]) -> dict[str, Any]:
    """Turn lists into tuples: JSON has no tuples, and a frozen value no lists."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}


def keep_program(folder: Path, index: int, program: Program) -> None:
    """Hand the program that was found for a run of a launch over to its ranks."""
    with whole_file(_program_file(folder, index)) as file:
        file.write(to_json(program).encode())


def kept_program(folder: Path, index: int) -> Program:
    """The program of a run that was kept. Raises OSError, ValueError."""
    return from_json(_program_file(folder, index).read_text())


def _program_file(folder: Path, index: int) -> Path:
    return folder / f"program-{index}.json"


class Journal:
    """The events of a launch: rank 0 appends them, and the controller follows them."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "journal.jsonl"
        self._offset = 0

    def add(self, event: Event) -> None:
        """Append an event by one write that starts on a new line.

        So it is separate from a line that a killed process left unfinished. Raises StoreError.
        """
        try:
            with self._path.open("a") as file:
                file.write("\n" + json.dumps(event) + "\n")
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror}") from error

    def new_events(self) -> Iterator[Event]:
        """Yield the events since the last call, except a line that is still being written."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                with contextlib.suppress(ValueError):  # empty, or cut short by a kill
                    yield json.loads(line)


@dataclass(frozen=True)
class Attempt:
    """An attempt at a run, noted in the journal when it begins."""

    index: int  # of its item
    run_id: str
    attempt: int  # number of the item's attempts in the launch so far, this one included


@dataclass(frozen=True)
class LaunchState:
    """Progress of a launch, according to its journal."""

    is_open: tuple[Attempt, ...]  # begun and without a row
    focus: int | None  # the item that the ranks worked on last
    attempts: dict[int, int]  # item -> how often it has begun
    statuses: dict[int, str]  # item -> status of its newest row
    num_rows: int
    num_shown: int  # of these rows


def read_state(folder: Path) -> LaunchState:
    begun: dict[str, Attempt] = {}
    attempts: dict[int, int] = {}
    statuses: dict[int, str] = {}
    num_rows, num_shown, focus = 0, 0, None
    for event in Journal(folder).new_events():
        if event["event"] == "case":
            index = int(event["index"] or 0)
            attempts[index] = attempts.get(index, 0) + 1
            begun[str(event["run_id"])] = Attempt(index, str(event["run_id"]), attempts[index])
            focus = index
        elif event["event"] == "focus":
            focus = int(event["index"] or 0)
        elif event["event"] == "left":  # it was alive beside another that failed
            attempts[begun.pop(str(event["run_id"])).index] -= 1
        elif event["event"] == "row":
            begun.pop(str(event["run_id"]), None)
            statuses[int(event["index"] or 0)] = str(event["status"])
            num_rows += 1
        elif event["event"] == "shown":
            num_shown += 1
    return LaunchState(tuple(begun.values()), focus, attempts, statuses, num_rows, num_shown)


_STOP = "stop"


def ask_to_stop(folder: Path) -> None:
    """Ask the ranks of a launch to end after the present round, and to keep what they have."""
    (folder / _STOP).touch()


def is_asked_to_stop(folder: Path) -> bool:
    """Return whether the ranks of a launch were asked to end."""
    return (folder / _STOP).exists()


def wait_until_shown(folder: Path) -> None:
    """Block until the controller has shown every row that the journal has."""
    while (state := read_state(folder)).num_shown < state.num_rows:
        time.sleep(POLL_S)


def note_node_folders(launch: Path, folders: Iterable[tuple[str, Path]]) -> None:
    """Note a launch's node folders, each with its host."""
    for host, folder in folders:
        Journal(launch).add({"event": "node", "host": host, "folder": str(folder)})


def noted_node_folders(launch: Path) -> list[Path]:
    """Return the launch's node folders on this machine that are still there."""
    notes = [event for event in Journal(launch).new_events() if event["event"] == "node"]
    here = {Path(str(note["folder"])) for note in notes if note["host"] == platform.node()}
    return sorted(folder for folder in here if folder.is_dir())
