"""The machine, the software and the commit on which a benchmark's figures depend."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from ppbench.errors import RepositoryError
from ppbench.git import Repository
from ppbench.run.machine.environment import read_environment

ROOT = Path(__file__).parents[1]
OWN_FILES = ("benchmarks/results", "benchmarks/README.md")
"""Files that benchmarks write, which do not count as changes of the code."""


@dataclass(frozen=True)
class Surroundings:
    """Machine, software, code and date, read when a benchmark begins."""

    date: str
    commit: str | None  # None outside a repository
    is_dirty: bool
    cpu: str
    num_cores: int
    memory_gib: float
    platform: str
    python: str
    torch: str
    load: float  # runnable processes, mean of the minute before

    def in_words(self) -> str:
        """The surroundings as a line of the page."""
        code = (self.commit or "no commit")[:12] + (", with changes" if self.is_dirty else "")
        return (
            f"{self.date}, commit {code}; {self.cpu}, {self.num_cores} cores, "
            f"{self.memory_gib:.0f} GiB, load {self.load:.1f} at the start; {self.platform}, "
            f"Python {self.python}, torch {self.torch}"
        )


def read_surroundings() -> Surroundings:
    """Read the surroundings; called first, while the load is still that of other processes."""
    machine = read_environment()
    commit, is_dirty = _commit()
    return Surroundings(
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        commit=commit,
        is_dirty=is_dirty,
        cpu=machine.cpu,
        num_cores=machine.num_cores,
        memory_gib=round(machine.memory_bytes / 2**30, 1),
        platform=machine.platform,
        python=machine.python,
        torch=machine.torch,
        load=os.getloadavg()[0],
    )


def _commit() -> tuple[str | None, bool]:
    try:
        state = Repository.around(ROOT).state(excluded=OWN_FILES)
    except RepositoryError:
        return None, False
    return state.commit, state.is_dirty
