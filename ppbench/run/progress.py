"""What the user sees while a sweep runs: a live line on a terminal, plain lines elsewhere.

Written to standard error, so that standard output holds the results alone.
"""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from ppbench.error_text import printable
from ppbench.run.job import Item


class Display(Protocol):
    """Told of what happens, in order."""

    def begin(self, items: list[Item], axes: tuple[str, ...]) -> None: ...
    def case_begins(self, index: int) -> None: ...
    def step_ends(self, step: int, num_steps: int, tokens_per_s: float) -> None: ...
    def case_ends(self, index: int, status: str, run_id: str, summary: str) -> None: ...
    def end(self) -> None: ...


class _Estimate:
    """Time left, from the time per token so far; cases differ mostly in their tokens."""

    def __init__(self, items: list[Item]) -> None:
        self._weights = [_tokens(item) for item in items]
        self._done = 0.0
        self._started_at = time.monotonic()

    def finish(self, index: int) -> None:
        self._done += self._weights[index]

    def seconds_left(self, index: int, share: float) -> float | None:
        done = self._done + self._weights[index] * share
        if done == 0:
            return None
        elapsed = time.monotonic() - self._started_at
        return elapsed / done * (sum(self._weights) - done)


def _tokens(item: Item) -> float:
    """All steps of the run, and two for building the model and measuring memory."""
    num_steps = item.measure.warmup_steps + item.measure.steps + 2
    return float(item.case.max_tokens_per_step * num_steps)


def describe(item: Item, axes: tuple[str, ...]) -> str:
    """The settings that tell a run from the others of its sweep."""
    settings = {**item.case.settings(), **item.measure.settings()}
    words = [f"{axis} {settings[axis]}" for axis in axes or ("schedule", "world_size")]
    if item.measure.launches > 1:
        words.append(f"launch {item.launch + 1} of {item.measure.launches}")
    return ", ".join(words)


def _clock_time(seconds: float | None) -> str:
    if seconds is None:
        return "-:--"
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class PlainDisplay:
    """One line when a case begins and one when it ends; steps would only fill a log."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, items: list[Item], axes: tuple[str, ...]) -> None:
        self._items, self._axes, self._estimate = items, axes, _Estimate(items)

    def case_begins(self, index: int) -> None:
        words = describe(self._items[index], self._axes)
        self._say(f"case {index + 1} of {len(self._items)}: {words}")

    def step_ends(self, step: int, num_steps: int, tokens_per_s: float) -> None:
        pass

    def case_ends(self, index: int, status: str, run_id: str, summary: str) -> None:
        self._estimate.finish(index)
        left = _clock_time(self._estimate.seconds_left(index, 0))
        self._say(f"  {status}, {summary}, run {run_id}, {left} left")

    def end(self) -> None:
        pass

    def _say(self, text: str) -> None:
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


class LiveDisplay:
    """A bar over all cases and one over the current case's steps."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, items: list[Item], axes: tuple[str, ...]) -> None:
        self._items, self._axes, self._estimate = items, axes, _Estimate(items)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[note]}", markup=False),
            console=self._console,
            refresh_per_second=4,
        )
        self._all = self._progress.add_task("starting workers", total=len(items), note="")
        self._steps = self._progress.add_task("step", total=1, note="", visible=False)
        self._progress.start()

    def case_begins(self, index: int) -> None:
        self._index = index
        words = describe(self._items[index], self._axes)
        self._progress.update(
            self._all, description=f"case {index + 1} of {len(self._items)}: {words}"
        )
        self._progress.reset(self._steps, description="step", note="", visible=True)

    def step_ends(self, step: int, num_steps: int, tokens_per_s: float) -> None:
        left = _clock_time(self._estimate.seconds_left(self._index, step / num_steps))
        self._progress.update(
            self._steps,
            completed=step,
            total=num_steps,
            description=f"step {step} of {num_steps}",
            note=f"{tokens_per_s:,.0f} tokens/s",
        )
        self._progress.update(self._all, note=f"{left} left")

    def case_ends(self, index: int, status: str, run_id: str, summary: str) -> None:
        self._estimate.finish(index)
        self._progress.update(self._all, advance=1)
        if status != "ok":
            words = describe(self._items[index], self._axes)
            line = f"{status}: {words} (run {run_id}): {summary}"
            self._progress.console.print(printable(line), markup=False, soft_wrap=True)

    def end(self) -> None:
        self._progress.stop()


def display_for(console: Console) -> Display:
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)
