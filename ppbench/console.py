"""Notes to whoever runs a command: lines beside its results, which never go into them.

They are records of the logger `ppbench`. The command line prints them all on standard error; a
notebook or another program decides for itself, as with any library's.
"""

from __future__ import annotations

import logging
import sys

from ppbench.errors import printable

_LOGGER = logging.getLogger("ppbench")


def note(text: str) -> None:
    """Log a line for people."""
    _LOGGER.info("%s", printable(text))


def print_notes() -> None:
    """Print every note on standard error from now on."""
    _LOGGER.setLevel(logging.INFO)
    _LOGGER.propagate = False
    if not any(isinstance(handler, _StandardError) for handler in _LOGGER.handlers):
        _LOGGER.addHandler(_StandardError())


class _StandardError(logging.Handler):
    """Prints on what is standard error at that moment."""

    def emit(self, record: logging.LogRecord) -> None:
        print(record.getMessage(), file=sys.stderr, flush=True)
