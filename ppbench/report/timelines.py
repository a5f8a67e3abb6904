"""The timelines of a report: one Gantt figure per ok run, gathered so that rivals share an axis.

Runs that differ only in schedule form a group and are drawn on one time axis: AFAB above 1F1B
compares at a glance only when a millisecond is as long in both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import plotly.graph_objects as go

from ppbench.analysis.metrics import median_step
from ppbench.errors import StoreError
from ppbench.report.cases import Axes, axis_text, is_oversubscribed, ok_runs, settings_text
from ppbench.report.explanation import has_parts, headline
from ppbench.report.gantt import gantt
from ppbench.report.units import milliseconds, percent, tokens_per_s
from ppbench.store import Store

NS_PER_S = 1e9
NUM_OPEN = 2  # groups whose timelines are drawn at once; the others wait to be opened


@dataclass(frozen=True)
class Timeline:
    """The median step of some runs, or a planned one, ready to be drawn."""

    name: str
    facts: str
    figure: go.Figure
    detail: None = None  # of a figure that shows an overview
    explanations: tuple[str, ...] = ()  # where the idle time went, run by run
    run_ids: tuple[str, ...] = ()


@dataclass(frozen=True)
class Group:
    """Timelines that differ only in schedule (or launch)."""

    title: str
    timeline: Timeline
    is_open: bool


def timeline(store: Store, runs: Sequence[pd.Series], names: Sequence[str]) -> Timeline:
    """The Gantt chart of a run's median step. Raises StoreError when it has no spans stored."""
    (run,), (name,) = runs, names
    spans = store.table("spans", [run["run_id"]])
    steps = store.table("steps", [run["run_id"]])
    if spans.empty or steps.empty:
        raise StoreError(_missing(run))
    step = median_step(steps)
    shown = spans[spans["step"] == step]
    if shown.empty:
        raise StoreError(_missing(run))
    told = (headline(run, store.table("edges", [run["run_id"]])),) if has_parts(run) else ()
    figure = gantt(shown, "")
    return Timeline(name, facts(run, step), figure, None, told, (str(run["run_id"]),))


def _missing(run: pd.Series) -> str:
    return (
        f"run {run['run_id']}: its spans are not in the store (missing or unreadable); "
        "measure it again with: ppbench sweep FILE --rerun"
    )


def planned(spans: pd.DataFrame, name: str, facts: str) -> Timeline:
    """The Gantt chart of a simulated step: in ms, as measured ones are, or in s from 1 s."""
    if spans["end_ns"].max() < NS_PER_S:
        return Timeline(name, facts, gantt(spans, ""))
    scaled = spans.assign(start_ns=spans["start_ns"] / 1e3, end_ns=spans["end_ns"] / 1e3)
    figure = gantt(scaled, "").update_xaxes(ticksuffix=" s")
    for trace in figure.data:
        if trace.hovertemplate:
            trace.hovertemplate = trace.hovertemplate.replace(" ms", " s")
    return Timeline(name, facts, figure)


def facts(run: pd.Series, step: int) -> str:
    """What a timeline's heading tells of its run."""
    parts = [
        f"step {step}, the median one",
        tokens_per_s(run["tokens_per_s"]),
        f"step {milliseconds(run['step_ns'])}",
        f"bubble {percent(run['bubble_fraction'])}",
        f"theory {percent(run['bubble_fraction_theory'])}",
    ]
    return " · ".join([*parts, "oversubscribed"] if is_oversubscribed(run) else parts)


def groups(store: Store, runs: pd.DataFrame, axes: Axes) -> list[Group]:
    """The timelines of all ok runs; groups worth comparing first, and the first of them open."""
    measured = ok_runs(runs)
    others = [axis for axis in axes if axis != "schedule"]
    titles = pd.Series([settings_text(r, others) for _, r in measured.iterrows()], measured.index)
    members = {title: measured[titles == title] for title in dict.fromkeys(titles)}
    ordered = sorted(members, key=lambda title: _worth_of(members[title]), reverse=True)
    return [
        Group(title, line, n < NUM_OPEN)
        for n, title in enumerate(ordered)
        for line in _rivals(store, members[title])
    ]


def _worth_of(members: pd.DataFrame) -> tuple[bool, int, int, int]:
    """How much a group deserves to be seen first: sound, with rivals, large."""
    first = members.iloc[0]
    is_sound = not any(is_oversubscribed(run) for _, run in members.iterrows())
    num_schedules = int(members["schedule"].nunique())
    return is_sound, num_schedules, int(first["world_size"]), int(first["num_microbatches"])


def _rivals(store: Store, members: pd.DataFrame) -> list[Timeline]:
    has_launches = len(members["launch"].unique()) > 1
    found: list[Timeline] = []
    for _, run in members.iterrows():
        launch = f", launch {run['launch']}" if has_launches else ""
        name = axis_text("schedule", run["schedule"]) + launch
        with contextlib.suppress(StoreError):
            found.append(timeline(store, [run], [name]))
    _share_axis(found)
    return found


def _share_axis(timelines: list[Timeline]) -> None:
    ends = [line.figure.layout.xaxis.range[1] for line in timelines]
    for line in timelines:
        line.figure.update_xaxes(range=[0, max(ends)])
