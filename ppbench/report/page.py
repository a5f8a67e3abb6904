"""Pages: one HTML file each, complete in itself, the same bytes for the same runs."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from ppbench.errors import StoreError
from ppbench.report import levels
from ppbench.report.about import About, about_report, about_timeline
from ppbench.report.answer import answer
from ppbench.report.cases import Axes, case_text, is_oversubscribed, ok_runs, varying_axes
from ppbench.report.chart_list import charts_of
from ppbench.report.document import render, write
from ppbench.report.explanation import has_parts, headline, what_if
from ppbench.report.filters import case_list, filters
from ppbench.report.provenance import common, environments, origin, plain_text
from ppbench.report.summary import bubbles, cautioned, failures, idle_parts, summary
from ppbench.report.timelines import Timeline, groups, planned, timeline
from ppbench.report.units import held, milliseconds, percent, size, tokens_per_s
from ppbench.store import Store

_NO_AXES: Axes = ()


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
        failures=failures(runs, axes),
        summary=summary(runs, axes),
        timelines=_timelines(store, runs, axes),
        charts=charts_of(store, runs, axes),
        idle_parts=idle_parts(ok_runs(runs), axes),
        idle_answers=_idle_answers(store, ok_runs(runs), axes),
        groups=groups(store, runs, axes),
        case_of=dict(zip(runs["run_id"], runs["case_id"], strict=True)),
        bubbles=bubbles(ok_runs(runs), axes),
        environments=environments(runs),
        command=command,
        sweep_text=sweep_text,
        sweep_file=common(runs, "sweep_file"),
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
    write(path, render_report(store, runs, title=title, command=command, sweep_text=sweep_text))


def write_timeline(path: Path, store: Store, run: pd.Series) -> None:
    """Write a page with the Gantt chart of one run's median step and the run's facts.

    Raises StoreError when the run has no spans, or when the file cannot be written.
    """
    name = case_text(run, _NO_AXES)
    line = timeline(store, [run], [name])
    table = store.table("memory", [run["run_id"]])
    memory = None if table.empty else levels.memory(table)
    about = about_timeline(name, pd.DataFrame([run]))
    write(path, _timeline_page(line, about, name, _facts(run), memory))


def write_plan(
    path: Path, spans: pd.DataFrame, *, title: str, subtitle: str, facts: list[tuple[str, str]]
) -> None:
    """Write a page with the Gantt chart of a simulated step, as `write_timeline` of a run.

    Raises StoreError when the file cannot be written.
    """
    line = planned(spans, title, subtitle)
    write(path, _timeline_page(line, about_timeline(title), title, facts), option="--html")


def _timeline_page(
    line: Timeline,
    about: About,
    title: str,
    facts: list[tuple[str, str]],
    memory: go.Figure | None = None,
) -> str:
    return render(
        "timeline.html", title=title, about=about, timeline=line, memory=memory, facts=facts
    )


def _timelines(store: Store, runs: pd.DataFrame, axes: Axes) -> dict[str, Timeline]:
    """The timeline of every ok run that has spans, by its id; a row of the table opens it."""
    found: dict[str, Timeline] = {}
    for _, run in ok_runs(runs).iterrows():
        with contextlib.suppress(StoreError):
            found[run["run_id"]] = timeline(store, [run], [case_text(run, axes)])
    return found


def _idle_answers(store: Store, runs: pd.DataFrame, axes: Axes) -> list[str]:
    """Where the idle time of the fastest run went, if it tells, and what if; sound runs first."""
    told = runs[[has_parts(run) for _, run in runs.iterrows()]]
    if told.empty:
        return []
    is_sound = [not is_oversubscribed(run) for _, run in told.iterrows()]
    ranked = told.assign(is_sound=is_sound).sort_values(["is_sound", "tokens_per_s"])
    fastest = ranked.iloc[-1]
    edges = store.table("edges", [fastest["run_id"]])
    first = f"Fastest, {case_text(fastest, axes)}: {headline(fastest, edges)}"
    return [first, *what_if(fastest, edges)]


def _facts(run: pd.Series) -> list[tuple[str, str]]:
    return [
        ("throughput", tokens_per_s(run["tokens_per_s"])),
        ("step", milliseconds(run["step_ns"])),
        ("bubble", percent(run["bubble_fraction"])),
        ("in theory", percent(run["bubble_fraction_theory"])),
        ("peak memory", size(run["peak_memory_bytes"])),
        ("held microbatches", held(run)),
        ("model", str(run["model_preset"])),
        ("device", str(run["device"])),
        ("cautions", plain_text(run["cautions"]) or "none"),
        ("run", str(run["run_id"])),
    ]
