"""Progress of a sweep: live on a terminal, plain lines elsewhere.

    journal of rank 0 --events--> Display.show

Each case that has ended stands there with its figures, the current one with what is done in it, and
nothing is silent for more than five seconds. It is written to standard error, so that standard
output holds the results alone.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.spinner import Spinner
from rich.text import Text

from engine.flight import Phase
from ppbench.console import wrapped
from ppbench.display.cases import axis_text
from ppbench.display.fields import figure
from ppbench.display.units import is_missing, size
from ppbench.errors import printable
from ppbench.run.job import Event, PlannedRun

if TYPE_CHECKING:
    from ppbench.run.sweep.plan import SweepPlan
    from ppbench.store import Store

PHASES = {
    Phase.CONNECTS: "connecting the ranks",
    Phase.BUILDS: "building",
    Phase.VERIFIES: "verifying",
    Phase.PEAK: "warm-up",
    Phase.MEMORY: "memory step",
    Phase.PROFILES: "profile",
    Phase.GATHERS: "storing",
    Phase.STORES: "storing",
}
"""The phases that are noted and shown; none of them is inside a step."""
SILENCE_S = 5.0
"""Longest time without a line."""
_LOOK_S = 0.5
_WIDEST = 48
"""Columns to which the names of cases are filled up, so that their figures stand in columns."""


class Display:
    """Shows the events of a sweep, in order; this one shows nothing."""

    is_waited_for = False
    """Whether the ranks wait, after each case, until its end has been shown."""

    def doing(self, what: str) -> AbstractContextManager[None]:  # noqa: ARG002  # for those that show it
        """Show what is done meanwhile, before the first case or after the last."""
        return nullcontext()

    def plans(self, plan: SweepPlan, store: Store) -> None:
        """Show that a sweep into a store begins, as planned."""

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None:
        """Show that these runs begin; the index of an event counts them."""

    def show(self, event: Event) -> None:
        """Show an event of the journal."""

    def end(self) -> None:
        """Show nothing more of these runs."""


class Estimate:
    """Estimates the time left: the runs to open, the turns to come, and the runs to close.

    Opening and closing a run takes the mean of those so far. A turn takes the run's own step time
    for each of its steps. A run that has not shown one has that of its kind, in proportion to its
    tokens: runs with sequences of one length, or runs over the same data with the same limit to
    lengths that vary. Sequences of varying length are mostly far shorter than the limit.
    """

    def __init__(self, items: list[PlannedRun], now: Callable[[], float] = time.monotonic) -> None:
        self._items, self._now = items, now
        self._to_open, self._to_close = set(range(len(items))), set(range(len(items)))
        self._opened_s: list[float] = []
        self._closed_s: list[float] = []
        self._step_s: dict[int, float] = {}  # of each run that has shown one
        self._turns_done: dict[int, int] = {}
        self._current: int | None = None  # the run that is being opened
        self._since = now()  # the last begin, turn or end

    def begin(self, index: int) -> None:
        """Begin to open a run; what was open before and has not ended begins anew."""
        took_s = self._passed_s()
        if self._current is not None:
            self._opened_s.append(took_s)
        self._current = index
        self._to_open.discard(index)
        self._turns_done.pop(index, None)

    def step(self, step_s: float) -> None:
        """Note the seconds of a warm-up step of the run that is being opened."""
        if self._current is not None:
            self._step_s[self._current] = step_s

    def turn(self, index: int, turn: int, step_s: float) -> None:
        """Note that a run has had its turn with this number, and the seconds of its steps."""
        took_s = self._passed_s()
        if self._current is not None:
            steps_s = step_s * (1 + self._items[index].measure.turns[turn])
            self._opened_s.append(max(took_s - steps_s, 0.0))
            self._current = None
        self._step_s[index], self._turns_done[index] = step_s, turn + 1

    def finish(self, index: int) -> None:
        """End a run, whatever its status."""
        took_s = self._passed_s()
        (self._closed_s if self._current is None else self._opened_s).append(took_s)
        self._current = None
        self._to_open.discard(index)
        self._to_close.discard(index)

    def seconds_left(self) -> tuple[float | None, bool]:
        """Return the seconds left, None if unknown; and whether runs of an unseen kind are left."""
        by_kind: dict[tuple[object, ...], list[float]] = {}  # seconds of a step per token
        for index, step_s in self._step_s.items():
            item = self._items[index]
            by_kind.setdefault(_kind(item), []).append(step_s / item.case.max_tokens_per_step)
        known: dict[int, float | None] = {}  # seconds of the turns to come
        for index in self._to_close:
            item, of_own = self._items[index], self._step_s.get(index)
            left = item.measure.turns[self._turns_done.get(index, 0) :]
            if of_own is None and (rates := by_kind.get(_kind(item))):
                of_own = statistics.fmean(rates) * item.case.max_tokens_per_step
            known[index] = None if of_own is None else of_own * sum(1 + num for num in left)
        if known and all(seconds is None for seconds in known.values()):
            return None, True
        to_open_s, to_close_s = (
            statistics.mean(took) if took else 0.0 for took in (self._opened_s, self._closed_s)
        )
        total = sum(seconds or 0.0 for seconds in known.values())
        total += len(self._to_open) * to_open_s + len(self._to_close) * to_close_s
        if self._current is not None:
            total += max(to_open_s - (self._now() - self._since), 0.0)
        return total, None in known.values()

    def _passed_s(self) -> float:
        now = self._now()
        passed_s, self._since = now - self._since, now
        return passed_s


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
    if item.measure.budget:
        words.append(f"launch {item.launch}")
    elif item.measure.launches > 1:
        words.append(f"launch {item.launch} (0 to {item.measure.launches - 1})")
    return ", ".join(words)


def time_left(estimate: Estimate) -> str:
    """Return the time left as text: `1:30 left`, `1:30 or more left`, `-:-- left`."""
    seconds, has_more = estimate.seconds_left()
    if seconds is None:
        return "-:-- left"
    clock = f"{round(seconds) // 60}:{round(seconds) % 60:02d}"
    return f"{clock} or more left" if has_more else f"{clock} left"


def figures_text(run: Mapping[str, Any]) -> str:
    """Return the figures of a run that its line shows when it has ended, from its row."""
    peak = run["peak_memory_bytes"]
    parts = [
        figure("tokens_per_s", run["tokens_per_s"]),
        f"bubble {figure('bubble_fraction', run['bubble_fraction'])}",
        "" if is_missing(peak) else f"peak {size(peak)}",
        str(run["cautions"] or "").replace(",", ", "),
    ]
    return ", ".join(part for part in parts if part)


class _ConsoleDisplay(Display):
    """A display that names cases, and estimates the time left."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def doing(self, what: str) -> AbstractContextManager[None]:
        return doing(what, self._console)

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None:
        self._items, self._estimate = items, Estimate(items)
        self._names = [describe(item, axes) for item in items]
        self._current = -1

    def show(self, event: Event) -> None:
        index = int(event.get("index", self._current) or 0)
        speed, step_s = float(event.get("tokens_per_s") or 0), float(event.get("step_s") or 0)
        match event["event"]:
            case "case":
                self._current = index
                self._estimate.begin(index)
                self._case_begins(index)
                self._now(index, "building")
            case "phase":
                self._now(index, str(event["what"]))
            case "step":
                step, num_steps = int(event["step"] or 0), int(event["num_steps"] or 1)
                self._estimate.step(step_s)
                # There may be more steps of warm-up than were asked for.
                is_within = step < num_steps
                what = (
                    f"warm-up, step {step + 1}" if is_within else f"after {step} steps of warm-up"
                )
                self._now(index, f"{what}, {speed:,.0f} tokens/s")
            case "turn":
                turn, num_turns = int(event["turn"] or 0), int(event["num_turns"] or 1)
                self._estimate.turn(index, turn, step_s)
                what = f"round {turn + 1} of {num_turns}, {speed:,.0f} tokens/s"
                self._now(index, f"{what}, {time_left(self._estimate)}")
            case "row":
                self._estimate.finish(index)
                status, run_id = str(event["status"]), str(event["run_id"])
                self._case_ends(index, status, run_id, str(event["summary"]))
                self._now(-1, "ending the run")

    def _case_begins(self, index: int) -> None: ...
    def _case_ends(self, index: int, status: str, run_id: str, summary: str) -> None: ...

    def _now(self, index: int, what: str) -> None:
        """Show what a run does now; −1: all of them."""


