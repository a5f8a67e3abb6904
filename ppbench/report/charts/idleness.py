"""Charts of the idle time of cases: the bubble, and its causes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ppbench.display.cases import Axes, by_case, ok_runs
from ppbench.display.colors import PART_COLORS
from ppbench.display.explanation import PART_NAMES
from ppbench.report.charts.canvas import (
    bars,
    blank,
    caution_notes,
    hatching,
    ids_in_panel,
    markers,
    shared_axis,
    with_hatch_key,
)
from ppbench.report.charts.panels import Panels, arrange, arrange_rows, figure_text

_SHORT_NAMES = {
    "structure": "schedule",
    "imbalance": "imbalance",
    "transfer": "transfers",
    "jitter": "jitter",
    "launch_gap": "launch gaps",
}  # a legend on a phone is narrow
PART_COLUMNS = {part: f"bubble_{part}" for part in PART_NAMES}


def bubble(runs: pd.DataFrame, axes: Axes) -> go.Figure:
    """Draw the measured `bubble_fraction` of every ok case as bars, its theory as markers.

    Values are medians over launches. `runs` are rows of the store's `runs`, `axes` the varying
    settings.
    """
    panels = arrange(by_case(runs, axes), axes)
    figure = blank(panels, "bubble", shared_axis(panels, tickformat=".0%"))
    figure.add_traces(list(bars(panels, "bubble_fraction", "%{value:.1%} measured")))
    cases = panels.cases
    marks = cases.assign(
        value=cases["bubble_fraction_theory"], hover=cases["text"].map(figure_text) + "<br>theory: "
    )
    diamond = {"symbol": "diamond", "size": 8}
    figure.add_traces(list(markers(panels, marks, "theory", diamond, "%{value:.1%}")))
    return with_hatch_key(figure, panels)


def idle(runs: pd.DataFrame, axes: Axes) -> go.Figure:
    """Draw the idle time of every ok case by cause: the parts of its bubble, stacked.

    Values are means over launches, so that the parts still add up; negative parts lie left of zero.
    Cases without stored parts are not drawn, nor are single ranks beside pipelines. `runs` are rows
    of the store's `runs`, `axes` the varying settings.
    """
    runs = ok_runs(runs).dropna(subset=list(PART_COLUMNS.values()))
    runs = runs[(runs["world_size"] > 1) | (runs["world_size"].max() == 1)]
    parts = runs.groupby("case_id")[[*PART_COLUMNS.values(), "bubble_mean"]].mean()
    panels = arrange_rows(by_case(runs, axes).join(parts, on="case_id"), axes)
    figure = blank(panels, "share of rank-time", shared_axis(panels, tickformat=".0%"), "relative")
    for part in PART_NAMES:
        figure.add_traces(list(_part_bars(panels, part)))
    return with_hatch_key(figure, panels)


def _part_bars(panels: Panels, part: str) -> Iterator[go.Bar]:
    name = PART_NAMES[part]
    for number, (panel, cases) in enumerate(panels.cases.groupby("panel")):
        text = cases["text"].map(figure_text)
        total = [f"<br>of {share:.1%} idle" for share in cases["bubble_mean"]]
        yield go.Bar(
            **panels.at(cases["x"], cases[PART_COLUMNS[part]]),
            **ids_in_panel(cases, int(str(panel))),
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
            customdata=np.column_stack([text, total + caution_notes(cases)]),
            hovertemplate=f"<b>%{{customdata[0]}}</b><br>{name}: %{{x:.1%}}%{{customdata[1]}}"
            "<extra></extra>",
        )
