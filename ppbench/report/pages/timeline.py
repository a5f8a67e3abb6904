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
from ppbench.display.document import Block, Code, Facts, Result, Section, Text
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
from ppbench.report.pages.templates import listed, page, write_page
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
            chart = drawing.picture(f"Memory over a step of {name}")
            drawn: list[Block] = [Text(_ABOUT_MEMORY, kind="note"), chart]
            memories.append(Section("", f"Memory, {name}", drawn, kind="memory"))
    if len(memories) == 1:
        memories = [dataclasses.replace(memories[0], heading="Memory")]
    damaged = store.damaged  # after all reading of the store
    first = [Section("damaged", "Damaged files", [Text([*damaged], "Left out")])] if damaged else []
    result = Result([*first, _drawn(line, has_flight=has_flight), *sections, *memories])
    about, drawn_here = about_runs(TIMELINE, line.name, runs), {"timeline": line}
    text = page(result, about, line.facts, assets=assets, timelines=drawn_here)
    write_page(path, text, assets=assets)


def _drawn(line: Timeline, *, has_flight: bool = False) -> Section:
    """The timeline, and how to read it."""
    lanes = (
        "The thick lane of a rank shows its compute, labelled with the microbatch; the thin lanes "
        "are its sends and receives, lighter while one end waits for the other"
    )
    if line.is_of_replicas:
        lanes += (
            ", and the collectives of its replicas, lighter until the slowest has come; the menu "
            "shows the other replicas, and each rank of all of them"
        )
    lanes += ". If a rank has several stages, the later ones are lighter."
    words = [lanes, "Idle time has the colour of its cause."]
    if line.is_in_a_row:
        words.append(
            "Between the lines is the step of the heading, with all its idle time; each rank "
            "begins it when it has ended the one before. The paler steps are those before and "
            "after it."
        )
    path = "" if line.is_failed else " or to show the critical path"
    words.append(f"Click a name to hide it{path}.")
    if has_flight:
        words.append(
            "Hatched actions were never finished; hover over them to see what the rank waited for."
        )
    blocks: list[Block] = [line.picture("timeline"), Text(" ".join(words), kind="note")]
    return Section("", "", blocks, kind="timeline timeline-page")


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


def planned_page(
    spans: pd.DataFrame, *, title: str, subtitle: str, facts: Mapping[str, str]
) -> str:
    """Return a page with the Gantt chart of a simulated step."""
    line = planned(spans, title, subtitle)
    result = Result([_drawn(line), Section("", "", [Facts(facts)], kind="run")])
    about = About(TIMELINE, shortened(title, CLIPPED))
    return page(result, about, line.facts, timelines={"timeline": line})
