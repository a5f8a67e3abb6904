"""`ppbench report` and `ppbench timeline`: runs as HTML pages, or drawn in the terminal."""

from __future__ import annotations

from typing import Annotated

from ppbench.cli import completion
from ppbench.cli.browser import Open, open_page
from ppbench.cli.commands import LOOK
from ppbench.cli.declare import argument, option
from ppbench.cli.emit import answers, file_written
from ppbench.cli.options import (
    REPORTS,
    RESULTS,
    LastSweepRuns,
    Output,
    PageAssets,
    StoredResults,
)
from ppbench.display.document import Result
from ppbench.display.formats import Assets
from ppbench.errors import UsageError


@answers("report", LOOK, 5)
def report(
    runs: LastSweepRuns = None,
    output: Output = None,
    assets: PageAssets = Assets.inline,
    open_it: Open = False,
    results: StoredResults = RESULTS,
) -> Result:
    """Write an HTML report of runs."""
    from ppbench.report.pages.report import report_runs
    from ppbench.store import Store

    path = report_runs(Store(results), runs or [], output, REPORTS, assets)
    if open_it:
        open_page(path)
    return file_written(path)


@answers("timeline", LOOK, 6)
def timeline(
    runs: Annotated[
        list[str],
        argument("RUN...", "Runs, stacked on one time axis.", completion.runs),
    ],
    step: Annotated[str, option("--step K|median|slowest", "The step of each run.")] = "median",
    planned: Annotated[
        bool, option("--planned", "Add the planned step under each measured one.")
    ] = False,
    output: Output = None,
    assets: PageAssets = Assets.inline,
    open_it: Open = False,
    terminal: Annotated[bool, option("--terminal", "Draw in the terminal instead.")] = False,
    results: StoredResults = RESULTS,
) -> Result:
    """Write the Gantt timelines of runs as an HTML page, or draw them in the terminal."""
    if terminal and (output or open_it):
        raise UsageError("--terminal: draws here and writes no page; leave -o and --open out")
    from ppbench.report.pages.timeline import run_names, timeline_of_runs
    from ppbench.store import Store

    store = Store(results)
    if terminal:
        from ppbench.report.timeline.terminal import TextTimeline
        from ppbench.report.timeline.timelines import steps_of

        named = store.named(runs)
        rows = [run for _, run in named.iterrows()]
        steps = steps_of(store, rows, run_names(named), choice=step, has_plan=planned)
        return Result([TextTimeline(steps)])
    path = timeline_of_runs(
        store, runs, output, REPORTS, choice=step, has_plan=planned, assets=assets
    )
    if open_it:
        open_page(path)
    return file_written(path)
