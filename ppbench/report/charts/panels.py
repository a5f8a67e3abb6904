"""The panel and the position of each case in a chart.

    world_size if it varies, else the first varying number, else another setting  ->  x
    schedule                                                ->  colour, bars side by side
    every other varying setting                             ->  panels (small multiples)

Cases are rows instead where only the schedule varies, and in charts with many marks per case: names
are long and screens are narrow, but a page can be of any height.

Positions are computed here as plain numbers, rather than by plotly's grouping of categories, so
that markers (theory, single ranks) lie exactly on the bar that they belong to.
"""

from __future__ import annotations

import html
import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from ppbench.display.cases import Axes, axis_text, settings_text

GROUP_WIDTH = 0.78  # of the distance between two positions on x
MAX_COLUMNS = 4
PANEL_PX, ROW_PX, GAP_PX, TOP_PX, BOTTOM_PX = 220, 22, 70, 64, 32
TITLE_PX = 22  # of a panel, in one line
TITLE_LINE_PX = 15  # each further line
AXIS_TITLE_PX = 20  # of the axis under a panel, where it has a title
_LEAST_SLOTS = 3  # keeps the bar of a single case narrow
_LEAST_ROWS = 3
_GAP_X = 0.025  # of the chart's width
_LONGEST_TICK = 24  # characters
_LINE, _MOST_LINES = 32, 8  # characters that the narrowest panel has room for
Update = dict[str, object]


@dataclass(frozen=True)
class Panels:
    """Cases with their panels and positions, in the columns `panel` and `x` (along the case axis).

    `along` are the settings of the case axis: x, or y if cases are rows.
    """

    cases: pd.DataFrame
    titles: tuple[str, ...]
    along: Update
    bar_width: float = 1.0
    has_rows: bool = False
    panel_px: int = PANEL_PX
    bottom_px: int = BOTTOM_PX

    @property
    def top_px(self) -> int:
        """Height of the legend and of the titles, if there are any."""
        return (TOP_PX if any(self.titles) else TOP_PX - TITLE_PX) + self.more_title_px

    @property
    def more_title_px(self) -> int:
        """Height of the longest title's further lines."""
        most = max((len(in_lines(title)) for title in self.titles), default=1)
        return max(0, most - 1) * TITLE_LINE_PX

    @property
    def value(self) -> str:
        """The letter of the value axis."""
        return "x" if self.has_rows else "y"

    def at(self, position: pd.Series, value: pd.Series) -> Update:
        """Return coordinates of marks: positions along the case axis, values on the other."""
        along, across = (column.to_numpy(dtype=float) for column in (position, value))
        return {"x": across, "y": along} if self.has_rows else {"x": along, "y": across}


def arrange(cases: pd.DataFrame, axes: Axes) -> Panels:
    """Assign each case of `by_case(runs, axes)` a panel and a position on x, or a row."""
    x_axis = _choose_x(cases, axes)
    if x_axis is None:
        return arrange_rows(cases, axes)
    index, ticks = _ticks(cases, x_axis)
    # Schedules lie side by side, each at its own offset from the tick.
    schedules = list(dict.fromkeys(cases["schedule"]))
    slot = GROUP_WIDTH / max(1, len(schedules))
    middle = (len(schedules) - 1) / 2
    offsets = np.array([(schedules.index(name) - middle) * slot for name in cases["schedule"]])
    placed, titles = in_panels(cases, [a for a in axes if a not in (x_axis, "schedule")])
    positions = np.array(index, dtype=float)
    return Panels(
        placed.assign(tick=positions, x=positions + offsets),
        titles,
        _named(ticks, max(len(ticks) + 0.1, _LEAST_SLOTS)),
        slot * 0.92,
    )


def arrange_rows(cases: pd.DataFrame, axes: Axes) -> Panels:
    """Assign each case a row, named by its schedule if that varies, else by what varies."""
    has_one_schedule = len(cases["schedule"].unique()) == 1
    row_axis = (_choose_x(cases, axes) if has_one_schedule else None) or "schedule"
    index, ticks = _ticks(cases, row_axis)
    placed, titles = in_panels(cases, [axis for axis in axes if axis != row_axis])
    rows = max(len(ticks), _LEAST_ROWS)
    upside_down = _named(ticks, -len(ticks) - 0.1)
    return Panels(
        placed.assign(x=np.array(index, dtype=float)),
        titles,
        {**upside_down, "autorange": False, "automargin": True},
        GROUP_WIDTH,
        has_rows=True,
        panel_px=rows * ROW_PX,
        bottom_px=BOTTOM_PX + AXIS_TITLE_PX,
    )


def figure_text(text: object) -> str:
    """Escape plain text for a figure, where plotly would interpret `<b>` as markup."""
    return html.escape(str(text), quote=False)


def in_lines(text: str) -> list[str]:
    """Wrap text to the width of a panel; very long text ends in an ellipsis."""
    return textwrap.wrap(text, _LINE, max_lines=_MOST_LINES, placeholder=" …")


def figure_lines(text: str) -> str:
    """Wrap and escape text for a figure."""
    return "<br>".join(figure_text(line) for line in in_lines(text))


