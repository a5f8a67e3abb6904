"""Charts of speed and of idle time: throughput, scaling, step times, the bubble and its causes."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np
import pandas as pd

from ppbench.config.case import EMULATED
from ppbench.display.cases import Axes, ok_runs
from ppbench.display.colors import PART_COLORS, schedule_colors, translucent
from ppbench.display.explanation import OF_REPLICAS, PART_NAMES
from ppbench.display.fields import field_of
from ppbench.display.units import NS_PER_MS, counted
from ppbench.report.charts.canvas import (
    NEUTRAL,
    NOT_FINITE_SYMBOL,
    bar,
    bars,
    blank,
    by_panel,
    by_schedule,
    caution_notes,
    hatching,
    hover_texts,
    ids_in_panel,
    in_panel,
    launch_notes,
    legend_key,
    markers,
    scatter,
    shared_axis,
    with_hatch_key,
)
from ppbench.report.charts.panels import arrange, arrange_rows, figure_text
from ppbench.report.scripts import Picture

LEAST_FOR_BOX = 8
"""Quartiles of fewer steps mean little, so these are drawn one by one."""
_QUARTILES = {"fastest": 0.0, "q1": 0.25, "median": 0.5, "q3": 0.75, "slowest": 1.0}
_KINDS = ["schedule", "runtime"]


def throughput(cases: pd.DataFrame, axes: Axes) -> Picture:
    """Draw the tokens/s of every ok case, as the median over its launches.

    Error bars reach from the slowest to the fastest launch, or over the 95 % interval of the median
    over the steps of a single launch. `cases` are rows of `by_case`, `axes` the varying settings.
    """
    panels = arrange(cases, axes)
    figure = blank(panels, field_of("tokens_per_s").heading, shared_axis(panels, tickformat=",~s"))
    shown = "%{value:,.0f} tokens/s"
    figure["data"] += bars(panels, "tokens_per_s", shown, with_spread=True)
    return with_hatch_key(figure, panels)


def scaling(cases: pd.DataFrame, axes: Axes) -> Picture:
    """Draw the scaling efficiency of every ok case against world size; see `efficiencies`.

    `cases` are rows of `by_case`, `axes` the varying settings, of which `world_size` must be one.
    Cases without a base to compare with are not drawn.
    """
    cases = efficiencies(cases, axes).dropna(subset=["efficiency"])
    panels = arrange(cases, axes)
    scale = shared_axis(panels, tickformat=".0%", rangemode="normal")
    sizes = cases["base_size"].unique()
    base = counted(int(sizes[0]), "rank") if len(sizes) == 1 else "fewest ranks"
    figure = blank(panels, f"efficiency, {base} = 100 %", scale)
    figure["data"] += [
        scatter(  # at 100 % for each panel, from its first tick to its last
            **in_panel(panel),
            name="ideal",
            legendgroup="ideal",
            showlegend=panel == 0,
            x=[panels.cases["tick"].min(), panels.cases["tick"].max()],
            y=[1.0, 1.0],
            mode="lines",
            line={"color": NEUTRAL, "width": 1.5, "dash": "dot"},
            hoverinfo="skip",
        )
        for panel in range(len(panels.titles))
    ]
    colors = schedule_colors(panels.cases["schedule"])
    for schedule, panel, schedule_cases, is_first in by_schedule(panels):
        drawn = schedule_cases.sort_values("tick")
        shapes = np.where(drawn["is_oversubscribed"], "circle-open", "circle")
        symbols = np.where(drawn["is_not_finite"], NOT_FINITE_SYMBOL, shapes).tolist()
        bases = [f", {counted(int(size), 'rank')} = 100%" for size in drawn["base_size"]]
        line = scatter(
            **panels.at(drawn["tick"], drawn["efficiency"]),
            **ids_in_panel(drawn, panel),
            name=figure_text(schedule),
            legendgroup=schedule,
            showlegend=is_first,
            mode="lines+markers",
            cliponaxis=False,
            line={"color": colors[schedule], "width": 2},
            marker={"color": colors[schedule], "size": 8, "symbol": symbols, "line": {"width": 0}},
            customdata=hover_texts(drawn, bases + caution_notes(drawn)),
            hovertemplate="<b>%{customdata[0]}</b><br>%{y:.1%}%{customdata[1]}<extra></extra>",
        )
        figure["data"].append(line)
    if cases["is_oversubscribed"].any():
        open_circle = {"symbol": "circle-open", "size": 8, "color": NEUTRAL}
        figure["data"].append(legend_key("oversubscribed", open_circle))
    return figure


def efficiencies(cases: pd.DataFrame, axes: Axes) -> pd.DataFrame:
    """Add `base_size` and `efficiency`: tokens/s per rank over tokens/s per rank of the base.

    The base of a case differs from it only in `world_size`, which is the smallest one measured. On
    one rank every schedule computes the same, so another schedule is the base there if the case's
    own was not measured, and the unsplit model if its runtime was not. Each emulated rank takes
    the configured time, so the model grows with the number of ranks, and total tokens/s are
    compared instead.
    """
    free = ("world_size", *_KINDS)
    others = [axis for axis in axes if axis not in free] or ["device"]
    speed = cases["tokens_per_s"].mask(cases["is_not_finite"])  # no base
    rows = cases.assign(tokens_per_s=speed).dropna(subset=others).sort_index()
    keys = list(zip(*(rows[axis] for axis in others), strict=True))
    speeds: list[Any] = list(rows[[*free, "device", "tokens_per_s"]].itertuples(index=False))
    groups = defaultdict[Any, list[Any]](list)  # of cases that differ only in what is free
    for key, own in zip(keys, speeds, strict=True):
        groups[key].append(own)
    sizes: list[int] = []
    efficiency: list[float] = []  # NaN without a base
    for key, own in zip(keys, speeds, strict=True):
        single = [other for other in groups[key] if other.world_size == 1]
        kind = own.schedule, own.runtime
        alike = [other for other in groups[key] if (other.schedule, other.runtime) == kind]
        size = 1 if single else min(other.world_size for other in alike)
        bases = [next((case.tokens_per_s for case in alike if case.world_size == size), math.nan)]
        if single:
            by_runtime = {case.runtime: case.tokens_per_s for case in reversed(single)}
            unsplit = by_runtime.get("single", single[0].tokens_per_s)
            bases += [by_runtime.get(own.runtime, math.nan), unsplit]
        base = next((base for base in bases if not math.isnan(base)), math.nan)
        growth = 1.0 if own.device == EMULATED else own.world_size / size
        sizes.append(size)
        efficiency.append(own.tokens_per_s / base / growth if base else math.nan)
    return rows.assign(base_size=sizes, efficiency=np.array(efficiency, dtype=float))


def has_scaling(cases: pd.DataFrame, axes: Axes) -> bool:
    """Whether some case can be compared with a base of fewer ranks."""
    if "world_size" not in axes or cases.empty:
        return False
    cases = efficiencies(cases, axes).dropna(subset=["efficiency"])
    return bool((cases["world_size"] > cases["base_size"]).any())


def step_times(cases: pd.DataFrame, runs: pd.DataFrame, steps: pd.DataFrame, axes: Axes) -> Picture:
    """Draw the periods in ms of all steps of every ok case: boxes, or points for few steps.

    A box spans the first to the third quartile over the steps of all launches, with the median
    inside; its whiskers reach the fastest and the slowest step that is not an outlier; outliers are
    points. Each panel has its own scale, which need not start at zero. `cases` are rows of
    `by_case`, `runs` and `steps` of the store's tables, `axes` the varying settings.
    """
    times = steps.merge(ok_runs(runs)[["run_id", "case_id", "launch"]], on="run_id")
    times = times.assign(
        ms=times["step_ns"] / NS_PER_MS,
        is_outlier=times["is_outlier"].eq(True),  # null where it was not asked
    ).dropna(subset=["ms"])
    # Quartiles over all steps, whiskers without outliers.
    by_case_id = times.groupby("case_id")["ms"]
    boxes = pd.DataFrame({name: by_case_id.quantile(q) for name, q in _QUARTILES.items()})
    usual = times[~times["is_outlier"]].groupby("case_id")["ms"]
    for name, ends in (("fastest", usual.min()), ("slowest", usual.max())):
        boxes[name] = ends.reindex(boxes.index).fillna(boxes[name])
    boxes["num_steps"] = by_case_id.size()
    panels = arrange_rows(cases.merge(boxes.reset_index(), on="case_id"), axes)
    figure = blank(panels, "ms per step", {"tickformat": ",~r"})
    colors = schedule_colors(panels.cases["schedule"])
    for schedule, panel, schedule_cases, _ in by_schedule(panels):
        drawn = schedule_cases[schedule_cases["num_steps"] >= LEAST_FOR_BOX]
        if len(drawn):
            box = {
                **ids_in_panel(drawn, panel),
                "name": figure_text(schedule),
                "showlegend": False,
                "orientation": "h",
                "y": drawn["x"].to_numpy(dtype=float),
                **{name: drawn[name].to_numpy(dtype=float) for name in ("q1", "median", "q3")},
                "lowerfence": drawn["fastest"].to_numpy(dtype=float),
                "upperfence": drawn["slowest"].to_numpy(dtype=float),
                "width": panels.bar_width * 0.8,
                "line": {"color": colors[schedule], "width": 1.5},
                "fillcolor": translucent(colors[schedule], 0.35),
                "boxpoints": False,
                "hoverinfo": "skip",
                "type": "box",
            }
            figure["data"].append(box)
    few = panels.cases[panels.cases["num_steps"] < LEAST_FOR_BOX]
    columns = ["case_id", "panel", "x", "schedule"]
    single_steps = times[~times["is_outlier"]].merge(few[columns], on="case_id")
    for (of, place), points in single_steps.groupby(["schedule", "panel"]):
        steps_of_panel = scatter(
            **panels.at(points["x"], points["ms"]),
            **ids_in_panel(points, int(str(place))),
            name=figure_text(str(of)),
            showlegend=False,
            mode="markers",
            marker={"size": 7, "color": colors[str(of)]},
            hoverinfo="skip",
        )
        figure["data"].append(steps_of_panel)
    # The medians are the marks to hover over: plotly would show five labels of a box at once.
    for panel, drawn, _ in by_panel(panels.cases):
        notes = launch_notes(drawn).str.replace("median of", "steps of") + caution_notes(drawn)
        medians = scatter(
            **panels.at(drawn["x"], drawn["median"]),
            **ids_in_panel(drawn, panel),
            name="median",
            showlegend=False,
            mode="markers",
            marker={"symbol": "line-ns", "size": 12, "line": {"width": 2.5, "color": NEUTRAL}},
            customdata=hover_texts(drawn, drawn.apply(_box_text, axis=1) + notes),
            hovertemplate="<b>%{customdata[0]}</b><br>median %{x:,.1f} ms%{customdata[1]}"
            "<extra></extra>",
        )
        figure["data"].append(medians)
    outliers = times[times["is_outlier"]].merge(panels.cases[["case_id", "panel", "x", "text"]])
    for panel, points, is_first in by_panel(outliers):
        where = [
            f"launch {launch}, step {step}"
            for launch, step in zip(points["launch"], points["step"], strict=True)
        ]
        rings = scatter(
            **panels.at(points["x"], points["ms"]),
            **ids_in_panel(points, panel),
            name="outlier",
            legendgroup="outlier",
            showlegend=is_first,
            mode="markers",
            cliponaxis=False,
            marker={"symbol": "circle-open", "size": 6, "color": NEUTRAL},
            customdata=hover_texts(points, where),
            hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}: %{x:,.1f} ms,"
            "<br>an outlier among the steps of its launch<extra></extra>",
        )
        figure["data"].append(rings)
    return figure


def _box_text(case: pd.Series) -> str:
    if case["num_steps"] < LEAST_FOR_BOX:
        return f" of {counted(int(case['num_steps']), 'step')}"
    return (
        f"<br>half of {counted(int(case['num_steps']), 'step')}: "
        f"{case['q1']:,.1f} to {case['q3']:,.1f} ms"
        f"<br>all but outliers: {case['fastest']:,.1f} to {case['slowest']:,.1f} ms"
    )


PART_COLUMNS = {part: f"bubble_{part}" for part in PART_NAMES if part not in OF_REPLICAS}
"""The parts of every run."""


def parts_of_runs(runs: pd.DataFrame) -> pd.DataFrame:
    """The parts of the runs that have them; those of replicas are columns only where some has."""
    known = runs.reindex(columns=[f"bubble_{part}" for part in PART_NAMES])
    known = known.dropna(subset=list(PART_COLUMNS.values())).astype(float)
    return known.dropna(axis="columns", how="all").fillna(0.0)


def bubble(cases: pd.DataFrame, axes: Axes) -> Picture:
    """Draw the measured `bubble_fraction` of every ok case as bars, its theory as markers.

    Values are medians over launches. `cases` are rows of `by_case`, `axes` the varying settings.
    """
    panels = arrange(cases, axes)
    figure = blank(
        panels, field_of("bubble_fraction").heading, shared_axis(panels, tickformat=".0%")
    )
    figure["data"] += bars(panels, "bubble_fraction", "%{value:.1%} measured")
    cases = panels.cases
    marks = cases.assign(
        value=cases["bubble_fraction_theory"], hover=cases["text"].map(figure_text) + "<br>theory: "
    )
    diamond = {"symbol": "diamond", "size": 8}
    figure["data"] += markers(panels, marks, "theory", diamond, "%{value:.1%}")
    return with_hatch_key(figure, panels)


def idle(cases: pd.DataFrame, runs: pd.DataFrame, axes: Axes) -> Picture:
    """Draw the idle time of every ok case by cause: the parts of its bubble, stacked.

    Values are means over launches, so that the parts still add up; negative parts lie left of zero.
    Cases without stored parts are not drawn, nor are single ranks beside pipelines. `cases` are
    rows of `by_case`, `runs` of the store's `runs`, `axes` the varying settings.
    """
    runs = ok_runs(runs)
    own = parts_of_runs(runs)
    runs = runs.loc[own.index].assign(**own)
    runs = runs[(runs["world_size"] > 1) | (runs["world_size"].max() == 1)]
    parts = runs.groupby("case_id")[[*own.columns, "bubble_mean"]].mean()
    panels = arrange_rows(cases.join(parts, on="case_id", how="inner"), axes)
    figure = blank(panels, "share of rank-time", shared_axis(panels, tickformat=".0%"), "relative")
    for column in own.columns:
        part = column.removeprefix("bubble_")
        for panel, drawn, is_first in by_panel(panels.cases):
            total = [f"<br>of {share:.1%} idle" for share in drawn["bubble_mean"]]
            trace = bar(
                **panels.at(drawn["x"], drawn[column]),
                **ids_in_panel(drawn, panel),
                name=field_of(f"{part}_ns").label,
                legendgroup=part,
                showlegend=is_first,
                orientation="h",
                width=panels.bar_width,
                marker={
                    "color": PART_COLORS[part],
                    "line": {"width": 0},
                    "pattern": hatching(drawn),
                },
                customdata=hover_texts(drawn, total + caution_notes(drawn)),
                hovertemplate=f"<b>%{{customdata[0]}}</b><br>{PART_NAMES[part]}: %{{x:.1%}}"
                "%{customdata[1]}<extra></extra>",
            )
            figure["data"].append(trace)
    return with_hatch_key(figure, panels)
