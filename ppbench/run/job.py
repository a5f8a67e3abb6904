"""What the controller and its workers tell each other: a job file and a journal.

The job file lists what to run. The journal is a file of JSON lines that rank 0 appends to; the
controller follows it for its display, and restarted workers read it to know what is left. Both
live in one folder per launch, beside the workers' logs.

    results/launches/<launch_id>/job.json
                                 journal.jsonl
                                 error-rank<r>.json   the exception that ended a rank
                                 logs/                what each worker printed
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ppbench.config.case import Case, Measure
from ppbench.run.environment import Commit

Event = dict[str, str | int | float | None]
EventName = Literal["case", "step", "round", "row", "end"]


@dataclass(frozen=True)
class Item:
    """One run to do."""

    case: Case
    measure: Measure
    launch: int
    resume_key: str


@dataclass(frozen=True)
class Job:
    """One launch's work and what every row of it carries."""

    results: str
    sweep_id: str
    sweep_name: str
    sweep_file: str
    commit: Commit | None
    items: tuple[Item, ...]


def write_job(folder: Path, job: Job) -> Path:
    folder.mkdir(parents=True)
    path = folder / "job.json"
    path.write_text(json.dumps(dataclasses.asdict(job)))
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
    # JSON has no tuples, and a case has no lists.
    settings = {key: tuple(v) if isinstance(v, list) else v for key, v in case.items()}
    return Item(Case(**settings), Measure(**measure), **data)  # type: ignore[arg-type]  # our own


class Journal:
    """Appended by rank 0, followed by the controller."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "journal.jsonl"
        self._offset = 0

    def append(self, event: EventName, **details: str | float | None) -> None:
        """In one write, begun on a new line: what a killed process left unfinished stays apart."""
        with self._path.open("a") as file:
            file.write("\n" + json.dumps({"event": event, **details}) + "\n")

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
                with contextlib.suppress(json.JSONDecodeError):  # empty, or cut short by a kill
                    yield json.loads(line)


CRASH = "a worker died without a Python error: it was killed, or crashed"
PEER_LOST = "crash"
"""Status of a rank that failed because another one had died. If no rank tells more, one crashed."""


@dataclass(frozen=True)
class RankError:
    """The exception that ended a rank."""

    rank: int
    at: float  # seconds since the epoch
    status: str
    message: str
    traceback: str


def write_rank_error(folder: Path, rank: int, status: str, error: BaseException) -> None:
    trace = "".join(traceback.format_exception(error))
    record = RankError(rank, time.time(), status, f"{type(error).__name__}: {error}", trace)
    path = folder / f"error-rank{rank}.json"
    aside = path.with_suffix(".partial")  # the agent may end this process at any moment
    aside.write_text(json.dumps(dataclasses.asdict(record)))
    aside.replace(path)


def take_rank_errors(folder: Path) -> list[RankError]:
    """Every rank's error, the cause first; their files are removed.

    The cause is the earliest error that does not merely tell that another rank is gone.
    """
    errors = []
    for path in folder.glob("error-rank*.json"):
        errors.append(RankError(**json.loads(path.read_text())))
        path.unlink()
    return sorted(errors, key=lambda error: (error.status == PEER_LOST, error.at))
