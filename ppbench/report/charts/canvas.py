"""Charts have this in common: cases in panels, marks with texts for the pointer, a legend.

A chart is plain data, as plotly.js takes it, with a figure for each panel. A page lays its panels
out by its own grid, draws one legend for all, and supplies the colours that the figures leave open
(charts.js); elsewhere, `ppbench.figures` does. Every mark is a bar, a box or a marker in one of a
few traces. A trace whose points belong to cases has `ids`: the case of each point, followed by a
slash and a number where a case has several points. To filter a chart, keep the matching points in
every array that is as long as `ids`.

    world_size if it varies, else the first varying number, else another setting  ->  place
    schedule                                                ->  colour, bars side by side
    every other varying setting                             ->  panels (small multiples)

Cases are rows instead where only the schedule varies, and in charts with many marks per case: names
are long and screens are narrow, but a page can be of any height.
"""

from __future__ import annotations

import html
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
from pandas.api.types import is_numeric_dtype

from ppbench.cautions import Caution
from ppbench.display.cases import (
    SPREAD_OF_LAUNCHES,
    Axes,
    axis_text,
    by_case,
    ok_runs,
    settings_text,
)
from ppbench.display.colors import schedule_colors
from ppbench.display.document import Picture, of_page
from ppbench.display.units import is_missing
from ppbench.report.scripts import PLOTTED, Figure, script_json
from ppbench.store import Store

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"
NEUTRAL = "#808080"  # legible on white and on near-black; a page replaces it
GROUP_WIDTH = 0.78
"""The width of a place that bars take, of the distance between two places."""
LEGEND: Mapping[str, object] = {
    "orientation": "h",
    "x": 0,
    "xanchor": "left",
    "y": 1,
    "yanchor": "bottom",
}
"""A horizontal legend above the figure."""
NOT_FINITE_SYMBOL = "x-thin-open"
_HATCH = {"size": 6, "solidity": 0.35, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.75)"}
_HATCHES = {"is_oversubscribed": "/", "is_not_finite": "x"}
_NOTES = {
    "is_oversubscribed": "oversubscribed: ranks shared cores,<br>so the schedule cannot be judged",
    "is_not_finite": "not finite: a loss or gradient was NaN<br>or infinite: speed means nothing",
}
_PANEL_PX, _ROW_PX, _BOTTOM_PX, _AXIS_TITLE_PX = 220, 22, 32, 20
_TOP_PX, _LEFT_PX, _RIGHT_PX = 10, 58, 12
_LEAST_WIDTH_PX, _LEAST_WIDTH_OF_ROWS_PX = 250, 360
_LEAST_PLACES = 3  # keeps the bar of a single case narrow
_LONGEST_TICK = 24  # characters
_HTML = f"""\
<div class="{PLOTTED}" role="figure" aria-label="{{{{ label }}}}" \
style="min-height: {{{{ height }}}}px"></div>
<script type="application/json">{{{{ data }}}}</script>"""
Point = dict[Any, Any]
"""A case, or a part of one, with its `panel`, `place` and `slot`; `within` is its place in that."""
Told = Callable[[Point], str]


@dataclass(frozen=True)
class Measured:
    """Runs that are ok, their cases, and the settings in which these differ."""

    store: Store
    runs: pd.DataFrame
    cases: pd.DataFrame  # rows of `by_case`
    axes: Axes

    @classmethod
    def of(cls, store: Store, runs: pd.DataFrame, axes: Axes) -> Measured:
        return cls(store, ok_runs(runs), by_case(runs, axes), axes)

    def having(self, columns: Sequence[str]) -> Measured:
        """Return it with the runs alone that have values in these columns."""
        known = self.runs.reindex(columns=list(columns)).notna().all(axis=1)
        if known.all():
            return self
        runs = self.runs[known]
        return replace(self, runs=runs, cases=by_case(runs, self.axes))

    def table(self, name: str) -> pd.DataFrame:
        """Return the rows of these runs in a table of the store."""
        return self.store.table(name, self.runs["run_id"])


@dataclass(frozen=True)
class Chart:
    """A kind of chart of a sweep, with its heading and a note on how to read it."""

    name: str
    order: int
    """Its place in a report."""
    heading: str
    note: str
    concerns: tuple[Caution, ...]
    """The cautions that concern its figures."""
    draw: Callable[[Measured], Drawing | None]
    """It returns None where the runs, of which at least one is ok, lack what it needs."""
    needs: str = ""
    """It says what runs may lack for the chart; it is empty where none can lack anything."""


@dataclass
class Drawing:
    """A chart as drawn: a figure of plotly for each panel, and what they have in common."""

    panels: list[Figure]
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

    def picture(self, label: str) -> Picture:
        """Return it as a page draws it, when it becomes visible; `label` is read aloud."""
        data = {
            "panels": self.panels,
            "along": self.along,
            "shared": self.shared,
            "rowPx": self.row_px,
            "leastWidth": self.least_width_px,
        }
        return of_page(_HTML, label=label, height=self.height, data=script_json(data))


