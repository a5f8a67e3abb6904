"""How idle the cases are, and what they wait for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ppbench.report.cases import Axes, by_case, ok_runs
from ppbench.report.charts.canvas import (
    bars,
    blank,
    crowded_notes,
    hatching,
    markers,
    of_cases,
    shared,
    with_hatch_key,
)
from ppbench.report.explanation import PART_NAMES
from ppbench.report.palette import PART_COLORS
from ppbench.report.panels import Panels, arrange, arrange_rows, figure_text

_SHORT_NAMES = {
    "structure": "schedule",
    "imbalance": "imbalance",
    "transfer": "transfers",
    "jitter": "jitter",
    "launch_gap": "launch gaps",
}  # a legend on a phone has little room
PART_COLUMNS = {part: f"bubble_{part}" for part in PART_NAMES}


def bubble(runs: pd.DataFrame, axes: Axes) -> go.Figure:
    """Measured `bubble_fraction` of every ok case, as bars; the schedule's theory as markers.

    `runs` are rows of the store's `runs`; the median over launches; `axes` are the varying
    settings.
    """
    panels = arrange(by_case(runs, axes), axes)
    figure = blank(panels, "bubble", shared(panels, tickformat=".0%"))
    figure.add_traces(list(bars(panels, "bubble_fraction", "%{value:.1%} measured")))
    cases = panels.cases
    marks = cases.assign(
        value=cases["bubble_fraction_theory"], hover=cases["text"].map(figure_text) + "<br>theory: "
    )
    diamond = {"symbol": "diamond", "size": 8}
    figure.add_traces(list(markers(panels, marks, "theory", diamond, "%{value:.1%}")))
    return with_hatch_key(figure, panels)


def idle(runs: pd.DataFrame, axes: Axes) -> go.Figure:
    """Where the idle time of every ok case went: the parts of its bubble, stacked.

    `runs` are rows of the store's `runs`; the mean over launches, so that the parts still add up;
    `axes` are the varying settings. Negative parts lie left of zero. Cases whose runs do not tell
    their parts are not drawn, nor are single ranks beside pipelines.
    """
    told = ok_runs(runs).dropna(subset=list(PART_COLUMNS.values()))
    told = told[(told["world_size"] > 1) | (told["world_size"].max() == 1)]
    parts = told.groupby("case_id")[[*PART_COLUMNS.values(), "bubble_mean"]].mean()
    panels = arrange_rows(by_case(told, axes).join(parts, on="case_id"), axes)
    figure = blank(panels, "share of rank-time", shared(panels, tickformat=".0%"), "relative")
    for part in PART_NAMES:
        figure.add_traces(list(_part(panels, part)))
    return with_hatch_key(figure, panels)


def _part(panels: Panels, part: str) -> Iterator[go.Bar]:
    name = PART_NAMES[part]
    for number, (panel, cases) in enumerate(panels.cases.groupby("panel")):
        text = cases["text"].map(figure_text)
        total = [f"<br>of {share:.1%} idle" for share in cases["bubble_mean"]]
        yield go.Bar(
            **panels.at(cases["x"], cases[PART_COLUMNS[part]]),
            **of_cases(cases, int(str(panel))),
            name=_SHORT_NAMES[part],
            legendgroup=part,
            showlegend=number == 0,
            orientation="h",
            width=panels.bar_width,
            marker={
                "color": PART_COLORS[part],
                "line": {"width": 0},
                "pattern": hatching(cases),
            },
            customdata=np.column_stack([text, total + crowded_notes(cases)]),
            hovertemplate=f"<b>%{{customdata[0]}}</b><br>{name}: %{{x:.1%}}%{{customdata[1]}}"
            "<extra></extra>",
        )
