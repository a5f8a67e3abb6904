"""Progress of a sweep: live on a terminal, plain lines elsewhere.

Each case that has ended stands there with its figures, the current one with what is done in it, and
nothing is silent for more than five seconds. It is written to standard error, so that standard
output holds the results alone.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.spinner import Spinner
from rich.text import Text

from engine.flight import Phase
from ppbench.console import wrapped
from ppbench.display.cases import axis_text
from ppbench.errors import printable
from ppbench.run.job import PlannedRun
from ppbench.run.sweep.phases import WORDS
from ppbench.run.sweep.pulse import Pulse


class Display:
    """Shows the events of a sweep, in order; a method that is not overridden shows nothing."""

    is_waited_for = False
    """Whether the ranks wait, after each case, until its end has been shown."""

    def doing(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002  # for those that show it
        """Show what is done meanwhile, before the first case or after the last."""
        return nullcontext()

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None: ...
    def case_begins(self, index: int) -> None: ...
    def phase_begins(self, phase: Phase) -> None: ...
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
        by_kind: dict[tuple[object, ...], list[float]] = {}  # seconds of a step per token
        for index, (seconds, count) in self._steps.items():
            item = self._items[index]
            rate = seconds / count / item.case.max_tokens_per_step
            by_kind.setdefault(_kind(item), []).append(rate)
        known: dict[int, float | None] = {}  # of all steps of a run: by its own, else by its kind's
        for index in self._to_come:
            item, known[index] = self._items[index], None
            if index in self._steps:
                seconds, count = self._steps[index]
                known[index] = seconds / count * _num_steps(item)
            elif rates := by_kind.get(_kind(item)):
                tokens = item.case.max_tokens_per_step * _num_steps(item)
                known[index] = statistics.fmean(rates) * tokens
        if all(seconds is None for seconds in known.values()) and known:
            return None, True
        around = statistics.mean(self._around) if self._around else 0.0
        total = 0.0
        for index, steps_s in known.items():
            if index == self._current:
                passed_s = self._now() - self._began_at - self._steps.get(index, (0.0, 0))[0]
                total += (steps_s or 0.0) * (1 - self._share_done) + max(around - passed_s, 0.0)
            else:
                total += (steps_s or 0.0) + around
        return total, None in known.values()


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
    usual = ("schedule", "world_size", *(("replicas",) if item.case.replicas > 1 else ()))
    words = [axis_text(axis, settings[axis]) for axis in axes or usual]
    if item.measure.launches > 1:
        words.append(f"launch {item.launch} (0 to {item.measure.launches - 1})")
    return ", ".join(words)


def time_left(estimate: Estimate) -> str:
    """Return the time left as text: `1:30 left`, `1:30 or more left`, `-:-- left`."""
    seconds, has_more = estimate.seconds_left()
    if seconds is None:
        return "-:-- left"
    clock = f"{round(seconds) // 60}:{round(seconds) % 60:02d}"
    return f"{clock} or more left" if has_more else f"{clock} left"


class _ConsoleDisplay(Display):
    """A display that names cases and what is done in them, and estimates the time left."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def doing(self, what: str) -> AbstractContextManager[None]:
        return doing(what, self._console)

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None:
        self._items, self._axes, self._estimate = items, axes, Estimate(items)
        self._current, self._is_warm = -1, False

    def case_begins(self, index: int) -> None:
        self._current, self._is_warm = index, False
        self._estimate.begin(index)

    def _case(self, index: int) -> str:
        return describe(self._items[index], self._axes)

    def _in_phase(self, phase: Phase) -> str:
        """Name what is done in a phase; empty if it says nothing new."""
        if phase is not Phase.ALIGNS:
            return WORDS[phase]
        if self._is_warm:  # after the measured steps the clocks are aligned again
            return ""
        self._is_warm = True
        return f"measured step 1 of {self._items[self._current].measure.steps}"

    def _after(self, step: int, num_steps: int) -> str:
        """Name the step that follows the one that has just ended."""
        num_measured = self._items[self._current].measure.steps
        num_done = step - num_steps + num_measured  # of the measured ones, once it is warm
        if step >= num_steps:
            return "memory step"
        if self._is_warm or num_done > 1:  # 1 may be a warm-up step beyond those asked for
            return f"measured step {num_done + 1} of {num_measured}"
        return f"warm-up, step {step + 1}"


