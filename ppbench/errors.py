"""Every error that a user can cause, with the exit code that the command line gives it.

    PpbenchError
    ├── UsageError            2  something that was typed: a command line, a path, a run id
    │   ├── SweepFileError    2  a sweep file, with file, line and key
    │   ├── RepositoryError   2  a git repository, or what is not in it
    │   └── NotMeasuredError  3  what is to be compared has no runs
    ├── StoreError            2  the results folder cannot be read or written
    ├── LaunchError           4  the workers could not be started
    └── SweepInterruptedError 130  stopped from the keyboard, or told to end

A message says what, where, what was expected and the fix, in that order.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_WORD = 100
"""Of a word that a known one is looked for by: comparing takes time with the square of it."""
LONGEST_LINE = 500
"""Characters of an error's first line that a list or a headline shows."""


class PpbenchError(Exception):
    """Shown to the user as its message alone; `exit_code` is the process's."""

    exit_code = 2


class UsageError(PpbenchError):
    """Something on the command line cannot be used."""


class SweepFileError(UsageError):
    """A sweep file cannot be used: `file:line: key: problem`."""

    def __init__(self, file: str, line: int | None, key: str | None, problem: str) -> None:
        where = file if line is None else f"{file}:{line}"
        super().__init__(": ".join(part for part in (where, key, problem) if part))


class RepositoryError(UsageError):
    """No git repository, or it does not have what was asked for."""


class NotMeasuredError(UsageError):
    """A commit, or what else is to be compared, has no runs in the store."""

    exit_code = 3


class StoreError(PpbenchError):
    """The results folder cannot be read or written."""


class LaunchError(PpbenchError):
    """The workers could not be started or ended without doing their work."""

    exit_code = 4


class SweepInterruptedError(PpbenchError):
    """The sweep was stopped; the message says what is kept and how to go on."""

    exit_code = 130


def nearest(word: str, known: Iterable[str], listed: Iterable[str] | None = None) -> str:
    """`; did you mean "x"? Known: a, b` for the end of a message about an unknown word.

    `listed` are the words to list where `known` are too many.
    """
    names = list(known)
    by_lower = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(word[:LONGEST_WORD].lower(), by_lower, n=1, cutoff=0.5)
    hint = f'; did you mean "{by_lower[close[0]]}"?' if close else "."
    return f"{hint} Known: {', '.join(names if listed is None else listed)}"


def first_line(text: object) -> str:
    """The first line of an error, cut where it is long; its trace or a log comes after."""
    line = str(text).strip().partition("\n")[0].rstrip()
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 1]}…"
