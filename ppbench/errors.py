"""Every error that a user can cause, with the exit code that the command line gives it.

    PpbenchError
    ├── UsageError            2  something that was typed: a command line, a path, a run id
    │   ├── SweepFileError    2  a sweep file, with file, line and key
    │   ├── RepositoryError   2  a git repository, or what is not in it
    │   └── NotMeasuredError  3  what is to be compared has no runs
    ├── StoreError            2  the results folder cannot be read or written
    ├── LaunchError           4  the workers could not be started
    └── SweepInterruptedError 130  stopped from the keyboard or by a signal

A message says what, where, what was expected and the fix, in that order.

The text of any exception is bounded and printable before it is stored or shown:

    describe(error)       "RuntimeError: not today", with the causes that it names
    readable(text, most)  head and tail of a long text, with every control character escaped
    system_problem(error) what the system refused, on one line, with the fix
"""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator
from enum import IntEnum

LONGEST_WORD = 100
"""Longest word that is spell-checked, in characters: difflib is quadratic in its length."""
LONGEST_LINE = 500
"""Most characters of an error's first line that a list or a headline shows."""


class ExitCode(IntEnum):
    """Every exit code of a command."""

    ok = 0
    regression = 1
    inexact = 1  # `ppbench models check`: a split model differs from the unsplit one
    usage = 2
    insufficient = 3  # too few launches, or none, for an answer
    failed_runs = 4
    interrupted = 130


class PpbenchError(Exception):
    """An error that the user sees as its message alone; `exit_code` ends the process."""

    exit_code = ExitCode.usage


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
    """A side of a comparison, such as a commit, has no runs in the store."""

    exit_code = ExitCode.insufficient


def no_runs_in(folder: object) -> UsageError:
    """The error for a store without runs, or that does not exist, whichever command reads it."""
    return UsageError(f"{folder}: no runs here yet; start with: ppbench sweep FILE")


class StoreError(PpbenchError):
    """The results folder cannot be read or written."""


class LaunchError(PpbenchError):
    """The workers could not be started, or ended before their work was done."""

    exit_code = ExitCode.failed_runs


class SweepInterruptedError(PpbenchError):
    """The sweep was stopped; the message says what is kept and how to go on."""

    exit_code = ExitCode.interrupted


def nearest(word: str, known: Iterable[str], listed: Iterable[str] | None = None) -> str:
    """`; did you mean "x"? Known: a, b`, to end a message about an unknown word.

    `listed` replaces `known` in the list where those are too many.
    """
    names = list(known)
    by_lower = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(word[:LONGEST_WORD].lower(), by_lower, n=1)
    hint = f'; did you mean "{by_lower[close[0]]}"?' if close else "."
    return f"{hint} Known: {', '.join(names if listed is None else listed)}"


def first_line(text: object) -> str:
    """The first line of an error, cut to `LONGEST_LINE` characters."""
    return shortened(str(text).strip().partition("\n")[0].rstrip(), LONGEST_LINE)


def shortened(text: str, length: int) -> str:
    """Cut a text to this many characters, with an ellipsis at the end if it is cut."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


MOST_OF_MESSAGE = 4_000
MOST_OF_TRACE = 8_000
MOST_OF_ERROR = 40_000
"""Most characters stored of an exception's message, of its traceback, of a run's whole error."""
_MOST_CAUSES = 3
_MOST_OF_CAUSE = 500
_NOTICE = 200

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e"
    "\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3\U0001d173-\U0001d17a"
    "\U000e0001\U000e0020-\U000e007f]"
)
"""Unicode's categories Cc (except newline and tab), Cf, Cs, Zl and Zp."""
_SURROGATE = re.compile("[\ud800-\udfff]")


def printable(text: str) -> str:
    """The text with control characters escaped; newlines and tabs stay."""
    return _UNSAFE.sub(_escaped, text.replace("\r\n", "\n"))


