"""`ppbench history`: a metric over commits, as tables and as a page."""

from __future__ import annotations

import hashlib
import shlex
from pathlib import Path
from typing import Annotated

from ppbench.cli.commands import COMPARE
from ppbench.cli.declare import option
from ppbench.cli.emit import answers
from ppbench.cli.options import REPORTS, RESULTS, StoredResults
from ppbench.console import note
from ppbench.display.commands import command, option_words
from ppbench.display.document import Block, Result, Text
from ppbench.display.rows import Rows
from ppbench.display.units import counted
from ppbench.errors import ExitCode


@answers("history", COMPARE, 3)
def history(
    metric: Annotated[
        str, option("--metric NAME", "A metric: a column of `runs`.")
    ] = "tokens_per_s",
    where: Annotated[
        list[str] | None, option("--where CONDITION", "Only runs that match, as in `ppbench ls`.")
    ] = None,
    repo: Annotated[
        Path | None, option("--repo DIR", "The repository; default: found by the commits.")
    ] = None,
    has_page: Annotated[bool, option("--page/--no-page", "Write a page.")] = True,
    results: StoredResults = RESULTS,
    reports: Annotated[Path, option("--reports", "Folder for pages.")] = REPORTS,
) -> Result:
    """Show a metric over commits: levels per case and machine, and what changed them."""
    from ppbench.commits.series import history as read_history
    from ppbench.report.charts.history import SHORT
    from ppbench.report.pages.history import (
        HistoryPage,
        backfill_command,
        changes_table,
        render_history,
        series_table,
    )
    from ppbench.store import Store

    result = read_history(metric, where=where or (), repo=repo, results=results)
    store_options = shlex.join(option_words(results=results))

    def own_page() -> str:
        again = command("history", metric=metric, where=where, repo=repo, results=results)
        shown = (result.metric, result.series, result.notes, result.line, again, store_options)
        return render_history(Store(results), HistoryPage(*shown))

    question = " ".join(where or [])
    mark = f"-{hashlib.sha256(question.encode()).hexdigest()[:6]}" if question else ""
    page = reports / f"history-{metric}{mark}.html"  # asked later, it shows more
    for text in result.notes:
        note(f"note: {text}")
    for number, series in enumerate(result.series, 1):  # pages say it beside the change
        for step in series.changes.steps:
            if backfill := backfill_command(series, step):
                first = series.points[step.first].commit[:SHORT]
                commits = counted(step.num_commits, "commit")
                name = f"series {number}: " if len(result.series) > 1 else ""
                text = (
                    f"{name}{commits} may have made the change at {first}, "
                    f"{series.num_unmeasured_of(step)} of them not measured: {backfill} "
                    f"{store_options}"
                )
                note(f"note: {text.rstrip()}")
    blocks: list[Block] = []
    if result.has_figures:
        has_steps = any((*one.changes.steps, *one.changes.spikes) for one in result.series)
        blocks = [
            Text(f"{result.metric.name} over commits, {result.line}"),
            series_table(result.series),
        ]
        if has_steps:
            blocks.append(changes_table(result.series))
        elif any(series.num_measured > 1 for series in result.series):
            blocks.append(Text("no change found"))
    return Result(
        blocks,
        Rows.of(result.frame),
        {"notes": list(result.notes)},
        ExitCode.ok if result.has_figures else ExitCode.insufficient,
        own_page=own_page if result.has_figures else None,
        page=page if result.has_figures and has_page else None,
    )
