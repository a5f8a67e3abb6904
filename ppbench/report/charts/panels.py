"""The panel of each case in a chart, and its place there.

    world_size if it varies, else the first varying number, else another setting  ->  place
    schedule                                                ->  colour, bars side by side
    every other varying setting                             ->  panels (small multiples)

Cases are rows instead where only the schedule varies, and in charts with many marks per case: names
are long and screens are narrow, but a page can be of any height.
"""

from __future__ import annotations

import html
from dataclasses import dataclass

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from ppbench.display.cases import Axes, axis_text, settings_text

GROUP_WIDTH = 0.78
"""The width of a place that bars take, of the distance between two places."""
PANEL_PX, ROW_PX, BOTTOM_PX, AXIS_TITLE_PX = 220, 22, 32, 20
_LEAST_PLACES = 3  # keeps the bar of a single case narrow
_LONGEST_TICK = 24  # characters
Update = dict[str, object]


@dataclass(frozen=True)
class Panels:
    """Cases with the number of their `panel`, of their `place` in it, and of their `slot` there.

    Places have names, the `ticks`; slots lie side by side. A chart of two numbers has no ticks.
    """

    cases: pd.DataFrame
    titles: tuple[str, ...]
    ticks: tuple[str, ...] = ()
    num_slots: int = 1
    has_rows: bool = False

    @property
    def along(self) -> str:
        """The letter of the axis with the places."""
        return "y" if self.has_rows else "x"

    @property
    def value(self) -> str:
        """The letter of the axis with the values."""
        return "x" if self.has_rows else "y"

    @property
    def height_px(self) -> int:
        """The height of a panel between its margins."""
        return max(len(self.ticks), _LEAST_PLACES) * ROW_PX if self.has_rows else PANEL_PX

    @property
    def bar_width(self) -> float:
        return GROUP_WIDTH / self.num_slots

    def positions(self, points: pd.DataFrame) -> list[float]:
        """Return where points lie along the places; `within` is theirs in the slot, if given.

        A page does the same for the places and slots that a filter leaves (`closeUp` in points.js).
        """
        within = points.get("within", 0.0)
        slot = points["slot"] - (self.num_slots - 1) / 2
        found = points["place"] + (slot + within) * self.bar_width
        return found.astype(float).round(6).tolist()

    def axis(self) -> Update:
        """Return the axis with the places, whose names are at whole numbers."""
        num = len(self.ticks)
        length = -num - 0.1 if self.has_rows else max(num + 0.1, _LEAST_PLACES)
        middle = (num - 1) / 2
        return {
            "tickvals": list(range(num)),
            "ticktext": list(self.ticks),
            "range": [middle - length / 2, middle + length / 2],
            "ticklabelstandoff": 3,
            "showgrid": False,
            "zeroline": False,
            "automargin": self.has_rows,
        }


def arrange(cases: pd.DataFrame, axes: Axes) -> Panels:
    """Give each case of `by_case(runs, axes)` a place on x, with schedules side by side."""
    x_axis = _choose_x(cases, axes)
    if x_axis is None:
        return arrange_rows(cases, axes)
    places, ticks = _ticks(cases, x_axis)
    slots, names = pd.factorize(cases["schedule"])
    placed, titles = in_panels(cases, [a for a in axes if a not in (x_axis, "schedule")])
    return Panels(placed.assign(place=places, slot=slots), titles, ticks, max(1, len(names)))


def arrange_rows(cases: pd.DataFrame, axes: Axes) -> Panels:
    """Give each case a row, named by its schedule if that varies, else by what varies."""
    has_one_schedule = len(cases["schedule"].unique()) == 1
    row_axis = (_choose_x(cases, axes) if has_one_schedule else None) or "schedule"
    places, ticks = _ticks(cases, row_axis)
    placed, titles = in_panels(cases, [axis for axis in axes if axis != row_axis])
    return Panels(placed.assign(place=places, slot=0), titles, ticks, has_rows=True)


def in_panels(cases: pd.DataFrame, axes: Axes) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Add the `panel` of each case, one per combination of these settings; return their titles."""
    titles = [settings_text(row, axes) for row in cases[["case_id", *axes]].to_dict("records")]
    panels, distinct = pd.factorize(np.array(titles, dtype=object))
    return cases.assign(panel=panels), tuple(map(str, distinct))


def _choose_x(cases: pd.DataFrame, axes: Axes) -> str | None:
    """Return the axis to draw along, of those other than the schedule in which cases differ."""
    varying = [a for a in axes if a != "schedule" and len(cases[a].astype(str).unique()) > 1]
    numbers = [axis for axis in varying if is_numeric_dtype(cases[axis])]
    return "world_size" if "world_size" in numbers else next(iter([*numbers, *varying]), None)


def _ticks(cases: pd.DataFrame, axis: str) -> tuple[list[int], tuple[str, ...]]:
    """Return the place of each case, and the names of the places; numbers are sorted."""
    values = list(dict.fromkeys(cases[axis]))
    if is_numeric_dtype(cases[axis]):
        values.sort()
    names = tuple(figure_text(elided(axis_text(axis, value))) for value in values)
    return [values.index(value) for value in cases[axis]], names


def elided(name: str) -> str:
    """Return the end of a long name, where paths and model names differ."""
    return name if len(name) <= _LONGEST_TICK else f"…{name[1 - _LONGEST_TICK :]}"


def figure_text(text: object) -> str:
    """Escape plain text for a figure, where plotly would interpret `<b>` as markup."""
    return html.escape(str(text), quote=False)
