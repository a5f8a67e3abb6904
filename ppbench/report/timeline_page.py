"""The page of a timeline: one HTML file, complete in itself, the same bytes for the same runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go

from ppbench.analysis.metrics import MEDIAN
from ppbench.report import levels
from ppbench.report.about import About, about_timeline
from ppbench.report.cases import Axes, case_text, cautions_of, varying_axes
from ppbench.report.failures import Flight, flight_of
from ppbench.report.timelines import Timeline, planned, timeline
from ppbench.report.units import (
    held,
    is_missing,
    milliseconds,
    percent,
    size,
    tokens_per_s,
    written,
)
from ppbench.report.writing import render, write_page
from ppbench.store import Store

Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class _Memory:
    """What the ranks of a run had allocated over a step."""

    name: str
    figure: go.Figure


@dataclass(frozen=True)
class _OfRun:
    """What a page tells of a run below its timeline."""

    name: str
    explanation: str
    facts: Facts
    flight: Flight | None = None  # of one that failed
    error: str = ""


def write_timeline(
    path: Path,
    store: Store,
    runs: pd.DataFrame,
    *,
    choice: str = MEDIAN,
    has_plan: bool = False,
) -> None:
    """Write a page with a step of each run on one time axis, and the runs' facts and memory.

    `choice` is `median`, `slowest` or the number of a step. Raises StoreError when a run has no
    spans or the file cannot be written, UsageError when it has no such step or no plan.
    """
    rows, names = [run for _, run in runs.iterrows()], run_names(runs)
    line = timeline(store, rows, names, choice=choice, has_plan=has_plan)
    texts = dict(zip(line.run_ids, line.explanations, strict=True))
    of_runs = [
        _of_failed(store, run, name)
        if run["status"] != "ok"
        else _OfRun(name, texts.get(str(run["run_id"]), ""), _facts(run))
        for name, run in zip(names, rows, strict=True)
    ]
    memories = [_memory(store, run, name) for name, run in zip(names, rows, strict=True)]
    about = about_timeline(line.name, runs)
    damaged = [str(damage) for damage in store.damaged]  # after all that reads the store
    drawn = [memory for memory in memories if memory is not None]
    write_page(path, _page(line, about, of_runs, drawn, damaged))


def run_names(runs: pd.DataFrame) -> list[str]:
    """What tells each of the runs from the others; of one, its usual settings."""
    axes: Axes = varying_axes(runs) if len(runs) > 1 else ()
    texts = [case_text(run, axes) for _, run in runs.iterrows()]
    is_repeated = [texts.count(text) > 1 for text in texts]
    ids = runs["run_id"].astype(str)
    named = zip(texts, ids, is_repeated, strict=True)
    return [f"{text}, {run_id}" if again else text for text, run_id, again in named]


def write_plan(path: Path, spans: pd.DataFrame, *, title: str, subtitle: str, facts: Facts) -> None:
    """Write a page with the Gantt chart of a simulated step, as `write_timeline` of a run.

    Raises StoreError when the file cannot be written.
    """
    line = planned(spans, title, subtitle)
    page = _page(line, about_timeline(title), [_OfRun("", "", facts)], [])
    write_page(path, page, option="--html")


def _page(
    line: Timeline,
    about: About,
    of_runs: Sequence[_OfRun],
    memories: Sequence[_Memory],
    damaged: Sequence[str] = (),
) -> str:
    shown = {"title": line.name, "timeline": line, "runs": of_runs, "memories": memories}
    return render("timeline.html", about=about, damaged=damaged, **shown)


def _memory(store: Store, run: pd.Series, name: str) -> _Memory | None:
    run_ids = [str(run["run_id"])]
    table = store.table("memory", run_ids)
    if table.empty:
        return None
    return _Memory(name, levels.memory(table, store.table("ranks", run_ids)))


def _of_failed(store: Store, run: pd.Series, name: str) -> _OfRun:
    error = "" if is_missing(run["error"]) else str(run["error"]).strip()
    return _OfRun(
        f"{name}: {run['status']}", "", _facts_of_failed(run), flight_of(store, run), error
    )


def _facts_of_failed(run: pd.Series) -> Facts:
    return [
        ("status", str(run["status"])),
        ("at rank", written(run["error_rank"], "{:.0f}")),
        ("try", written(run["attempt"], "{:.0f}")),
        ("model", str(run["model_preset"])),
        ("device", str(run["device"])),
        ("run", str(run["run_id"])),
    ]


def _facts(run: pd.Series) -> Facts:
    return [
        ("throughput", tokens_per_s(run["tokens_per_s"])),
        ("step", milliseconds(run["step_ns"])),
        ("bubble", percent(run["bubble_fraction"])),
        ("in theory", percent(run["bubble_fraction_theory"])),
        ("peak memory", size(run["peak_memory_bytes"])),
        ("held microbatches", held(run)),
        ("model", str(run["model_preset"])),
        ("device", str(run["device"])),
        ("cautions", ", ".join(cautions_of(run)) or "none"),
        ("run", str(run["run_id"])),
    ]
