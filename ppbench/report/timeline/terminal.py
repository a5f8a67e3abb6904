"""Steps as text, measured or planned: a row per rank, time to the right.

A measured step is cut into slices of time; a character shows what took most of its slice. Steps are
stacked on one scale:

    1f1b · step 3, the median one · 120.0 ms
    time ms 0          30          60          90          120
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

In a planned program every action has its label: the shortest is as wide as the widest label, and
others are in proportion. Idle time is a `.` for each of the shortest. A program wider than the
terminal is cut into blocks:

    time s  0              5              10
    rank 0  F0 F1 F2 .  .  .  .  B0─── .  B1─── .  B2───
    rank 1  .  F0 F1 .  .  B0─── F2 B1─── .  B2─── .  .
    rank 2  .  .  F0 B0─── F1 B1─── F2 B2─── .  .  .  .

With colours the ops have those of every figure, and later stages of a rank are lighter; without, a
line shows how far an action reaches.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import pandas as pd
from rich.console import Console
from rich.style import Style
from rich.text import Text

from engine.plan.action import COMPUTE_OPS, Action
from engine.plan.drawing import label_of
from engine.plan.spans import COLUMNS
from ppbench.analysis.waits import Cause
from ppbench.display.colors import OP_COLORS, OP_WORDS, ink_on
from ppbench.display.markup import fragment
from ppbench.display.units import round_step
from ppbench.prediction import Prediction
from ppbench.report.timeline.drawing import MS, SECONDS, Drawing, Unit
from ppbench.report.timeline.marks import CAUSE_WORDS, OPEN_WORDS, Marks, Step
from ppbench.report.timeline.overview import overview
from ppbench.report.timeline.timelines import planned_step

MOST_CELLS = 8  # width of a planned action in cells, however short the others are
_PIPED_WIDTH = 120  # of a measured step in a file or a pipe
_UNBOUNDED = 10**9  # a planned program in a file or a pipe is not cut
_LEAST_WIDTH = 8
_LEAST_TICK_GAP = 8
_DIM, _BOLD, _NO_STYLE = Style(dim=True), Style(bold=True), Style.null()
_BESIDE, _IDLE = "the steps before and after", "idle"
_OP_OF = {words: op for op, words in OP_WORDS.items()}
_SIGN_OF = {
    CAUSE_WORDS[Cause.STAGE]: ".",
    CAUSE_WORDS[Cause.TRANSFER]: "~",
    CAUSE_WORDS[Cause.GATHER]: "≈",
    CAUSE_WORDS[Cause.HOST]: ":",
    CAUSE_WORDS[Cause.REDUCE]: "+",
    CAUSE_WORDS[Cause.NO_WORK]: " ",
    OPEN_WORDS["waiting"]: "/",
    OPEN_WORDS["working"]: "=",
    OPEN_WORDS["stopped"]: "#",
    OPEN_WORDS["dead"]: "x",
    _BESIDE: "░",
    _IDLE: ".",
}
_SHARE_BESIDE = 0.25  # of a step in a row, so much is shown of those beside it
_Cells = list[tuple[str, Style]]


@dataclass(frozen=True)
class TextTimeline:
    """Steps one above the other: a block of a document, as wide and colourful as the terminal."""

    steps: Sequence[Step]
    unit: Unit = MS
    label_cells: int = 0
    """In how many cells the shortest action stands. The times of such a step are counted in cells;
    any other is as wide as there is room."""
    of_page: str = ""
    """The drawing of a page in place of the text."""

    def terminal(self) -> str:
        return self.drawn(Console(highlight=False))

    def markdown(self) -> str:
        text = self.drawn(Console(highlight=False, no_color=True, color_system=None))
        return f"```\n{text}\n```"

    def html(self) -> str:
        text = self.drawn(Console(highlight=False, no_color=True, color_system=None))
        return self.of_page or fragment("<pre>{{ text }}</pre>", text=text)

    def drawn(self, console: Console) -> str:
        """Draw the steps in the width and the colours of a console."""
        has_width = console.is_terminal or "COLUMNS" in os.environ
        has_colors = console.color_system is not None and not console.no_color
        gutter = len(f"rank {max(step.num_ranks for step in self.steps) - 1}  ")
        gutter = max(gutter, len(f"time {self.unit.name} "))
        if self.label_cells:
            start_ns, end_ns = 0, max(map(_end_of_work, self.steps))
            num_cells, width = end_ns, console.width if has_width else _UNBOUNDED
            block = max(1, (width - gutter) // self.label_cells) * self.label_cells
        else:
            views = [_view_of(step) for step in self.steps]
            start_ns, end_ns = min(start for start, _ in views), max(1, *(end for _, end in views))
            width = console.width if has_width else _PIPED_WIDTH
            num_cells = block = max(_LEAST_WIDTH, width - gutter - 1)
        per_ns = num_cells / (end_ns - start_ns)

        ruler, gap = [" "] * num_cells, round_step(_LEAST_TICK_GAP / per_ns / self.unit.ns)
        for number in itertools.count(math.ceil(start_ns / self.unit.ns / gap)):
            at = round((float(number * gap) * self.unit.ns - start_ns) * per_ns)
            label = f"{float(number * gap):,.6g}"
            if at + len(label) > num_cells:
                break
            if at % block + len(label) <= block:
                ruler[at : at + len(label)] = label
        time_line = (f"time {self.unit.name}", _DIM, [(char, _DIM) for char in ruler])

        names: list[str] = []
        blocks: list[Text] = []
        num_hidden = 0
        for step in self.steps:
            rows = [time_line]
            if step.beside and not self.label_cells:
                line = _names_line(step, self.unit, num_cells, (start_ns, end_ns))
                rows.append(("", _NO_STYLE, [(char, _NO_STYLE) for char in line]))
            if self.label_cells:
                used, cells, hidden = _labelled(
                    step, num_cells, self.label_cells, block, has_colors
                )
                num_hidden += hidden
            else:
                used, cells = _sliced(step, num_cells, (start_ns, end_ns), has_colors)
            names += used
            rows += [(f"rank {rank}", _NO_STYLE, row) for rank, row in enumerate(cells)]
            for first in range(0, num_cells, block):
                blocks.append(Text())
                if step.title:
                    blocks.append(Text(step.title, _BOLD))
                for name, style, row in rows:
                    text = Text(name.ljust(gutter), style)
                    for shown, run in itertools.groupby(row[first : first + block], lambda c: c[1]):
                        text.append("".join(char for char, _ in run), shown)
                    blocks.append(text)
            if step.flight is not None and len(step.flight):  # what each rank of it was doing
                accounts = step.flight.sort_values("rank")["account"].dropna()
                blocks += [Text(), *(Text(str(account)) for account in accounts)]
        if num_hidden:
            blocks += [Text(), Text(f"{num_hidden:,} actions are too short to be drawn")]

        legend = []
        for name in dict.fromkeys(names):
            if name not in _OP_OF:
                sign = Text(_SIGN_OF[name] if _SIGN_OF[name] != " " else "blank", _DIM)
            else:
                op = _OP_OF[name]
                sign = Text(f" {op} ", _filled(OP_COLORS[op])) if has_colors else Text(op.value)
            legend.append(Text.assemble(sign, f" {name}"))
        if has_colors and any(step.num_stages > step.num_ranks for step in self.steps):
            legend.append(Text("lighter: later stages of a rank"))
        with console.capture() as capture:
            for printed in (Text("   ").join(legend), *blocks):
                printed.rstrip()
                console.print(printed, soft_wrap=not has_width, highlight=False)
        return capture.get().rstrip("\n")


def text_of_program(prediction: Prediction) -> TextTimeline:
    """A planned program, in which every action has its label.

    Of replicas it is the slowest one's step by slices, with its title.
    """
    program = prediction.program
    if prediction.replication is not None:
        step = planned_step(prediction.frame)
        whose = f"replica {step.replica} of {prediction.replication.replicas}"
        unit = MS if prediction.makespan_s < 1 else SECONDS
        return TextTimeline([step.titled(f"{program.schedule}: {whose}, planned")], unit)
    has_stages = program.num_stages > program.world_size
    widest = max(len(label_of(a, has_stages=has_stages)) for row in program.actions for a in row)
    cells = widest + 1
    spans = [span for span in prediction.spans_in_a_row() if span.op in COMPUTE_OPS]
    lengths = [span.end_ns - span.start_ns for span in spans if span.step == 0]
    ticks = max(min(filter(None, lengths)), -(-max(lengths) // MOST_CELLS))  # that `cells` show
    in_cells = (
        span._replace(start_ns=span.start_ns * cells // ticks, end_ns=span.end_ns * cells // ticks)
        for span in spans
    )
    step = planned_step(pd.DataFrame(in_cells, columns=list(COLUMNS)))
    each = Fraction(prediction.ticks_per_s * cells, ticks)
    return TextTimeline([step], Unit("s", float(each)), cells)


def _filled(color: str) -> Style:
    return Style(color=ink_on(color), bgcolor=color)


def _end_of_work(step: Step) -> int:
    return max(int((marks.begin_ns + marks.width_ns).max()) for marks in _work(step.marks))


def _work(every: Sequence[Marks]) -> list[Marks]:
    return [marks for marks in every if marks.kind.name in _OP_OF and marks.kind.lane == "compute"]


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


def _names_line(step: Step, unit: Unit, num_slices: int, view_ns: tuple[int, int]) -> str:
    """The names of a step in a row and of those beside it, with lines between them."""
    start_ns, end_ns = view_ns
    line = [" "] * num_slices
    for name, *edges, is_own in Drawing([step], unit).names(step):
        ends = (round((at * unit.ns - start_ns) / (end_ns - start_ns) * num_slices) for at in edges)
        begin, end = (min(max(0, at), num_slices) for at in ends)
        text = name if len(name) < end - begin - 1 else name.split(" · ")[0]
        if len(text) < end - begin - 1:
            at = (begin + 1 + end - len(text)) // 2
            line[at : at + len(text)] = text
        for at in (begin, end) if is_own else ():
            line[min(at, num_slices - 1)] = "│"
    return "".join(line)


def _styles(marks: Marks, has_colors: bool) -> list[Style]:
    """The style of each shade of a kind; bold is where a rank was not waiting, as likely guilty."""
    if not has_colors:
        return [_NO_STYLE] * len(marks.kind.colors)
    if marks.kind.beside:
        return [Style(color=color) for color in marks.kind.colors]
    if marks.kind.name in _OP_OF:
        return [_filled(color) for color in marks.kind.colors]
    is_bold = marks.kind.hatch and marks.kind.name != OPEN_WORDS["waiting"]
    return [_BOLD if is_bold else _DIM]


def _labels(step: Step, marks: Marks) -> tuple[str, ...]:
    """The label of each action, with its stage if ranks have several."""
    if not marks.kind.has_text:
        return marks.labels
    places = (marks.numbers[key].tolist() for key in ("stage", "microbatch"))
    op, has_stages = _OP_OF[marks.kind.name], step.num_stages > step.num_ranks
    return tuple(
        label_of(Action(stage, op, microbatch), has_stages=has_stages)
        for stage, microbatch in zip(*places, strict=True)
    )


def _labelled(
    step: Step, num_cells: int, label_cells: int, block: int, has_colors: bool
) -> tuple[list[str], list[_Cells], int]:
    """Return the names of a planned step's kinds, its rows, and how many actions have no cell.

    No label crosses the end of a block.
    """
    rows: list[_Cells] = [
        [(" " if at % label_cells else ".", _DIM) for at in range(num_cells)]
        for _ in range(step.num_ranks)
    ]
    fill, names, num_hidden, is_in_a_row = " " if has_colors else "─", list[str](), 0, False
    for marks in sorted(_work(step.marks_in_a_row), key=lambda marks: not marks.kind.beside):
        styles, labels = _styles(marks, has_colors), _labels(step, marks)
        ends = np.stack([marks.begin_ns, marks.begin_ns + marks.width_ns]).clip(0, num_cells)
        names += [] if marks.kind.beside else [marks.kind.name]
        for rank, shade, label, begin, end in zip(
            marks.row.tolist(), marks.shade.tolist(), labels, *ends.tolist(), strict=True
        ):
            row, style = rows[rank], styles[shade]
            if marks.kind.beside:
                row[begin:end] = [(_SIGN_OF[_BESIDE], style)] * (end - begin)
                is_in_a_row |= begin < end
                continue
            num_hidden += begin == end
            length = max(end - begin - 1, min(1, end - begin))
            until_cut = block - begin % block
            indent = until_cut if until_cut < len(label) <= length - until_cut else 0
            text = (fill * indent + label[:length]).ljust(length, fill)
            row[begin:end] = [
                *((c, style) for c in text),
                *[(" ", _NO_STYLE)] * (end - begin - length),
            ]
            if row[begin - 1 : begin] == [(".", _DIM)]:  # the gap is too short for a sign
                row[begin - 1] = (" ", _DIM)
    return [*names, *([_BESIDE] if is_in_a_row else []), _IDLE], rows, num_hidden


def _sliced(
    step: Step, num_slices: int, view_ns: tuple[int, int], has_colors: bool
) -> tuple[list[str], list[_Cells]]:
    """Return the names of a step's kinds of marks, and a row of slices for each rank.

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
    styles = [*(_styles(marks, has_colors) for marks in kinds), [_NO_STYLE]]
    line = " " if has_colors else "─"
    signs = [*(line if name in _OP_OF else _SIGN_OF[name] for name in names), " "]
    rows = [[(signs[kind], styles[kind][0]) for kind in rank] for rank in mostly]
    for number, (name, marks) in enumerate(zip(names, kinds, strict=True)):
        op, labels = _OP_OF.get(name), () if marks.kind.beside else _labels(step, marks)
        if has_colors and op and marks.kind.has_text:  # the colour says the op
            labels = tuple(map(str, marks.numbers["microbatch"].tolist()))
        times_ns = np.stack([marks.begin_ns, marks.begin_ns + marks.width_ns])
        first, after = np.round((times_ns - start_ns) / (end_ns - start_ns) * num_slices).astype(
            int
        )
        if op is None:
            first = np.maximum(first - 1, 0)  # it may fill most of the slice that it begins in
        # Each bar has its label or, if it does not fit, the letter of its op.
        bars = zip(marks.row, marks.shade, first, after, labels, strict=True) if labels else ()
        for rank, shade, begin, end, label in bars:
            own = np.flatnonzero(mostly[rank, begin:end] == number)
            if not len(own):
                continue
            at, row, style = begin + int(own[0]), rows[rank], styles[number][shade]
            text = ""
            if len(label) < min(end, num_slices) - at + (0 if label.isdecimal() else 1):
                text = label
            elif op is not None and not label.isdecimal():
                text = op.value
            for place in own + begin:
                row[place] = (row[place][0], style)
            row[at : at + len(text)] = [(char, style) for char in text]
    return names, rows