class Canvas(Drawing):
    """A drawing of cases in panels, at places along one axis and with values along the other."""

    def __init__(
        self,
        cases: pd.DataFrame,
        axes: Axes,
        title: str,
        value_axis: Mapping[str, object],
        *,
        has_rows: bool = False,
        is_shared: bool = True,
        barmode: str = "overlay",
        across: Mapping[str, object] | None = None,
        height_px: int | None = None,
        top_px: int = _TOP_PX,
    ) -> None:
        """`title` is that of the value axis.

        Another axis of values, `across`, takes the place of the one with cases; then every setting
        of `axes` has its own panels.
        """
        varying = [a for a in axes if a != "schedule" and len(cases[a].astype(str).unique()) > 1]
        numbers = [axis for axis in varying if is_numeric_dtype(cases[axis])]
        x_axis = "world_size" if "world_size" in numbers else next(iter([*numbers, *varying]), None)
        has_rows = across is None and (has_rows or x_axis is None)
        schedules = list(dict.fromkeys(cases["schedule"]))
        # Rows are named by the schedule if that varies, else by what varies.
        row_axis = x_axis if x_axis is not None and len(schedules) == 1 else "schedule"
        along = row_axis if has_rows else x_axis
        apart = [row_axis] if has_rows else [x_axis, "schedule"]
        apart = [] if across is not None else apart
        self.has_rows, self.num_slots = has_rows, 1 if has_rows else max(1, len(schedules))
        self.value = "x" if has_rows else "y"
        self.colors = schedule_colors(schedules)
        self.cases: list[Point] = cases.to_dict("records")
        titles = [settings_text(case, [a for a in axes if a not in apart]) for case in self.cases]
        panels = list(dict.fromkeys(titles))
        values = [] if along is None else list(dict.fromkeys(case[along] for case in self.cases))
        if along in numbers:
            values.sort()
        for case, panel in zip(self.cases, titles, strict=True):
            case["panel"] = panels.index(panel)
            case["place"] = values.index(case[along]) if along is not None else 0
            case["slot"] = 0 if has_rows else schedules.index(case["schedule"])
        num = len(values)
        half = -(num + 0.1) / 2 if has_rows else max(num + 0.1, _LEAST_PLACES) / 2
        places: Mapping[str, object] = {
            "tickvals": list(range(num)),
            "ticktext": [figure_text(elided(axis_text(str(along), value))) for value in values],
            "range": [(num - 1) / 2 - half, (num - 1) / 2 + half],
            "ticklabelstandoff": 3,
            "showgrid": False,
            "zeroline": False,
            "automargin": has_rows,
        }
        named = {"title": {"text": title, "standoff": 4}, "zeroline": False, **value_axis}
        letter = "y" if has_rows else "x"
        both = {letter: places if across is None else across, self.value: named}
        below_px = _BOTTOM_PX + (_AXIS_TITLE_PX if has_rows or across is not None else 0)
        rows_px = max(num, _LEAST_PLACES) * _ROW_PX if has_rows else _PANEL_PX
        margin = {"l": 12 if has_rows else _LEFT_PX, "r": _RIGHT_PX, "t": top_px, "b": below_px}
        layout = {
            "barmode": barmode,
            "height": (height_px or rows_px) + below_px + top_px,
            "margin": margin,
            "hovermode": "closest",
        }
        super().__init__(
            [
                {
                    "title": text,
                    "data": [],
                    "layout": {
                        **layout,
                        **{f"{name}axis": {**both[name], "fixedrange": True} for name in "xy"},
                    },
                }
                for text in panels
            ],
            letter if across is None else "",
            tuple(self.value if across is None else "xy") if is_shared else (),
            _ROW_PX if has_rows else 0,
            _LEAST_WIDTH_OF_ROWS_PX if has_rows else _LEAST_WIDTH_PX,
        )

    @property
    def bar_width(self) -> float:
        return GROUP_WIDTH / self.num_slots

    def points(self, rows: pd.DataFrame) -> list[Point]:
        """Return rows that have a `case_id` as points of their cases."""
        cases = {case["case_id"]: case for case in self.cases}
        records: list[Point] = rows.to_dict("records")
        return [cases[own["case_id"]] | own for own in records if own["case_id"] in cases]

    def by_schedule(
        self, points: Sequence[Point] | None = None
    ) -> Iterator[tuple[str, str, list[Point]]]:
        """Yield the name, the colour and the points of each schedule."""
        every = self.cases if points is None else points
        for schedule in dict.fromkeys(point["schedule"] for point in every):
            own = [point for point in every if point["schedule"] == schedule]
            yield figure_text(schedule), self.colors[schedule], own

    def marks(
        self,
        points: Sequence[Point],
        kind: str,
        value: str | Callable[[Point], float] | None,
        told: Told | None,
        **settings: Any,
    ) -> None:
        """Add a trace for each panel of the points, at the places of their cases.

        `value` is a name or a function. `told` is the text of a point, below its case's name and
        above its cautions; without it, points have none. A setting, also one within another, may be
        a function of the point.
        """
        by_panel = defaultdict[int, list[Point]](list)
        for point in points:
            by_panel[point["panel"]].append(point)
        for panel, own in by_panel.items():
            trace: Figure = {"ids": ids_of(own)}
            if self.along:
                # As `closeUp` in points.js does for the places and slots that a filter leaves.
                meta = {key: [p.get(key, 0) for p in own] for key in ("place", "slot", "within")}
                trace |= {"meta": meta, self.along: [self._position(point) for point in own]}
            if value is not None:
                read = value if callable(value) else lambda point: point[value]
                trace[self.value] = [float(read(point)) for point in own]
            if told is None:
                trace["hoverinfo"] = "skip"
            else:
                trace["hovertext"] = [
                    "<br>".join(
                        filter(
                            None, [f"<b>{figure_text(p['text'])}</b>", told(p), caution_notes(p)]
                        )
                    )
                    for p in own
                ]
                trace["hovertemplate"] = "%{hovertext}<extra></extra>"
            self.add(panel, kind, **trace, **_of_points(settings, own))

    def bars(self, value: str, told: Told, **settings: Any) -> None:
        """Add the bars of each schedule; rows are not in the legend, as they have names."""
        for schedule, color, cases in self.by_schedule():
            self.marks(
                cases,
                "bar",
                value,
                told,
                name=schedule,
                showlegend=not self.has_rows,
                orientation="h" if self.has_rows else "v",
                width=self.bar_width * 0.92,
                marker={"color": color, "line": {"width": 0}, "pattern": HATCHING},
                **settings,
            )

    def markers(
        self, points: Sequence[Point], value: str, told: Told, name: str, **marker: Any
    ) -> None:
        """Add markers with a white outline."""
        marker = {"line": {"width": 1, "color": "#ffffff"}, **marker}
        look = {"mode": "markers", "cliponaxis": False, "marker": marker}
        self.marks(points, "scatter", value, told, name=name, **look)

    def add_hatch_keys(self) -> None:
        """Add an entry to the legend for each kind of hatching in the chart."""
        for caution, shape in _HATCHES.items():
            if any(case[caution] for case in self.cases):
                marker = {"color": NEUTRAL, "line": {"width": 0}}
                marker["pattern"] = {**_HATCH, "shape": shape}
                name = caution.removeprefix("is_").replace("_", " ")
                self.add_key(name, "bar", marker=marker)

    def _position(self, point: Point) -> float:
        slot = point["slot"] - (self.num_slots - 1) / 2
        return round(float(point["place"] + (slot + point.get("within", 0)) * self.bar_width), 6)


