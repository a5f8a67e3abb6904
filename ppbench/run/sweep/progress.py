"""Progress of a sweep: live bars on a terminal, plain lines elsewhere.

It is written to standard error, so that standard output holds the results alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from ppbench.errors import printable
from ppbench.run.job import PlannedRun


class Display:
    """Shows the events of a sweep, in order; a method that is not overridden shows nothing."""

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None: ...
    def case_begins(self, index: int) -> None: ...
    def step_ends(self, step: int, num_steps: int, tokens_per_s: float, step_s: float) -> None: ...
    def case_ends(self, index: int, status: str, run_id: str, summary: str) -> None: ...
    def end(self) -> None: ...


class Estimate:
    """Estimates the time left: the steps of each run to come, and the time around the steps.

    A step's time is taken from the runs of its kind so far: runs with sequences of one length, or
    runs over the same data with the same limit to lengths that vary. Only within a kind is a step's
    time proportional to its tokens: sequences of varying length are mostly far shorter than the
    limit. The time around the steps is the mean of the finished runs.
    """

    def __init__(self, items: list[PlannedRun], now: Callable[[], float] = time.monotonic) -> None:
        self._items, self._now = items, now
        self._to_come = set(range(len(items)))
        self._current: int | None = None
        self._began_at = now()
        self._share_done = 0.0
        self._steps: dict[int, tuple[float, int]] = {}  # by run: seconds of its steps, their number
        self._around: list[float] = []  # each finished run's time without its steps

    def begin(self, index: int) -> None:
        """Begin a run; the one before it has ended or will be begun again."""
        self._current, self._share_done, self._began_at = index, 0.0, self._now()
        self._steps.pop(index, None)

    def step(self, step: int, num_steps: int, step_s: float) -> None:
        """Count a step of the current run, and the seconds that it took."""
        if self._current is not None:
            seconds, count = self._steps.get(self._current, (0.0, 0))
            self._steps[self._current] = (seconds + step_s, count + 1)
            self._share_done = step / num_steps

    def finish(self, index: int) -> None:
        """End a run, whatever its status."""
        steps_s, _ = self._steps.get(index, (0.0, 0))
        if index == self._current:
            self._around.append(max(self._now() - self._began_at - steps_s, 0.0))
        self._to_come.discard(index)
        self._current = None

    def seconds_left(self) -> tuple[float | None, bool]:
        """Return the seconds left, None if unknown; and whether runs of an unseen kind are left."""
        rates = self._rates()
        known = {index: self._steps_seconds(index, rates) for index in self._to_come}
        if all(seconds is None for seconds in known.values()) and known:
            return None, True
        around = statistics.mean(self._around) if self._around else 0.0
        total = 0.0
        for index, seconds in known.items():
            is_current = index == self._current
            total += (seconds or 0.0) * (1 - self._share_done if is_current else 1)
            total += max(around - self._passed_around(), 0.0) if is_current else around
        return total, None in known.values()

    def _passed_around(self) -> float:
        """Return the seconds of the current run that were not its steps."""
        current = -1 if self._current is None else self._current
        steps_s, _ = self._steps.get(current, (0.0, 0))
        return self._now() - self._began_at - steps_s

    def _rates(self) -> dict[tuple[object, ...], float]:
        """Return, by kind, the seconds of a step per token: the mean over the runs seen."""
        by_kind: dict[tuple[object, ...], list[float]] = {}
        for index, (seconds, count) in self._steps.items():
            item = self._items[index]
            rate = seconds / count / item.case.max_tokens_per_step
            by_kind.setdefault(_kind(item), []).append(rate)
        return {kind: statistics.fmean(rates) for kind, rates in by_kind.items()}

    def _steps_seconds(self, index: int, rates: Mapping[tuple[object, ...], float]) -> float | None:
        """Return the time of all steps of a run, from its own steps if any, else from its kind."""
        item = self._items[index]
        if index in self._steps:
            seconds, count = self._steps[index]
            return seconds / count * _num_steps(item)
        rate = rates.get(_kind(item))
        if rate is None:
            return None
        return rate * item.case.max_tokens_per_step * _num_steps(item)


def _num_steps(item: PlannedRun) -> int:
    """Return the number of steps of a run that report their progress."""
    return item.measure.warmup_steps + item.measure.steps


def _kind(item: PlannedRun) -> tuple[object, ...]:
    """Return the key of the runs whose steps take time in proportion to their tokens."""
    case = item.case
    if isinstance(case.seq_len, int):
        return ()
    return case.data_source, case.data_max_seq_len, case.data_tokenizer


def describe(item: PlannedRun, axes: tuple[str, ...]) -> str:
    """Name the settings that distinguish a run from the others of its sweep."""
    settings = {**item.case.settings(), **item.measure.settings()}
    words = [f"{axis} {settings[axis]}" for axis in axes or ("schedule", "world_size")]
    if item.measure.launches > 1:
        words.append(f"launch {item.launch + 1} of {item.measure.launches}")
    return ", ".join(words)


def time_left(estimate: Estimate) -> str:
    """Return the time left as text: `1:30 left`, `1:30 or more left`, `-:-- left`."""
    seconds, has_more = estimate.seconds_left()
    if seconds is None:
        return "-:-- left"
    clock = f"{round(seconds) // 60}:{round(seconds) % 60:02d}"
    return f"{clock} or more left" if has_more else f"{clock} left"


class _ConsoleDisplay(Display):
    """A display that names cases and estimates the time left."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None:
        self._items, self._axes, self._estimate = items, axes, Estimate(items)

    def _title(self, index: int) -> str:
        words = describe(self._items[index], self._axes)
        return f"case {index + 1} of {len(self._items)}: {words}"


class PlainDisplay(_ConsoleDisplay):
    """Prints a line when a case begins and one when it ends; steps would only fill a log."""

    def case_begins(self, index: int) -> None:
        self._estimate.begin(index)
        self._say(self._title(index))

    def step_ends(
        self,
        step: int,
        num_steps: int,
        tokens_per_s: float,  # noqa: ARG002  # for displays that show it
        step_s: float,
    ) -> None:
        self._estimate.step(step, num_steps, step_s)

    def case_ends(self, index: int, status: str, run_id: str, summary: str) -> None:
        self._estimate.finish(index)
        self._say(f"  {status}, {summary}, run {run_id}, {time_left(self._estimate)}")

    def _say(self, text: str) -> None:
        self._console.print(printable(text), highlight=False, markup=False, soft_wrap=True)


class LiveDisplay(_ConsoleDisplay):
    """Shows a bar for all cases and one for the current case's steps."""

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None:
        super().begin(items, axes)
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
        self._estimate.begin(index)
        self._progress.update(self._all, description=self._title(index))
        self._progress.reset(self._steps, description="step", note="", visible=True)

    def step_ends(self, step: int, num_steps: int, tokens_per_s: float, step_s: float) -> None:
        self._estimate.step(step, num_steps, step_s)
        self._progress.update(
            self._steps,
            completed=step,
            total=num_steps,
            description=f"step {step} of {num_steps}",
            note=f"{tokens_per_s:,.0f} tokens/s",
        )
        self._progress.update(self._all, note=time_left(self._estimate))

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
