"""A node's private folder: what its supervisor has seen, and what its ranks leave behind.

    ppbench-<launch>-<random>/events.jsonl     what happened, by the supervisor alone
                              samples.jsonl    the node's load, memory and accelerators
                              start-0/         the ranks that were started first: flight records,
                              start-1/         errors, stacks of crashes; those started next; ...

It is in shared memory if that has room. A launch notes its folders in the store: where all its
processes are killed at once, the next sweep into that store reads them and removes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ppbench.errors import StoreError

START_FOLDER = "PPBENCH_START_FOLDER"
"""Environment variable of a rank, with the folder of its start."""
ASKS = "PPBENCH_SAMPLES"
"""Environment variable of a rank: descriptor of a node's first rank, where it asks for samples."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # a folder that is made there is private
ROOM_BYTES = 16 * 2**20
"""Free memory from which on the folder is there: a node's samples, and the records of 80 ranks."""
ALIVE, STOPPED, DEAD = "alive", "stopped", "dead"
_EVENTS, _START = "events.jsonl", "start-"


def make_node_folder(launch_id: str = "") -> Path:
    """Make a node's folder. Raises StoreError where none can be made."""
    memory = None
    with contextlib.suppress(OSError):  # there is none
        has_room = shutil.disk_usage(SHARED_MEMORY).free >= ROOM_BYTES
        memory = SHARED_MEMORY if has_room and os.access(SHARED_MEMORY, os.W_OK) else None
    try:
        return Path(tempfile.mkdtemp(prefix=f"ppbench-{launch_id}-", dir=memory))
    except OSError as error:
        raise StoreError(
            f"no folder for the ranks' flight records can be made: {error}; set TMPDIR to a folder "
            "of your own"
        ) from error


def remove_node_folder(node: Path) -> None:
    shutil.rmtree(node, ignore_errors=True)


def start_folder(node: Path, start: int) -> Path:
    """Return the folder for the files of the ranks that are started for the nth time."""
    return node / f"{_START}{start}"


def folder_of_rank() -> Path:
    """Return where this rank keeps its files."""
    return Path(os.environ[START_FOLDER])


def number_of(start: Path) -> int:
    """Return the number of a start, by its folder."""
    return int(start.name.removeprefix(_START))


def flight_path(start: Path, rank: int) -> Path:
    return start / f"flight-rank{rank}"


def samples_path(node: Path) -> Path:
    return node / "samples.jsonl"


def last_start(node: Path, before: int | None = None) -> Path | None:
    """Return the folder of the newest start whose ranks have come so far as to leave records.

    With `before`, only earlier starts count. None if there is no such start.
    """
    starts = sorted(node.glob(f"{_START}*"), key=number_of, reverse=True)
    for start in starts:
        if (before is None or number_of(start) < before) and any(start.glob("flight-rank*")):
            return start
    return None


@dataclass(frozen=True)
class Started:
    """The ranks were started, for the nth time."""

    start: int


@dataclass(frozen=True)
class Exit:
    """A rank whose process ended by itself; those that the supervisor ended have none."""

    start: int
    rank: int
    pid: int
    exitcode: int  # the negative number of the signal, if one ended it
    at_ns: int  # on the node's monotonic clock
    log: str = ""  # file of its standard error; empty where it has no log of its own


@dataclass(frozen=True)
class Ending:
    """Why the supervisor ended the ranks of a start, and the states that they were in."""

    start: int
    cause: str  # `exit`, `timeout`, `elsewhere` (on another node) or `stopped` (from outside)
    at_ns: int  # on the node's monotonic clock
    states: dict[int, str]  # rank -> `alive`, `stopped` or `dead`
    oom_kills: int = 0  # processes of any launch that the kernel killed for memory just then


@dataclass
class Events:
    """What a node's supervisor has noted."""

    num_starts: int = 0
    exits: list[Exit] = field(default_factory=list)  # in the order in which they were seen
    endings: list[Ending] = field(default_factory=list)

    def first_failure(self) -> Exit | None:
        """Return the rank that failed first in the newest start that had a failure."""
        failures = [one for one in self.exits if one.exitcode != 0]
        return next((one for one in failures if one.start == failures[-1].start), None)


def note(node: Path, event: Started | Exit | Ending) -> None:
    """Append a line by one write: it is whole unless the supervisor was killed meanwhile."""
    line = json.dumps({"event": type(event).__name__, **dataclasses.asdict(event)}) + "\n"
    try:
        file = os.open(node / _EVENTS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(file, line.encode())
        os.close(file)
    except OSError as error:  # no room, or the folder is gone: the supervisor's log has it
        print(f"{node / _EVENTS}: cannot be written: {error}: {line}", flush=True)


def read_events(node: Path) -> Events:
    """Return what has been noted so far; nothing where there is no file."""
    events = Events()
    try:
        lines = (node / _EVENTS).read_text().splitlines()
    except OSError:
        return events
    for line in lines:
        with contextlib.suppress(ValueError):  # cut short by a kill
            details = json.loads(line)
            match details.pop("event"):
                case "Started":
                    events.num_starts += 1
                case "Exit":
                    events.exits.append(Exit(**details))
                case "Ending":
                    states = {int(rank): state for rank, state in details.pop("states").items()}
                    events.endings.append(Ending(states=states, **details))
    return events


def signal_name(number: int) -> str:
    """Return a signal's name such as `SIGKILL`; a real-time signal has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
