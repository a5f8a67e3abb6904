"""What the controller and its workers tell each other: a job file and a journal.

The job file lists what to run. The journal is a file of JSON lines that rank 0 appends to; the
controller follows it for its display, and restarted workers read it to know what is left. Both
live in one folder per launch, beside the workers' logs.

    results/launches/<launch_id>/job.json
                                 journal.jsonl
                                 running              there while it has work; locked by who does it
                                 logs/                what each worker printed
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ppbench.config.case import Case, Measure
from ppbench.errors import StoreError
from ppbench.files import whole_file
from ppbench.repository import Commit

Event = dict[str, str | int | float | None]
EventName = Literal["case", "step", "round", "row", "end"]


@dataclass(frozen=True)
class Item:
    """One run to do."""

    case: Case
    measure: Measure
    launch: int
    resume_key: str
    position: int = 0  # among all runs of the sweep, in the order of its file
    references: tuple[str, ...] = ()  # resume keys of the engine's runs of the same, for agreement


@dataclass(frozen=True)
class Job:
    """One launch's work and what every row of it carries."""

    launch_id: str
    results: str
    sweep_id: str
    sweep_name: str
    sweep_file: str
    commit: Commit | None
    items: tuple[Item, ...]


def write_job(folder: Path, job: Job) -> Path:
    """Raises StoreError."""
    path = folder / "job.json"
    with whole_file(path) as file:
        file.write(json.dumps(dataclasses.asdict(job)).encode())
    return path


def read_job(path: Path) -> Job:
    data = json.loads(path.read_text())
    items = tuple(_read_item(item) for item in data.pop("items"))
    commit = data.pop("commit")
    return Job(**data, items=items, commit=None if commit is None else Commit(**commit))


def _read_item(data: dict[str, object]) -> Item:
    case, measure = data.pop("case"), data.pop("measure")
    assert isinstance(case, dict)
    assert isinstance(measure, dict)
    return Item(Case(**_frozen(case)), Measure(**measure), **_frozen(data))


def _frozen(data: dict[str, Any]) -> dict[str, Any]:
    """JSON has no tuples, and what is frozen no lists."""
    return {key: tuple(v) if isinstance(v, list) else v for key, v in data.items()}


class Journal:
    """Appended by rank 0, followed by the controller."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "journal.jsonl"
        self._offset = 0

    def append(self, event: EventName, **details: str | float | None) -> None:
        self.add({"event": event, **details})

    def add(self, event: Event) -> None:
        """In one write, begun on a new line: what a killed process left unfinished stays apart.

        Raises StoreError.
        """
        try:
            with self._path.open("a") as file:
                file.write("\n" + json.dumps(event) + "\n")
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be written: {error.strerror}") from error

    def new_events(self) -> Iterator[Event]:
        """Events since the last call; a line still being written is left for the next one."""
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
class Begun:
    """A run that the journal says has begun."""

    index: int  # of its item
    run_id: str
    attempt: int  # which try of the item this is in the launch, from 1


@dataclass(frozen=True)
class Progress:
    """How far a launch has come, by its journal."""

    is_open: tuple[Begun, ...]  # begun and without a row
    attempts: dict[int, int]  # item -> how often it was begun
    statuses: dict[int, str]  # item -> of its newest row


def read_progress(folder: Path) -> Progress:
    begun: dict[str, Begun] = {}
    attempts: dict[int, int] = {}
    statuses: dict[int, str] = {}
    for event in Journal(folder).new_events():
        if event["event"] == "case":
            index = int(event["index"] or 0)
            attempts[index] = attempts.get(index, 0) + 1
            begun[str(event["run_id"])] = Begun(index, str(event["run_id"]), attempts[index])
        elif event["event"] == "row":
            begun.pop(str(event["run_id"]), None)
            statuses[int(event["index"] or 0)] = str(event["status"])
    return Progress(tuple(begun.values()), attempts, statuses)
