"""The Gantt chart: a pure function from spans to a plotly figure, for notebooks and pages alike.

Every mark is a bar in one of a few traces with typed numeric arrays. A trace, shape or annotation
per span would be slow from a thousand spans on, as would `plotly.express.timeline` (dates on a
categorical axis). Steps are stacked on one time axis, a row per rank, rank 0 on top:

    AFAB
    rank 0   | 0 | 1 |.............|   0   |   1   |    thick; the microbatch inside; idle by cause
     send        -   -                                  thin; forward and backward in own colours,
     recv    ~~~~~~~~~~~~~~~~~~~~~~-       -            lighter while one end waits for the other
    1F1B
    rank 0   ...

More than MOST_BARS bars are replaced by an overview; when zoomed in, a page takes the bars in view
from the packed marks (see `ppbench.report.timeline.overview`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from engine.plan.spans import Lane
from ppbench.display.colors import HATCH_COLORS, TRACK_COLOR, ink_on
from ppbench.display.units import NS_PER_MS, counted
from ppbench.report.charts.canvas import PLAIN, legend
from ppbench.report.charts.panels import Update, figure_text
from ppbench.report.timeline.marks import Floats, Kind, Marks, Step, marks_of, size_unit_of
from ppbench.report.timeline.overview import MOST_SHARE, NUM_SLICES, Detail, Trace, heat_map, packed

MOST_BARS = 5000
LANE_CENTRES: dict[Lane, float] = {Lane.COMPUTE: -0.14, Lane.SEND: 0.24, Lane.RECV: 0.38}
LANE_HEIGHTS: dict[Lane, float] = {Lane.COMPUTE: 0.56, Lane.SEND: 0.11, Lane.RECV: 0.11}
PATH = "critical path"
_TALL_PX, _SHORT_PX, _MOST_ROWS_PX = 96, 18, 1200
_LANES_NAMED_PX = 60  # height from which a row has labels `send` and `recv`
_TITLE_PX, _TOP_PX, _BOTTOM_PX, _NOTE_PX = 30, 38, 36, 60
_SMALL = '<span style="font-size:9px">{}</span>'
_MAX_OUTLINED = 1500  # with more bars than this, outlines would hide them
_MOST_PATH_POINTS = 4000
_ROOM = 1.005  # to the right of the end
_PATH_CENTRE = 0.06  # in the compute lane, below the numbers


@dataclass(frozen=True)
class Gantt:
    """A figure and, where it shows an overview, the packed marks for details."""

    figure: go.Figure
    detail: Detail | None


def gantt(steps: Sequence[Step]) -> go.Figure:
    """Draw steps one above the other, in ms since the first computation of each.

    This is for notebooks and pictures: steps with too many bars remain an overview.
    """
    return gantt_with_detail(steps, has_detail=False).figure


def gantt_with_detail(steps: Sequence[Step], *, has_detail: bool = True) -> Gantt:
    """Draw steps for a page that can zoom in. Without `has_detail` an overview remains one."""
    drawing = _Drawing(steps)
    if drawing.num_bars <= MOST_BARS:
        return Gantt(drawing.with_bars(), None)
    return drawing.with_overview(has_detail=has_detail)


class _Drawing:
    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps = list(steps)
        unit = size_unit_of(self._steps)
        self._marks = [marks_of(step, unit) for step in self._steps]
        self._row_px = _row_px(sum(step.num_ranks for step in self._steps))
        heights = [self._title_rows(step) + step.num_ranks for step in self._steps]
        tops = [0.0, *accumulate(heights)]
        self._num_rows = tops[-1]
        self._placed = [  # each step with its first row
            (step, top + self._title_rows(step))
            for step, top in zip(self._steps, tops, strict=False)
        ]
        self.num_bars = sum(len(marks) for kinds in self._marks for marks in kinds)

    def _title_rows(self, step: Step) -> float:
        return _TITLE_PX / self._row_px if step.title else 0.0

    @property
    def _end_ms(self) -> float:
        return max(step.end_ns for step in self._steps) / NS_PER_MS

    def with_bars(self) -> go.Figure:
        figure = self._empty()
        is_outlined = self.num_bars <= _MAX_OUTLINED
        figure.add_traces([_bars(stacked, is_outlined=is_outlined) for stacked in self._stacked()])
        return figure.add_traces(self._path_lines())

    def with_overview(self, *, has_detail: bool) -> Gantt:
        figure = self._empty()
        stacked = self._stacked()
        computations = [[m for m in kinds if m.kind.has_text] for kinds in self._marks]
        grids = [
            self._grid(step, row, kinds)
            for (step, row), kinds in zip(self._placed, computations, strict=True)
        ]
        figure.add_traces([*grids, *map(_no_bars, stacked)])
        first = len(figure.data) - len(stacked)
        figure.add_traces(self._path_lines())
        figure.update_layout(**self._note(has_detail=has_detail))
        if not has_detail:
            return Gantt(figure, None)
        for grid in figure.data[: len(grids) + 1]:
            if grid.type == "heatmap":  # the page counts these from the columns
                grid.update(customdata=None, text=None, hovertemplate=None)
        layout, columns = packed(stacked, max(step.end_ns for step in self._steps), first)
        detail = Detail(columns)
        description = {
            **layout,
            "columns": detail.name,
            "mostBars": MOST_BARS,
            "slices": NUM_SLICES,
            "mostShare": MOST_SHARE,
            "laneHeight": LANE_HEIGHTS[Lane.COMPUTE],
            "grids": [
                {
                    "trace": first - len(grids) + n,
                    "firstRow": row,
                    "ranks": step.num_ranks,
                    "kinds": [marks.kind.name for marks in computations[n]],
                }
                for n, (step, row) in enumerate(self._placed)
            ],
        }
        figure.update_layout(meta={**figure.layout.meta, "detail": description})
        return Gantt(figure, detail)

    def _stacked(self) -> list[Trace]:
        """Return the kinds in the order in which they first appear, idle time first."""
        kinds = {marks.kind.name: marks.kind for step in self._marks for marks in step}
        return [self._stack(kind.name) for kind in sorted(kinds.values(), key=_rank_of_kind)]

    def _stack(self, name: str) -> Trace:
        stacked, rows, shades = [], [], []
        colors: list[str] = []  # steps may have different numbers of them
        for kinds, (_, first) in zip(self._marks, self._placed, strict=True):
            for marks in kinds:
                if marks.kind.name == name:
                    stacked.append(marks)
                    rows.append(marks.rank + first)
                    colors += [color for color in marks.kind.colors if color not in colors]
                    shades.append(
                        np.array([colors.index(c) for c in marks.kind.colors])[marks.shade]
                    )
        lane = LANE_CENTRES[stacked[0].kind.lane]
        return Trace(stacked, np.concatenate(rows), lane, colors, np.concatenate(shades))

    def _path_lines(self) -> list[go.Scatter]:
        """Draw the critical path from bar to bar, in the text colour of the page.

        Unfinished steps have none.
        """
        points = [
            _path_points(step.path(), first) for step, first in self._placed if step.flight is None
        ]
        if not points:
            return []
        x, y = (np.concatenate(both) for both in zip(*points, strict=True))
        line = go.Scatter(
            name=PATH,
            x=x,
            y=y,
            mode="lines",
            line={"width": 2, "shape": "linear"},
            visible="legendonly",
            hoverinfo="skip",
            meta=PATH,
        )
        return [line]

    def _grid(self, step: Step, row: float, kinds: Sequence[Marks]) -> go.Heatmap:
        gap_px = max(1, round(self._row_px * (1 - LANE_HEIGHTS[Lane.COMPUTE])))
        middle = row + LANE_CENTRES[Lane.COMPUTE]
        return heat_map(kinds, step.num_ranks, step.end_ns, middle, gap_px)

    def _note(self, *, has_detail: bool) -> Update:
        num_spans = sum(len(step.spans) for step in self._steps)
        more = (
            f"Zoom in until at most {MOST_BARS:,} bars are in view to see them one by one."
            if has_detail
            else "On the page of ppbench timeline, zooming in shows the single bars."
        )
        text = (
            f"{counted(num_spans, 'span')} make {self.num_bars:,} bars, too many to draw one by "
            f"one: the view is merged into {NUM_SLICES} slices of time per rank.<br>A slice has "
            "the colour of the op that took at least four fifths of its compute time, else slate, "
            f"and is fainter the more it idles.<br>{more}"
        )
        note = {
            "name": "note",
            "text": text,
            "showarrow": False,
            "align": "left",
            "x": 0,
            "xref": "paper",
            "xanchor": "left",
            "y": 0,
            "yref": "paper",
            "yanchor": "top",
            "yshift": -_BOTTOM_PX + 8,
        }
        return {
            "annotations": [*self._titles(), note],
            "height": self._height + _NOTE_PX,
            "margin.b": _BOTTOM_PX + _NOTE_PX,
        }

    @property
    def _height(self) -> int:
        return round(self._num_rows * self._row_px) + _TOP_PX + _BOTTOM_PX

    def _empty(self) -> go.Figure:
        """Return a figure with the layout and a faint track for each thin lane."""
        figure = go.Figure(layout=self._layout())
        ranks = self._rank_rows()
        lanes = [ranks + LANE_CENTRES[lane] for lane in (Lane.SEND, Lane.RECV)]
        return figure.add_trace(
            go.Bar(
                orientation="h",
                y=np.concatenate(lanes),
                base=np.zeros(2 * len(ranks)),
                x=np.full(2 * len(ranks), self._end_ms),
                width=LANE_HEIGHTS[Lane.SEND],
                marker={"color": TRACK_COLOR, "line": {"width": 0}},
                hoverinfo="skip",
                showlegend=False,
            )
        )

    def _rank_rows(self) -> Floats:
        rows = [first + np.arange(step.num_ranks, dtype=float) for step, first in self._placed]
        return np.concatenate(rows)

    def _layout(self) -> Update:
        return {
            "template": PLAIN,
            "barmode": "overlay",
            "uniformtext": {"mode": "hide", "minsize": 9},
            "height": self._height,
            "margin": {"l": 62, "r": 12, "t": _TOP_PX, "b": _BOTTOM_PX},
            "hovermode": "closest",
            "dragmode": "zoom",
            "legend": legend(),
            "annotations": self._titles(),
            "meta": {"timeline": self._meta()},
            "xaxis": {
                "range": [0, self._end_ms * _ROOM],
                "ticksuffix": " ms",
                "showticksuffix": "first",  # the last tick may be cut off at the edge
                "exponentformat": "none",
                "separatethousands": True,
                "zeroline": False,
            },
            "yaxis": {
                "range": [self._num_rows - 0.48, -0.52],
                **self._ticks(),
                "showgrid": False,
                "zeroline": False,
                "fixedrange": self._row_px >= _LANES_NAMED_PX,
            },
        }

    def _meta(self) -> Update:
        """Return what a page needs to draw the timeline itself; see `timeline.js`."""
        return {
            "rowPx": self._row_px,
            "endMs": self._end_ms,
            "lanes": {
                lane.value: {"at": LANE_CENTRES[lane], "height": LANE_HEIGHTS[lane]}
                for lane in LANE_CENTRES
            },
            "steps": [
                {
                    "title": step.title,
                    "firstRow": first,
                    "ranks": step.num_ranks,
                    "end": step.end_ns / NS_PER_MS,
                }
                for step, first in self._placed
            ],
        }

    def _titles(self) -> list[Update]:
        """Return a title above the first rank of each step."""
        return [_title(step.title, first) for step, first in self._placed if step.title]

    def _ticks(self) -> Update:
        """Return tick labels `rank 0` and, in tall rows, small labels `send` and `recv`."""
        labels = {Lane.COMPUTE: "rank {}"}
        if self._row_px >= _LANES_NAMED_PX:
            labels |= {lane: _SMALL.format(lane.value) for lane in (Lane.SEND, Lane.RECV)}
        places = [
            (rank, first + rank, lane)
            for step, first in self._placed
            for rank in range(step.num_ranks)
            for lane in labels
        ]
        return {
            "tickvals": np.array([row + LANE_CENTRES[lane] for _, row, lane in places]),
            "ticktext": [labels[lane].format(rank) for rank, _, lane in places],
            "ticks": "",
            "ticklabelstandoff": 4,
        }


def _title(text: str, first_row: float) -> Update:
    """Return a step's title as an annotation above its first row."""
    return {
        "name": "title",  # a page shortens it where it does not fit
        "text": f"<b>{figure_text(text)}</b>",
        "showarrow": False,
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "y": first_row - 0.5,
        "yref": "y",
        "yanchor": "bottom",
        "font": {"size": 13},
    }


