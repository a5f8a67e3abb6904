"""`ppbench sweep --live`: the report of a sweep, rewritten whenever a case has ended.

The ranks wait until it is written, so that it disturbs no case. A page is written aside and
renamed: whoever is killed leaves the last whole one. An open page loads itself anew by a refresh
tag, which the page that is written at the end does not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ppbench.display.units import counted
from ppbench.errors import PpbenchError
from ppbench.run.sweep.progress import Display

if TYPE_CHECKING:
    from engine.flight import Phase
    from ppbench.config.sweep import Sweep
    from ppbench.display.formats import Assets
    from ppbench.report.pages.templates import Live
    from ppbench.run.job import PlannedRun
    from ppbench.run.sweep.plan import Choice
    from ppbench.store import Store


class ReportingDisplay(Display):
    """Passes everything on to another display, and has the report written as cases end."""

    is_waited_for = True

    def __init__(
        self, inner: Display, write: Callable[[Sequence[str], str], None], run_ids: Sequence[str]
    ) -> None:
        """`write` takes the runs that are done, and how far the sweep is.

        `run_ids` are the runs that are done already.
        """
        self._inner, self._write = inner, write
        self.run_ids = list(run_ids)

    def doing(self, what: str) -> AbstractContextManager[None]:
        return self._inner.doing(what)

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None:
        self._inner.begin(items, axes)
        self._num_before, self._num_all = len(self.run_ids), len(self.run_ids) + len(items)
        self._word = "run" if any(item.measure.launches > 1 for item in items) else "case"
        self._ended: set[int] = set()
        if items:
            self._show()

    def case_begins(self, index: int) -> None:
        self._inner.case_begins(index)

    def phase_begins(self, phase: Phase) -> None:
        self._inner.phase_begins(phase)

    def step_ends(self, step: int, num_steps: int, tokens_per_s: float, step_s: float) -> None:
        self._inner.step_ends(step, num_steps, tokens_per_s, step_s)

    def case_ends(self, index: int, status: str, run_id: str, summary: str) -> None:
        self._inner.case_ends(index, status, run_id, summary)
        self.run_ids.append(run_id)
        self._ended.add(index)
        self._show()

    def end(self) -> None:
        self._inner.end()

    def _show(self) -> None:
        num_done = self._num_before + len(self._ended)
        with contextlib.suppress(PpbenchError):  # the report at the end says what is wrong
            self._write(self.run_ids, f"{num_done} of {counted(self._num_all, self._word)}")


@contextlib.contextmanager
def reporting(
    inner: Display,
    asked: tuple[Sweep, Store, Choice],
    reports: Path,
    command: str,
    assets: Assets,
    on_page: Callable[[Path], None],
) -> Iterator[Display]:
    """Have the page of a sweep that is about to run written until the block ends.

    It is there from the beginning, when `on_page` is called. If the sweep is stopped, it is written
    a last time, of the cases that have ended; without any, it is removed. Raises StoreError.
    """
    from ppbench.report.pages.provenance import REPORT, About
    from ppbench.report.pages.report import render_report
    from ppbench.report.pages.templates import Live, render, write_page
    from ppbench.run.sweep.plan import plan_sweep, runs_of
    from ppbench.store import newest_of

    read, store, choice = asked
    plan = plan_sweep(read, store, choice)
    path = report_path(reports, read, plan.sweep_id)

    def write(run_ids: Sequence[str], live: Live | None) -> None:
        runs = newest_of(store.table("runs", run_ids)).sort_values("position", kind="stable")
        if len(runs):
            facts = {"title": read.name, "command": command, "sweep_text": read.said.source.text}
            text = render_report(store, runs, **facts, assets=assets, live=live)
        else:
            about = About(kind=REPORT, title=read.name)
            text = render("waiting.html", title=read.name, command=command, about=about, live=live)
        write_page(path, text, "--reports", assets)

    def write_live(run_ids: Sequence[str], done: str) -> None:
        write(run_ids, Live(done, f"{datetime.now(UTC):%H:%M:%S}"))

    missing = {item.resume_key for item in plan.missing}
    runs = runs_of(plan, store)
    done = [str(run_id) for run_id in runs.loc[~runs["resume_key"].isin(missing), "run_id"]]
    write_live([], counted(0, "case"))
    on_page(path)
    display = ReportingDisplay(inner, write_live, done)
    try:
        yield display
    except BaseException:
        with contextlib.suppress(PpbenchError):  # the sweep's own error is what is reported
            if display.run_ids:
                write(display.run_ids, None)
            else:
                path.unlink(missing_ok=True)
        raise


def report_path(reports: Path, read: Sweep, sweep_id: str) -> Path:
    return reports / f"{read.name}-{sweep_id}.html"
