"""The page of a timeline: one self-contained HTML file, the same bytes for the same runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ppbench.analysis.metrics import MEDIAN
from ppbench.display.cases import Axes, case_text, cautions_of, varying_axes
from ppbench.display.fields import figure
from ppbench.display.formats import Assets
from ppbench.display.units import (
    held,
    is_missing,
    milliseconds,
    percent,
    size,
    written,
)
from ppbench.errors import shortened
from ppbench.report.charts.canvas import Drawing
from ppbench.report.charts.levels import memory_over_time
from ppbench.report.pages.provenance import CLIPPED, TIMELINE, About, about_runs
from ppbench.report.pages.tables import flight_of
from ppbench.report.pages.templates import listed, render, write_page
from ppbench.report.timeline.timelines import planned, timeline
from ppbench.store import Store

Facts = list[tuple[str, str]]
_SECTION: dict[str, object] = {"name": "", "explanation": "", "flight": None, "error": ""}
"""The page says this of a run beside its facts; only a failed run has a flight and an error."""


def write_timeline(
    path: Path,
    store: Store,
    runs: pd.DataFrame,
    *,
    choice: str = MEDIAN,
    has_plan: bool = False,
    assets: Assets = Assets.inline,
) -> None:
    """Write a page with a step of each run on one time axis, and the runs' facts and memory.

    `choice` is `median`, `slowest` or a step number. Raises StoreError if a run has no spans or the
    file cannot be written, UsageError if a run has no such step or no plan.
    """
    rows, names = [run for _, run in runs.iterrows()], run_names(runs)
    line = timeline(store, rows, names, choice=choice, has_plan=has_plan)
    texts = dict(zip(line.run_ids, line.explanations, strict=True))
    sections: list[dict[str, object]] = []
    memories: list[tuple[str, Drawing]] = []
    for name, run in zip(names, rows, strict=True):
        run_id = str(run["run_id"])
        section: dict[str, object]
        workload = [("model", str(run["model_preset"])), ("device", str(run["device"]))]
        if run["status"] == "ok":
            facts = [
                ("throughput", figure("tokens_per_s", run["tokens_per_s"])),
                ("step", milliseconds(run["step_ns"])),
                ("bubble", percent(run["bubble_fraction"])),
                ("theory", percent(run["bubble_fraction_theory"])),
                ("peak memory", size(run["peak_memory_bytes"])),
                ("held microbatches", held(run)),
                *workload,
                ("cautions", ", ".join(cautions_of(run)) or "none"),
                ("run", run_id),
            ]
            section = {"name": name, "explanation": texts.get(run_id, ""), "facts": facts}
        else:
            facts = [
                ("status", str(run["status"])),
                ("at rank", written(run["error_rank"], ".0f")),
                ("try", written(run["attempt"], ".0f")),
                *workload,
                ("run", run_id),
            ]
            error = "" if is_missing(run["error"]) else str(run["error"]).strip()
            flight, heading = flight_of(store, run), f"{name}: {run['status']}"
            section = {"name": heading, "facts": facts, "flight": flight, "error": error}
        sections.append({**_SECTION, **section})
        levels = store.table("memory", [run_id])
        if not levels.empty:
            memories.append((name, memory_over_time(levels, store.table("ranks", [run_id]))))
    text = render(
        "timeline.html",
        assets=assets,
        title=line.name,
        about=about_runs(TIMELINE, line.name, runs),
        timeline=line,
        runs=sections,
        memories=memories,
        damaged=store.damaged,  # after all reading of the store
    )
    write_page(path, text, assets=assets)


def timeline_of_runs(
    store: Store,
    names: Sequence[str],
    output: Path | None,
    reports: Path,
    *,
    choice: str = MEDIAN,
    has_plan: bool = False,
    assets: Assets = Assets.inline,
) -> Path:
    """Write the page of the named runs, as `write_timeline` does, and return its path.

    By default it lies in the folder `reports`, whose index is rebuilt when a page is added to it.
    """
    runs = store.named(names)
    ids = [str(run_id) for run_id in runs["run_id"]]
    name = ids[0]
    if len(ids) > 1 or choice != MEDIAN or has_plan:  # whatever else was chosen is in a hash
        chosen = json.dumps([ids, choice, has_plan])
        name += f"-{hashlib.sha256(chosen.encode()).hexdigest()[:6]}"
    path = output or reports / f"timeline-{name}.html"
    with listed(path, reports):
        write_timeline(path, store, runs, choice=choice, has_plan=has_plan, assets=assets)
    return path


def run_names(runs: pd.DataFrame) -> list[str]:
    """Name each run by the settings that vary; a single run by its usual settings."""
    axes: Axes = varying_axes(runs) if len(runs) > 1 else ()
    texts = [case_text(run, axes) for _, run in runs.iterrows()]
    is_repeated = [texts.count(text) > 1 for text in texts]
    ids = runs["run_id"].astype(str)
    named = zip(texts, ids, is_repeated, strict=True)
    return [f"{text}, {run_id}" if again else text for text, run_id, again in named]


def write_plan(path: Path, spans: pd.DataFrame, *, title: str, subtitle: str, facts: Facts) -> None:
    """Write a page with the Gantt chart of a simulated step.

    Raises StoreError if the file cannot be written.
    """
    page = render(
        "timeline.html",
        title=title,
        about=About(TIMELINE, shortened(title, CLIPPED)),
        timeline=planned(spans, title, subtitle),
        runs=[{**_SECTION, "facts": facts}],
        memories=[],
        damaged=[],
    )
    write_page(path, page, option="-o")
