"""How much the steps of a case differ."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ppbench.report.cases import Axes, by_case, ok_runs
from ppbench.report.charts.canvas import (
    blank,
    by_schedule,
    crowded_notes,
    launch_notes,
    of_cases,
)
from ppbench.report.palette import schedule_colors, translucent
from ppbench.report.panels import Panels, arrange_rows, figure_text
from ppbench.report.style import NEUTRAL
from ppbench.report.units import NS_PER_MS, counted

LEAST_FOR_BOX = 8
"""Quartiles of fewer steps say nothing; they are shown one by one."""
_QUARTILES = {"fastest": 0.0, "q1": 0.25, "median": 0.5, "q3": 0.75, "slowest": 1.0}


def step_times(runs: pd.DataFrame, steps: pd.DataFrame, axes: Axes) -> go.Figure:
    """The full times of all steps of every ok case, in ms: boxes, or points where steps are few.

    `runs` and `steps` are rows of the store's tables, `axes` the varying settings. A box goes from
    the first to the third quartile over the steps of all launches, with the median inside; its
    whiskers reach to the fastest and the slowest step that does not stand apart; those that do are
    points. Each panel has a scale of its own, which need not begin at zero.
    """
    told = _of_cases(ok_runs(runs), steps)
    cases = by_case(runs, axes).merge(_boxes(told), on="case_id")
    panels = arrange_rows(cases, axes)
    figure = blank(panels, "ms per step", {"tickformat": ",~r"})
    figure.add_traces(
        [*_drawn(panels), *_few(panels, told), *_medians(panels), *_outliers(panels, told)]
    )
    return figure


def _of_cases(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """`case_id`, `launch`, `step`, `ms` and `is_apart` of every step."""
    owned = steps.merge(runs[["run_id", "case_id", "launch"]], on="run_id")
    is_apart = owned["is_outlier"].eq(True)  # null where older runs do not tell
    return owned.assign(ms=owned["step_with_optimizer_ns"] / NS_PER_MS, is_apart=is_apart).dropna(
        subset=["ms"]
    )


def _boxes(steps: pd.DataFrame) -> pd.DataFrame:
    """The box of each case: quartiles over all steps, whiskers over those not apart."""
    by_case_id = steps.groupby("case_id")["ms"]
    boxes = pd.DataFrame({name: by_case_id.quantile(q) for name, q in _QUARTILES.items()})
    usual = steps[~steps["is_apart"]].groupby("case_id")["ms"]
    for name, ends in (("fastest", usual.min()), ("slowest", usual.max())):
        boxes[name] = ends.reindex(boxes.index).fillna(boxes[name])
    boxes["num_steps"] = by_case_id.size()
    return boxes.reset_index()


def _drawn(panels: Panels) -> Iterator[go.Box]:
    colors = schedule_colors(panels.cases["schedule"])
    for schedule, panel, every, _ in by_schedule(panels):
        cases = every[every["num_steps"] >= LEAST_FOR_BOX]
        if cases.empty:
            continue
        yield go.Box(
            **of_cases(cases, panel),
            name=figure_text(schedule),
            showlegend=False,
            orientation="h",
            y=cases["x"].to_numpy(dtype=float),
            q1=cases["q1"].to_numpy(dtype=float),
            median=cases["median"].to_numpy(dtype=float),
            q3=cases["q3"].to_numpy(dtype=float),
            lowerfence=cases["fastest"].to_numpy(dtype=float),
            upperfence=cases["slowest"].to_numpy(dtype=float),
            width=panels.bar_width * 0.8,
            line={"color": colors[schedule], "width": 1.5},
            fillcolor=translucent(colors[schedule], 0.35),
            boxpoints=False,
            hoverinfo="skip",
        )


def _medians(panels: Panels) -> Iterator[go.Scatter]:
    """What there is to hover over: plotly would show five labels of a box at once."""
    for panel, cases in panels.cases.groupby("panel"):
        notes = launch_notes(cases).str.replace("median of", "steps of") + crowded_notes(cases)
        yield go.Scatter(
            **panels.at(cases["x"], cases["median"]),
            **of_cases(cases, int(str(panel))),
            name="median",
            showlegend=False,
            mode="markers",
            marker={"symbol": "line-ns", "size": 12, "line": {"width": 2.5, "color": NEUTRAL}},
            customdata=np.column_stack([cases["text"].map(figure_text), _box_text(cases) + notes]),
            hovertemplate="<b>%{customdata[0]}</b><br>median %{x:,.1f} ms%{customdata[1]}"
            "<extra></extra>",
        )


def _box_text(cases: pd.DataFrame) -> pd.Series:
    return cases.apply(_case_text, axis=1)


def _case_text(case: pd.Series) -> str:
    if case["num_steps"] < LEAST_FOR_BOX:
        return f" of {counted(int(case['num_steps']), 'step')}"
    return (
        f"<br>half of {counted(int(case['num_steps']), 'step')}: "
        f"{case['q1']:,.1f} to {case['q3']:,.1f} ms"
        f"<br>all but outliers: {case['fastest']:,.1f} to {case['slowest']:,.1f} ms"
    )


def _few(panels: Panels, steps: pd.DataFrame) -> Iterator[go.Scatter]:
    colors = schedule_colors(panels.cases["schedule"])
    few = panels.cases[panels.cases["num_steps"] < LEAST_FOR_BOX]
    columns = ["case_id", "panel", "x", "schedule"]
    usual = steps[~steps["is_apart"]].merge(few[columns], on="case_id")
    for (schedule, panel), points in usual.groupby(["schedule", "panel"]):
        yield go.Scatter(
            **panels.at(points["x"], points["ms"]),
            **of_cases(points, int(str(panel))),
            name=figure_text(schedule),
            showlegend=False,
            mode="markers",
            marker={"size": 7, "color": colors[str(schedule)]},
            hoverinfo="skip",
        )


def _outliers(panels: Panels, steps: pd.DataFrame) -> Iterator[go.Scatter]:
    apart = steps[steps["is_apart"]].merge(panels.cases[["case_id", "panel", "x", "text"]])
    for number, (panel, points) in enumerate(apart.groupby("panel")):
        where = [
            f"launch {launch}, step {step}"
            for launch, step in zip(points["launch"], points["step"], strict=True)
        ]
        yield go.Scatter(
            **panels.at(points["x"], points["ms"]),
            **of_cases(points, int(str(panel))),
            name="outlier",
            legendgroup="outlier",
            showlegend=number == 0,
            mode="markers",
            cliponaxis=False,
            marker={"symbol": "circle-open", "size": 6, "color": NEUTRAL},
            customdata=np.column_stack([points["text"].map(figure_text), where]),
            hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}: %{x:,.1f} ms,"
            "<br>apart from the other steps of its launch<extra></extra>",
        )
