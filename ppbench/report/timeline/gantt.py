"""The Gantt chart of plotly, for notebooks and pictures; pages draw timelines themselves.

Every mark is a bar in one of a few traces with typed numeric arrays. A trace, shape or annotation
per span would be slow from a thousand spans on, as would `plotly.express.timeline` (dates on a
categorical axis). More than MOST_BARS bars are drawn as a heat map of slices of time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.plan.spans import Lane
from ppbench.display.colors import (
    BLUE,
    HATCH_COLORS,
    MIXED_COLOR,
    TRACK_COLOR,
    ink_on,
    translucent,
)
from ppbench.report.charts.canvas import LEGEND, NEUTRAL, figure_text
from ppbench.report.scripts import Figure
from ppbench.report.timeline.drawing import MOST_BARS, NUM_SLICES, PALE, ROW_PX, Drawing
from ppbench.report.timeline.marks import Marks, Step

if TYPE_CHECKING:
    import plotly.graph_objects as go

PATH = "critical path"
_FAINTEST = 0.08
_TOP_PX, _BOTTOM_PX, _NOTE_PX = 38, 36, 60
_LANES_NAMED_PX = 60  # height from which a row has labels `send` and `recv`
_MOST_OUTLINED = 1500  # with more bars than this, outlines would hide them


def gantt(steps: Sequence[Step]) -> go.Figure:
    """Draw steps one above the other, in ms since the first computation of each."""
    import plotly.graph_objects as go

    drawing = Drawing(steps)
    is_overview = drawing.num_bars > MOST_BARS
    traces = [_tracks(drawing), *_windows(drawing)]
    if is_overview:
        traces += [_heat_map(drawing, *placed) for placed in drawing.placed]
    traces += [_bars(drawing, own, is_empty=is_overview) for own in drawing.kinds]
    traces += _path(drawing)
    return go.Figure({"data": traces, "layout": _layout(drawing, is_overview=is_overview)})


def _tracks(drawing: Drawing) -> Figure:
    """Return a faint track for each thin lane."""
    ranks = np.concatenate([row + np.arange(step.num_ranks) for step, row in drawing.placed])
    thin = [place for lane, place in drawing.lanes.items() if lane is not Lane.COMPUTE]
    start, end = (ns / drawing.unit.ns for ns in (drawing.start_ns, drawing.end_ns))
    num_tracks = len(thin) * len(ranks)
    return {
        "type": "bar",
        "base": [start] * num_tracks,
        "x": np.full(num_tracks, end - start),
        "y": np.concatenate([ranks + place.centre for place in thin]),
        "width": thin[0].height,
        "marker": {"color": TRACK_COLOR, "line": {"width": 0}},
        "orientation": "h",
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _bars(drawing: Drawing, own: Marks, *, is_empty: bool) -> Figure:
    """Return the bars of a kind; empty ones only have an entry in the legend."""
    kind = own.kind
    trace: Figure = {
        "type": "bar",
        "name": kind.name,
        "legendgroup": kind.group or kind.name,
        "legendrank": 2000 if kind.is_idle else 1000,
        "showlegend": kind.is_listed,
        "orientation": "h",
        "width": drawing.lanes[kind.lane].height,
        "marker": {"color": kind.colors[0], "line": {"width": 0}},
        "base": [None],
        "x": [None],
        "y": [None],
    }
    if is_empty:
        return trace
    # Sorted by shade, so that the first bar, whose colour the legend shows, is of a first stage.
    order = np.argsort(own.shade, kind="stable")
    shade = own.shade[order].tolist()
    trace |= {
        "base": drawing.times(own.begin_ns)[order].tolist(),
        "x": drawing.times(own.width_ns)[order],
        "y": (own.row + drawing.lanes[kind.lane].centre)[order],
        "hovertext": [_text(drawing, own, n) for n in order.tolist()],
        "hovertemplate": "%{hovertext}<extra></extra>",
    }
    if kind.lane is not Lane.COMPUTE:
        # A transfer may last less than a pixel; an outline in its own colour keeps it visible.
        trace["marker"]["line"] = {"color": kind.colors[0], "width": 1}
    elif not kind.is_idle and drawing.num_bars <= _MOST_OUTLINED:
        trace["marker"]["line"] = {"width": 0.6}
    if len(kind.colors) > 1:
        trace["marker"]["color"] = [kind.colors[n] for n in shade]
    if kind.beside:
        trace["marker"]["opacity"] = PALE
    if kind.has_text or kind.hatch:
        texts = own.labels or list(map(str, own.numbers["microbatch"].tolist()))
        trace |= {
            "text": [figure_text(texts[n]) for n in order.tolist()],
            "constraintext": "inside",
            "insidetextanchor": "start" if kind.hatch else "middle",  # its end may be out of view
            "insidetextfont": {"color": NEUTRAL if kind.beside else [kind.inks[n] for n in shade]},
            "textangle": 0,
            "textposition": "inside",
        }
    if kind.hatch:
        trace["marker"]["pattern"] = {
            "fgcolor": HATCH_COLORS[ink_on(kind.colors[0])],
            "fillmode": "overlay",
            "shape": kind.hatch,
            "size": 9,
            "solidity": 0.16,
        }
    return trace


def _text(drawing: Drawing, own: Marks, n: int) -> str:
    """Return what a mark is, as `linesOf` in columns.js does."""
    unit = drawing.unit

    def time(value_ns: Any) -> str:
        return f"{value_ns / unit.ns:,.3f} {unit.name}"

    values: dict[str, Any] = {"start": time(own.begin_ns[n]), "duration": time(own.width_ns[n])}
    for name, numbers in own.numbers.items():
        values[name] = time(numbers[n]) if name.endswith("_ns") else numbers[n]
    if "num_bytes" in values:
        values["num_bytes"] = f"{values['num_bytes'] / drawing.size_bytes:,.1f} {drawing.size_unit}"
    if (phrases := own.phrases) is not None:
        words = phrases.words[phrases.codes[n]]
        values["phrase"] = words.replace("{}", time(phrases.amount_ns[n]))
    heading, *lines = (figure_text(line.format_map(values)) for line in own.kind.lines)
    return "<br>".join([f"<b>{heading}</b>", *lines])


def _heat_map(drawing: Drawing, step: Step, first_row: float) -> Figure:
    """Return the computations of a step in slices of time."""
    grid, lane = drawing.overview_of(step), drawing.lanes[Lane.COMPUTE]
    colors = [(kind.colors[0], PALE if kind.beside else 1) for kind in grid.kinds]
    colors += [(MIXED_COLOR, 1), (MIXED_COLOR, PALE)]
    scale: list[list[object]] = []  # a ramp per kind and two for several, from nearly clear
    for number, (color, opacity) in enumerate(colors):
        scale += [
            [number / len(colors), translucent(color, _FAINTEST * opacity)],
            [(number + 1) / len(colors), translucent(color, opacity)],
        ]
    names = np.array([*(kind.name for kind in grid.kinds), "several", "several"], object)
    start, end = (ns / drawing.unit.ns for ns in step.shown_ns)
    width = (end - start) / NUM_SLICES
    return {
        "type": "heatmap",
        # A cell is its main kind plus its busy share; NaN where it is idle.
        "z": np.where(grid.busy > 0, grid.mostly + np.clip(grid.busy, 0.001, 0.999), np.nan),
        "zmin": 0,
        "zmax": len(colors),
        "colorscale": scale,
        "showscale": False,
        "x0": start + width / 2,
        "dx": width,
        "y0": first_row + lane.centre,
        "dy": 1,
        "ygap": max(1, round(drawing.row_px * (1 - lane.height))),
        "text": names[grid.mostly],
        "customdata": np.stack([grid.busy, grid.counts], axis=-1),
        "hovertemplate": "<b>%{customdata[0]:.0%} computing</b>, mostly %{text}<br>"
        f"around %{{x:,.2f}} {drawing.unit.name}<br>"
        "%{customdata[1]:,} computations begin here<extra></extra>",
    }


def _path(drawing: Drawing) -> list[Figure]:
    """Return the critical path as a line in the text colour, which waits to be switched on."""
    points = [point or (np.nan, np.nan) for point in drawing.path()]
    if not points:
        return []
    line = {"visible": "legendonly", "line": {"shape": "linear", "width": 2}}
    return [_line(PATH, points, **line)]


def _windows(drawing: Drawing) -> list[Figure]:
    """Return a line around the windows of each step in a row, from rank to rank."""
    points: list[tuple[float, float]] = []
    for step, first_row in drawing.placed:
        if step.beside:
            edges = list(zip(*drawing.windows(step), strict=True))
            sides = [
                [(x, first_row + rank + by) for rank, x in enumerate(edge) for by in (-0.5, 0.5)]
                for edge in edges
            ]
            points += [*sides[0], *reversed(sides[1]), sides[0][0], (np.nan, np.nan)]
    line = {"showlegend": False, "line": {"color": BLUE, "width": 1.2}}
    return [_line("the step", points, **line)] if points else []


def _line(name: str, points: Sequence[tuple[float, float]], **settings: Any) -> Figure:
    x, y = np.array(points).T
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": x,
        "y": y,
        "hoverinfo": "skip",
        **settings,
    }


def _layout(drawing: Drawing, *, is_overview: bool) -> Figure:
    unit, is_tall = drawing.unit, drawing.row_px >= _LANES_NAMED_PX
    notes: list[Figure] = []
    for step, first_row in drawing.placed:
        above = {"showarrow": False, "y": first_row - 0.5, "yanchor": "bottom"}
        if step.title:
            title = {"text": f"<b>{figure_text(step.title)}</b>", "font": {"size": 13}}
            place = {"x": 0, "xanchor": "left", "xref": "paper"}
            notes.append({**above, **title, **place, "yshift": ROW_PX if step.beside else 0})
        for name in drawing.names(step) if step.beside else ():
            text = f"<b>{name.text}</b>" if name.is_own else name.text
            middle = (name.begin + name.end) / 2
            notes.append({**above, "text": text, "x": middle, "font": {"size": 11}})
    if is_overview:
        text = f"{drawing.note} On the page of ppbench timeline, zooming in shows the single bars."
        text = text.replace(". ", ".<br>")
        place = {"x": 0, "y": 0, "xref": "paper", "yref": "paper", "yshift": 8 - _BOTTOM_PX}
        anchors = {"align": "left", "xanchor": "left", "yanchor": "top"}
        notes.append({"text": text, "showarrow": False, **place, **anchors})
    labels = {Lane.COMPUTE: "rank {}"}  # and, in tall rows, small ones of the thin lanes
    if is_tall:
        small = '<span style="font-size:9px">{}</span>'
        labels = {lane: labels.get(lane, small.format(lane.value)) for lane in drawing.lanes}
    ticks = [
        (first_row + rank + drawing.lanes[lane].centre, label.format(rank))
        for step, first_row in drawing.placed
        for rank in range(step.num_ranks)
        for lane, label in labels.items()
    ]
    below_px = _BOTTOM_PX + (_NOTE_PX if is_overview else 0)
    return {
        "annotations": notes,
        "barmode": "overlay",
        "height": round(drawing.num_rows * drawing.row_px) + _TOP_PX + below_px,
        "hovermode": "closest",
        "legend": LEGEND,
        "margin": {"b": below_px, "l": 62, "r": 12, "t": _TOP_PX},
        "uniformtext": {"minsize": 9, "mode": "hide"},
        "xaxis": {
            "exponentformat": "none",
            "range": [drawing.start_ns / unit.ns, drawing.last_ns / unit.ns],
            "separatethousands": True,
            "showticksuffix": "first",  # the last tick may be cut off at the edge
            "ticksuffix": f" {unit.name}",
            "zeroline": False,
        },
        "yaxis": {
            "fixedrange": is_tall,
            "range": [drawing.num_rows - 0.48, -0.52],
            "showgrid": False,
            "ticklabelstandoff": 4,
            "ticks": "",
            "tickvals": np.array([row for row, _ in ticks]),
            "ticktext": [text for _, text in ticks],
            "zeroline": False,
        },
    }
