"""Pages: one HTML file each, complete in itself, the same bytes for the same runs.

plotly.js is inlined once and figures are embedded as JSON, rather than through plotly's own
`to_html`: that repeats its settings per figure, gives every chart a random id and draws all of
them at once. The page's policy forbids every network request.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from ppbench.report import charts
from ppbench.report.answer import answer
from ppbench.report.cases import Axes, case_text, is_oversubscribed, ok_runs, varying_axes
from ppbench.report.explanation import has_parts, headline, what_if
from ppbench.report.summary import bubbles, cautioned, failures, idle_parts, summary
from ppbench.report.timelines import groups
from ppbench.report.units import (
    MISSING,
    counted,
    is_missing,
    size,
)
from ppbench.report.writing import environment, write_page
from ppbench.store import Store

_TEMPLATES = Path(__file__).parent / "templates"
_NO_AXES: Axes = ()


@dataclass(frozen=True)
class Chart:
    """A figure over all cases, with its heading and how to read it."""

    name: str
    heading: str
    explanation: str
    figure: go.Figure


def render_report(
    store: Store, runs: pd.DataFrame, *, title: str, command: str, sweep_text: str | None
) -> str:
    """The report of `runs` (rows of `store.runs()`) as HTML.

    `command` is what reproduces it; `sweep_text` is the sweep file's content, if it is known.
    """
    axes = varying_axes(runs)
    template = environment().get_template("report.html")
    return template.render(
        title=title,
        subtitle=_subtitle(runs),
        answer=answer(runs, axes),
        cautions=cautioned(runs, axes),
        num_cases=runs["case_id"].nunique(),
        failures=failures(runs, axes),
        summary=summary(runs, axes),
        charts=_charts(store, runs, axes),
        idle_parts=idle_parts(ok_runs(runs), axes),
        idle_answers=_idle_answers(store, ok_runs(runs), axes),
        groups=groups(store, runs, axes),
        bubbles=bubbles(ok_runs(runs), axes),
        environments=_environments(runs),
        command=command,
        sweep_text=sweep_text,
        sweep_file=_common(runs, "sweep_file"),
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
    write_page(
        path, render_report(store, runs, title=title, command=command, sweep_text=sweep_text)
    )


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


def _charts(store: Store, runs: pd.DataFrame, axes: Axes) -> list[Chart]:
    measured = ok_runs(runs)
    if measured.empty:
        return []
    drawn = [
        Chart(
            "throughput",
            "Throughput",
            "Tokens of a step over its full time, optimizer included.",
            charts.throughput(measured, axes),
        ),
        Chart(
            "bubble",
            "Bubble",
            "Bars: the share of rank-time without compute, as measured. Diamonds: what the "
            "schedule leaves idle even with free transfers and equal stages, or those emulated.",
            charts.bubble(measured, axes),
        ),
    ]
    with_memory = measured[measured["peak_memory_bytes"].notna()]
    if not with_memory.empty:
        ranks = store.table("ranks", with_memory["run_id"])
        drawn.append(
            Chart(
                "memory",
                "Peak memory",
                "Bars: the rank that needs most. Points: every rank, rank 0 on the left.",
                charts.peak_memory(with_memory, ranks, axes),
            )
        )
    return drawn


def _subtitle(runs: pd.DataFrame) -> str:
    """How many runs of how many cases, on what, measured when."""
    days = sorted({str(moment)[:10] for moment in runs["created_at"].dropna()})
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else ""
    parts = [
        f"{counted(len(runs), 'run')} of {counted(runs['case_id'].nunique(), 'case')}",
        _common(runs, "model_preset"),
        _common(runs, "device"),
        when,
    ]
    return " · ".join(part for part in parts if part)


def _common(runs: pd.DataFrame, column: str) -> str:
    """The value that all runs share, or nothing."""
    values = runs[column].dropna().unique()
    return str(values[0]) if len(values) == 1 else ""


def _environments(runs: pd.DataFrame) -> list[list[tuple[str, str]]]:
    """The facts of every distinct environment and commit among the runs, in the runs' order."""
    distinct = runs.drop_duplicates(["fingerprint", "environment", "commit", "branch", "is_dirty"])
    return [_environment_facts(run) for _, run in distinct.iterrows()]


def _environment_facts(run: pd.Series) -> list[tuple[str, str]]:
    text = run["environment"]
    details: dict[str, object] = {} if is_missing(text) else json.loads(str(text))
    facts = [_environment_fact(name, value) for name, value in details.items()]
    return [
        ("commit", _commit(run)),
        ("fingerprint", _plain(run["fingerprint"])),
        ("ppbench", _plain(run["ppbench_version"])),
        *((name, text) for name, text in facts if text != MISSING),
    ]


def _environment_fact(name: str, value: object) -> tuple[str, str]:
    words = name.removesuffix("_bytes").replace("_", " ")
    return words, size(value) if name.endswith("_bytes") else _plain(value)


def _commit(run: pd.Series) -> str:
    if is_missing(run["commit"]):
        return "not in a repository"
    dirty = ", with uncommitted changes" if run["is_dirty"] is True or run["is_dirty"] == 1 else ""
    branch = "" if is_missing(run["branch"]) else f" on {run['branch']}"
    return f"{run['commit']}{branch}{dirty}"


def _plain(value: object) -> str:
    """A fact from the environment as text; nothing for what the machine does not have."""
    if is_missing(value) or value == []:
        return MISSING
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value)
    return value if isinstance(value, str) else json.dumps(value)