class PlainDisplay(_ConsoleDisplay):
    """Prints a line when a run begins and one when it ends, and others only to break a silence."""

    def __init__(
        self,
        console: Console,
        *,
        looks_by_itself: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`looks_by_itself`: in a thread, which a process that measures should not have."""
        super().__init__(console)
        self._looks_by_itself, self._clock = looks_by_itself, clock
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._what, self._began_s, self._spoke_s = "", clock(), clock()

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None:
        super().begin(items, axes)
        if items:
            self.start("starting the ranks")

    def start(self, what: str) -> None:
        """Say from now on that this is being done."""
        self._is_over.clear()
        self._now(-1, what)
        if self._looks_by_itself:
            threading.Thread(target=self._look_on, daemon=True, name="progress").start()

    def _look_on(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            self.look()

    def look(self) -> None:
        """Say what is being done if there was silence for long enough."""
        with self._lock:
            now = self._clock()
            if not self._is_over.is_set() and now - self._spoke_s >= SILENCE_S:
                self._say(f"  {self._what}, {now - self._began_s:.0f} s")

    def _now(self, index: int, what: str) -> None:
        with self._lock:
            what = what if index < 0 else f"{self._names[index]}: {what}"
            if what != self._what:
                self._what, self._began_s = what, self._clock()
        if not self._looks_by_itself:
            self.look()

    def _case_begins(self, index: int) -> None:
        with self._lock:
            self._say(f"run {index + 1} of {len(self._items)}: {self._names[index]}")

    def _case_ends(self, index: int, status: str, run_id: str, summary: str) -> None:
        text = f"{self._names[index]}: {status}, {summary}, run {run_id}"
        with self._lock:
            self._say(f"  {text}, {time_left(self._estimate)}")

    def _say(self, line: str) -> None:
        """Print a line, while the lock is held: lines never mix."""
        self._console.print(printable(line), highlight=False, markup=False, soft_wrap=True)
        self._spoke_s = self._clock()

    def end(self) -> None:
        with self._lock:
            self._is_over.set()


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
        self._doing = Spinner("dots")
        self._live = Live(
            Group(self._bar, self._doing), console=self._console, refresh_per_second=4
        )
        self._now(-1, "starting the ranks")
        if items:  # else the sweep is done already
            self._live.start()

    def _now(self, index: int, what: str) -> None:
        text = printable(what if index < 0 else f"{self._names[index]}: {what}")
        self._doing.update(text=Text(text, no_wrap=True, overflow="ellipsis"))
        self._bar.update(self._all, note=time_left(self._estimate))

    def _case_ends(self, index: int, status: str, run_id: str, summary: str) -> None:
        self._bar.update(self._all, advance=1)
        name = self._names[index].ljust(min(max(map(len, self._names)), _WIDEST))
        line = f"{name}  {summary}" if status == "ok" else f"{name}  {status}: {summary} ({run_id})"
        text = wrapped(printable(line), self._console.file)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def end(self) -> None:
        self._live.stop()


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
    plain = PlainDisplay(console, looks_by_itself=True)
    plain.start(what)
    try:
        yield
    finally:
        plain.end()
