"""Prose for the user: notes, and text wrapped at the width of a terminal.

Notes are lines that are not part of a command's results. They are records of the loggers `ppbench`
and `engine`. The command line prints all of them on standard error; a notebook or another program
handles them like any library's.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import sys
import textwrap
from typing import IO

from ppbench.errors import printable

_LOGGER = logging.getLogger("ppbench")
_LOGGERS = _LOGGER, logging.getLogger("engine")
_HANGING_INDENT = "  "
_COMMAND = re.compile(r"(?:^|(?<=: ))ppbench [a-z]+(?: .*)?$|\(ppbench [^()]*\)")
"""A command that ends a line or is in brackets. It is copied as a whole: no line break parts it."""
_NO_BREAK = "\0"


def note(text: str) -> None:
    """Log a line for the user."""
    _LOGGER.info("%s", printable(text))


def warn(problem: str) -> None:
    """Log a warning. Unlike a note, a program that has not set up logging prints it too."""
    _LOGGER.warning("warning: %s", printable(problem))


def width_of(stream: IO[str]) -> int | None:
    """The columns of a terminal, or those that COLUMNS says; None if nothing bounds the lines."""
    is_bounded = stream.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    return shutil.get_terminal_size().columns if is_bounded else None


def wrapped(text: str, stream: IO[str]) -> str:
    """Wrap lines that are wider than the terminal at words.

    Text for a pipe or a file stays, unless COLUMNS says how wide that is.
    """
    if (width := width_of(stream)) is None:
        return text
    from rich.cells import cell_len

    lines = []
    for line in text.split("\n"):
        if cell_len(line) <= width:
            lines.append(line)
            continue
        own = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            _COMMAND.sub(lambda found: found[0].replace(" ", _NO_BREAK), line.strip()),
            width,
            initial_indent=own,
            subsequent_indent=own + _HANGING_INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]  # a line of blanks alone
    return "\n".join(lines).replace(_NO_BREAK, " ")


def print_notes() -> None:
    """Print every note on standard error from now on."""
    for logger in _LOGGERS:
        logger.setLevel(logging.INFO)
        logger.propagate = False
        if not any(isinstance(handler, _StandardError) for handler in logger.handlers):
            logger.addHandler(_StandardError())


class _StandardError(logging.Handler):
    """Prints to the current `sys.stderr`, which may be replaced after this handler is made."""

    def emit(self, record: logging.LogRecord) -> None:
        print(wrapped(record.getMessage(), sys.stderr), file=sys.stderr, flush=True)