class PlainDisplay(_ConsoleDisplay):
    """Prints a line when a run begins and one when it ends, and others only to break a silence."""

    def __init__(self, console: Console, *, looks_by_itself: bool = False) -> None:
        """`looks_by_itself`: in a thread, which a process that measures should not have."""
        super().__init__(console)
        self._looks_by_itself = looks_by_itself
        say = functools.partial(console.print, highlight=False, markup=False, soft_wrap=True)
        self._pulse = Pulse(lambda text: say(printable(text)))

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None:
        super().begin(items, axes)
        self._pulse.doing("starting the ranks" if items else "")
        if self._looks_by_itself:
            self._pulse.start()

    def case_begins(self, index: int) -> None:
        super().case_begins(index)
        self._pulse.say(f"run {index + 1} of {len(self._items)}: {self._case(index)}")
        self._pulse.doing("building")

    def phase_begins(self, phase: Phase) -> None:
        if what := self._in_phase(phase):
            self._pulse.doing(what)

    def step_ends(self, step: int, num_steps: int, tokens_per_s: float, step_s: float) -> None:
        self._estimate.step(step, num_steps, step_s)
        self._pulse.doing(f"{self._after(step, num_steps)}, {tokens_per_s:,.0f} tokens/s")
        self._pulse.look()

    def case_ends(self, index: int, status: str, run_id: str, summary: str) -> None:
        self._estimate.finish(index)
        self._pulse.say(f"  {status}, {summary}, run {run_id}, {time_left(self._estimate)}")
        self._pulse.doing("ending the run")

    def end(self) -> None:
        self._pulse.stop()


class LiveDisplay(_ConsoleDisplay):
    """Shows a bar for all runs and what the current one does; above them each run that ended."""

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None:
        super().begin(items, axes)
        self._bar = Progress(
            BarColumn(bar_width=24),
            TextColumn("{task.completed} of {task.total} runs"),
            TextColumn("{task.fields[note]}", markup=False),
            console=self._console,
        )
        self._all = self._bar.add_task("", total=len(items), note="")
        self._now = Spinner("dots", Text("starting the ranks", no_wrap=True, overflow="ellipsis"))
        self._live = Live(Group(self._bar, self._now), console=self._console, refresh_per_second=4)
        self._width = max([len(self._case(index)) for index in range(len(items))], default=0)
        if items:  # else the sweep is done already
            self._live.start()

    def case_begins(self, index: int) -> None:
        super().case_begins(index)
        self._show("building")

    def phase_begins(self, phase: Phase) -> None:
        if what := self._in_phase(phase):
            self._show(what)

    def step_ends(self, step: int, num_steps: int, tokens_per_s: float, step_s: float) -> None:
        self._estimate.step(step, num_steps, step_s)
        self._show(f"{self._after(step, num_steps)}, {tokens_per_s:,.0f} tokens/s")
        self._bar.update(self._all, note=time_left(self._estimate))

    def case_ends(self, index: int, status: str, run_id: str, summary: str) -> None:
        self._estimate.finish(index)
        self._bar.update(self._all, advance=1, note=time_left(self._estimate))
        name = self._case(index).ljust(min(self._width, _WIDEST))
        line = f"{name}  {summary}" if status == "ok" else f"{name}  {status}: {summary} ({run_id})"
        text = wrapped(printable(line), self._console.file)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _show(self, what: str) -> None:
        text = f"{self._case(self._current)}: {what}" if self._current >= 0 else what
        self._now.update(text=Text(printable(text), no_wrap=True, overflow="ellipsis"))

    def end(self) -> None:
        self._live.stop()


_WIDEST = 48
"""Columns to which the names of cases are filled up, so that their figures stand in columns."""


def display_for(console: Console) -> Display:
    """Return the display of a controller's process, which measures nothing itself."""
    if console.is_terminal:
        return LiveDisplay(console)
    return PlainDisplay(console, looks_by_itself=True)


@contextmanager
def doing(what: str, console: Console) -> Iterator[None]:
    """Show what is being done meanwhile: at once on a terminal, elsewhere once it takes long."""
    if console.is_terminal:
        with console.status(Text(what)):
            yield
        return
    pulse = Pulse(lambda line: console.print(line, highlight=False, markup=False, soft_wrap=True))
    pulse.doing(what)
    pulse.start()
    try:
        yield
    finally:
        pulse.stop()
