"""Steps with too many marks to draw at once: an overview of all, and packed columns for details.

The overview is a grid of ranks and slices of time, drawn as a heat map: the hue shows the op, the
strength how busy the rank was. Its size does not depend on the number of spans, so a step of a
million spans is drawn as fast as one of a hundred. A span that covers several slices adds to each
exactly the time that it spends there.

Zooming in, a page takes the marks in view from packed columns. A step of a million spans has some
two million marks, hundreds of megabytes as JSON. Packed, each column is differences or plain
integers, cut into planes of one byte each (all lowest bytes first, then all next ones), which
deflate to a few megabytes:

    begin    1000  1010  1021   ->  differences  1000 10 11  ->  planes  [232 10 11] [3 0 0]

Times are rounded to `quantumNs`, a millionth of the step or finer. `columns.js` reads the columns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ppbench.display.colors import MIXED_COLOR, ink_on, translucent
from ppbench.display.units import NS_PER_MS
from ppbench.report.timeline.marks import Floats, Ints, Kind, Marks

MOST_SHARE = 0.8
"""Below this share the main op is close to chance, and neighbouring colours would flicker."""
Cells = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Overview:
    """`shares[kind, rank, slice]` of the time; `counts[rank, slice]` of marks that begin."""

    shares: Cells
    counts: Cells

    @property
    def busy(self) -> Cells:
        """The busy share of the time, by rank and slice."""
        return np.asarray(np.minimum(self.shares.sum(axis=0), 1.0))

    @property
    def mostly(self) -> Ints:
        """The kind with MOST_SHARE of the busy time, by rank and slice; else their number."""
        is_most = self.shares.max(axis=0) >= MOST_SHARE * self.shares.sum(axis=0)
        return np.where(is_most, self.shares.argmax(axis=0), len(self.shares))


def overview(
    kinds: Sequence[Marks], num_ranks: int, start_ns: float, end_ns: float, num_slices: int
) -> Overview:
    """Return the overview of a period; marks of the same rank and kind must not overlap."""
    edges = np.linspace(start_ns, end_ns, num_slices + 1)
    shares = np.zeros((len(kinds), num_ranks, num_slices))
    counts = np.zeros((num_ranks, num_slices))
    for number, marks in enumerate(kinds):
        bounds = np.searchsorted(marks.rank, np.arange(num_ranks + 1))
        for rank in range(num_ranks):
            own = slice(bounds[rank], bounds[rank + 1])
            begin, width = marks.begin_ns[own], marks.width_ns[own]
            counts[rank] += np.histogram(begin, edges)[0]
            if len(begin):  # the running total, interpolated at the edges
                total = np.concatenate([[0], np.cumsum(width)])
                times = np.stack([begin, begin + width], axis=1).ravel()
                levels = np.stack([total[:-1], total[1:]], axis=1).ravel()
                shares[number, rank] = np.diff(np.interp(edges, times, levels))
    return Overview(shares / np.diff(edges), counts)


NUM_SLICES = 600
SEVERAL = "several"
_FAINTEST = 0.08
PALE = 0.3
"""The opacity of the bars of the steps beside the one that is shown."""


def heat_map(
    kinds: Sequence[Marks],
    num_ranks: int,
    shown_ns: tuple[int, int],
    first_row: float,
    gap_px: int,
    *,
    has_hover: bool,
) -> dict[str, object]:
    """Return the computations of a step, from one time to another, as a trace of plotly.

    Rank 0 is on row `first_row`. A page needs no hover texts: it makes them of the packed columns.
    """
    start_ns, end_ns = shown_ns
    grid = overview(kinds, num_ranks, start_ns, end_ns, NUM_SLICES)
    width_ms = (end_ns - start_ns) / NUM_SLICES / NS_PER_MS
    colors = [*((marks.kind.colors[0], PALE if marks.kind.beside else 1) for marks in kinds)]
    is_beside = np.array([marks.kind.beside != 0 for marks in kinds])
    colors += [(MIXED_COLOR, 1), *([(MIXED_COLOR, PALE)] if is_beside.any() else [])]
    scale: list[list[object]] = []  # a ramp per kind and one for several, from nearly clear
    for number, (color, opacity) in enumerate(colors):
        scale += [
            [number / len(colors), translucent(color, _FAINTEST * opacity)],
            [(number + 1) / len(colors), translucent(color, opacity)],
        ]
    # A cell is its main kind plus its busy share; NaN where it is idle.
    is_mixed = grid.mostly == len(kinds)
    mostly = grid.mostly + (is_mixed & is_beside[grid.shares.argmax(axis=0)])
    codes = np.where(grid.busy > 0, mostly + np.clip(grid.busy, 0.001, 0.999), np.nan)
    names = [marks.kind.name for marks in kinds]
    names += [SEVERAL] * (len(colors) - len(kinds))
    hover = {
        "customdata": np.stack([grid.busy, grid.counts], axis=-1),
        "hovertemplate": "<b>%{customdata[0]:.0%} computing</b>, mostly %{text}<br>"
        "around %{x:,.2f} ms<br>%{customdata[1]:,} computations begin here<extra></extra>",
        "text": np.array(names, dtype=object)[mostly],
    }
    trace = {
        "colorscale": scale,
        "dx": width_ms,
        "dy": 1,
        "showscale": False,
        "x0": start_ns / NS_PER_MS + width_ms / 2,
        "y0": first_row,
        "ygap": gap_px,
        "z": codes,
        "zmax": len(names),
        "zmin": 0,
        **(hover if has_hover else {}),
    }
    return {**dict(sorted(trace.items())), "type": "heatmap"}


_FINEST, _STEPS_SHOWN = 1, 1_000_000
_COARSEST = 1000  # hover texts have three digits of a ms


@dataclass(frozen=True)
class Trace:
    """The marks of one kind over all steps; their bars lie at `row` + `lane`."""

    marks: list[Marks]
    row: Floats  # of the rank's middle
    lane: float
    height: float  # of a bar
    colors: list[str]
    shade: Ints  # index into the colours

    @property
    def kind(self) -> Kind:
        return self.marks[0].kind

    @property
    def inks(self) -> list[str]:
        """The text colour for each of the colours, if there is text."""
        has_labels = self.kind.has_text or self.kind.hatch
        return [ink_on(color) for color in self.colors] if has_labels else []


@dataclass(frozen=True)
class Detail:
    """Packed columns, and the name by which a figure refers to them."""

    columns: bytes

    @property
    def name(self) -> str:
        return f"columns-{hashlib.sha256(self.columns).hexdigest()[:12]}"


def packed(
    traces: Sequence[Trace], shown_ns: int, first: int = 0
) -> tuple[dict[str, object], bytes]:
    """Return the layout of the columns, which the page needs to read them, and the columns.

    `first` is the number of the first of these traces in the figure.
    """
    quantum_ns = _FINEST
    while quantum_ns < _COARSEST and quantum_ns * 10 * _STEPS_SHOWN <= shown_ns:
        quantum_ns *= 10
    buffer = bytearray()

    def rounded(values_ns: Ints) -> Ints:
        return (values_ns + quantum_ns // 2) // quantum_ns

    def column(values: Ints) -> dict[str, object]:
        """Append the values minus their minimum, a plane per byte; return how to read them."""
        least = int(values.min())
        rest = (values - least).astype("<u8")
        num_planes = (int(rest.max()).bit_length() + 7) // 8
        planes = rest.view(np.uint8).reshape(-1, 8).T[:num_planes]
        place = len(buffer)
        buffer.extend(np.ascontiguousarray(planes).tobytes())
        return {"at": place, "planes": num_planes, "least": least}

    layouts = []
    for number, trace in enumerate(traces, first):
        marks = trace.marks
        begin = rounded(np.concatenate([m.begin_ns for m in marks]))
        order = np.lexsort((begin, trace.row))
        row, begin = trace.row[order], begin[order]
        is_new = np.r_[True, row[1:] != row[:-1]]
        width = rounded(np.concatenate([m.width_ns for m in marks]))[order]
        layout: dict[str, object] = {
            "trace": number,
            "count": len(begin),
            "rows": [[float(row[at]), int(at)] for at in np.flatnonzero(is_new)],
            "lane": trace.lane,
            "begin": column(np.where(is_new, begin, np.diff(begin, prepend=0))),
            "width": column(width),
        }
        numbers = []
        for name, (_, unit) in marks[0].numbers.items():
            values = np.concatenate([m.numbers[name][0] for m in marks])[order]
            if is_time := name.endswith("_ns"):
                values = rounded(values)
            factor = unit * quantum_ns if is_time else unit
            numbers.append({"name": name, "factor": factor, **column(values)})
        layout |= {"numbers": numbers, "hasText": trace.kind.has_text}
        if len(trace.colors) > 1:
            shade = column(trace.shade[order])
            layout |= {"shade": shade, "colors": trace.colors, "inks": trace.inks}
        # Either all marks of a kind have phrases, or none.
        if phrases := [m.phrases for m in marks if m.phrases is not None]:
            words: list[str] = []
            codes = []
            for own in phrases:
                codes.append(own.codes + len(words))
                words += own.words
            amount = rounded(np.concatenate([own.amount_ns for own in phrases])[order])
            codes_of = column(np.concatenate(codes)[order])
            layout["phrases"] = {"words": words, "codes": codes_of, "amount": column(amount)}
        layouts.append(layout)
    return {"quantumMs": quantum_ns / NS_PER_MS, "traces": layouts}, bytes(buffer)
