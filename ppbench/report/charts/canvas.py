"""What the charts are made of: an empty chart with its panels, bars of cases, markers, notes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from ppbench.report.cases import SPREAD_OF_LAUNCHES
from ppbench.report.palette import schedule_colors
from ppbench.report.panels import (
    MAX_COLUMNS,
    Panels,
    Update,
    arrangement,
    axes_of,
    axis_key,
    figure_text,
    panels_meta,
    title_annotations,
)
from ppbench.report.style import NEUTRAL, PLAIN, legend
from ppbench.report.units import is_missing

HATCH = {"size": 6, "solidity": 0.35, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.75)"}
NOT_FINITE_SYMBOL = "x-thin-open"
NOT_FINITE_NOTE = "<br>not finite: a loss or gradient was NaN<br>or infinite, nothing was learnt"
CROWDED_NOTE = "<br>oversubscribed: ranks shared cores,<br>says nothing about the schedule"


def blank(panels: Panels, title: str, value_axis: Update, barmode: str = "overlay") -> go.Figure:
    """An empty chart; `title` is that of the axis on which figures are read.

    `layout.meta.panels` tells a page how they lie, so that it can arrange those that it does not
    hide in as many columns as its width has room for.
    """
    y_title = "" if panels.has_rows else title
    under = {"title": {"text": title, "standoff": 4}} if panels.has_rows else {}
    scale: Update = {"zeroline": False, **under, **value_axis}
    left_px = 12 if panels.has_rows else 58
    figure = go.Figure(
        layout={
            "template": PLAIN,
            "barmode": barmode,
            "margin": {"l": left_px, "r": 12, "t": panels.top_px, "b": panels.bottom_px},
            "hovermode": "closest",
            "legend": {**legend(), "yref": "container", "y": 1, "yanchor": "top"},
            "annotations": title_annotations(panels),
            "meta": {"panels": panels_meta(panels, y_title)},
            **axes_of(panels, scale),
        }
    )
    columns = min(len(panels.titles), MAX_COLUMNS)
    return figure.update_layout(arrangement(panels, columns, y_title))


def shared(panels: Panels, **settings: object) -> Update:
    """An axis of figures that is the same in every panel; from zero unless told otherwise."""
    return {"rangemode": "tozero", "matches": panels.value, **settings}


def bars(panels: Panels, column: str, shown: str, *, with_spread: bool = False) -> Iterator[go.Bar]:
    """One trace per schedule and panel; the legend names each schedule once, unless rows do.

    `shown` is the figure in words, with `%{value}` in its place.
    """
    for schedule, panel, cases, is_first in by_schedule(panels):
        error = _error_bars(panels, cases, column) if with_spread else {}
        yield go.Bar(
            **panels.at(cases["x"], cases[column]),
            **of_cases(cases, panel),
            **error,
            name=figure_text(schedule),
            legendgroup=schedule,
            showlegend=is_first and not panels.has_rows,
            orientation="h" if panels.has_rows else "v",
            width=panels.bar_width,
            marker={
                "color": schedule_colors(panels.cases["schedule"])[schedule],
                "line": {"width": 0},
                "pattern": hatching(cases),
            },
            customdata=_notes(cases, with_spread=with_spread),
            hovertemplate=_hover(panels, f"<b>%{{customdata[0]}}</b><br>{shown}%{{customdata[1]}}"),
        )


def by_schedule(panels: Panels) -> Iterator[tuple[str, int, pd.DataFrame, bool]]:
    """Schedule, panel, its cases, and whether the schedule comes for the first time."""
    for schedule, of_schedule in panels.cases.groupby("schedule", sort=False):
        for number, (panel, cases) in enumerate(of_schedule.groupby("panel")):
            yield str(schedule), int(str(panel)), cases, number == 0


def of_cases(points: pd.DataFrame, panel: int) -> Update:
    """Whose points a trace shows, and in which panel.

    Of points with the same id plotly would draw one only: what comes after a slash tells a case's
    points apart.
    """
    ids = points["case_id"].to_list()
    if not points["case_id"].is_unique:
        nth = points.groupby("case_id").cumcount()
        ids = [f"{case_id}/{n}" if n else case_id for case_id, n in zip(ids, nth, strict=True)]
    return {"ids": ids, **in_panel(panel)}


def in_panel(panel: int) -> Update:
    return {"xaxis": f"x{axis_key(panel)}", "yaxis": f"y{axis_key(panel)}"}


def markers(
    panels: Panels, points: pd.DataFrame, name: str, marker: Mapping[str, object], shown: str
) -> Iterator[go.Scatter]:
    """Markers of each panel at `x` along its cases and at `value`, with `hover` as heading."""
    for number, (panel, of_panel) in enumerate(points.groupby("panel")):
        yield go.Scatter(
            **panels.at(of_panel["x"], of_panel["value"]),
            **of_cases(of_panel, int(str(panel))),
            name=name,
            legendgroup=name,
            showlegend=number == 0,
            mode="markers",
            cliponaxis=False,
            marker={"line": {"width": 1, "color": "#ffffff"}, **marker},
            text=of_panel["hover"].to_list(),
            hovertemplate=_hover(panels, f"%{{text}}{shown}"),
        )


def hatching(cases: pd.DataFrame) -> Update:
    shapes = np.where(cases["is_oversubscribed"], "/", "")
    return {**HATCH, "shape": np.where(cases["is_not_finite"], "x", shapes).tolist()}


def with_hatch_key(figure: go.Figure, panels: Panels) -> go.Figure:
    """Explain the hatching in the legend, where there is any."""
    marks = (("oversubscribed", "/"), ("not finite", "x"))
    for name, shape in marks:
        if panels.cases[f"is_{name.replace(' ', '_')}"].any():
            pattern = {**HATCH, "shape": shape}
            figure.add_trace(
                go.Bar(
                    name=name,
                    x=[None],
                    y=[None],
                    marker={"color": NEUTRAL, "line": {"width": 0}, "pattern": pattern},
                    hoverinfo="skip",
                )
            )
    return figure


def legend_key(name: str, marker: Mapping[str, object]) -> go.Scatter:
    """A marker that is in the legend only."""
    return go.Scatter(
        name=name, x=[None], y=[None], mode="markers", marker=dict(marker), hoverinfo="skip"
    )


def crowded_notes(cases: pd.DataFrame) -> pd.Series:
    """For hovering: what must be known of a case whose ranks shared cores, or that broke down."""
    crowded = cases["is_oversubscribed"].map({True: CROWDED_NOTE, False: ""})
    return crowded + cases["is_not_finite"].map({True: NOT_FINITE_NOTE, False: ""})


def launch_notes(cases: pd.DataFrame) -> pd.Series:
    """For hovering: of how many launches a figure is the median."""
    return cases["num_launches"].map(lambda n: f"<br>median of {n} launches" if n > 1 else "")


def _hover(panels: Panels, text: str) -> str:
    return text.replace("%{value", f"%{{{panels.value}") + "<extra></extra>"


def _notes(cases: pd.DataFrame, *, with_spread: bool) -> np.ndarray:
    """For hovering: the case in words, and what must be known about its figure."""
    spread = [_spread_text(case) if with_spread else "" for _, case in cases.iterrows()]
    notes = launch_notes(cases) + spread + crowded_notes(cases)
    return np.column_stack([cases["text"].map(figure_text), notes])


def _spread_text(case: pd.Series) -> str:
    if is_missing(case["low"]):
        return ""
    between = f"{case['low']:,.0f} to {case['high']:,.0f}"
    if case["spread"] == SPREAD_OF_LAUNCHES:
        return f"<br>its launches: {between}"
    return f"<br>95 % by the steps of its one launch:<br>{between}"


def _error_bars(panels: Panels, cases: pd.DataFrame, column: str) -> Update:
    """From `low` to `high`; in the colour of the page's ink, or of its template."""
    if not cases["low"].notna().any():
        return {}
    error = {
        "type": "data",
        "symmetric": False,
        "array": (cases["high"] - cases[column]).to_numpy(dtype=float),
        "arrayminus": (cases[column] - cases["low"]).to_numpy(dtype=float),
        "thickness": 1.3,
        "width": 3,
    }
    return {f"error_{panels.value}": error}
