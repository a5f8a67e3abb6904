"""Charts over the cases of a sweep: DataFrame in, plotly Figure out.

Pure, so that notebooks and pages draw the same. Every mark is a bar or a marker of a few traces
with typed numeric arrays.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ppbench.report.cases import Axes, by_case
from ppbench.report.palette import schedule_colors
from ppbench.report.panels import (
    BOTTOM_PX,
    TOP_PX,
    Panels,
    Update,
    arrange,
    arrangement,
    axes_of,
    axis_key,
    columns_offered,
    figure_text,
    panels_meta,
    title_annotations,
)
from ppbench.report.style import NEUTRAL, PLAIN, legend
from ppbench.report.units import size_unit


def throughput(runs: pd.DataFrame, axes: Axes) -> go.Figure:
    """Tokens/s of every ok case, the median over its launches; `axes` are the varying settings."""
    panels = arrange(by_case(runs, axes), axes)
    figure = _chart(panels, "tokens/s", {"tickformat": ",~s"})
    figure.add_traces(list(_bars(panels, "tokens_per_s", "%{y:,.0f} tokens/s")))
    return _with_hatch_key(figure, panels)


def bubble(runs: pd.DataFrame, axes: Axes) -> go.Figure:
    """Measured `bubble_fraction` of every ok case, as bars; the schedule's theory as markers."""
    panels = arrange(by_case(runs, axes), axes)
    figure = _chart(panels, "bubble", {"tickformat": ".0%"})
    figure.add_traces(list(_bars(panels, "bubble_fraction", "%{y:.1%} measured")))
    cases = panels.cases
    marks = cases.assign(
        y=cases["bubble_fraction_theory"], hover=cases["text"].map(figure_text) + "<br>theory"
    )
    figure.add_traces(list(_markers(marks, "theory", "diamond", 8, "%{y:.1%}")))
    return _with_hatch_key(figure, panels)


def peak_memory(runs: pd.DataFrame, ranks: pd.DataFrame, axes: Axes) -> go.Figure:
    """Peak allocated memory of every ok case: the highest rank as a bar, each rank as a point.

    `ranks` holds the store's `ranks` rows of these runs. Points stand from rank 0 on the left to
    the last rank on the right of their bar.
    """
    cases = by_case(runs, axes)
    unit, unit_bytes = size_unit(cases["peak_memory_bytes"].max())
    cases["peak"] = cases["peak_memory_bytes"] / unit_bytes
    panels = arrange(cases, axes)
    figure = _chart(panels, unit, {"tickformat": ",~r"})
    figure.add_traces(list(_bars(panels, "peak", f"%{{y:,.1f}} {unit}, highest rank")))
    points = _rank_points(panels, runs, ranks, unit_bytes)
    figure.add_traces(list(_markers(points, "each rank", "circle", 5, f"%{{y:,.1f}} {unit}")))
    return _with_hatch_key(figure, panels)


def _chart(panels: Panels, y_title: str, y_axis: Update) -> go.Figure:
    """An empty chart. `layout.meta.arrangements` holds its layout for each number of columns."""
    num_panels = len(panels.titles)
    offered = columns_offered(num_panels)
    arrangements = {columns: arrangement(num_panels, columns, y_title) for columns in offered}
    figure = go.Figure(
        layout={
            "template": PLAIN,
            "barmode": "overlay",
            "margin": {"l": 58, "r": 12, "t": TOP_PX, "b": BOTTOM_PX},
            "hovermode": "closest",
            "legend": {**legend(), "yref": "container", "y": 1, "yanchor": "top"},
            "annotations": title_annotations(panels),
            "meta": {
                "arrangements": {str(n): update for n, update in arrangements.items()},
                "panels": panels_meta(panels, y_title),
            },
            **axes_of(panels, {"rangemode": "tozero", "zeroline": False, **y_axis}),
        }
    )
    return figure.update_layout(arrangements[offered[-1]])


