"""Where each case stands in a chart: panel, position along x, colour.

    world_size if it varies, else the first varying number  ->  x
    schedule                                                ->  colour, bars side by side
    every other varying setting                             ->  panels (small multiples)

Positions are computed here, as plain numbers, rather than by plotly's grouping of categories:
markers (theory, single ranks) then stand exactly on the bar that they belong to.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype

from ppbench.report.cases import Axes, axis_text, settings_text

GROUP_WIDTH = 0.78  # of the distance between two positions on x
MAX_COLUMNS = 4
PANEL_PX, GAP_PX, TOP_PX, BOTTOM_PX = 220, 70, 64, 32
_LEAST_SLOTS = 3  # so that a lone case is a bar and not a wall
_GAP_X = 0.025  # of the chart's width
Update = dict[str, object]


@dataclass(frozen=True)
class Panels:
    """Cases with their places: columns `panel` and `x` are added to the frame."""

    cases: pd.DataFrame
    titles: tuple[str, ...]
    ticks: tuple[str, ...]
    bar_width: float


def arrange(cases: pd.DataFrame, axes: Axes) -> Panels:
    """Give every case of `by_case(runs, axes)` its place."""
    x_axis = _choose_x(cases, axes)
    others = [axis for axis in axes if axis not in (x_axis, "schedule")] if x_axis else []
    ticks, index = _ticks(cases, x_axis)
    titles = [figure_text(settings_text(row, others)) for _, row in cases.iterrows()]
    panels = list(dict.fromkeys(titles))
    offsets, bar_width = _offsets(list(cases["schedule"]) if x_axis else [""] * len(cases))
    placed = cases.assign(
        panel=[panels.index(title) for title in titles],
        x=np.array(index, dtype=float) + offsets,
    )
    return Panels(placed, tuple(panels), ticks, bar_width)


def figure_text(text: object) -> str:
    """Plain text for a figure, where plotly would take `<b>` and the like as markup."""
    return html.escape(str(text), quote=False)


def _offsets(series: list[str]) -> tuple[np.ndarray, float]:
    """How far from its tick each bar stands so that series stand side by side; and its width."""
    names = list(dict.fromkeys(series))
    slot = GROUP_WIDTH / max(1, len(names))
    return np.array([(names.index(s) - (len(names) - 1) / 2) * slot for s in series]), slot * 0.92


def _choose_x(cases: pd.DataFrame, axes: Axes) -> str | None:
    numbers = [a for a in axes if is_numeric_dtype(cases[a]) and len(cases[a].unique()) > 1]
    return "world_size" if "world_size" in numbers else next(iter(numbers), None)


def _ticks(cases: pd.DataFrame, x_axis: str | None) -> tuple[tuple[str, ...], list[int]]:
    """Labels along x, and which of them each case stands on."""
    if x_axis is None:
        return tuple(figure_text(text) for text in cases["text"]), list(range(len(cases)))
    values = sorted(cases[x_axis].unique())
    return tuple(figure_text(axis_text(x_axis, v)) for v in values), [
        values.index(v) for v in cases[x_axis]
    ]


def columns_offered(num_panels: int) -> list[int]:
    """The numbers of columns that a chart can take, by the width there is."""
    return list(range(1, max(1, min(num_panels, MAX_COLUMNS)) + 1))


def arrangement(num_panels: int, columns: int, y_title: str) -> Update:
    """Layout settings (dotted keys) that put the panels in so many columns."""
    rows = math.ceil(num_panels / columns)
    plot_px = rows * PANEL_PX + (rows - 1) * GAP_PX
    update: Update = {"height": plot_px + TOP_PX + BOTTOM_PX}
    width = (1 - (columns - 1) * _GAP_X) / columns
    for panel in range(num_panels):
        row, column = divmod(panel, columns)
        left = column * (width + _GAP_X)
        top = 1 - row * (PANEL_PX + GAP_PX) / plot_px
        key = axis_key(panel)
        update[f"xaxis{key}.domain"] = [left, min(1.0, left + width)]
        update[f"yaxis{key}.domain"] = [max(0.0, top - PANEL_PX / plot_px), top]
        update[f"yaxis{key}.showticklabels"] = column == 0
        update[f"yaxis{key}.title.text"] = y_title if column == 0 else ""
    return update


def panels_meta(panels: Panels, y_title: str) -> Update:
    """For a page that hides panels and arranges the others as `arrangement` does."""
    return {
        "titles": list(panels.titles),
        "yTitle": y_title,
        "panelPx": PANEL_PX,
        "gapPx": GAP_PX,
        "topPx": TOP_PX,
        "bottomPx": BOTTOM_PX,
        "gapX": _GAP_X,
        "maxColumns": MAX_COLUMNS,
    }


def axis_key(panel: int) -> str:
    """Plotly's suffix of a panel's axes: none for the first, then 2, 3, ..."""
    return "" if panel == 0 else str(panel + 1)


def axes_of(panels: Panels, y_axis: Mapping[str, object]) -> dict[str, object]:
    """The x and y axes of every panel; all panels share one y scale."""
    positions = np.arange(len(panels.ticks), dtype=float)
    middle = (len(panels.ticks) - 1) / 2
    room = max(len(panels.ticks) + 0.1, _LEAST_SLOTS) / 2
    axes: dict[str, object] = {}
    for panel in range(len(panels.titles)):
        key = axis_key(panel)
        axes[f"xaxis{key}"] = {
            "tickvals": positions,
            "ticktext": list(panels.ticks),
            "range": [middle - room, middle + room],
            "anchor": f"y{key}",
            "ticklabelstandoff": 3,
            "showgrid": False,
            "zeroline": False,
            "fixedrange": True,
        }
        shared = {} if panel == 0 else {"matches": "y"}
        axes[f"yaxis{key}"] = {**y_axis, **shared, "anchor": f"x{key}", "fixedrange": True}
    return axes


def title_annotations(panels: Panels) -> list[dict[str, object]]:
    """Each panel's title, tied to its panel so that it moves along."""
    return [
        {
            "text": title,
            "xref": f"x{axis_key(panel)} domain",
            "yref": f"y{axis_key(panel)} domain",
            "x": 0,
            "y": 1,
            "yshift": 4,
            "xanchor": "left",
            "yanchor": "bottom",
            "showarrow": False,
            "font": {"size": 12},
        }
        for panel, title in enumerate(panels.titles)
        if title
    ]
