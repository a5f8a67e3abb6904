"""The record of files of a store that cannot be read.

The reader leaves such files out and continues; each of them is one `DamagedFile`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ppbench.console import warn

Skip = Callable[[str], None]
"""A function that receives a problem as a line of text."""
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
    """A file of the store that was left out."""

    path: Path
    table: str
    reason: str
    run_ids: tuple[str, ...] = ()
    """The runs whose rows are lost; empty where that is unknown."""
    fix: str = MEASURE_AGAIN

    def __str__(self) -> str:
        rows = f"its rows of {self.table}"
        return f"{self.path}: damaged, {rows} are left out: {self.reason}; {self.fix}"


def brief(reason: object) -> str:
    """The first line of an error, of bounded length, its control characters escaped."""
    text = str(reason) or type(reason).__name__
    line = next((line for line in text.splitlines() if line.strip()), text).strip().rstrip(".")
    plain = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    return plain if len(plain) <= _LONGEST_REASON else f"{plain[: _LONGEST_REASON - 1]}…"


class ConsoleNote:
    """Warns once of each problem of a store."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, problem: str) -> None:
        """Warn unless that was done."""
        if problem not in self._seen:
            self._seen.add(problem)
            warn(problem)