def in_panels(cases: pd.DataFrame, axes: Axes) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Add the `panel` of each case, one per combination of these settings; return their titles."""
    rows = cases[["case_id", *axes]].to_dict("records")
    titles = [settings_text(row, axes) for row in rows]
    distinct = tuple(dict.fromkeys(titles))
    return cases.assign(panel=[distinct.index(title) for title in titles]), distinct


def _named(ticks: Sequence[str], length: float) -> Update:
    """Return an axis with a name at each whole number; backwards if `length` is negative."""
    middle = (len(ticks) - 1) / 2
    return {
        "tickvals": np.arange(len(ticks), dtype=float),
        "ticktext": list(ticks),
        "range": [middle - length / 2, middle + length / 2],
        "ticklabelstandoff": 3,
        "showgrid": False,
        "zeroline": False,
    }


def _choose_x(cases: pd.DataFrame, axes: Axes) -> str | None:
    """Return the axis to draw along, of those other than the schedule in which cases differ."""
    varying = [a for a in axes if a != "schedule" and len(cases[a].astype(str).unique()) > 1]
    numbers = [axis for axis in varying if is_numeric_dtype(cases[axis])]
    return "world_size" if "world_size" in numbers else next(iter([*numbers, *varying]), None)


def _ticks(cases: pd.DataFrame, axis: str) -> tuple[list[int], tuple[str, ...]]:
    """Return the tick of each case, and the names of the ticks; numbers are sorted."""
    values = list(dict.fromkeys(cases[axis]))
    if is_numeric_dtype(cases[axis]):
        values.sort()
    names = tuple(figure_text(elided(axis_text(axis, value))) for value in values)
    return [values.index(value) for value in cases[axis]], names


def elided(name: str) -> str:
    """Return the end of a long name, where paths and model names differ."""
    return name if len(name) <= _LONGEST_TICK else f"…{name[1 - _LONGEST_TICK :]}"


def arrangement(meta: Mapping[str, Any], columns: int) -> Update:
    """Return layout settings (dotted keys) that arrange panels in so many columns.

    `meta` describes the panels, as `panels_meta` returns it.
    """
    num_panels = len(meta["titles"])
    columns = max(1, columns)
    rows = max(1, math.ceil(num_panels / columns))
    panel_px, gap_px = meta["panelPx"], meta["gapPx"]
    plot_px = rows * panel_px + (rows - 1) * gap_px
    update: Update = {"height": plot_px + meta["topPx"] + meta["bottomPx"]}
    width = (1 - (columns - 1) * _GAP_X) / columns
    for panel in range(num_panels):
        row, column = divmod(panel, columns)
        left = column * (width + _GAP_X)
        top = 1 - row * (panel_px + gap_px) / plot_px
        key = axis_key(panel)
        update[f"xaxis{key}.domain"] = [left, min(1.0, left + width)]
        update[f"yaxis{key}.domain"] = [max(0.0, top - panel_px / plot_px), top]
        update[f"yaxis{key}.showticklabels"] = column == 0
        update[f"yaxis{key}.title.text"] = meta["yTitle"] if column == 0 else ""
    return update


def panels_meta(panels: Panels, y_title: str) -> Update:
    """Describe the panels to a page, which arranges them as `arrangement` does."""
    return {
        "titles": [figure_text(title) for title in panels.titles],
        "yTitle": y_title,
        "panelPx": panels.panel_px,
        "gapPx": GAP_PX + panels.bottom_px - BOTTOM_PX + panels.more_title_px,
        "topPx": panels.top_px,
        "bottomPx": panels.bottom_px,
        "moreTitlePx": panels.more_title_px,
        "gapX": _GAP_X,
        "maxColumns": MAX_COLUMNS,
    }


def axis_key(panel: int) -> str:
    """Return plotly's suffix of a panel's axes: none for the first, then 2, 3, ..."""
    return "" if panel == 0 else str(panel + 1)


def axes_of(panels: Panels, value_axis: Mapping[str, object]) -> dict[str, object]:
    """Return the axes of every panel; an axis with the setting `matches` is shared."""
    letters = ("y", "x") if panels.has_rows else ("x", "y")
    axes: dict[str, object] = {}
    for panel in range(len(panels.titles)):
        key = axis_key(panel)
        for letter, other, settings in zip(
            letters, reversed(letters), (panels.along, value_axis), strict=True
        ):
            own = {k: v for k, v in settings.items() if panel or k != "matches"}
            axes[f"{letter}axis{key}"] = {**own, "anchor": f"{other}{key}", "fixedrange": True}
    return axes


def title_annotations(panels: Panels) -> list[dict[str, object]]:
    """Return each panel's title, anchored to its panel; hovering shows it in full."""
    return [
        {
            "text": figure_lines(title),
            **({} if " ".join(in_lines(title)) == title else {"hovertext": figure_text(title)}),
            "xref": f"x{axis_key(panel)} domain",
            "yref": f"y{axis_key(panel)} domain",
            "x": 0,
            "y": 1,
            "yshift": 4,
            "xanchor": "left",
            "yanchor": "bottom",
            "align": "left",
            "showarrow": False,
            "font": {"size": 12},
        }
        for panel, title in enumerate(panels.titles)
        if title
    ]
