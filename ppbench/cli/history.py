"""`ppbench history`: a metric over commits, as tables and as a page."""

from __future__ import annotations

import hashlib
import json
import shlex
import sys
from collections.abc import Iterator
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
from ppbench.display.tables import EVERYTHING, View, render
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


Where = Annotated[
    list[str] | None,
    typer.Option("--where", metavar="CONDITION", help="Only runs that match, as in `ppbench ls`."),
]
HasAll = Annotated[
    bool, typer.Option("--all", help="Include commits off HEAD's first-parent line.")
]
HasDirty = Annotated[
    bool, typer.Option("--dirty", help="Include work trees with uncommitted changes.")
]
Repo = Annotated[
    Path | None,
    typer.Option("--repo", metavar="DIR", help="The repository; default: found by the commits."),
]
Page = Annotated[
    Path | None, typer.Option("-o", "--output", metavar="FILE", help="File of the page.")
]


def history(
    metric: Annotated[
        str, typer.Option("--metric", metavar="NAME", help="A metric: a column of `runs`.")
    ] = "tokens_per_s",
    where: Where = None,
    has_all: HasAll = False,
    has_dirty: HasDirty = False,
    repo: Repo = None,
    page: Page = None,
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
    result = read_history(
        metric,
        where=where or (),
        has_all=has_all,
        has_dirty=has_dirty,
        repo=repo,
        results=results,
    )
    store_options = shlex.join(option_words(results=results))
    path = None
    if result.has_figures and (page or has_page):
        choice = {"where": where, "all": has_all, "dirty": has_dirty}
        question = " ".join([*(where or []), "--all" * has_all, "--dirty" * has_dirty])
        mark = f"-{hashlib.sha256(question.encode()).hexdigest()[:6]}" if question.strip() else ""
        path = page or reports / f"history-{metric}{mark}.html"  # asked later, it shows more
        again = command("history", metric=metric, **choice, repo=repo, results=results)
        shown = (result.metric, result.analyses, result.notes, result.line, again, store_options)
        with listed(path, reports):
            write_page(path, render_history(Store(results), HistoryPage(*shown)))
    is_shown = result.has_figures or how in (Format.json, Format.csv)
    if text := history_text(result, how, view) if is_shown else "":  # CSV without a row is empty
        print_text(text, how)
    for text in result.notes:
        note(f"note: {text}")
    for number, analysis in enumerate(result.analyses, 1):  # pages say it beside the change
        for step in analysis.steps:
            if backfill := backfill_command(analysis.series, step):
                first = analysis.series.points[step.first].commit[:_SHORT]
                commits = counted(step.num_commits, "commit")
                name = f"series {number}: " if len(result.analyses) > 1 else ""
                text = (
                    f"{name}{commits} may have made the change at {first}, "
                    f"{step.num_unmeasured} of them not measured: {backfill} {store_options}"
                )
                note(f"note: {text.rstrip()}")
    if path is not None:
        is_beside = how is not Format.table or is_stream(path)
        print(f"page: {path}", file=sys.stderr if is_beside else sys.stdout)
    raise typer.Exit(ExitCode.ok if result.has_figures else ExitCode.insufficient)


def history_text(result: History, how: Format, view: View = EVERYTHING) -> str:
    """The output of `ppbench history`."""
    match how:
        case Format.json:
            return json.dumps(result.values(), indent=2, allow_nan=False)
        case Format.csv:
            return render(result.frame, how, [], view)
        case Format.table | Format.markdown:
            return "\n\n".join(_tables(result, how, view))


def _tables(result: History, how: Format, view: View) -> Iterator[str]:
    import pandas as pd

    yield f"{result.metric.name} over commits, {result.line}"
    rows: list[dict[str, object]] = []
    steps: list[dict[str, object]] = []
    unit = "points" if result.metric.in_points else "%"
    for number, analysis in enumerate(result.analyses, 1):
        series, level = analysis.series, analysis.current
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
                "state": analysis.state.value,
            }
        )
        found = sorted((*analysis.steps, *analysis.spikes), key=lambda step: step.first)
        for step in found:
            size, first = step.size, series.points[step.first]
            judged = {True: ", better", False: ", worse", None: ""}[step.is_better]
            change = f"{100 * size.estimate:+.1f} {unit}"
            date = (first.author_date or "")[:10]
            subject = shortened(first.subject or "", _LONGEST_SUBJECT)
            steps.append(
                {
                    "number": number,
                    "change_text": f"{'spike ' * step.is_spike}{change}{judged}",
                    "interval": f"{100 * size.low:+.1f} to {100 * size.high:+.1f}",
                    "commits": step.num_commits,
                    "unmeasured": step.num_unmeasured,
                    "since": series.points[step.good].commit[:_SHORT],
                    "last": series.points[step.last].commit[:_SHORT],
                    "likeliest": " ".join(filter(None, [first.commit[:_SHORT], date, subject])),
                }
            )
    shown = [
        name for name in SERIES if name not in ("failed", "gaps") or any(row[name] for row in rows)
    ]
    yield render(pd.DataFrame(rows), how, shown, view, ["case", "level", "state"])
    if steps:
        whole = View(remedy="--format markdown shows all")
        yield render(pd.DataFrame(steps), how, STEPS, whole, ["change_text", "likeliest"])
    elif any(analysis.series.num_measured > 1 for analysis in result.analyses):
        yield "no change found"
