"""`ppbench history`: a metric over commits, as tables and as a page."""

from __future__ import annotations

import hashlib
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppbench.cli.options import (
    REPORTS,
    RESULTS,
    Columns,
    HowToPrint,
    Sort,
    StoredResults,
    print_text,
)
from ppbench.console import note
from ppbench.display.commands import command, option_words
from ppbench.display.fields import figure
from ppbench.display.formats import Format
from ppbench.display.tables import View, render
from ppbench.display.units import counted
from ppbench.errors import ExitCode, shortened
from ppbench.files import is_stream

if TYPE_CHECKING:
    from ppbench.commits.series import History

SERIES = [
    *("number", "case", "fingerprint", "commits", "launches", "failed", "gaps"),
    *("level", "state"),
]
STEPS = ["number", "change_text", "interval", "commits", "unmeasured", "since", "last", "likeliest"]
_SHORT = 9
_LONGEST_SUBJECT = 50


def history(
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="A metric: a column of `runs`.")
    ] = "tokens_per_s",
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where", metavar="CONDITION", help="Only runs that match, as in `ppbench ls`."
        ),
    ] = None,
    repo: Annotated[
        Path | None,
        typer.Option(
            "--repo", metavar="DIR", help="The repository; default: found by the commits."
        ),
    ] = None,
    page: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="File of the page.")
    ] = None,
    has_page: Annotated[bool, typer.Option("--page/--no-page", help="Write a page.")] = True,
    results: StoredResults = RESULTS,
    reports: Annotated[Path, typer.Option("--reports", help="Folder for pages.")] = REPORTS,
    how: HowToPrint = Format.table,
    columns: Columns = None,
    sort: Sort = None,
) -> None:
    """Show a metric over commits: levels per case and machine, and what changed them."""
    from ppbench.commits.series import history as read_history
    from ppbench.report.pages.history import HistoryPage, backfill_command, render_history
    from ppbench.report.pages.templates import listed, write_page
    from ppbench.store import Store

    view = View.of(columns, sort)
    result = read_history(metric, where=where or (), repo=repo, results=results)
    store_options = shlex.join(option_words(results=results))
    path = None
    if result.has_figures and (page or has_page):
        question = " ".join(where or [])
        mark = f"-{hashlib.sha256(question.encode()).hexdigest()[:6]}" if question else ""
        path = page or reports / f"history-{metric}{mark}.html"  # asked later, it shows more
        again = command("history", metric=metric, where=where, repo=repo, results=results)
        shown = (result.metric, result.series, result.notes, result.line, again, store_options)
        with listed(path, reports):
            write_page(path, render_history(Store(results), HistoryPage(*shown)))
    is_for_programs = how in (Format.json, Format.csv)
    if result.has_figures or is_for_programs:
        text = render(result.frame, how, [], view) if is_for_programs else _text(result, how, view)
        if text:  # CSV without a row is empty
            print_text(text, how)
    for text in result.notes:
        note(f"note: {text}")
    for number, series in enumerate(result.series, 1):  # pages say it beside the change
        for step in series.changes.steps:
            if backfill := backfill_command(series, step):
                first = series.points[step.first].commit[:_SHORT]
                commits = counted(step.num_commits, "commit")
                name = f"series {number}: " if len(result.series) > 1 else ""
                text = (
                    f"{name}{commits} may have made the change at {first}, "
                    f"{series.num_unmeasured_of(step)} of them not measured: {backfill} "
                    f"{store_options}"
                )
                note(f"note: {text.rstrip()}")
    if path is not None:
        is_beside = how is not Format.table or is_stream(path)
        print(f"page: {path}", file=sys.stderr if is_beside else sys.stdout)
    raise typer.Exit(ExitCode.ok if result.has_figures else ExitCode.insufficient)


def _text(result: History, how: Format, view: View) -> str:
    """The series and their changes, as a table each."""
    import pandas as pd

    rows: list[dict[str, object]] = []
    steps: list[dict[str, object]] = []
    for number, series in enumerate(result.series, 1):
        level, unit = series.current, "points" if series.metric.in_points else "%"
        rows.append(
            {
                "number": number,
                "case": series.case,
                "fingerprint": series.fingerprint,
                "commits": series.num_measured,
                "launches": series.num_launches,
                "failed": series.num_failures,
                "gaps": series.num_unmeasured,
                "level": "" if level is None else figure(result.metric.name, level.estimate),
                "state": series.state.value,
            }
        )
        found = (*series.changes.steps, *series.changes.spikes)
        for step in sorted(found, key=lambda step: step.first):
            size, first = step.size, series.points[step.first]
            judged = {True: ", better", False: ", worse", None: ""}[series.is_better(step)]
            date = (first.author_date or "")[:10]
            subject = shortened(first.subject or "", _LONGEST_SUBJECT)
            steps.append(
                {
                    "number": number,
                    "change_text": f"{'spike ' * step.is_spike}{100 * size.estimate:+.1f} {unit}"
                    f"{judged}",
                    "interval": f"{100 * size.low:+.1f} to {100 * size.high:+.1f}",
                    "commits": step.num_commits,
                    "unmeasured": series.num_unmeasured_of(step),
                    "since": series.points[step.good].commit[:_SHORT],
                    "last": series.points[step.last].commit[:_SHORT],
                    "likeliest": " ".join(filter(None, [first.commit[:_SHORT], date, subject])),
                }
            )
    shown = [
        name for name in SERIES if name not in ("failed", "gaps") or any(row[name] for row in rows)
    ]
    parts = [
        f"{result.metric.name} over commits, {result.line}",
        render(pd.DataFrame(rows), how, shown, view, ["case", "level", "state"]),
    ]
    if steps:
        whole = View(remedy="--format markdown shows all")
        parts.append(render(pd.DataFrame(steps), how, STEPS, whole, ["change_text", "likeliest"]))
    elif any(series.num_measured > 1 for series in result.series):
        parts.append("no change found")
    return "\n\n".join(parts)
