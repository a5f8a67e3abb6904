"""The report page: one self-contained HTML file, the same bytes for the same runs."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ppbench.display.cases import (
    Axes,
    case_text,
    is_not_finite,
    is_oversubscribed,
    ok_runs,
    varying_axes,
)
from ppbench.display.explanation import has_parts, headline, what_if
from ppbench.errors import StoreError, UsageError
from ppbench.report.charts.catalogue import charts_of
from ppbench.report.pages.conclusions import answer
from ppbench.report.pages.provenance import (
    about_report,
    common,
    environments,
    origin,
    verifications,
)
from ppbench.report.pages.tables import (
    bubbles,
    case_list,
    cautioned,
    failure_counts,
    failures,
    filters,
    idle_parts,
    summary,
)
from ppbench.report.pages.templates import listed, render, write_page
from ppbench.report.timeline.timelines import Timeline, groups, timeline
from ppbench.store import Store
from ppbench.store.recovery import edges_of_run


def render_report(
    store: Store, runs: pd.DataFrame, *, title: str, command: str, sweep_text: str | None
) -> str:
    """Return the report of `runs` (rows of `store.runs()`) as HTML.

    `command` reproduces it; `sweep_text` is the content of the sweep file, if known.
    """
    axes = varying_axes(runs)
    return render(
        "report.html",
        title=title,
        about=about_report(title, runs, axes),
        subtitle=origin(runs),
        answer=answer(runs, axes),
        filters=filters(runs, axes),
        cases=case_list(runs, axes),
        cautions=cautioned(runs, axes),
        num_cases=runs["case_id"].nunique(),
        failures=failures(store, runs, axes),
        failure_counts=failure_counts(runs),
        summary=summary(runs, axes),
        timelines=_timelines(store, runs, axes),
        charts=charts_of(store, runs, axes),
        idle_parts=idle_parts(ok_runs(runs), axes),
        idle_answers=_idle_answers(store, ok_runs(runs), axes),
        groups=groups(store, runs, axes),
        cases_of=dict(zip(runs["run_id"], runs["case_id"], strict=True)),
        names={run["run_id"]: case_text(run, axes) for _, run in runs.iterrows()},
        bubbles=bubbles(ok_runs(runs), axes),
        environments=environments(runs),
        verifications=verifications(runs),
        command=command,
        sweep_text=sweep_text,
        sweep_file=common(runs, "sweep_file"),
        damaged=[str(damage) for damage in store.damaged],  # after all reading of the store
    )


def write_report(
    path: Path,
    store: Store,
    runs: pd.DataFrame,
    *,
    title: str,
    command: str,
    sweep_text: str | None,
) -> None:
    """Write the report to `path`. Raises StoreError if that fails."""
    text = render_report(store, runs, title=title, command=command, sweep_text=sweep_text)
    write_page(path, text)


def report_runs(store: Store, names: Sequence[str], output: Path | None, reports: Path) -> Path:
    """Write a report of the named runs, or of the last sweep, and return its path.

    By default it lies in the folder `reports`, whose index is rebuilt when a page is added to it.
    """
    runs = store.named(names).sort_values("run_id") if names else store.last_sweep()
    last = runs.iloc[-1]
    title = str(last["sweep_name"]).replace("/", "-")
    # Chosen runs get a file of their own: the sweep's report stays as it is.
    default = f"report-{last['run_id']}" if names else f"{title}-{last['sweep_id']}"
    path = output or reports / f"{default}.html"
    command = shlex.join(["ppbench", "report", *names])
    with listed(path, reports):
        write_report(path, store, runs, title=title, command=command, sweep_text=_sweep_text(runs))
    return path


def _sweep_text(runs: pd.DataFrame) -> str | None:
    """The sweep file, if all runs come from one and it can still be read."""
    files = runs["sweep_file"].dropna().unique()
    if len(files) != 1:
        return None
    try:
        return Path(files[0]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def _timelines(store: Store, runs: pd.DataFrame, axes: Axes) -> dict[str, Timeline]:
    """Return the timeline of every run that can be drawn, by its id."""
    drawn: dict[str, Timeline] = {}
    for _, run in runs.iterrows():
        with contextlib.suppress(StoreError, UsageError):
            drawn[run["run_id"]] = timeline(store, [run], [case_text(run, axes)])
    return drawn


def _idle_answers(store: Store, runs: pd.DataFrame, axes: Axes) -> list[str]:
    """Explain the idle time of the fastest run that stores its causes; sound runs come first."""
    explained = runs[[has_parts(run) and not is_not_finite(run) for _, run in runs.iterrows()]]
    if explained.empty:
        return []
    is_sound = [not is_oversubscribed(run) for _, run in explained.iterrows()]
    ranked = explained.assign(is_sound=is_sound).sort_values(["is_sound", "tokens_per_s"])
    fastest = ranked.iloc[-1]
    edges = edges_of_run(store, fastest)
    first = f"Fastest, {case_text(fastest, axes)}: {headline(fastest, edges)}"
    return [first, *what_if(fastest, edges)]
