"""Files of a store that cannot be used as they are: which, why, and what to do about each.

The reading layer finds damage, leaves the file out and goes on; each file left out is one record.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

Skip = Callable[[str], None]
"""Receives a problem as a line of text."""
_MOST_RUNS_NAMED = 3
_LONGEST_REASON = 200
MEASURE_AGAIN = "remove it, and measure again with: ppbench sweep FILE"
"""The fix for a file whose rows are lost."""


class DamagedError(Exception):
    """A file of the store cannot be used; the message is the reason."""

    def __init__(self, reason: object, fix: str = MEASURE_AGAIN) -> None:
        super().__init__(brief(reason))
        self.fix = fix


@dataclass(frozen=True)
class DamagedFile:
    """A file of the store, or some rows of it, that was left out."""

    path: Path
    table: str
    reason: str
    run_ids: tuple[str, ...] = ()
    """The runs whose rows are lost; empty where that is unknown."""
    fix: str = MEASURE_AGAIN

    def __str__(self) -> str:
        return f"{self.path}: damaged, {self._lost()} left out: {self.reason}; {self.fix}"

    def _lost(self) -> str:
        rows = f"its rows of {self.table}"
        if not self.run_ids or self.run_ids == (self.path.stem,):
            return f"{rows} are"
        return f"{rows} for {names_of(self.run_ids)} are"


def names_of(run_ids: Iterable[str]) -> str:
    """A few runs by name, and how many more there are."""
    ids = list(run_ids)
    few = ", ".join(ids[:_MOST_RUNS_NAMED])
    more = len(ids) - _MOST_RUNS_NAMED
    return f"run{'s' if len(ids) > 1 else ''} {few}" + (f" and {more} more" if more > 0 else "")


def brief(reason: object) -> str:
    """The first line of an error, of bounded length, its control characters escaped."""
    text = str(reason) or type(reason).__name__
    line = next((line for line in text.splitlines() if line.strip()), text).strip().rstrip(".")
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return plain if len(plain) <= _LONGEST_REASON else f"{plain[: _LONGEST_REASON - 1]}…"


class ConsoleNote:
    """Prints each problem of a store once, as a warning on stderr."""

    def __init__(self) -> None:
        self._printed: set[str] = set()

    def __call__(self, problem: str) -> None:
        """Print the problem unless that was done."""
        if problem not in self._printed:
            self._printed.add(problem)
            print(f"warning: {problem}", file=sys.stderr)
