"""Shows what a command is doing, on standard error: a live line on a terminal, else plain lines."""

from __future__ import annotations

import time
from typing import Self

from rich.console import Console
from rich.markup import escape

from ppbench.commits.bench import Progress
from ppbench.console import wrapped
from ppbench.display.units import counted, duration

_SHOWN = ("waiting for ", "warning: ", "setup: ")
"""Prefixes of a sweep's lines that are shown even without a live line."""


class LiveProgress(Progress):
    """A progress on standard error, live inside its `with` block."""

    def __init__(self, first: str = "looking at what is stored", *, is_shown: bool = True) -> None:
        self._is_shown = is_shown
        self._console = Console(stderr=True)
        self._status = self._console.status(first)
        self._what = self._said = ""
        self._seconds: list[float] = []
        self._began_s = 0.0

    def __enter__(self) -> Self:
        if self._is_shown and self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._status.stop()

    def begin(self, what: str, num_left: int | None = None) -> None:
        left = ""
        if num_left is not None:
            left = f", {counted(num_left, 'start')} left with this one"
            if self._seconds:
                seconds = sum(self._seconds) / len(self._seconds) * num_left
                left += f", about {duration(seconds)}"
        self._what, self._began_s = what + left, time.monotonic()
        self.show(f"{self._what}: starting")
        if not self._console.is_terminal:
            self.say(self._what)

    def end(self, outcome: str) -> None:
        self._seconds.append(time.monotonic() - self._began_s)
        self.say(f"{self._what}: {outcome}" if self._console.is_terminal else f"  {outcome}")

    def note(self, line: str) -> None:
        self.show(f"{self._what}: {line.strip()}")
        if not self._console.is_terminal and line.startswith(_SHOWN):
            self.say(f"  {line}")

    def show(self, text: str, said: str = "") -> None:
        """Show what is done now; where there is no live line, `said` is printed once."""
        self._status.update(escape(text))
        if said not in ("", self._said) and not self._console.is_terminal:
            self._said = said
            self.say(said)

    def say(self, text: str) -> None:
        text = wrapped(text, self._console.file)
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)
