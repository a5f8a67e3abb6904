"""A line on what is being done whenever nothing has been printed for a while."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

SILENCE_S = 5.0
"""Longest time without a line."""
_LOOK_S = 0.5


class Pulse:
    """Says what is being done, and for how long, after so many seconds of silence.

    Lines that are said through it and its own never mix. Started, it looks by itself; else only
    when `look` is called.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        silence_s: float = SILENCE_S,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._say, self._silence_s, self._now = say, silence_s, now
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._what, self._began_s, self._spoke_s = "", now(), now()

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True, name="pulse").start()

    def stop(self) -> None:
        """Say nothing more."""
        self._ended.set()
        with self._lock:
            self._what = ""

    def doing(self, what: str) -> None:
        """Note what is being done from now on."""
        with self._lock:
            if what != self._what:
                self._what, self._began_s = what, self._now()

    def say(self, line: str) -> None:
        """Print a line of the caller's."""
        with self._lock:
            self._say(line)
            self._spoke_s = self._now()

    def look(self) -> None:
        """Say what is being done if there was silence for long enough."""
        with self._lock:
            now = self._now()
            if self._what and now - self._spoke_s >= self._silence_s:
                self.say(f"  {self._what}, {now - self._began_s:.0f} s")

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_S):
            self.look()
