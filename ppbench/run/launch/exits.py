"""How workers ended: written by their agent as it happens, read by whoever accounts for it.

    <launch's folder>/exits.jsonl    a line for each worker that ended of itself

Workers that the agent ends because another one has failed are not in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path

FILE = "exits.jsonl"
MOST_WORDS = 2_000
"""Bytes of a worker's log that may tell why it died."""


@dataclass(frozen=True)
class Exit:
    """How a worker ended."""

    attempt: int  # how often the workers had been restarted
    rank: int
    pid: int
    exitcode: int  # of a signal, its negative number
    at: float  # seconds since the epoch
    at_ns: int = 0  # the same moment on the machine's monotonic clock; 0 where it is not known

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}) {self.how}"

    @property
    def how(self) -> str:
        """Such as `was ended by SIGKILL`."""
        if self.exitcode >= 0:
            return f"ended with exit code {self.exitcode}"
        return f"was ended by {signal_name(-self.exitcode)}"


def signal_name(number: int) -> str:
    """`SIGKILL`; a real-time signal has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def note_exit(folder: Path, ended: Exit) -> None:
    """In one write: a line is whole, or the agent was killed in the middle of it."""
    with (folder / FILE).open("a") as file:
        file.write(json.dumps(dataclasses.asdict(ended)) + "\n")


def read_exits(folder: Path) -> list[Exit]:
    """Those of workers that failed, in the order in which the agent saw them."""
    return [one for one in read_ends(folder) if one.exitcode != 0]


def read_ends(folder: Path) -> list[Exit]:
    """Those of all workers, also with exit code 0, in the order in which the agent saw them."""
    try:
        lines = (folder / FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    exits = []
    for line in lines:
        with contextlib.suppress(ValueError):  # cut short by a kill
            exits.append(Exit(**json.loads(line)))
    return exits


def last_words(folder: Path, ended: Exit) -> str:
    """The end of what a worker wrote to standard error; empty if there is no such log."""
    for path in folder.glob(f"logs/*/attempt_{ended.attempt}/{ended.rank}/stderr.log"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(-min(path.stat().st_size, MOST_WORDS), os.SEEK_END)
            return file.read().decode(errors="replace").strip()
    return ""


def first_exit(folder: Path) -> Exit | None:
    """The failure that ended the newest start of the workers, as far as the agent can tell."""
    exits = read_exits(folder)
    newest = max((one.attempt for one in exits), default=0)
    return min((one for one in exits if one.attempt == newest), key=lambda e: e.at, default=None)
