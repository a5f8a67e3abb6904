"""Steps laid out one above the other, once for every drawing of them, and packed for pages.

They have one time axis and a row per rank, rank 0 on top:

    AFAB
    rank 0   | 0 | 1 |.............|   0   |   1   |    thick; the microbatch inside; idle by cause
     send        -   -                                  thin; forward and backward in own colours,
     recv    ~~~~~~~~~~~~~~~~~~~~~~-       -            lighter while one end waits for the other
     collective           ~~~~--                        of replicas only; lighter before the slowest
    1F1B
    rank 0   ...

The marks of a kind are columns over all steps. A page gets them packed: each column is cut into
planes of one byte (all lowest bytes first, then all next ones), which deflate well: a step of a
million spans takes a few megabytes.

    begin    1000  1010  1021   ->  differences  1000 10 11  ->  planes  [232 10 11] [3 0 0]

Times are rounded to a millionth of the step or finer. `columns.js` reads the columns; the rest of
what a page needs is in `meta`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from engine.plan.spans import Lane
from ppbench.display.colors import HATCH_COLORS
from ppbench.display.units import NS_PER_MS, counted, milliseconds, size_unit
from ppbench.report.timeline.marks import Floats, Ints, Kind, Marks, Step, joined, most
from ppbench.report.timeline.overview import MOST_SHARE, Overview, overview

MOST_BARS = 5000
"""Of more bars in view, an overview is drawn."""
NUM_SLICES = 600
PALE = 0.3
"""The opacity of the bars of the steps beside the one that is shown."""
ROW_PX = 22
"""Above the rows of a step in a row, for the names of it and of those beside it."""
_TALL_PX, _SHORT_PX, _MOST_ROWS_PX = 96, 18, 1200
_SMALL_PX, _SMALL_ROW_PX = 112, (2, 28)  # of a step, and of its rows
_TITLE_PX = 30
_AROUND_PX = 74  # the height of what a page has above and below the rows
_MOST_PATH_POINTS = 4000
_PATH_BELOW = 0.2  # the middle of the compute lane, below the numbers
_ROOM = 1.005  # to the right of the end
_STEPS_SHOWN = 1_000_000


class Place(NamedTuple):
    """Where a lane lies in a row, as shares of its height."""

    centre: float
    height: float


LANES = {
    Lane.COMPUTE: Place(-0.14, 0.56),
    Lane.SEND: Place(0.24, 0.11),
    Lane.RECV: Place(0.38, 0.11),
}
LANES_OF_REPLICAS = {
    Lane.COMPUTE: Place(-0.18, 0.5),
    Lane.SEND: Place(0.145, 0.1),
    Lane.RECV: Place(0.26, 0.1),
    Lane.COLLECTIVE: Place(0.39, 0.12),
}
SMALL_LANES = {Lane.COMPUTE: Place(0.0, 0.92)}


class Unit(NamedTuple):
    """A unit of time, with its nanoseconds."""

    name: str
    ns: float


MS, SECONDS = Unit("ms", NS_PER_MS), Unit("s", 1e9)


class Name(NamedTuple):
    """The name of a step in a row, with its window on the first rank."""

    text: str
    begin: float
    end: float
    is_own: bool


@dataclass(frozen=True)
class Packed:
    """What a page draws steps from: their columns, and how to read and to show them."""

    meta: dict[str, Any]
    columns: bytes


class Drawing:
    """Steps one above the other. Time 0 is the start of the first computation of each.

    A drawing of one step of replicas can have the `others` behind it: their rows lie below those
    in sight.
    """

    def __init__(
        self,
        steps: Sequence[Step],
        unit: Unit = MS,
        *,
        others: Sequence[Step] = (),
        is_small: bool = False,
    ) -> None:
        """A small drawing has the computations alone, in low rows."""
        self.steps, self.unit, self.is_small = list(steps), unit, is_small
        every = [*steps, *others]
        lanes = {marks.kind.lane for step in every for marks in self.marks_of(step)}
        self.lanes = LANES_OF_REPLICAS if Lane.COLLECTIVE in lanes else LANES
        self.row_px = _row_px(sum(step.num_ranks for step in steps))
        if is_small:
            self.lanes = SMALL_LANES
            self.row_px = float(np.clip(_SMALL_PX / steps[0].num_ranks, *_SMALL_ROW_PX))
        self.num_rows = 0.0
        self.placed: list[tuple[Step, float]] = []  # each step with its first row
        for step in steps:
            above_px = (_TITLE_PX if step.title else 0) + (ROW_PX if step.beside else 0)
            first = self.num_rows + above_px / self.row_px
            self.placed.append((step, first))
            self.num_rows = first + step.num_ranks
        ranks = steps[0].num_ranks
        self.behind = [(step, self.num_rows + n * ranks) for n, step in enumerate(others)]
        self.start_ns = min(step.shown_ns[0] for step in every)
        self.end_ns = max(step.shown_ns[1] for step in every)
        largest = max(most(step.spans["num_bytes"]) for step in steps)
        self.size_unit, self.size_bytes = size_unit(largest)

    def marks_of(self, step: Step) -> list[Marks]:
        """Return what is drawn of a step and of those beside it."""
        if not self.is_small:
            return step.marks_in_a_row
        return [one for one in step.marks if one.kind.op and one.kind.lane is Lane.COMPUTE]

    @cached_property
    def kinds(self) -> list[Marks]:
        """The marks of all steps: first those of idle time, then computations, then transfers."""
        parts: dict[tuple[str, int], list[tuple[Marks, float]]] = {}
        for step, first_row in (*self.placed, *self.behind):
            for marks in self.marks_of(step):
                parts.setdefault(_key(marks.kind), []).append((marks, first_row))
        return sorted(
            map(joined, parts.values()),
            key=lambda own: (
                own.kind.lane is not Lane.COMPUTE,
                not own.kind.is_idle,
                own.kind.beside != 0,
            ),
        )

    @property
    def num_bars(self) -> int:
        return sum(len(own.row) for own in self.kinds)

    @property
    def last_ns(self) -> float:
        """The end with some room beyond it."""
        return self.start_ns + (self.end_ns - self.start_ns) * _ROOM

    @property
    def note(self) -> str:
        """What an overview shows, in words."""
        num_spans = sum(len(each.spans) for step in self.steps for each in (step, *step.beside))
        return (
            f"{counted(num_spans, 'span')} make {self.num_bars:,} bars, too many to draw one by "
            f"one: the view is merged into {NUM_SLICES} slices of time per rank. A slice has the "
            "colour of the op that took at least four fifths of its compute time, else slate, and "
            "is fainter the more it idles."
        )

    def overview_of(self, step: Step) -> Overview:
        """Return the overview of a step's computations."""
        computations = [marks for marks in self.marks_of(step) if marks.kind.has_text]
        return overview(computations, step.num_ranks, *step.shown_ns, NUM_SLICES)

    def times(self, values_ns: Ints) -> Floats:
        return np.asarray(values_ns / self.unit.ns, np.float64)

    def names(self, step: Step) -> list[Name]:
        """Return the names of a step in a row and of those beside it, in their order."""
        names = []
        for each in sorted((step, *step.beside), key=lambda each: each.end_ns):
            text = each.name
            if each.period_ns is not None:
                period_ms = milliseconds(each.period_ns * NS_PER_MS / self.unit.ns)
                text += f" · {period_ms.replace('ms', self.unit.name)}"
            begin, end = self.windows(each)[0]
            names.append(Name(text, begin, end, each is step))
        return names

    def windows(self, step: Step) -> list[list[float]]:
        """Return when each rank begins and ends a step in a row."""
        assert step.windows_ns is not None
        edges_ns = np.stack(step.windows_ns, axis=1) - step.origin_ns
        return [[begin, end] for begin, end in self.times(edges_ns).tolist()]

    def path(self) -> list[tuple[float, float] | None]:
        """Return the critical path from bar to bar, as points of time and row.

        It has one piece per run of computations on a rank, and ends with None behind each step.
        Unfinished steps have none.
        """
        below = self.lanes[Lane.COMPUTE].centre + _PATH_BELOW
        points: list[tuple[float, float] | None] = []
        for step, first_row in self.placed:
            if step.flight is not None:
                continue
            rank = step.path.rank
            starts = np.flatnonzero(np.r_[True, rank[1:] != rank[:-1]])
            ends = np.r_[starts[1:] - 1, len(rank) - 1]
            if len(starts) * 2 > _MOST_PATH_POINTS:
                kept = np.linspace(0, len(starts) - 1, _MOST_PATH_POINTS // 2).astype(np.int64)
                starts, ends = starts[kept], ends[kept]
            times = np.stack([step.path.start_ns[starts], step.path.end_ns[ends]], axis=1)
            x = self.times(times.ravel() - step.origin_ns).tolist()
            y = np.repeat(rank[starts] + first_row + below, 2).tolist()
            points += [*zip(x, y, strict=True), None]
        return points


def _row_px(num_rows: int) -> float:
    """Return the height of a row, which is less where there are many."""
    return float(np.clip(_MOST_ROWS_PX / num_rows, _SHORT_PX, _TALL_PX))


def _key(kind: Kind) -> tuple[str, int]:
    """Tell the kinds of a step from those of the steps beside it."""
    return kind.name, kind.beside


def packed(drawing: Drawing) -> Packed:
    """Return what a page draws these steps from."""
    unit, quantum_ns = drawing.unit, _quantum_ns(drawing)
    buffer = bytearray()

    def column(values: Ints, *, is_time: bool = False) -> list[int]:
        """Append the values minus their minimum, a plane per byte; return how to read them."""
        if is_time:
            values = _rounded(values, quantum_ns)
        least = int(values.min())
        rest = (values - least).astype("<u8")
        num_planes = (int(rest.max()).bit_length() + 7) // 8
        planes = rest.view(np.uint8).reshape(-1, 8).T[:num_planes]
        place = len(buffer)
        buffer.extend(np.ascontiguousarray(planes).tobytes())
        return [place, num_planes, least]

    kinds = []
    for own in drawing.kinds:
        kind, begin = own.kind, _rounded(own.begin_ns, quantum_ns)
        is_new = np.r_[True, own.row[1:] != own.row[:-1]]
        described: dict[str, object] = {
            "name": kind.name,
            "group": kind.group or kind.name,
            "lane": kind.lane.value,
            "op": kind.op,
            "lines": kind.lines,
            "isIdle": kind.is_idle,
            "isListed": kind.is_listed,
            "beside": kind.beside,
            "opacity": PALE if kind.beside else 1,
            "colors": kind.colors,
            "inks": kind.inks,
            "count": len(begin),
            "rows": [[round(own.row[at], 6), int(at)] for at in np.flatnonzero(is_new)],
            "begin": column(np.where(is_new, begin, np.diff(begin, prepend=0))),
            "width": column(own.width_ns, is_time=True),
            "shade": column(own.shade),
            "numbers": {
                name: column(values, is_time=name.endswith("_ns"))
                for name, values in own.numbers.items()
            },
            "hasText": kind.has_text,
        }
        if own.phrases is not None:
            described["words"] = own.phrases.words
            described["codes"] = column(own.phrases.codes)
            described["amount"] = column(own.phrases.amount_ns, is_time=True)
        if kind.hatch:
            described |= {"hatch": kind.hatch, "hatchColor": HATCH_COLORS[kind.inks[0]]}
            described["labels"] = list(own.labels)
        kinds.append(described)
    meta: dict[str, Any] = {
        "unit": f" {unit.name}",
        "quantum": quantum_ns / unit.ns,
        "size": [drawing.size_unit, drawing.size_bytes],
        "first": drawing.start_ns / unit.ns,
        "last": drawing.last_ns / unit.ns,
        "rows": drawing.num_rows,
        "rowPx": drawing.row_px,
        "height": round(drawing.num_rows * drawing.row_px) + _AROUND_PX,
        "lanes": {
            lane.value: {"at": place.centre, "height": place.height}
            for lane, place in drawing.lanes.items()
        },
        "steps": [_step_meta(drawing, *placed) for placed in drawing.placed],
        "path": [point and [round(value, 6) for value in point] for point in drawing.path()],
        "mostBars": MOST_BARS,
        "slices": NUM_SLICES,
        "mostShare": MOST_SHARE,
        "kinds": kinds,
    }
    if drawing.num_bars > MOST_BARS:
        zoom = f"Zoom in until at most {MOST_BARS:,} bars are in view to see them one by one."
        meta |= {"note": f"{drawing.note} {zoom}", "cells": list(_cells(drawing))}
    if drawing.behind:
        every = sorted((*drawing.placed, *drawing.behind), key=lambda placed: placed[0].replica)
        meta["replicas"] = {
            "shown": drawing.steps[0].replica,
            "rowPx": _row_px(len(every)),  # of a rank of all of them
            "steps": [_step_meta(drawing, *placed) for placed in every],
        }
    return Packed(meta, bytes(buffer))


def _step_meta(drawing: Drawing, step: Step, first_row: float) -> dict[str, Any]:
    meta = {
        "title": step.title,
        "firstRow": round(first_row, 6),
        "ranks": step.num_ranks,
        "start": step.shown_ns[0] / drawing.unit.ns,
        "end": step.shown_ns[1] / drawing.unit.ns,
    }
    if step.beside:
        meta |= {"names": drawing.names(step), "windows": drawing.windows(step)}
        meta |= {"abovePx": ROW_PX, "aboveRows": ROW_PX / drawing.row_px}
    return meta


def _cells(drawing: Drawing) -> Iterator[dict[str, object]]:
    """Yield the overview of each step, which a page shows until it has read the columns."""
    places = {_key(own.kind): number for number, own in enumerate(drawing.kinds)}
    for step in drawing.steps:
        grid = drawing.overview_of(step)
        yield {
            "kinds": [places[_key(kind)] for kind in grid.kinds],
            "busy": _text(np.ceil(grid.busy * 255)),
            "mostly": _text(grid.mostly),
        }


def _text(values: np.typing.NDArray[Any]) -> str:
    return base64.b64encode(values.astype(np.uint8).tobytes()).decode("ascii")


def _quantum_ns(drawing: Drawing) -> int:
    """Return a millionth of the time that is shown, or less; at most what texts have digits for."""
    share_ns = max(1, (drawing.end_ns - drawing.start_ns) / _STEPS_SHOWN)
    return min(int(drawing.unit.ns) // 1000, int(10 ** math.floor(math.log10(share_ns))))


def _rounded(values_ns: Ints, quantum_ns: int) -> Ints:
    return (values_ns + quantum_ns // 2) // quantum_ns
