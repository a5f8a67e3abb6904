"""Charts have this in common: the style, a figure per panel, bars, markers, hover notes.

A chart is plain data, as plotly.js takes it. A page lays its panels out by its own grid, draws one
legend for all, and supplies the colours that the figures leave open (page.css); elsewhere,
`ppbench.figures` does. Every mark is a bar, a box or a marker in one of a few traces. A trace whose
points belong to cases has `ids`: the case of each point, followed by a slash and a number where a
case has several points. To filter a chart, keep the matching points in every array that is as long
as `ids`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from ppbench.display.cases import SPREAD_OF_LAUNCHES
from ppbench.display.colors import schedule_colors
from ppbench.display.units import is_missing
from ppbench.report.charts.panels import (
    AXIS_TITLE_PX,
    BOTTOM_PX,
    ROW_PX,
    Panels,
    Update,
    figure_text,
)
from ppbench.report.scripts import Picture

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
_NOTES = {
    "is_oversubscribed": "oversubscribed: ranks shared cores,<br>so the schedule cannot be judged",
    "is_not_finite": "not finite: a loss or gradient was NaN<br>or infinite: speed means nothing",
}
_TOP_PX, _LEFT_PX, _RIGHT_PX = 10, 58, 12
_LEAST_WIDTH_PX, _LEAST_WIDTH_OF_ROWS_PX = 250, 360


@dataclass
class Drawing:
    """A chart: a figure of plotly for each panel, and what they have in common."""

    panels: list[Picture]
    """Each with its `title`, `data` and `layout`."""
    along: str = ""
    """The letter of the axis with the places of cases, if the chart has one."""
    shared: tuple[str, ...] = ()
    """The letters of axes that have one range in all panels."""
    row_px: int = 0
    """The height of each place, where cases are rows."""
    least_width_px: int = _LEAST_WIDTH_PX
    _named: set[str] = field(default_factory=set)

    @property
    def height(self) -> int:
        """The height of its first row of panels."""
        return int(self.panels[0]["layout"]["height"])

    def add(self, panel: int, kind: str, **settings: Any) -> None:
        """Add a trace; the legend names each once, and those with `showlegend=False` never."""
        trace = {**settings, "type": kind, "legendgroup": settings["name"]}
        if trace.setdefault("showlegend", True):
            trace["showlegend"] = settings["name"] not in self._named
            self._named.add(settings["name"])
        self.panels[panel]["data"].append(trace)

    def add_key(self, name: str, kind: str = "scatter", **settings: Any) -> None:
        """Add an entry to the legend that has no points of its own."""
        empty = {"x": [None], "y": [None], "hoverinfo": "skip"}
        self.add(0, kind, name=name, **empty, **settings)

    def data(self) -> Picture:
        """Return all of it, as a page takes it."""
        return {
            "panels": self.panels,
            "along": self.along,
            "shared": self.shared,
            "rowPx": self.row_px,
            "leastWidth": self.least_width_px,
        }


class Canvas(Drawing):
    """A drawing of cases in panels."""

    def __init__(
        self,
        arranged: Panels,
        title: str,
        value_axis: Mapping[str, object],
        along: Update | None = None,
        *,
        shared: str | None = None,
        height_px: int | None = None,
        top_px: int = _TOP_PX,
        barmode: str = "overlay",
    ) -> None:
        """`title` is that of the value axis; `along` replaces the axis with the places."""
        self.arranged = arranged
        has_title_below = arranged.has_rows or along is not None
        below_px = BOTTOM_PX + (AXIS_TITLE_PX if has_title_below else 0)
        plot_px = arranged.height_px if height_px is None else height_px
        named = {"title": {"text": title, "standoff": 4}, "zeroline": False, **value_axis}
        axes = {arranged.along: along or arranged.axis(), arranged.value: named}
        panels: list[Picture] = [
            {
                "title": text,
                "data": [],
                "layout": {
                    "template": PLAIN,
                    "barmode": barmode,
                    "height": plot_px + below_px + top_px,
                    "margin": {
                        "l": 12 if arranged.has_rows else _LEFT_PX,
                        "r": _RIGHT_PX,
                        "t": top_px,
                        "b": below_px,
                    },
                    "hovermode": "closest",
                    **{f"{name}axis": {**axes[name], "fixedrange": True} for name in "xy"},
                },
            }
            for text in arranged.titles
        ]
        super().__init__(
            panels,
            "" if along else arranged.along,
            tuple(arranged.value if shared is None else shared),
            ROW_PX if arranged.has_rows else 0,
            _LEAST_WIDTH_OF_ROWS_PX if arranged.has_rows else _LEAST_WIDTH_PX,
        )

    def marks(
        self, points: pd.DataFrame, values: str | None, panel: int, kind: str, **settings: Any
    ) -> None:
        """Add a trace of points at the places of their cases, with values from a column."""
        where = {self.arranged.along: self.arranged.positions(points)}
        if values is not None:
            where[self.arranged.value] = points[values].astype(float).tolist()
        places = points.reindex(columns=["place", "slot", "within"]).fillna({"within": 0.0})
        meta = {str(name): column.tolist() for name, column in places.items()}
        self.add(panel, kind, **where, ids=ids_of(points), meta=meta, **settings)

    def by_schedule(self, cases: pd.DataFrame | None = None) -> Iterator[tuple[str, str, int, Any]]:
        """Yield each schedule, its colour, panel and cases."""
        every = self.arranged.cases
        colors = schedule_colors(every["schedule"])
        for schedule, own in (every if cases is None else cases).groupby("schedule", sort=False):
            for panel, drawn in own.groupby("panel"):
                yield str(schedule), colors[str(schedule)], int(str(panel)), drawn

    def bars(self, column: str, shown: str, *, with_spread: bool = False) -> None:
        """Add a trace per schedule and panel; rows are not in the legend, as they have names.

        `shown` is the hover text of the value, with the placeholder `%{value}`.
        """
        value = self.arranged.value
        for schedule, color, panel, cases in self.by_schedule():
            error: Update = {}
            notes = launch_notes(cases)
            if with_spread and cases["low"].notna().any():  # page or template supply the colour
                error[f"error_{value}"] = {
                    "type": "data",
                    "symmetric": False,
                    "array": (cases["high"] - cases[column]).tolist(),
                    "arrayminus": (cases[column] - cases["low"]).tolist(),
                    "thickness": 1.3,
                    "width": 3,
                }
                notes = notes + [_spread_note(case) for case in cases.to_dict("records")]
            self.marks(
                cases,
                column,
                panel,
                "bar",
                **error,
                name=figure_text(schedule),
                showlegend=not self.arranged.has_rows,
                orientation="h" if self.arranged.has_rows else "v",
                width=self.arranged.bar_width * 0.92,
                marker={"color": color, "line": {"width": 0}, "pattern": hatching(cases)},
                customdata=hover_texts(cases, notes + caution_notes(cases)),
                hovertemplate=self.hover(f"<b>%{{customdata[0]}}</b><br>{shown}%{{customdata[1]}}"),
            )

    def markers(
        self, points: pd.DataFrame, name: str, marker: Mapping[str, object], shown: str
    ) -> None:
        """Add a trace per panel: markers of cases at their `value`, with the text `hover`."""
        for panel, own in points.groupby("panel"):
            self.marks(
                own,
                "value",
                int(str(panel)),
                "scatter",
                name=name,
                mode="markers",
                cliponaxis=False,
                marker={"line": {"width": 1, "color": "#ffffff"}, **marker},
                text=own["hover"].tolist(),
                hovertemplate=self.hover(f"%{{text}}{shown}"),
            )

    def hover(self, text: str) -> str:
        return text.replace("%{value", f"%{{{self.arranged.value}") + "<extra></extra>"

    def add_hatch_keys(self) -> None:
        """Add an entry to the legend for each kind of hatching in the chart."""
        for name, shape in (("oversubscribed", "/"), ("not finite", "x")):
            if self.arranged.cases[f"is_{name.replace(' ', '_')}"].any():
                pattern = {**HATCH, "shape": shape}
                marker = {"color": NEUTRAL, "line": {"width": 0}, "pattern": pattern}
                self.add_key(name, "bar", marker=marker)


def _spread_note(case: Mapping[Any, Any]) -> str:
    if is_missing(case["low"]):
        return ""
    between = f"{case['low']:,.0f} to {case['high']:,.0f}"
    if case["spread"] == SPREAD_OF_LAUNCHES:
        return f"<br>launches: {between}"
    return f"<br>95 % interval over the steps of one launch:<br>{between}"


def ids_of(points: pd.DataFrame) -> list[str]:
    """Name the case of each point; plotly draws only one of several points with the same id."""
    pairs = zip(points["case_id"], points.groupby("case_id").cumcount(), strict=True)
    return [f"{case_id}/{n}" if n else str(case_id) for case_id, n in pairs]


def hatching(cases: pd.DataFrame) -> Update:
    shapes = np.where(cases["is_oversubscribed"], "/", "")
    return {**HATCH, "shape": np.where(cases["is_not_finite"], "x", shapes).tolist()}


def symbols(cases: pd.DataFrame, symbol: str = "circle") -> list[str]:
    """Return the symbol of each case: open where ranks shared cores, a cross if not finite."""
    shapes = np.where(cases["is_oversubscribed"], f"{symbol}-open", symbol)
    return np.where(cases["is_not_finite"], NOT_FINITE_SYMBOL, shapes).tolist()  # type: ignore[no-any-return]


def caution_notes(cases: pd.DataFrame) -> pd.Series:
    """Return the hover notes of cases that were oversubscribed or not finite."""
    notes = pd.Series("", cases.index, dtype=object)
    for name, text in _NOTES.items():
        notes = notes.where(~cases[name].astype(bool), notes + f"<br>{text}")
    return notes


def launch_notes(cases: pd.DataFrame) -> pd.Series:
    """Return hover notes on the number of launches that a median is taken over."""
    notes = [f"<br>median of {n} launches" if n > 1 else "" for n in cases["num_launches"]]
    return pd.Series(notes, cases.index, dtype=object)


def hover_texts(cases: pd.DataFrame, notes: pd.Series | list[str]) -> list[list[str]]:
    """Return the `customdata` of each case or point: its case's name, and the notes on it."""
    return [[figure_text(text), note] for text, note in zip(cases["text"], notes, strict=True)]


def legend() -> dict[str, object]:
    """Return the settings of a horizontal legend above the figure."""
    return {"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom"}
