"""A sweep run to its end: what a command and a notebook call, and what they get.

    sweep file --read--> cases --minus the runs in the store--> measured --> SweepResult

Quiet but for notes: whoever wants to show progress passes a display.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppbench.config.feasibility import notes_on_stages
from ppbench.config.overrides import parse_only
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import Sweep
from ppbench.console import note
from ppbench.errors import LaunchError, SweepInterruptedError
from ppbench.results import Results
from ppbench.run.job import PlannedRun
from ppbench.run.machine.environment import default_device
from ppbench.run.sweep.control import run_plan
from ppbench.run.sweep.plan import Choice, SweepPlan, exclusive_plan, plan_sweep, runs_of
from ppbench.run.sweep.progress import Display
from ppbench.store import Store, check_writable


@dataclass(frozen=True, eq=False)
class SweepResult:
    """Every run of a sweep that is in the store, those of earlier calls included."""

    plan: SweepPlan
    store: Store

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """A row per run, in the order of the sweep file; failed ones too."""
        return runs_of(self.plan, self.store)

    @property
    def results(self) -> Results:
        """The same runs with their steps, ranks and spans, as `ppbench.load` has them."""
        return Results(self.store, self.frame)

    @property
    def is_ok(self) -> bool:
        """Whether every run that was asked for is in the store and succeeded."""
        good = set(self.frame.loc[self.frame["status"] == "ok", "resume_key"])
        return good.issuperset(item.resume_key for item in self.plan.chosen)

    @property
    def is_emulated(self) -> bool:
        return any(case.is_emulated for case, _ in self.plan.sweep.cases)

    def __repr__(self) -> str:
        sweep, num_ok = self.plan.sweep, int((self.frame["status"] == "ok").sum())
        return f"SweepResult({sweep.name}: {num_ok} of {len(self.plan.items)} runs are ok)"


def sweep(
    file: str | Path,
    *,
    results: str | Path = "results",
    overrides: Sequence[str] = (),
    only: Sequence[str] = (),
    rerun: bool = False,
    retry_failed: bool = False,
    display: Display | None = None,
) -> SweepResult:
    """Measure what is missing of a sweep file's cases, into the folder `results`.

    `overrides` are `KEY=VALUE` as of `--set`, `only` as of `--only`. Raises UsageError for what
    cannot be run, SweepInterruptedError when it is stopped from the keyboard; what is finished by
    then stays. A run that fails has a row that says why.
    """
    path, choice = Path(file), Choice(rerun, retry_failed, parse_only(list(only)))
    read = read_sweep(path, list(overrides), default_device())
    check_writable(Path(results), "--results")
    note_stages(dataclasses.replace(read, cases=choice.only.select(read.cases)))
    return run_sweep(read, Store(Path(results)), choice, display)


def note_stages(read: Sweep) -> None:
    """Note what is remarkable about the stages of the sweep's models."""
    for text in notes_on_stages((case for case, _ in read.cases), read.facts):
        note(f"note: {text}")


def run_sweep(
    read: Sweep,
    store: Store,
    choice: Choice,
    display: Display | None = None,
    command: str | None = None,
) -> SweepResult:
    """Run what is missing of a sweep that has been read.

    When the workers cannot go on, a note says so, and what is finished stays. Raises
    SweepInterruptedError, which says how to go on where `command` makes the same sweep.
    """
    plan = plan_sweep(read, store, choice)
    try:
        with exclusive_plan(read, store, choice, _note_holder) as plan:
            _note_done(plan)
            run_plan(plan, store, display or _Quiet(), reruns=choice.reruns)
    except LaunchError as error:
        note(f"error: {error}")
    except KeyboardInterrupt:
        raise SweepInterruptedError(_stopped(plan, store, choice, command)) from None
    return SweepResult(plan, store)


def _note_holder(holder: str) -> None:
    note(
        f"waiting for {holder or 'another sweep'}, which measures into the same results; "
        "two at once would disturb each other, or do the same twice"
    )


def _note_done(plan: SweepPlan) -> None:
    num_failed = sum(plan.failed.values())
    num_chosen = len(plan.chosen)
    if num_done := num_chosen - len(plan.missing) - num_failed:
        note(f"{num_done} of {num_chosen} runs are done already; --rerun runs them again")
    if plan.failed:
        kinds = ", ".join(f"{count} {status}" for status, count in plan.failed.items())
        note(f"{num_failed} failed before ({kinds}); --retry-failed runs them again")


class _Quiet:
    """A display that shows nothing."""

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None: ...
    def case_begins(self, index: int) -> None: ...
    def step_ends(self, step: int, num_steps: int, tokens_per_s: float, step_s: float) -> None: ...
    def case_ends(self, index: int, status: str, run_id: str, summary: str) -> None: ...
    def end(self) -> None: ...


def choice_options(choice: Choice) -> list[str]:
    """The options of a command line that make the choice."""
    words = ["--rerun"] * choice.reruns + ["--retry-failed"] * choice.retries_failed
    return [*words, *_only_options(choice.only.allowed)]


def _only_options(allowed: Iterable[tuple[str, Iterable[object]]]) -> list[str]:
    return [
        word
        for key, values in allowed
        for value in values
        for word in ("--only", f"{key}={value if isinstance(value, str) else json.dumps(value)}")
    ]


def _stopped(plan: SweepPlan, store: Store, choice: Choice, command: str | None) -> str:
    num_done = int((runs_of(plan, store)["status"] == "ok").sum())
    kept = f"stopped; {num_done} of {len(plan.items)} runs are done, and kept"
    if command is None:
        return kept
    whole = f"{command} {shlex.join(choice_options(choice))}".strip()
    return f"{kept}. Go on with: {whole}\nReport on what is done with: ppbench report"
