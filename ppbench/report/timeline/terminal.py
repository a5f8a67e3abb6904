"""Measured steps and planned programs as text: a row per rank, time to the right.

A measured step is cut into slices of time; a character shows what took most of its slice. Steps are
stacked on one scale:

    1f1b · step 3, the median one · 120.0 ms
            0          30          60          90          120 ms
    rank 0  F0──F1──...............B0──────B1──────
    rank 1      F0──B0──────F1──B1──────

Of steps in a row, the end of the one before and the begin of the one after are `░`; a line between
marks where the first rank begins and ends the step:

            step 2      │      step 3 · 80.0 ms       │      step 4
    rank 0  ░░░░░░░░░░░░F0──F1──.....B0──────B1───────░░░░░░░░....
    rank 1  ░░░░░░░░░░░░░░░░F0──F1──B0──────B1──────────░░░░░░░░░░

Idle time is `.` for each character that waits for a stage, `~` for a message, `≈` or `+` for
parameters or gradients of all replicas, `:` for the host, and blank once a rank has finished its
work. The unfinished action of a failed run is drawn to the end in a sign of its own, and what each
rank was doing is listed below:

    rank 0  F0──F1──...............1B0////////////
    rank 1      F0──1B0xxxxxxxxxxxxxxxxxxxxxxxxxxx

In a planned program the shortest action is as wide as the widest label, others in proportion; a
program wider than the terminal is cut into blocks:

    time s  0              5              10
    rank 0  F0 F1 F2 .  .  .  .  B0─── .  B1─── .  B2───
    rank 1  .  F0 F1 .  .  B0─── F2 B1─── .  B2─── .  .
    rank 2  .  .  F0 B0─── F1 B1─── F2 B2─── .  .  .  .

With colours the ops have those of every figure; without, a line shows how far an action reaches.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.text import Text

from engine.plan.action import COMPUTE_OPS, JOINING_OPS, Action, Op
from engine.plan.drawing import label_of
from engine.plan.spans import Span
from ppbench.analysis.waits import Cause
from ppbench.display.colors import OP_COLORS, OP_WORDS, ink_on, tinted
from ppbench.display.predictions import amount, peaks_text, replicas_facts, shape_text
from ppbench.display.units import NS_PER_MS, round_step
from ppbench.prediction import Prediction
from ppbench.report.timeline.drawing import Drawing
from ppbench.report.timeline.marks import (
    CAUSE_WORDS,
    OPEN_WORDS,
    Step,
)
from ppbench.report.timeline.overview import overview
from ppbench.report.timeline.timelines import planned_step

MOST_CELLS = 8  # width of an action in cells, however short the others are
LIGHTEST = 0.62
_PIPED_WIDTH = 120  # of a measured step in a file or a pipe
_UNBOUNDED = 10**9  # a planned program in a file or a pipe is not cut
_LEAST_WIDTH = 8
_LEAST_TICK_GAP, _LEAST_LABEL_GAP = 12, 8
_DIM, _BOLD, _NO_STYLE = Style(dim=True), Style(bold=True), Style.null()
_IDLE_SIGNS = {
    Cause.STAGE: ".",
    Cause.TRANSFER: "~",
    Cause.GATHER: "≈",
    Cause.HOST: ":",
    Cause.REDUCE: "+",
    Cause.NO_WORK: " ",
}
_OPEN_SIGNS = {"waiting": "/", "working": "=", "stopped": "#", "dead": "x"}
_BESIDE = "the steps before and after"
_OP_OF = {words: op for op, words in OP_WORDS.items()}
_SIGN_OF = {words: _IDLE_SIGNS[cause] for cause, words in CAUSE_WORDS.items()} | {
    words: _OPEN_SIGNS[state] for state, words in OPEN_WORDS.items()
}
_SIGN_OF[_BESIDE] = "░"
_SHARE_BESIDE = 0.25  # of a step in a row, so much is shown of those beside it

Cell = tuple[str, Style]


def draw_steps(steps: Sequence[Step], console: Console) -> str:
    """Draw the steps one above the other, in the width and the colours of the console."""
    width = console.width if _has_width(console) else _PIPED_WIDTH
    gutter = len(f"rank {max(step.num_ranks for step in steps) - 1}  ")
    num_slices = max(_LEAST_WIDTH, width - gutter - 1)
    views = [_view_of(step) for step in steps]
    view_ns = min(start for start, _ in views), max(1, *(end for _, end in views))
    start_ms, end_ms = (ns / NS_PER_MS for ns in view_ns)
    per_ms = num_slices / (end_ms - start_ms)
    gap_ms = float(round_step(_LEAST_TICK_GAP / per_ms))
    ruler = [" "] * (num_slices + _LEAST_TICK_GAP)
    for number in range(math.ceil(start_ms / gap_ms), int(end_ms / gap_ms) + 1):
        ms = number * gap_ms
        text = f"{ms:,.6g}" + (" ms" if number == 0 else "")
        at = round((ms - start_ms) * per_ms)
        ruler[at : at + len(text)] = text
    ruler_line = Text(" " * gutter + "".join(ruler).rstrip(), _DIM)
    has_colors = _has_colors(console)
    sliced = [_sliced(step, num_slices, view_ns, has_colors=has_colors) for step in steps]
    legend = Text()
    for name in dict.fromkeys(name for names, _ in sliced for name in names):
        if name not in _OP_OF:
            sign = Text(_SIGN_OF[name] if _SIGN_OF[name] != " " else "blank", _DIM)
        elif has_colors:
            sign = Text(" 0 ", _filled(OP_COLORS[_OP_OF[name]]))
        else:
            sign = Text(_OP_OF[name].value)
        legend.append_text(sign).append(f" {name}   ")
    lines = [legend]
    for step, (_, rows) in zip(steps, sliced, strict=True):
        lines += [Text(), *([Text(step.title, _BOLD)] if step.title else []), ruler_line]
        if step.beside:
            lines.append(Text(" " * gutter + _names_line(step, num_slices, view_ns)))
        for rank, row in enumerate(rows):
            lines.append(Text(f"rank {rank}".ljust(gutter)).append_text(row))
        if step.flight is not None and len(step.flight):  # what each rank of it was doing
            accounts = step.flight.sort_values("rank")["account"].dropna()
            lines += [Text(), *(Text(str(account)) for account in accounts)]
    return _printed(lines, console)


def draw_prediction(prediction: Prediction, console: Console) -> str:
    """Draw the program with its legend and figures, in the width and colours of the console.

    Of replicas, it is the slowest one's ranks, the collectives in order, and the figures of all.
    """
    if prediction.replication is not None:
        return _replicas(prediction, console)
    grid = _Grid(prediction, has_colors=_has_colors(console))
    gutter = len(f"rank {prediction.program.world_size - 1}  ")
    width = console.width if _has_width(console) else _UNBOUNDED
    block = max(1, (width - gutter) // grid.num_chars) * grid.num_chars
    title = f"{prediction.program.schedule}: {shape_text(prediction)}"
    lines = [Text(title, _BOLD), grid.legend()]
    rows = grid.rows(block)
    for first in range(0, grid.width, block):
        lines.append(Text())
        for name, row in rows:
            lines.append(Text(name.ljust(gutter), _DIM if name == rows[0][0] else _NO_STYLE))
            lines[-1].append_text(_text_of(row[first : first + block]))
    values, figures = prediction.figures(), [f"makespan {amount(prediction.makespan_s)} s"]
    of_row = ["bubble_of_period"] if grid.is_in_a_row else []
    for name in (*of_row, "bubble_fraction", "bubble_idle_over_ideal", "bubble_max_stage_span"):
        figure = f"{name} {values[name]:.4f}"
        joined = f"{figures[-1]}   {figure}"  # no line break parts name and value
        figures = [*figures[:-1], joined] if len(joined) <= width else [*figures, figure]
    peaks = peaks_text(prediction.peaks)
    figures.append(f"peak activations by rank: {peaks} (microbatches of a rank's share)")
    ranks = range(prediction.program.world_size)
    num_hidden = sum(begin == end for rank in ranks for _, begin, end in grid.extents(rank))
    if num_hidden:
        figures.append(f"{num_hidden:,} actions are too short to be drawn")
    return _printed([*lines, Text(), *map(Text, figures)], console)


def _replicas(prediction: Prediction, console: Console) -> str:
    step, shape = planned_step(prediction.frame), prediction.shape()
    whose = f"replica {step.replica} of {shape['replicas']}"
    title = f"{prediction.program.schedule}: {shape_text(prediction)}; {whose}, planned"
    facts = [f"{name}: {value}" for name, value in replicas_facts(prediction)]
    makespan = f"makespan {amount(prediction.makespan_s)} s"
    lanes = [
        f"rank {rank}: {' '.join(str(action) for action in row if action.op in JOINING_OPS)}"
        for rank, row in enumerate(prediction.program.actions)
    ]
    drawn = draw_steps([step.titled(title)], console)
    return "\n".join(
        [drawn, "", makespan, *facts, "", "collectives of each rank, in order:", *lanes]
    )


def _has_width(console: Console) -> bool:
    return console.is_terminal or "COLUMNS" in os.environ


def _has_colors(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _printed(lines: Iterable[Text], console: Console) -> str:
    with console.capture() as capture:
        for line in lines:
            line.rstrip()
            console.print(line, soft_wrap=not _has_width(console), highlight=False)
    return capture.get().rstrip("\n")


def _text_of(cells: Iterable[Cell]) -> Text:
    text = Text()
    for style, run in itertools.groupby(cells, key=lambda cell: cell[1]):
        text.append("".join(char for char, _ in run), style)
    return text


def _filled(color: str) -> Style:
    return Style(color=ink_on(color), bgcolor=color)


def _view_of(step: Step) -> tuple[int, int]:
    """The times that are drawn: of steps beside it, only what is close."""
    start_ns, end_ns = step.shown_ns
    if step.windows_ns is None:
        return start_ns, end_ns
    begin, end = (
        int(most) - step.origin_ns for most in (step.windows_ns[0].min(), step.windows_ns[1].max())
    )
    room = round(_SHARE_BESIDE * (end - begin))
    return max(start_ns, begin - room), min(end_ns, end + room)


def _names_line(step: Step, num_slices: int, view_ns: tuple[int, int]) -> str:
    """The names of a step in a row and of those beside it, with lines between them."""
    start_ns, end_ns = view_ns
    line = [" "] * num_slices
    for name, *edges, is_own in Drawing([step]).names(step):
        ends = (
            round((ms * NS_PER_MS - start_ns) / (end_ns - start_ns) * num_slices) for ms in edges
        )
        begin, end = (min(max(0, at), num_slices) for at in ends)
        text = name if len(name) < end - begin - 1 else name.split(" · ")[0]
        if len(text) < end - begin - 1:
            at = (begin + 1 + end - len(text)) // 2
            line[at : at + len(text)] = text
        for at in (begin, end) if is_own else ():
            line[min(at, num_slices - 1)] = "│"
    return "".join(line).rstrip()


def _sliced(
    step: Step, num_slices: int, view_ns: tuple[int, int], *, has_colors: bool
) -> tuple[list[str], list[Text]]:
    """Return the names of a measured step's kinds of marks, and a row of slices for each rank.

    A slice shows the kind of mark that took most of it.
    """
    start_ns, end_ns = view_ns
    compute = [
        marks
        for marks in step.marks_in_a_row
        if marks.kind.lane == "compute" and not (marks.kind.beside and marks.kind.is_idle)
    ]
    kinds = sorted(compute, key=lambda kind: kind.kind.name not in _OP_OF)
    shares = overview(kinds, step.num_ranks, start_ns, end_ns, num_slices).shares
    mostly = np.where(shares.sum(axis=0) > 0, shares.argmax(axis=0), len(kinds))
    names = [_BESIDE if marks.kind.beside else marks.kind.name for marks in kinds]
    line = " " if has_colors else "─"
    signs = [*(line if name in _OP_OF else _SIGN_OF[name] for name in names), " "]
    rows = [[signs[kind] for kind in rank] for rank in mostly]
    has_stages = step.num_stages > step.num_ranks
    styles = []
    for number, (name, marks) in enumerate(zip(names, kinds, strict=True)):
        op, labels = _OP_OF.get(name), marks.labels
        if marks.kind.has_text and op:  # without colours actions, with stages if ranks have several
            places = (marks.numbers[key].tolist() for key in ("stage", "microbatch"))
            labels = tuple(
                str(m) if has_colors else f"{s if has_stages else ''}{_OP_OF[name].value}{m}"
                for s, m in zip(*places, strict=True)
            )
        times_ns = np.stack([marks.begin_ns, marks.begin_ns + marks.width_ns])
        slices = (times_ns - start_ns) / (end_ns - start_ns) * num_slices
        first, after = np.round(slices).astype(np.int64)
        if op is None:
            first = np.maximum(first - 1, 0)  # it may fill most of the slice that it begins in
        # Each bar has its label or, if it does not fit, the letter of its op.
        bars = zip(marks.rank, first, after, labels, strict=True) if labels else ()
        for rank, begin, end, label in bars:
            own = np.flatnonzero(mostly[rank, begin:end] == number)
            if not len(own):
                continue
            at = begin + int(own[0])
            if len(label) < min(end, num_slices) - at + (0 if label.isdecimal() else 1):
                rows[rank][at : at + len(label)] = label
            elif op is not None and not label.isdecimal():
                rows[rank][at] = op.value
        # Bold is where a rank was not waiting, as it is the likelier culprit.
        is_bold = marks.kind.hatch and name != OPEN_WORDS["waiting"]
        style = _BOLD if is_bold else _DIM if op is None else _filled(OP_COLORS[op])
        if marks.kind.beside:
            style = Style(color=OP_COLORS[_OP_OF[marks.kind.name]])
        styles.append(style if has_colors else _NO_STYLE)
    styles.append(_NO_STYLE)
    return names, [
        _text_of((sign, styles[kind]) for sign, kind in zip(row, rank, strict=True))
        for row, rank in zip(rows, mostly, strict=True)
    ]


class _Grid:
    """A planned program in characters."""

    def __init__(self, prediction: Prediction, *, has_colors: bool) -> None:
        program = prediction.program
        self._prediction, self._has_colors = prediction, has_colors
        self._has_stages = program.num_stages > program.world_size
        self._ranks = program.placement.ranks
        self._ops = [op for op in OP_COLORS if any(a.op is op for r in program.actions for a in r)]
        self._spans: list[list[Span]] = [[] for _ in program.actions]
        for span in prediction.spans_in_a_row():
            if span.op in COMPUTE_OPS:
                self._spans[span.rank].append(span)
        own = [span for row in self._spans for span in row if span.step == 0]
        lengths = {span.end_ns - span.start_ns for span in own}
        shortest = min(length for length in lengths if length > 0)
        widest = max(len(self._label(action)) for row in program.actions for action in row)
        # So many characters show so many ticks.
        self.num_chars, self._ticks = widest + 1, max(shortest, -(-max(lengths) // MOST_CELLS))
        last = max(span.end_ns for span in own)
        self.width = self._char_at(last)
        self.is_in_a_row = any(
            span.step and span.end_ns > 0 and span.start_ns < last
            for row in self._spans
            for span in row
        )

    def _char_at(self, tick: int) -> int:
        return tick * self.num_chars // self._ticks

    def _label(self, action: Action) -> str:
        return label_of(action, has_stages=self._has_stages)

    def rows(self, block: int) -> list[tuple[str, list[Cell]]]:
        """Return the time line, then each rank, by name; no label crosses the end of a block."""
        line = [" "] * self.width
        per_tick = Fraction(self.num_chars, self._ticks)
        step = round_step(_LEAST_LABEL_GAP / (per_tick * self._prediction.ticks_per_s))
        for count in itertools.count():
            at = int(count * step * self._prediction.ticks_per_s * per_tick)
            label = amount(count * step)
            if at + len(label) > self.width:
                break
            if at % block + len(label) <= block:
                line[at : at + len(label)] = label
        rows = [("time s", [(char, _DIM) for char in line])]
        fill = " " if self._has_colors else "─"
        for rank in range(self._prediction.program.world_size):
            row = [(" " if at % self.num_chars else ".", _DIM) for at in range(self.width)]
            for span in self._spans[rank]:
                if span.step:
                    ends = (self._char_at(tick) for tick in (span.start_ns, span.end_ns))
                    begin, end = (min(max(0, at), self.width) for at in ends)
                    style = Style(color=OP_COLORS[span.op]) if self._has_colors else _NO_STYLE
                    row[begin:end] = [(_SIGN_OF[_BESIDE], style)] * (end - begin)
            for action, begin, end in self.extents(rank):
                shade = self._ranks[: action.stage].count(rank)  # stages of the rank before it
                label, style = self._label(action), self._style(action.op, shade)
                length = max(end - begin - 1, min(1, end - begin))
                until_cut = block - begin % block
                indent = until_cut if until_cut < len(label) <= length - until_cut else 0
                text = (fill * indent + label[:length]).ljust(length, fill)
                gap = [(" ", _NO_STYLE)] * (end - begin - length)
                row[begin:end] = [*((char, style) for char in text), *gap]
                if row[begin - 1 : begin] == [(".", _DIM)]:  # the gap is too short for a sign
                    row[begin - 1] = (" ", _DIM)
            rows.append((f"rank {rank}", row))
        return rows

    def extents(self, rank: int) -> Iterator[tuple[Action, int, int]]:
        """Yield each action of a rank with its first character and the one after its last."""
        for span in self._spans[rank]:
            if span.step == 0:
                action = Action(span.stage, span.op, span.microbatch)
                yield action, self._char_at(span.start_ns), self._char_at(span.end_ns)

    def _style(self, op: Op, shade: int) -> Style:
        most = -(-len(self._ranks) // self._prediction.program.world_size) - 1
        return _filled(tinted(OP_COLORS[op], LIGHTEST * shade / max(1, most)))

    def legend(self) -> Text:
        """Return the colour of each op; with several stages per rank, a shade for each."""
        stages = self._prediction.program.placement.stages_of(0)
        parts = []
        for op in self._ops:
            tiles = [Text(f" {op} ", self._style(op, shade)) for shade in range(len(stages))]
            name = Text.assemble(*tiles) if self._has_colors else Text(op)
            parts.append(Text.assemble(name, " ", OP_WORDS[op]))
        if self.is_in_a_row:
            parts.append(Text(f"{_SIGN_OF[_BESIDE]} {_BESIDE}"))
        parts.append(Text.assemble((".", _DIM), " idle"))
        if len(stages) > 1 and self._has_colors:
            parts.append(Text("lighter: later stages of a rank"))
        return Text("   ").join(parts)