def encodable(text: str) -> str:
    """The text with lone surrogates escaped, as of a path that is not UTF-8."""
    return _SURROGATE.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def bounded(text: str, most: int = MOST_OF_MESSAGE, log: str = "") -> str:
    """Shorten a text to `most` characters: its head, the number left out, and its tail.

    `log` names the file that has the whole text.
    """
    if len(text) <= most:
        return text
    head = (most - _NOTICE) * 2 // 3
    tail = most - _NOTICE - head
    where = f"; the whole is in {log}" if log else ""
    notice = f"[{len(text) - head - tail:,} characters left out{where}]"[: _NOTICE - 2]
    return f"{text[:head]}\n{notice}\n{text[-tail:]}"


def readable(text: str, most: int = MOST_OF_MESSAGE, log: str = "") -> str:
    """Shorten a text and escape its control characters."""
    return bounded(printable(bounded(text, most, log)), most, log)


def describe(error: BaseException, log: str = "") -> str:
    """`Type: message`, with the members of an exception group and the explicit causes."""
    text = _message(error, MOST_OF_MESSAGE, log)
    if isinstance(error, BaseExceptionGroup):
        leaves = list(_leaves(error))
        members = [_message(leaf, _MOST_OF_CAUSE) for leaf in leaves[:_MOST_CAUSES]]
        rest = [f"and {len(leaves) - _MOST_CAUSES} more"] if len(leaves) > _MOST_CAUSES else []
        text = f"{text}: {'; '.join([*members, *rest])}"
    causes: list[BaseException] = []
    cause = error.__cause__
    while cause is not None and cause not in (error, *causes) and len(causes) < _MOST_CAUSES:
        causes.append(cause)
        cause = cause.__cause__
    text = "; caused by ".join([text, *(_message(cause, _MOST_OF_CAUSE) for cause in causes)])
    return bounded(printable(text), 3 * MOST_OF_MESSAGE, log)


def _message(error: BaseException, most: int, log: str = "") -> str:
    name, text = type(error).__name__, str(error)
    return f"{name}: {bounded(text, most, log)}" if text else name


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """The members of a group and of its inner groups that are not groups themselves."""
    if isinstance(error, BaseExceptionGroup):
        for member in error.exceptions:
            yield from _leaves(member)
    else:
        yield error


def chain_of(error: BaseException, *, has_contexts: bool = True) -> Iterator[BaseException]:
    """Yield the exception, its members and all their causes, each once; and their contexts."""
    pending, seen = [error], set[int]()
    while pending:
        first = pending.pop(0)
        if id(first) in seen:
            continue
        seen.add(id(first))
        yield first
        members = first.exceptions if isinstance(first, BaseExceptionGroup) else ()
        is_left_out = first.__suppress_context__ or not has_contexts
        context = None if is_left_out else first.__context__
        pending += filter(None, (*members, first.__cause__, context))


_FIXES = {
    errno.EMFILE: "raise the limit with: ulimit -n 65536",
    errno.ENOSPC: "make room on the disk, or choose another place",
    errno.EDQUOT: "make room within the quota, or choose another place",
    errno.EACCES: "change its permissions, or choose another place",
    errno.EPERM: "change its permissions, or choose another place",
    errno.EROFS: "choose another place",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOTDIR: "a part of the path is a file; choose another place",
}


def fix_of(number: int | None) -> str:
    """`; choose a shorter path`, to end a message with; empty if no fix is known."""
    fix = _FIXES.get(number or 0)
    return "" if fix is None else f"; {fix}"


def system_problem(error: BaseException) -> str | None:
    """What the system refused, where, and the fix; None for an error of another kind."""
    for linked in chain_of(error):
        if isinstance(linked, OSError) and linked.errno is not None:
            words = f"{linked.strerror or os.strerror(linked.errno)}{fix_of(linked.errno)}"
            if linked.filename is None or isinstance(linked.filename, int):
                return words
            return f"{os.fsdecode(linked.filename)}: {words}"
        if isinstance(linked, MemoryError):
            return "out of memory; free some"
    return None