def _of_points(setting: Any, points: Sequence[Point]) -> Any:
    """Return a setting in which each function is replaced by its values for the points."""
    if isinstance(setting, dict):
        return {key: _of_points(own, points) for key, own in setting.items()}
    return list(map(setting, points)) if callable(setting) else setting


def ids_of(points: Sequence[Point]) -> list[str]:
    """Name the case of each point; plotly draws only one of several points with the same id."""
    counts = Counter[str]()
    ids = []
    for case_id in (str(point["case_id"]) for point in points):
        ids.append(f"{case_id}/{counts[case_id]}" if counts[case_id] else case_id)
        counts[case_id] += 1
    return ids


def _shape(case: Point) -> str:
    return next((_HATCHES[name] for name in reversed(_HATCHES) if case[name]), "")


HATCHING = {**_HATCH, "shape": _shape}
"""The pattern of a bar, by its case."""


def symbol(case: Point, shape: str = "circle") -> str:
    """Return the symbol of a case: open where ranks shared cores, a cross if not finite."""
    if case["is_not_finite"]:
        return NOT_FINITE_SYMBOL
    return f"{shape}-open" if case["is_oversubscribed"] else shape


def caution_notes(case: Point) -> str:
    """Return what to know of a case that was oversubscribed or not finite."""
    return "<br>".join(text for name, text in _NOTES.items() if case[name])


def launch_note(case: Point) -> str:
    """Return the number of launches that a median is taken over, if there are several."""
    return f"<br>median of {case['num_launches']} launches" if case["num_launches"] > 1 else ""


def spread_note(case: Point) -> str:
    """Return the range of throughput over launches, or over the steps of one."""
    if is_missing(case["low"]):
        return ""
    between = f"{case['low']:,.0f} to {case['high']:,.0f}"
    if case["spread"] == SPREAD_OF_LAUNCHES:
        return f"<br>launches: {between}"
    return f"<br>95 % interval over the steps of one launch:<br>{between}"


def elided(name: str) -> str:
    """Return the end of a long name, where paths and model names differ."""
    return name if len(name) <= _LONGEST_TICK else f"…{name[1 - _LONGEST_TICK :]}"


def figure_text(text: object) -> str:
    """Escape plain text for a figure, where plotly would interpret `<b>` as markup."""
    return html.escape(str(text), quote=False)
