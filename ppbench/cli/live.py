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
    from ppbench.config.sweep import Sweep
    from ppbench.display.formats import Assets
    from ppbench.report.pages.templates import Live
    from ppbench.run.job import Event, PlannedRun
    from ppbench.run.sweep.plan import SweepPlan
    from ppbench.store import Store


class ReportingDisplay(Display):
    """Passes everything on to another display, and has the report written as cases end."""

    is_waited_for = True

    def __init__(
        self,
        inner: Display,
        on_plan: Callable[[SweepPlan, Store], Sequence[str]],
        write: Callable[[Sequence[str], str], None],
    ) -> None:
        """`on_plan` returns the runs that are done already.

        `write` takes the runs that are done, and how far the sweep is.
        """
        self._inner, self._on_plan, self._write = inner, on_plan, write
        self.run_ids: list[str] = []

    def doing(self, what: str) -> AbstractContextManager[None]:
        return self._inner.doing(what)

    def plans(self, plan: SweepPlan, store: Store) -> None:
        self.run_ids = list(self._on_plan(plan, store))

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None:
        self._inner.begin(items, axes)
        self._num_before, self._num_all = len(self.run_ids), len(self.run_ids) + len(items)
        self._word = "run" if any(item.measure.launches > 1 for item in items) else "case"
        self._ended: set[object] = set()
        if items:
            self._show()

    def show(self, event: Event) -> None:
        self._inner.show(event)
        if event["event"] == "row":
            self.run_ids.append(str(event["run_id"]))
            self._ended.add(event["index"])
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
    read: Sweep,
    reports: Path,
    command: str,
    assets: Assets,
    on_page: Callable[[Path], None],
) -> Iterator[Display]:
    """Have the page of a sweep that is about to run written until the block ends.

    It is there once the sweep is planned, when `on_page` is called. If the sweep is stopped, it is
    written a last time, of the cases that have ended; without any, it is removed.
    """
    from ppbench.display.document import Code, Result, Section
    from ppbench.report.pages.provenance import REPORT, About
    from ppbench.report.pages.report import render_report
    from ppbench.report.pages.templates import Live, page, write_page
    from ppbench.run.sweep.plan import runs_of
    from ppbench.store import newest_of

    planned: list[tuple[Path, Store]] = []

    def on_plan(plan: SweepPlan, store: Store) -> Sequence[str]:
        missing = {item.resume_key for item in plan.missing}
        runs = runs_of(plan, store)
        planned.append((report_path(reports, read, plan.sweep_id), store))
        write_live([], counted(0, "case"))
        on_page(planned[0][0])
        return [str(run_id) for run_id in runs.loc[~runs["resume_key"].isin(missing), "run_id"]]

    def write(run_ids: Sequence[str], live: Live | None) -> None:
        path, store = planned[0]
        runs = newest_of(store.table("runs", run_ids)).sort_values("position", kind="stable")
        if len(runs):
            facts = {"title": read.name, "command": command, "sweep_text": read.said.source.text}
            text = render_report(store, runs, **facts, assets=assets, live=live)
        else:
            about = About(kind=REPORT, title=read.name)
            waiting = Result([Section("reproduce", "Command", [Code(command)])])
            text = page(waiting, about, "No case has ended yet.", live=live)
        write_page(path, text, "--reports", assets)

    def write_live(run_ids: Sequence[str], done: str) -> None:
        write(run_ids, Live(done, f"{datetime.now(UTC):%H:%M:%S}"))

    display = ReportingDisplay(inner, on_plan, write_live)
    try:
        yield display
    except BaseException:
        with contextlib.suppress(PpbenchError):  # the sweep's own error is what is reported
            if display.run_ids:
                write(display.run_ids, None)
            elif planned:
                planned[0][0].unlink(missing_ok=True)
        raise


def report_path(reports: Path, read: Sweep, sweep_id: str) -> Path:
    return reports / f"{read.name}-{sweep_id}.html"
