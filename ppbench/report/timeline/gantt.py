"""The Gantt chart: a pure function from spans to a plotly figure, for notebooks and pages alike.

Every mark is a bar in one of a few traces with typed numeric arrays. A trace, shape or annotation
per span would be slow from a thousand spans on, as would `plotly.express.timeline` (dates on a
categorical axis). Steps are stacked on one time axis, a row per rank, rank 0 on top:

    AFAB
    rank 0   | 0 | 1 |.............|   0   |   1   |    thick; the microbatch inside; idle by cause
     send        -   -                                  thin; forward and backward in own colours,
     recv    ~~~~~~~~~~~~~~~~~~~~~~-       -            lighter while one end waits for the other
     collective           ~~~~--                        of replicas only; lighter before the slowest
    1F1B
    rank 0   ...

A figure is a `Picture`: plotly's JSON as plain data, keys in plotly's order. Pages write it as it
is, since checking each value, as plotly's objects do, takes longer than all the rest.

More than MOST_BARS bars are replaced by an overview; when zoomed in, a page takes the bars in view
from the packed marks (see `ppbench.report.timeline.overview`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from engine.plan.spans import Lane
from ppbench.display.colors import BLUE, HATCH_COLORS, TRACK_COLOR, ink_on
from ppbench.display.units import NS_PER_MS, counted, milliseconds, size_unit
from ppbench.report.charts.canvas import NEUTRAL, PLAIN, legend
from ppbench.report.charts.panels import Update, figure_text
from ppbench.report.scripts import Picture
from ppbench.report.timeline.marks import Floats, Kind, Step, most
from ppbench.report.timeline.overview import (
    MOST_SHARE,
    NUM_SLICES,
    PALE,
    Detail,
    Trace,
    heat_map,
    packed,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_BARS = 5000
_NO_ARRAYS: Update = {"base": [None], "x": [None], "y": [None]}


class Place(NamedTuple):
    """Where a lane lies in a row, as shares of its height."""

    centre: float
    height: float


Lanes = Mapping[Lane, Place]
LANES: Lanes = {
    Lane.COMPUTE: Place(-0.14, 0.56),
    Lane.SEND: Place(0.24, 0.11),
    Lane.RECV: Place(0.38, 0.11),
}
LANES_OF_REPLICAS: Lanes = {
    Lane.COMPUTE: Place(-0.18, 0.5),
    Lane.SEND: Place(0.145, 0.1),
    Lane.RECV: Place(0.26, 0.1),
    Lane.COLLECTIVE: Place(0.39, 0.12),
}
PATH, WINDOWS = "critical path", "the step"
_TALL_PX, _SHORT_PX, _MOST_ROWS_PX = 96, 18, 1200
_LANES_NAMED_PX = 60  # height from which a row has labels `send` and `recv`
_TITLE_PX, _TOP_PX, _BOTTOM_PX, _NOTE_PX = 30, 38, 36, 60
_ROW_PX = 22  # above the rows of a step in a row, for the names of it and of those beside it
_SMALL = '<span style="font-size:9px">{}</span>'
_MAX_OUTLINED = 1500  # with more bars than this, outlines would hide them
_MOST_PATH_POINTS = 4000
_ROOM = 1.005  # to the right of the end
_PATH_BELOW = 0.2  # the middle of the compute lane, below the numbers


@dataclass(frozen=True)
class Gantt:
    """A figure and, where it shows an overview, the packed marks for details."""

    picture: Picture
    detail: Detail | None


def gantt(steps: Sequence[Step]) -> go.Figure:
    """Draw steps one above the other, in ms since the first computation of each.

    This is for notebooks and pictures: steps with too many bars remain an overview.
    """
    import plotly.graph_objects as go

    return go.Figure(gantt_with_detail(steps, has_detail=False).picture)


def gantt_with_detail(steps: Sequence[Step], *, has_detail: bool = True) -> Gantt:
    """Draw steps for a page that can zoom in. Without `has_detail` an overview remains one."""
    return _Drawing(steps, has_others=has_detail and len(steps) == 1).drawn(has_detail=has_detail)


class _Drawing:
    def __init__(self, steps: Sequence[Step], *, has_others: bool) -> None:
        self._steps = list(steps)
        others = self._steps[0].others if has_others else ()
        unit = size_unit(max(most(step.spans["num_bytes"]) for step in self._steps))
        self._marks = [step.marks_in_a_row(unit) for step in (*self._steps, *others)]
        lanes = {marks.kind.lane for kinds in self._marks for marks in kinds}
        self._lanes = LANES_OF_REPLICAS if Lane.COLLECTIVE in lanes else LANES
        # Rows are lower where there are many.
        all_px = _MOST_ROWS_PX / sum(step.num_ranks for step in self._steps)
        self._row_px = float(np.clip(all_px, _SHORT_PX, _TALL_PX))
        self._num_rows = 0.0
        self._placed: list[tuple[Step, float]] = []  # each step with its first row
        for step in self._steps:
            above_px = (_TITLE_PX if step.title else 0) + (_ROW_PX if step.beside else 0)
            first = self._num_rows + above_px / self._row_px
            self._placed.append((step, first))
            self._num_rows = first + step.num_ranks
        # A page shows other replicas on demand; their rows lie below those that are in sight.
        ranks = self._steps[0].num_ranks
        self._behind = [(step, self._num_rows + n * ranks) for n, step in enumerate(others)]
        shown = [step.shown_ns for step in (*self._steps, *others)]
        self._start_ns, self._end_ns = (
            min(start for start, _ in shown),
            max(end for _, end in shown),
        )
        self._start_ms, self._end_ms = self._start_ns / NS_PER_MS, self._end_ns / NS_PER_MS
        self._shown_ms = self._end_ms - self._start_ms
        self._num_bars = sum(len(marks) for kinds in self._marks for marks in kinds)

    def drawn(self, *, has_detail: bool) -> Gantt:
        """Return the bars or, of too many, the overview and what a page takes the bars from."""
        stacked, path = self._stacked(), self._path_lines()
        if self._num_bars <= MOST_BARS:
            is_outlined = self._num_bars <= _MAX_OUTLINED
            bars = [_bars(own, is_outlined=is_outlined) for own in stacked]
            traces = [self._tracks(), *self._windows(), *bars, *path]
            return Gantt({"data": traces, "layout": self._layout()}, None)
        computations = [[m for m in kinds if m.kind.has_text] for kinds in self._marks]
        lane = self._lanes[Lane.COMPUTE]
        gap_px = max(1, round(self._row_px * (1 - lane.height)))
        grids = [
            heat_map(
                kinds,
                step.num_ranks,
                step.shown_ns,
                row + lane.centre,
                gap_px,
                has_hover=not has_detail,
            )
            for (step, row), kinds in zip(self._placed, computations, strict=False)
        ]
        num_spans = sum(len(each.spans) for step in self._steps for each in (step, *step.beside))
        more = (
            f"Zoom in until at most {MOST_BARS:,} bars are in view to see them one by one."
            if has_detail
            else "On the page of ppbench timeline, zooming in shows the single bars."
        )
        note: Update = {
            "align": "left",
            "name": "note",
            "showarrow": False,
            "text": f"{counted(num_spans, 'span')} make {self._num_bars:,} bars, too many to draw "
            f"one by one: the view is merged into {NUM_SLICES} slices of time per rank.<br>A slice "
            "has the colour of the op that took at least four fifths of its compute time, else "
            f"slate, and is fainter the more it idles.<br>{more}",
            "x": 0,
            "xanchor": "left",
            "xref": "paper",
            "y": 0,
            "yanchor": "top",
            "yref": "paper",
            "yshift": -_BOTTOM_PX + 8,
        }
        picture: Picture = {
            "data": [self._tracks(), *grids, *map(_trace, stacked), *self._windows(), *path],
            "layout": self._layout(note),
        }
        if not has_detail:
            return Gantt(picture, None)
        first = 1 + len(grids)  # the tracks come before them
        places, columns = packed(stacked, self._end_ns - self._start_ns, first)
        detail, places_of = Detail(columns), {_key(t.kind): n for n, t in enumerate(stacked)}
        picture["layout"]["meta"]["detail"] = {
            **places,
            "columns": detail.name,
            "mostBars": MOST_BARS,
            "slices": NUM_SLICES,
            "mostShare": MOST_SHARE,
            "laneHeight": lane.height,
            "grids": [
                {
                    "trace": 1 + n,
                    "firstRow": row,
                    "ranks": step.num_ranks,
                    "kinds": [first + places_of[_key(m.kind)] for m in computations[n]],
                }
                for n, (step, row) in enumerate(self._placed)
            ],
        }
        return Gantt(picture, detail)

    def _stacked(self) -> list[Trace]:
        """Return the kinds in the order in which they first appear, idle time first."""
        kinds = {_key(marks.kind): marks.kind for step in self._marks for marks in step}
        traces = []
        for kind in sorted(
            kinds.values(),
            key=lambda kind: (kind.lane is not Lane.COMPUTE, not kind.is_idle, kind.beside != 0),
        ):
            stacked, rows, shades = [], [], []
            colors: list[str] = []  # steps may have different numbers of them
            for own, (_, first) in zip(self._marks, (*self._placed, *self._behind), strict=True):
                for marks in (marks for marks in own if _key(marks.kind) == _key(kind)):
                    stacked.append(marks)
                    rows.append(marks.rank + first)
                    colors += [color for color in marks.kind.colors if color not in colors]
                    numbers = [colors.index(color) for color in marks.kind.colors]
                    shades.append(np.array(numbers)[marks.shade])
            lane, row = self._lanes[stacked[0].kind.lane], np.concatenate(rows)
            traces.append(Trace(stacked, row, *lane, colors, np.concatenate(shades)))
        return traces

    def _path_lines(self) -> list[Update]:
        """Draw the critical path from bar to bar, in the text colour of the page.

        It is a line over the path's computations, one piece per run of them on a rank, with a gap
        behind each step. Unfinished steps have none.
        """
        below = self._lanes[Lane.COMPUTE].centre + _PATH_BELOW
        x: list[Floats] = []
        y: list[Floats] = []
        for step, first_row in self._placed:
            if step.flight is not None:
                continue
            rank = step.path.rank
            starts = np.flatnonzero(np.r_[True, rank[1:] != rank[:-1]])
            ends = np.r_[starts[1:] - 1, len(rank) - 1]
            if len(starts) * 2 > _MOST_PATH_POINTS:
                kept = np.linspace(0, len(starts) - 1, _MOST_PATH_POINTS // 2).astype(np.int64)
                starts, ends = starts[kept], ends[kept]
            times = np.stack([step.path.start_ns[starts], step.path.end_ns[ends]], axis=1)
            x.append(np.r_[(times.ravel() - step.origin_ns) / NS_PER_MS, np.nan])
            y.append(np.r_[np.repeat(rank[starts] + first_row + below, 2), np.nan])
        if not x:
            return []
        line: Update = {
            "hoverinfo": "skip",
            "line": {"shape": "linear", "width": 2},
            "meta": PATH,
            "mode": "lines",
            "name": PATH,
            "visible": "legendonly",
            "x": np.concatenate(x),
            "y": np.concatenate(y),
            "type": "scatter",
        }
        return [line]

    def _windows(self) -> list[Update]:
        """Draw a line around the windows of each step in a row, from rank to rank."""
        x: list[Floats] = []
        y: list[Floats] = []
        for step, first_row in self._placed:
            if step.windows_ns is None:
                continue
            begins, ends = ((each - step.origin_ns) / NS_PER_MS for each in step.windows_ns)
            down = (
                first_row + np.repeat(np.arange(step.num_ranks), 2) + [-0.5, 0.5] * step.num_ranks
            )
            x += [np.repeat(begins, 2), np.repeat(ends, 2)[::-1], begins[:1], np.array([np.nan])]
            y += [down, down[::-1], down[:1], np.array([np.nan])]
        if not x:
            return []
        line: Update = {
            "hoverinfo": "skip",
            "line": {"color": BLUE, "width": 1.2},
            "mode": "lines",
            "name": WINDOWS,
            "showlegend": False,
            "x": np.concatenate(x),
            "y": np.concatenate(y),
            "type": "scatter",
        }
        return [line]

    def _names(self) -> list[Update]:
        """Name each step in a row and those beside it, above their windows on the first rank."""
        return [
            {
                "font": {"size": 11},
                "showarrow": False,
                "text": f"<b>{text}</b>" if is_own else text,
                "x": (begin + end) / 2,
                "y": first_row - 0.5,
                "yanchor": "bottom",
            }
            for step, first_row in self._placed
            for text, begin, end, is_own in (row_of(step)["names"] if step.beside else ())
        ]

    def _tracks(self) -> Update:
        """Return a faint track for each thin lane."""
        rows = [first + np.arange(step.num_ranks, dtype=float) for step, first in self._placed]
        ranks = np.concatenate(rows)
        thin = [place for lane, place in self._lanes.items() if lane is not Lane.COMPUTE]
        num_tracks = len(thin) * len(ranks)
        return {
            "base": [self._start_ms] * num_tracks,
            "hoverinfo": "skip",
            "marker": {"color": TRACK_COLOR, "line": {"width": 0}},
            "orientation": "h",
            "showlegend": False,
            "width": thin[0].height,
            "x": np.full(num_tracks, self._shown_ms),
            "y": np.concatenate([ranks + place.centre for place in thin]),
            "type": "bar",
        }

    def _layout(self, *notes: Update) -> Picture:
        """Return the layout, with room for `notes` below the axis."""
        height = round(self._num_rows * self._row_px) + _TOP_PX + _BOTTOM_PX
        below_px = _NOTE_PX * len(notes)
        titles: list[Update] = [
            {
                "font": {"size": 13},
                "name": "title",  # a page shortens it where it does not fit
                "showarrow": False,
                "text": f"<b>{figure_text(step.title)}</b>",
                "x": 0,
                "xanchor": "left",
                "xref": "paper",
                "y": first_row - 0.5,
                "yanchor": "bottom",
                "yref": "y",
                **({"yshift": _ROW_PX} if step.beside else {}),
            }
            for step, first_row in self._placed
            if step.title
        ]
        annotations = [*titles, *self._names(), *notes]
        labels = {Lane.COMPUTE: "rank {}"}  # and, in tall rows, small ones of the thin lanes
        if self._row_px >= _LANES_NAMED_PX:
            thin = (lane for lane in self._lanes if lane is not Lane.COMPUTE)
            labels |= {lane: _SMALL.format(lane.value) for lane in thin}
        places = [
            (rank, first + rank, lane)
            for step, first in self._placed
            for rank in range(step.num_ranks)
            for lane in labels
        ]
        meta: Picture = {  # what a page needs to draw the timeline itself; see `timeline.js`
            "rowPx": self._row_px,
            "startMs": self._start_ms,
            "endMs": self._end_ms,
            "lanes": {
                lane.value: {"at": place.centre, "height": place.height}
                for lane, place in self._lanes.items()
            },
            "steps": [
                {
                    "title": step.title,
                    "firstRow": first,
                    "ranks": step.num_ranks,
                    "start": step.shown_ns[0] / NS_PER_MS,
                    "end": step.shown_ns[1] / NS_PER_MS,
                    **(
                        {
                            "row": row_of(step),
                            "abovePx": _ROW_PX,
                            "aboveRows": _ROW_PX / self._row_px,
                        }
                        if step.beside
                        else {}
                    ),
                }
                for step, first in self._placed
            ],
        }
        if self._behind:  # the first row of each replica, and which of them is shown at first
            first_rows = {step.replica: row for step, row in (*self._placed, *self._behind)}
            meta["replicas"] = {
                "firstRows": [first_rows[n] for n in sorted(first_rows)],
                "shown": self._steps[0].replica,
            }
            if self._steps[0].beside:
                steps = {step.replica: step for step, _ in (*self._placed, *self._behind)}
                meta["replicas"]["rows"] = [row_of(steps[n]) for n in sorted(steps)]
        return {
            **({"annotations": annotations} if annotations else {}),
            "barmode": "overlay",
            "dragmode": "zoom",
            "height": height + below_px,
            "hovermode": "closest",
            "legend": legend(),
            "margin": {"b": _BOTTOM_PX + below_px, "l": 62, "r": 12, "t": _TOP_PX},
            "meta": {"timeline": meta},
            "template": PLAIN,
            "uniformtext": {"minsize": 9, "mode": "hide"},
            "xaxis": {
                "exponentformat": "none",
                "range": [self._start_ms, self._start_ms + self._shown_ms * _ROOM],
                "separatethousands": True,
                "showticksuffix": "first",  # the last tick may be cut off at the edge
                "ticksuffix": " ms",
                "zeroline": False,
            },
            "yaxis": {
                "fixedrange": self._row_px >= _LANES_NAMED_PX,
                "range": [self._num_rows - 0.48, -0.52],
                "showgrid": False,
                "ticklabelstandoff": 4,
                "ticks": "",
                "ticktext": [labels[lane].format(rank) for rank, _, lane in places],
                "tickvals": np.array([row + self._lanes[lane].centre for _, row, lane in places]),
                "zeroline": False,
            },
        }


def _key(kind: Kind) -> tuple[str, int]:
    """Tell the kinds of a step from those of the steps beside it."""
    return kind.name, kind.beside


def row_of(step: Step) -> Picture:
    """Return the windows of a step in a row, and its name and those of the steps beside it.

    Each name comes with its window on the first rank, and whether it is the step's own.
    """
    names, windows = [], []
    for each in sorted((step, *step.beside), key=lambda each: each.end_ns):
        assert each.windows_ns is not None
        edges = (np.stack(each.windows_ns, axis=1) - step.origin_ns) / NS_PER_MS
        text = each.name
        if each.period_ns is not None:
            text += f" · {milliseconds(each.period_ns)}"
        names.append([text, *edges[0].tolist(), each is step])
        if each is step:
            windows = edges.tolist()
    return {"names": names, "windows": windows}


def _bars(stacked: Trace, *, is_outlined: bool) -> Picture:
    kind, marks = stacked.kind, stacked.marks
    # Sorted by shade, so that the first bar, whose colour the legend shows, is of a first stage.
    order = np.argsort(stacked.shade, kind="stable")
    shade = stacked.shade[order].tolist()
    width_ms = np.concatenate([m.width_ns for m in marks]) / NS_PER_MS
    numbers = [
        np.concatenate([m.numbers[name][0] * m.numbers[name][1] for m in marks])
        for name in marks[0].numbers
    ]
    columns = [*numbers, width_ms]
    phrases = [text for m in marks if m.phrases is not None for text in m.phrases.texts()]
    arrays: Update = {
        "base": (np.concatenate([m.begin_ns for m in marks]) / NS_PER_MS)[order].tolist(),
        "customdata": np.column_stack(columns)[order],
        "x": width_ms[order],
        "y": (stacked.row + stacked.lane)[order],
    }
    if phrases:
        arrays["hovertext"] = [phrases[n] for n in order.tolist()]
    if kind.has_text:
        microbatch = np.concatenate([m.numbers["microbatch"][0] for m in marks])
        arrays["text"] = list(map(str, microbatch[order].tolist()))
    if kind.hatch:
        labels = [figure_text(label) for m in marks for label in m.labels]
        arrays["text"] = [labels[n] for n in order.tolist()]
    trace = _trace(stacked, arrays, is_outlined=is_outlined)
    if len(stacked.colors) > 1:
        trace["marker"]["color"] = [stacked.colors[n] for n in shade]
        if not kind.beside:
            trace["insidetextfont"]["color"] = [stacked.inks[n] for n in shade]
    return trace


def _trace(stacked: Trace, arrays: Update = _NO_ARRAYS, *, is_outlined: bool = False) -> Picture:
    """Return a trace with all settings and these arrays."""
    kind = stacked.kind
    is_transfer = kind.lane is not Lane.COMPUTE
    # A transfer may last less than a pixel; an outline in its own colour keeps it visible.
    line = {"color": kind.colors[0], "width": 1} if is_transfer else {}
    if not is_transfer:
        line = {"width": 0.6 if is_outlined and not kind.is_idle else 0}
    inside: Update = {}
    if kind.has_text or kind.hatch:
        inside = {
            "constraintext": "inside",
            "insidetextanchor": "start" if kind.hatch else "middle",  # its end may be out of view
            "insidetextfont": {"color": stacked.inks[0]},
            "textangle": 0,
            "textposition": "inside",
        }
    marker: Update = {"color": kind.colors[0], "line": line}
    if kind.beside:
        marker["opacity"] = PALE
        if inside:
            inside["insidetextfont"] = {"color": NEUTRAL}
    if kind.hatch:
        marker["pattern"] = {
            "fgcolor": HATCH_COLORS[ink_on(kind.colors[0])],
            "fillmode": "overlay",
            "shape": kind.hatch,
            "size": 9,
            "solidity": 0.16,
        }
    settings: Update = {
        "hovertemplate": kind.hover,
        "legendgroup": kind.group or kind.name,
        "legendrank": 2000 if kind.is_idle else 1000,
        "marker": marker,
        "meta": {
            "lane": kind.lane.value,
            "op": kind.op,
            "isIdle": kind.is_idle,
            "beside": kind.beside,
            "numbers": list(stacked.marks[0].numbers),
        },
        "name": kind.name,
        "orientation": "h",
        "showlegend": kind.is_listed,
        "width": stacked.height,
    }
    return {**dict(sorted({**settings, **inside, **arrays}.items())), "type": "bar"}
