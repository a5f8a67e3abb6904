"""Pages: one HTML file each, complete in itself, the same bytes for the same runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pandas as pd

from ppbench.errors import StoreError, UsageError
from ppbench.report.about import about_report
from ppbench.report.answer import answer
from ppbench.report.cases import (
    Axes,
    case_text,
    is_not_finite,
    is_oversubscribed,
    ok_runs,
    varying_axes,
)
from ppbench.report.chart_list import charts_of
from ppbench.report.explanation import has_parts, headline, what_if
from ppbench.report.failures import counts, failures
from ppbench.report.filters import case_list, filters
from ppbench.report.provenance import common, environments, origin, verifications
from ppbench.report.recovered import edges_of_run
from ppbench.report.summary import bubbles, cautioned, idle_parts, summary
from ppbench.report.timelines import Timeline, groups, timeline
from ppbench.report.writing import render, write_page
from ppbench.store import Store


def render_report(
    store: Store, runs: pd.DataFrame, *, title: str, command: str, sweep_text: str | None
) -> str:
    """The report of `runs` (rows of `store.runs()`) as HTML.

    `command` is what reproduces it; `sweep_text` is the sweep file's content, if it is known.
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
        failure_counts=counts(runs),
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
        damaged=[str(damage) for damage in store.damaged],  # after all that reads the store
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
    """Render the report and write it to `path`. Raises StoreError when that cannot be done."""
    text = render_report(store, runs, title=title, command=command, sweep_text=sweep_text)
    write_page(path, text)


def _timelines(store: Store, runs: pd.DataFrame, axes: Axes) -> dict[str, Timeline]:
    """The timeline of every run that can be drawn, by its id; a row of the table opens it."""
    found: dict[str, Timeline] = {}
    for _, run in runs.iterrows():
        with contextlib.suppress(StoreError, UsageError):
            found[run["run_id"]] = timeline(store, [run], [case_text(run, axes)])
    return found


def _idle_answers(store: Store, runs: pd.DataFrame, axes: Axes) -> list[str]:
    """Where the idle time of the fastest run went, if it tells, and what if; sound runs first."""
    told = runs[[has_parts(run) and not is_not_finite(run) for _, run in runs.iterrows()]]
    if told.empty:
        return []
    is_sound = [not is_oversubscribed(run) for _, run in told.iterrows()]
    ranked = told.assign(is_sound=is_sound).sort_values(["is_sound", "tokens_per_s"])
    fastest = ranked.iloc[-1]
    edges = edges_of_run(store, fastest)
    first = f"Fastest, {case_text(fastest, axes)}: {headline(fastest, edges)}"
    return [first, *what_if(fastest, edges)]