def _bars(panels: Panels, column: str, shown: str) -> Iterator[go.Bar]:
    """One trace per schedule and panel; the legend names each schedule once."""
    colors = schedule_colors(panels.cases["schedule"])
    for schedule, of_schedule in panels.cases.groupby("schedule", sort=False):
        for number, (panel, cases) in enumerate(of_schedule.groupby("panel")):
            key = axis_key(int(str(panel)))
            yield go.Bar(
                name=figure_text(schedule),
                legendgroup=str(schedule),
                showlegend=number == 0,
                ids=cases["case_id"].to_list(),
                x=cases["x"].to_numpy(dtype=float),
                y=cases[column].to_numpy(dtype=float),
                width=panels.bar_width,
                xaxis=f"x{key}",
                yaxis=f"y{key}",
                marker={
                    "color": colors[str(schedule)],
                    "line": {"width": 0},
                    "pattern": {**_HATCH, "shape": np.where(cases["is_oversubscribed"], "/", "")},
                },
                customdata=_notes(cases),
                hovertemplate=f"<b>%{{customdata[0]}}</b><br>{shown}%{{customdata[1]}}<extra></extra>",
            )


_HATCH = {"size": 6, "solidity": 0.35, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.75)"}


def _notes(cases: pd.DataFrame) -> np.ndarray:
    """For hovering: the case in words, and what must be known about its figure."""
    launches = cases["num_launches"].map(lambda n: f"<br>median of {n} launches" if n > 1 else "")
    crowded = cases["is_oversubscribed"].map(
        {
            True: "<br>oversubscribed: ranks shared cores,<br>says nothing about the schedule",
            False: "",
        }
    )
    return np.column_stack([cases["text"].map(figure_text), launches + crowded])


def _markers(
    points: pd.DataFrame, name: str, symbol: str, size_px: int, shown: str
) -> Iterator[go.Scatter]:
    """Markers at `x`, `y` of each panel, with `hover` as their heading."""
    for number, (panel, of_panel) in enumerate(points.groupby("panel")):
        key = axis_key(int(str(panel)))
        yield go.Scatter(
            name=name,
            legendgroup=name,
            showlegend=number == 0,
            mode="markers",
            cliponaxis=False,
            ids=of_panel["case_id"].to_list(),
            x=of_panel["x"].to_numpy(dtype=float),
            y=of_panel["y"].to_numpy(dtype=float),
            xaxis=f"x{key}",
            yaxis=f"y{key}",
            marker={"symbol": symbol, "size": size_px, "line": {"width": 1, "color": "#ffffff"}},
            text=of_panel["hover"].to_list(),
            hovertemplate=f"%{{text}}: {shown}<extra></extra>",
        )


def _rank_points(
    panels: Panels, runs: pd.DataFrame, ranks: pd.DataFrame, unit_bytes: int
) -> pd.DataFrame:
    """One row per case and rank, spread over the width of the case's bar."""
    owned = ranks.merge(runs[["run_id", "case_id"]], on="run_id")
    peaks = owned.groupby(["case_id", "rank"])["peak_memory_bytes"].median().reset_index()
    columns = ["case_id", "panel", "x", "text", "world_size"]
    points = peaks.merge(panels.cases[columns], on="case_id").dropna()
    spread = (points["rank"] + 0.5) / points["world_size"] - 0.5
    text = points["text"].map(figure_text)
    return points.assign(
        x=points["x"] + spread * panels.bar_width * 0.8,
        y=points["peak_memory_bytes"] / unit_bytes,
        hover=text + "<br>rank " + points["rank"].astype(str),
    )


def _with_hatch_key(figure: go.Figure, panels: Panels) -> go.Figure:
    """Explain the hatching in the legend, where there is any."""
    if panels.cases["is_oversubscribed"].any():
        pattern = {**_HATCH, "shape": "/"}
        figure.add_trace(
            go.Bar(
                name="oversubscribed",
                x=[None],
                y=[None],
                marker={"color": NEUTRAL, "line": {"width": 0}, "pattern": pattern},
                hoverinfo="skip",
            )
        )
    return figure
