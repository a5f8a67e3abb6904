"""Parts shared by the charts: the style, an empty chart with panels, bars, markers, hover notes.

Charts are plain data, as plotly.js takes them. They leave their colours open: in a report the page
supplies them (page.css); elsewhere, `ppbench.figures` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from ppbench.display.cases import SPREAD_OF_LAUNCHES
from ppbench.display.colors import schedule_colors
from ppbench.display.units import is_missing
from ppbench.report.charts.panels import (
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
from ppbench.report.scripts import Picture

Trace = dict[str, Any]
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
NEUTRAL = "#808080"  # legible on white and on near-black; a page replaces it
_FRAME = "rgba(128,128,128,0.22)"
PLAIN = {
    "layout": {
        "font": {"family": FONT, "size": 12, "color": NEUTRAL},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": {"gridcolor": _FRAME, "zerolinecolor": _FRAME},
        "yaxis": {"gridcolor": _FRAME, "zerolinecolor": _FRAME},
    },
    "data": {
        "scatter": [{"marker": {"color": NEUTRAL}, "line": {"color": NEUTRAL}, "type": "scatter"}],
        "bar": [{"error_x": {"color": NEUTRAL}, "error_y": {"color": NEUTRAL}, "type": "bar"}],
    },
}


HATCH = {"size": 6, "solidity": 0.35, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.75)"}
NOT_FINITE_SYMBOL = "x-thin-open"
NOT_FINITE_NOTE = (
    "<br>not finite: a loss or gradient was NaN<br>or infinite, so speed means nothing"
)
OVERSUBSCRIBED_NOTE = "<br>oversubscribed: ranks shared cores,<br>so the schedule cannot be judged"


def blank(panels: Panels, title: str, value_axis: Update, barmode: str = "overlay") -> Picture:
    """Return an empty chart; `title` is the title of the value axis.

    `layout.meta.panels` describes the panels, so that a page can hide some of them and arrange the
    others in as many columns as fit its width.
    """
    y_title = "" if panels.has_rows else title
    under = {"title": {"text": title, "standoff": 4}} if panels.has_rows else {}
    scale: Update = {"zeroline": False, **under, **value_axis}
    left_px = 12 if panels.has_rows else 58
    meta = panels_meta(panels, y_title)
    layout: Picture = {
        "template": PLAIN,
        "barmode": barmode,
        "margin": {"l": left_px, "r": 12, "t": panels.top_px, "b": panels.bottom_px},
        "hovermode": "closest",
        "legend": {**legend(), "yref": "container", "y": 1, "yanchor": "top"},
        "annotations": title_annotations(panels),
        "meta": {"panels": meta},
        **axes_of(panels, scale),
    }
    columns = min(len(panels.titles), MAX_COLUMNS)
    for path, value in arrangement(meta, columns).items():  # dotted keys
        *outer, last = path.split(".")
        place = layout
        for key in outer:
            place = place.setdefault(key, {})
        place[last] = value
    return {"data": [], "layout": layout}


def bar(**settings: object) -> Trace:
    return {**settings, "type": "bar"}


def scatter(**settings: object) -> Trace:
    return {**settings, "type": "scatter"}


def shared_axis(panels: Panels, **settings: object) -> Update:
    """Return a value axis that all panels share; it starts at zero by default."""
    return {"rangemode": "tozero", "matches": panels.value, **settings}


def bars(panels: Panels, column: str, shown: str, *, with_spread: bool = False) -> Iterator[Trace]:
    """Yield a trace per schedule and panel; the legend names each schedule once, unless rows do.

    `shown` is the hover text of the value, with the placeholder `%{value}`.
    """
    for schedule, panel, cases, is_first in by_schedule(panels):
        error: Update = {}
        if with_spread and cases["low"].notna().any():  # page or template supply the colour
            error[f"error_{panels.value}"] = {
                "type": "data",
                "symmetric": False,
                "array": (cases["high"] - cases[column]).to_numpy(dtype=float),
                "arrayminus": (cases[column] - cases["low"]).to_numpy(dtype=float),
                "thickness": 1.3,
                "width": 3,
            }
        notes = launch_notes(cases)
        if with_spread:
            for number, case in enumerate(cases[["low", "high", "spread"]].to_dict("records")):
                between = f"{case['low']:,.0f} to {case['high']:,.0f}"
                if is_missing(case["low"]):
                    continue
                if case["spread"] == SPREAD_OF_LAUNCHES:
                    notes.iloc[number] += f"<br>launches: {between}"
                else:
                    interval = "95 % interval over the steps of one launch"
                    notes.iloc[number] += f"<br>{interval}:<br>{between}"
        yield bar(
            **panels.at(cases["x"], cases[column]),
            **ids_in_panel(cases, panel),
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
            customdata=hover_texts(cases, notes + caution_notes(cases)),
            hovertemplate=_hover(panels, f"<b>%{{customdata[0]}}</b><br>{shown}%{{customdata[1]}}"),
        )


def by_schedule(panels: Panels) -> Iterator[tuple[str, int, pd.DataFrame, bool]]:
    """Yield schedule, panel, its cases, and whether this is the first panel of the schedule."""
    for schedule, schedule_cases in panels.cases.groupby("schedule", sort=False):
        for panel, cases, is_first in by_panel(schedule_cases):
            yield str(schedule), panel, cases, is_first


def by_panel(points: pd.DataFrame) -> Iterator[tuple[int, pd.DataFrame, bool]]:
    """Yield panel, its points, and whether this is the first panel that has any."""
    for number, (panel, panel_points) in enumerate(points.groupby("panel")):
        yield int(str(panel)), panel_points, number == 0


def ids_in_panel(points: pd.DataFrame, panel: int) -> Update:
    """Return the trace settings that name the case of each point, and the panel's axes.

    Plotly draws only one of several points with the same id, so a case's further points get a
    number after a slash.
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
) -> Iterator[Trace]:
    """Yield a trace per panel: markers at `x` along its cases and at `value`, headed `hover`."""
    for panel, panel_points, is_first in by_panel(points):
        yield scatter(
            **panels.at(panel_points["x"], panel_points["value"]),
            **ids_in_panel(panel_points, panel),
            name=name,
            legendgroup=name,
            showlegend=is_first,
            mode="markers",
            cliponaxis=False,
            marker={"line": {"width": 1, "color": "#ffffff"}, **marker},
            text=panel_points["hover"].to_list(),
            hovertemplate=_hover(panels, f"%{{text}}{shown}"),
        )


