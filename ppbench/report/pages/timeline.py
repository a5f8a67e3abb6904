"""The page of a timeline: one self-contained HTML file, the same bytes for the same runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from ppbench.analysis.metrics import MEDIAN
from ppbench.display.cases import Axes, case_text, cautions_of, varying_axes
from ppbench.display.document import Block, Code, Facts, Picture, Result, Section, Text
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
from ppbench.report.charts.levels import memory_over_time
from ppbench.report.pages.provenance import CLIPPED, TIMELINE, About, about_runs
from ppbench.report.pages.tables import flight_of
from ppbench.report.pages.templates import listed, macro, page, write_page
from ppbench.report.timeline.timelines import Timeline, planned, timeline
from ppbench.store import Store

_ABOUT_MEMORY = (
    "Bytes allocated to tensors on each rank during an additional step that is not timed, since "
    "recording allocations slows it down. Dashed lines are the peaks predicted from the program."
)


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
    sections: list[Section] = []
    memories: list[Section] = []
    has_flight = False
    for name, run in zip(names, rows, strict=True):
        run_id = str(run["run_id"])
        workload = {"model": str(run["model_preset"]), "device": str(run["device"])}
        blocks: list[Block] = []
        heading = name
        if run["status"] == "ok":
            facts = {
                "throughput": figure("tokens_per_s", run["tokens_per_s"]),
                "step": milliseconds(run["step_ns"]),
                "bubble": percent(run["bubble_fraction"]),
                "theory": percent(run["bubble_fraction_theory"]),
                "peak memory": size(run["peak_memory_bytes"]),
                "held microbatches": held(run),
                **workload,
                "cautions": ", ".join(cautions_of(run)) or "none",
            }
            blocks += [Text(text)] if (text := texts.get(run_id, "")) else []
        else:
            facts = {
                "status": str(run["status"]),
                "at rank": written(run["error_rank"], ".0f"),
                "try": written(run["attempt"], ".0f"),
                **workload,
            }
            heading = f"{name}: {run['status']}"
            if flight := flight_of(store, run):
                has_flight = True
                blocks.append(Section("", "What each rank was doing", flight))
            if not is_missing(run["error"]):
                blocks.append(Section("", "Error", [Code(str(run["error"]).strip())]))
        blocks.append(Facts({**facts, "run": run_id}))
        sections.append(Section("", heading if len(rows) > 1 else "", blocks, kind="run"))
        levels = store.table("memory", [run_id])
        if not levels.empty:
            drawing = memory_over_time(levels, store.table("ranks", [run_id]))
            chart = macro("parts.html", "panels", drawing, f"Memory over a step of {name}")
            drawn: list[Block] = [Text(_ABOUT_MEMORY, is_note=True), Picture(of_page=chart)]
            memories.append(Section("", f"Memory, {name}", drawn, kind="memory"))
    if len(memories) == 1:
        memories = [dataclasses.replace(memories[0], heading="Memory")]
    damaged = store.damaged  # after all reading of the store
    first = [Section("damaged", "Damaged files", [Text([*damaged], "Left out")])] if damaged else []
    text = _page_of(
        line,
        [*first, _drawn(line, has_flight=has_flight), *sections, *memories],
        about_runs(TIMELINE, line.name, runs),
        assets=assets,
        has_charts=bool(memories),
    )
    write_page(path, text, assets=assets)


def _drawn(line: Timeline, *, has_flight: bool = False) -> Section:
    """The timeline, and how to read it."""
    drawn = macro("parts.html", "shown_timeline", line, f"Timeline of {line.name}", "timeline")
    note = macro("parts.html", "timeline_reading", line, has_flight)
    picture = Picture(of_page=f"{drawn}\n{macro('parts.html', 'timeline_meta', line, 'timeline')}")
    return Section("", "", [picture, Picture(of_page=note)], kind="timeline timeline-page")


def _page_of(
    line: Timeline,
    blocks: Sequence[Block],
    about: About,
    *,
    assets: Assets = Assets.inline,
    has_charts: bool = False,
) -> str:
    rest = {"timeline": line, "has_charts": has_charts}
    return page(Result(blocks), about, line.facts, template="timeline.html", assets=assets, **rest)


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


def write_plan(
    path: Path, spans: pd.DataFrame, *, title: str, subtitle: str, facts: Mapping[str, str]
) -> None:
    """Write a page with the Gantt chart of a simulated step.

    Raises StoreError if the file cannot be written.
    """
    line = planned(spans, title, subtitle)
    blocks = [_drawn(line), Section("", "", [Facts(facts)], kind="run")]
    write_page(
        path, _page_of(line, blocks, About(TIMELINE, shortened(title, CLIPPED))), option="-o"
    )