def _row_px(num_ranks: int) -> float:
    """Return the height of a row, which is lower where there are many."""
    return float(np.clip(_MOST_ROWS_PX / num_ranks, _SHORT_PX, _TALL_PX))


def _rank_of_kind(kind: Kind) -> tuple[bool, bool]:
    """Return a sort key: idle time first and hence at the back, transfers last."""
    return kind.lane is not Lane.COMPUTE, not kind.is_idle


def _bars(stacked: Trace, *, is_outlined: bool) -> go.Bar:
    kind, marks = stacked.kind, stacked.marks
    # Sorted by shade, so that the first bar, whose colour the legend shows, is of a first stage.
    order = np.argsort(stacked.shade, kind="stable")
    shade = stacked.shade[order]
    width_ms = np.concatenate([m.width_ns for m in marks]) / NS_PER_MS
    columns = [*(_joined(marks, name) for name in marks[0].numbers), width_ms]
    phrases = [text for m in marks if m.phrases is not None for text in m.phrases.texts()]
    trace = _no_bars(stacked, is_outlined=is_outlined)
    trace.update(
        y=(stacked.row + stacked.lane)[order],
        base=(np.concatenate([m.begin_ns for m in marks]) / NS_PER_MS)[order],
        x=width_ms[order],
        customdata=np.column_stack(columns)[order],
        hovertext=[phrases[n] for n in order] if phrases else None,
    )
    if kind.has_text:
        microbatch = np.concatenate([m.numbers["microbatch"][0] for m in marks])
        trace.update(text=microbatch[order].astype(str).tolist())
    if kind.hatch:
        labels = [figure_text(label) for m in marks for label in m.labels]
        trace.update(text=[labels[n] for n in order])
    if len(stacked.colors) > 1:
        trace.marker.color = [stacked.colors[n] for n in shade]
        trace.insidetextfont.color = [stacked.inks[n] for n in shade]
    return trace


