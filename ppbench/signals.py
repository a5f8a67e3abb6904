"""Holds signals back where an exception of a handler would be lost, or would end the process."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals that ask a process to end."""


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Call the handlers of signals that end a process after this block, and not within it.

    Blocking them would not do: another thread takes a signal that is blocked in this one, and the
    main thread calls its handler all the same. Only the main thread does, so others need nothing.
    """
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        received.append(number)

    handlers = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in ENDING}
    handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for one in received:
            signal.raise_signal(signal.Signals(one))
