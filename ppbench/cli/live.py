"""`ppbench sweep --live`: the report of a sweep, rewritten while it runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from ppbench.display.units import counted
from ppbench.run.sweep.phases import QUIET
from ppbench.run.sweep.progress import Display

if TYPE_CHECKING:
    from engine.flight import Phase
    from ppbench.config.sweep import Sweep
    from ppbench.display.formats import Assets
    from ppbench.report.pages.live import LivePage, LiveReport
    from ppbench.run.job import PlannedRun
    from ppbench.run.sweep.plan import Choice
    from ppbench.store import Store


class ReportingDisplay(Display):
    """Passes everything on to another display, and has the report written as cases end."""

    def __init__(self, inner: Display, report: LiveReport, run_ids: Sequence[str]) -> None:
        """`run_ids` are the sweep's runs that are done already."""
        self._inner, self._report = inner, report
        self._done = list(run_ids)
        self._num_all = 0

    def doing(self, what: str) -> AbstractContextManager[None]:
        return self._inner.doing(what)

    def begin(self, items: list[PlannedRun], axes: tuple[str, ...]) -> None:
        self._inner.begin(items, axes)
        self._num_all = len(self._done) + len(items)
        self._word = "run" if any(item.measure.launches > 1 for item in items) else "case"
        self._ended: set[int] = set()
        self._num_before = len(self._done)
        if items:
            self._show()

    def case_begins(self, index: int) -> None:
        self._inner.case_begins(index)
        self._report.go_on()

    def phase_begins(self, phase: Phase) -> None:
        self._inner.phase_begins(phase)
        if phase in QUIET:
            self._report.go_on()
        else:
            self._report.hold()

    def step_ends(self, step: int, num_steps: int, tokens_per_s: float, step_s: float) -> None:
        self._inner.step_ends(step, num_steps, tokens_per_s, step_s)
        self._report.hold()

    def case_ends(self, index: int, status: str, run_id: str, summary: str) -> None:
        self._inner.case_ends(index, status, run_id, summary)
        self._done.append(run_id)
        self._ended.add(index)
        self._report.go_on()
        self._show()

    def end(self) -> None:
        self._inner.end()

    @property
    def run_ids(self) -> list[str]:
        """The runs that have ended."""
        return list(self._done)

    def _show(self) -> None:
        num_done = self._num_before + len(self._ended)
        self._report.show(self._done, f"{num_done} of {counted(self._num_all, self._word)}")


@contextlib.contextmanager
def reporting(inner: Display, page: LivePage, run_ids: Sequence[str]) -> Iterator[Display]:
    """Have the page written until the block ends; then nothing refreshes it any more.

    It is there from the beginning. If the sweep is stopped, it is written a last time, of the cases
    that have ended.
    """
    from ppbench.report.pages.live import LiveReport, write_live, write_stopped

    write_live(page, [], counted(0, "case"))
    report = LiveReport(page)
    display = ReportingDisplay(inner, report, run_ids)
    try:
        yield display
    except BaseException:
        report.close()
        write_stopped(page, display.run_ids)
        raise
    report.close()


def report_path(reports: Path, read: Sweep, sweep_id: str) -> Path:
    return reports / f"{read.name}-{sweep_id}.html"


def live_page(
    read: Sweep, store: Store, choice: Choice, reports: Path, command: str, assets: Assets
) -> tuple[LivePage, list[str]]:
    """Return the page of a sweep that is about to run, and the ids of its runs that are done."""
    from ppbench.report.pages.live import LivePage
    from ppbench.run.sweep.plan import plan_sweep, runs_of

    plan = plan_sweep(read, store, choice)
    page = LivePage(
        path=str(report_path(reports, read, plan.sweep_id)),
        results=str(store.folder),
        title=read.name,
        command=command,
        sweep_text=Path(read.file).read_text(encoding="utf-8"),
        assets=str(assets.value),
    )
    missing = {item.resume_key for item in plan.missing}
    runs = runs_of(plan, store)
    return page, [str(run_id) for run_id in runs.loc[~runs["resume_key"].isin(missing), "run_id"]]