def _joined(marks: list[Marks], name: str) -> Floats:
    return np.concatenate([m.numbers[name][0] * m.numbers[name][1] for m in marks])


def _no_bars(stacked: Trace, *, is_outlined: bool = False) -> go.Bar:
    """Return a trace with all settings but no arrays."""
    kind = stacked.kind
    is_transfer = kind.lane is not Lane.COMPUTE
    # A transfer may last less than a pixel; an outline in its own colour keeps it visible.
    line = {"width": 1, "color": kind.colors[0]} if is_transfer else {}
    if not is_transfer:
        line = {"width": 0.6 if is_outlined and not kind.is_idle else 0}
    inside = {
        "textposition": "inside",
        "insidetextanchor": "start" if kind.hatch else "middle",  # its end may be out of view
        "textangle": 0,
        "constraintext": "inside",
        "insidetextfont": {"color": stacked.inks[0] if stacked.inks else None},
    }
    return go.Bar(
        name=kind.name,
        legendgroup=kind.group or kind.name,
        showlegend=kind.is_listed,
        legendrank=2000 if kind.is_idle else 1000,
        orientation="h",
        x=[None],
        y=[None],
        base=[None],
        width=LANE_HEIGHTS[kind.lane],
        marker={"color": kind.colors[0], "line": line, **_hatched(kind)},
        hovertemplate=kind.hover,
        meta={
            "lane": kind.lane.value,
            "op": kind.op,
            "isIdle": kind.is_idle,
            "numbers": list(stacked.marks[0].numbers),
        },
        **(inside if kind.has_text or kind.hatch else {}),
    )


