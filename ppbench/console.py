"""Notes: lines for the user that are not part of a command's results.

They are records of the logger `ppbench`. The command line prints all of them on standard error; a
notebook or another program handles them like any library's.
"""

from __future__ import annotations

import logging
import sys

from ppbench.errors import printable

_LOGGER = logging.getLogger("ppbench")


def note(text: str) -> None:
    """Log a line for the user."""
    _LOGGER.info("%s", printable(text))


def warn(problem: str) -> None:
    """Log a warning. Unlike a note, a program that has not set up logging prints it too."""
    _LOGGER.warning("warning: %s", printable(problem))


def print_notes() -> None:
    """Print every note on standard error from now on."""
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.propagate = False
    if not any(isinstance(handler, _StandardError) for handler in _LOGGER.handlers):
        _LOGGER.addHandler(_StandardError())


class _StandardError(logging.Handler):
    """Prints to the current `sys.stderr`, which may be replaced after this handler is made."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)
