"""`ppbench sweep --live`: the report of a sweep, rewritten whenever a case has ended.

The ranks wait until it is written, so that it disturbs no case. A page is written aside and
renamed: whoever is killed leaves the last whole one. An open page loads itself anew by a refresh
tag, which the page that is written at the end does not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ppbench.display.units import counted
from ppbench.errors import PpbenchError
from ppbench.run.sweep.progress import Display

if TYPE_CHECKING:
    from ppbench.config.sweep import Sweep
    from ppbench.display.formats import Assets
    from ppbench.run.job import Event, PlannedRun
    from ppbench.run.sweep.plan import SweepPlan
    from ppbench.store import Store


class LiveReport(Display):
    """Passes everything on to another display, and rewrites the page of a sweep as cases end.

    The page is there once the sweep is planned, when `on_page` is called. If the sweep is stopped
    inside its `with` block, it is written a last time, of the cases that have ended; without any,
    it is removed.
    """

    is_waited_for = True

    def __init__(
        self,
        inner: Display,
        read: Sweep,
        reports: Path,
        command: str,
        assets: Assets,
        on_page: Callable[[Path], None],
    ) -> None:
        self._inner, self._read, self._reports = inner, read, reports
        self._command, self._assets, self._on_page = command, assets, on_page
        self._planned: tuple[Path, Store] | None = None
        self.run_ids: list[str] = []
        """The runs that are done."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is not None and self._planned is not None:
            with contextlib.suppress(PpbenchError):  # the sweep's own error is what is reported
                if self.run_ids:
                    self._write("")
                else:
                    self._planned[0].unlink(missing_ok=True)

    def doing(self, what: str) -> AbstractContextManager[None]:
        return self._inner.doing(what)

    def plans(self, plan: SweepPlan, store: Store) -> None:
        from ppbench.run.sweep.plan import runs_of

        self._planned = report_path(self._reports, self._read, plan.sweep_id), store
        self._write(counted(0, "case"))
        self._on_page(self._planned[0])
        runs, missing = runs_of(plan, store), {item.resume_key for item in plan.missing}
        self.run_ids = [*map(str, runs.loc[~runs["resume_key"].isin(missing), "run_id"])]

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
            self._write(f"{num_done} of {counted(self._num_all, self._word)}")

    def _write(self, done: str) -> None:
        """Write the page of the runs that are done; it says how far a sweep that goes on is."""
        from ppbench.display.document import Code, Result, Section
        from ppbench.report.pages.provenance import REPORT, About
        from ppbench.report.pages.report import render_report
        from ppbench.report.pages.templates import Live, page, write_page
        from ppbench.store import newest_of

        assert self._planned is not None
        path, store = self._planned
        live = Live(done, f"{datetime.now(UTC):%H:%M:%S}") if done else None
        runs = newest_of(store.table("runs", self.run_ids)).sort_values("position", kind="stable")
        if len(runs):
            text = render_report(
                store,
                runs,
                title=self._read.name,
                command=self._command,
                sweep_text=self._read.said.source.text,
                assets=self._assets,
                live=live,
            )
        else:
            about = About(kind=REPORT, title=self._read.name)
            waiting = Result([Section("reproduce", "Command", [Code(self._command)])])
            text = page(waiting, about, "No case has ended yet.", live=live)
        write_page(path, text, "--reports", self._assets)


def report_path(reports: Path, read: Sweep, sweep_id: str) -> Path:
    return reports / f"{read.name}-{sweep_id}.html"