def _hatched(kind: Kind) -> Update:
    if not kind.hatch:
        return {}
    color = HATCH_COLORS[ink_on(kind.colors[0])]
    lines = {"shape": kind.hatch, "fgcolor": color, "size": 9, "solidity": 0.16}
    return {"pattern": {**lines, "fillmode": "overlay"}}


def _path_points(path: pd.DataFrame, first_row: float) -> tuple[Floats, Floats]:
    """Return a line over the path's computations, one piece per run of them on a rank.

    It ends with a gap, which separates it from the next step's path.
    """
    rank = path["rank"].to_numpy()
    is_new = np.r_[True, rank[1:] != rank[:-1]]
    starts = np.flatnonzero(is_new)
    ends = np.r_[starts[1:] - 1, len(rank) - 1]
    if len(starts) * 2 > _MOST_PATH_POINTS:
        kept = np.linspace(0, len(starts) - 1, _MOST_PATH_POINTS // 2).astype(np.int64)
        starts, ends = starts[kept], ends[kept]
    times = [path["start_ns"].to_numpy()[starts], path["end_ns"].to_numpy()[ends]]
    x = np.stack(times, axis=1).ravel() / NS_PER_MS
    y = np.repeat(rank[starts] + first_row + _PATH_CENTRE, 2)
    return np.r_[x, np.nan], np.r_[y, np.nan]