def hatching(cases: pd.DataFrame) -> Update:
    shapes = np.where(cases["is_oversubscribed"], "/", "")
    return {**HATCH, "shape": np.where(cases["is_not_finite"], "x", shapes).tolist()}


def with_hatch_key(figure: Picture, panels: Panels) -> Picture:
    """Add an entry to the legend for each kind of hatching in the chart."""
    marks = (("oversubscribed", "/"), ("not finite", "x"))
    for name, shape in marks:
        if panels.cases[f"is_{name.replace(' ', '_')}"].any():
            pattern = {**HATCH, "shape": shape}
            figure["data"].append(
                bar(
                    name=name,
                    x=[None],
                    y=[None],
                    marker={"color": NEUTRAL, "line": {"width": 0}, "pattern": pattern},
                    hoverinfo="skip",
                )
            )
    return figure


def legend_key(name: str, marker: Mapping[str, object]) -> Trace:
    """Return a marker that appears in the legend only."""
    return scatter(
        name=name, x=[None], y=[None], mode="markers", marker=dict(marker), hoverinfo="skip"
    )


def caution_notes(cases: pd.DataFrame) -> pd.Series:
    """Return the hover notes of cases that were oversubscribed or not finite."""
    marks = zip(cases["is_oversubscribed"], cases["is_not_finite"], strict=True)
    notes = [OVERSUBSCRIBED_NOTE * shared + NOT_FINITE_NOTE * broken for shared, broken in marks]
    return pd.Series(notes, cases.index, dtype=object)


def launch_notes(cases: pd.DataFrame) -> pd.Series:
    """Return hover notes on the number of launches that a median is taken over."""
    notes = [f"<br>median of {n} launches" if n > 1 else "" for n in cases["num_launches"]]
    return pd.Series(notes, cases.index, dtype=object)


def _hover(panels: Panels, text: str) -> str:
    return text.replace("%{value", f"%{{{panels.value}") + "<extra></extra>"


def hover_texts(cases: pd.DataFrame, notes: pd.Series | list[str]) -> np.ndarray:
    """Return the `customdata` of each case or point: its case's name, and the notes on it."""
    return np.column_stack([list(map(figure_text, cases["text"])), notes])


def legend() -> dict[str, object]:
    """Return the settings of a horizontal legend above the figure."""
    return {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
