"""A predicted step as a coloured grid in the terminal: a row per rank, time to the right.

    time s  0              5              10
    rank 0  F0 F1 F2 .  .  .  .  B0─── .  B1─── .  B2───
    rank 1  .  F0 F1 .  .  B0─── F2 B1─── .  B2─── .  .
    rank 2  .  .  F0 B0─── F1 B1─── F2 B2─── .  .  .  .

The shortest action is as wide as the widest label, others in proportion. A step wider than the
terminal is cut into blocks. Without colours, a line shows how far an action reaches.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

from rich.console import Console
from rich.style import Style
from rich.text import Text

from engine.plan.action import Action, Op
from engine.plan.drawing import label_of
from engine.plan.schedules.formulae import Times
from ppbench.planning.prediction import Prediction
from ppbench.report.palette import OP_COLORS, OP_WORDS, ink_on, tinted
from ppbench.report.units import counted

MOST_CELLS = 8  # that an action takes, however short the others are
LIGHTEST = 0.62
MOST_LISTED = 16
_LEAST_TICK_GAP = 8
_UNBOUNDED = 10**9  # a file or a pipe has no edge
_DIM, _BOLD, _NO_STYLE = Style(dim=True), Style(bold=True), Style.null()

Cell = tuple[str, Style]


class Scale(NamedTuple):
    """`num_chars` characters show `ticks` ticks."""

    num_chars: int
    ticks: int

    def at(self, ticks: int) -> int:
        return ticks * self.num_chars // self.ticks


def draw(prediction: Prediction, console: Console) -> str:
    """The grid with its legend and its figures, as wide and as colourful as the console is."""
    grid = _Grid(prediction, has_colors=console.color_system is not None and not console.no_color)
    gutter = len(f"rank {prediction.program.world_size - 1}  ")
    width = console.width if console.is_terminal else _UNBOUNDED
    block = max(1, (width - gutter) // grid.scale.num_chars) * grid.scale.num_chars
    title = f"{prediction.program.schedule}: {shape_text(prediction)}"
    lines = [Text(title, _BOLD), grid.legend()]
    rows = grid.rows(block)
    for first in range(0, grid.width, block):
        lines.append(Text())
        for name, row in rows:
            lines.append(Text(name.ljust(gutter), _DIM if name == rows[0][0] else _NO_STYLE))
            lines[-1].append_text(_joined(row[first : first + block]))
            lines[-1].rstrip()
    lines += [Text(), *map(Text, figure_lines(prediction, width)), *map(Text, grid.notes())]
    with console.capture() as capture:
        for line in lines:
            console.print(line, soft_wrap=not console.is_terminal, highlight=False)
    return capture.get().rstrip("\n")


def shape_text(prediction: Prediction) -> str:
    """`4 ranks, 8 microbatches, F=1 I=1 W=1`."""
    program = prediction.program
    counts = [counted(program.world_size, "rank")]
    if program.num_stages > program.world_size:
        counts.append(counted(program.num_stages, "stage"))
    counts.append(counted(program.num_microbatches, "microbatch"))
    return ", ".join([*counts, costs_text(prediction.costs)])


def costs_text(costs: Times) -> str:
    return f"F={amount(costs.f)} I={amount(costs.i)} W={amount(costs.w)}"


def amount(value: Fraction) -> str:
    """Up to six digits, none that say nothing."""
    return f"{float(value):.6g}"


def figure_lines(prediction: Prediction, width: int) -> list[str]:
    """Makespan, the three bubbles by name, and the peaks; no figure is parted from its name."""
    simulation = prediction.simulation
    names = ("bubble_fraction", "bubble_idle_over_ideal", "bubble_max_stage_span")
    lines = [f"makespan {amount(prediction.makespan_s)} s"]
    for figure in (f"{name} {getattr(simulation, name):.4f}" for name in names):
        joined = f"{lines[-1]}   {figure}"
        lines = [*lines[:-1], joined] if len(joined) <= width else [*lines, figure]
    peaks = peaks_text(prediction)
    return [*lines, f"peak activations by rank: {peaks} (microbatches of a rank's share)"]


def peaks_text(prediction: Prediction) -> str:
    """`4, 3, 2, 1`, or in words where many are equal."""
    peaks = list(map(amount, prediction.peaks))
    if len(peaks) > MOST_LISTED and len(set(peaks)) == 1:
        return f"{peaks[0]} on each of {len(peaks)}"
    return ", ".join(peaks)


class _Grid:
    """Where each action stands, in characters."""

    def __init__(self, prediction: Prediction, *, has_colors: bool) -> None:
        program = prediction.program
        self._prediction, self._has_colors = prediction, has_colors
        self._has_stages = program.num_stages > program.world_size
        self._ranks = program.placement.ranks
        self._ops = [op for op in OP_COLORS if any(a.op is op for r in program.actions for a in r)]
        self.scale = self._fitting_scale()
        self.width = self.scale.at(prediction.simulation.makespan_ns)

    def _fitting_scale(self) -> Scale:
        program, simulation = self._prediction.program, self._prediction.simulation
        rows = zip(simulation.start_ns, simulation.end_ns, strict=True)
        lengths = {e - s for starts, ends in rows for s, e in zip(starts, ends, strict=True)}
        longest = max(lengths)
        shortest = min(length for length in lengths if length > 0)
        widest = max(len(self._label(action)) for row in program.actions for action in row)
        return Scale(widest + 1, max(shortest, -(-longest // MOST_CELLS)))

    def _label(self, action: Action) -> str:
        return label_of(action, has_stages=self._has_stages)

    def rows(self, block: int) -> list[tuple[str, list[Cell]]]:
        """The time line, then each rank by name; no label lies across the end of a block."""
        actions = self._prediction.program.actions
        ranks = [(f"rank {rank}", self._row(rank, block)) for rank in range(len(actions))]
        return [("time s", self._time_line(block)), *ranks]

    def _row(self, rank: int, block: int) -> list[Cell]:
        cell = self.scale.num_chars
        row = [(" " if at % cell else ".", _DIM) for at in range(self.width)]
        for action, begin, end in self._extents(rank):
            row[begin:end] = self._bar(action, begin, end, block)
            if row[begin - 1 : begin] == [(".", _DIM)]:  # no room for its own gap
                row[begin - 1] = (" ", _DIM)
        return row

    def _extents(self, rank: int) -> Iterator[tuple[Action, int, int]]:
        """Each action of a rank with the characters that it takes."""
        simulation = self._prediction.simulation
        starts, ends = simulation.start_ns[rank], simulation.end_ns[rank]
        for action, start, end in zip(simulation.program.actions[rank], starts, ends, strict=True):
            yield action, self.scale.at(start), self.scale.at(end)

    def _bar(self, action: Action, begin: int, end: int, block: int) -> Iterator[Cell]:
        """An action's label, its length, and a gap."""
        label, style = self._label(action), self._style(action.op, self._shade(action.stage))
        length = max(end - begin - 1, min(1, end - begin))
        until_cut = block - begin % block
        indent = until_cut if until_cut < len(label) <= length - until_cut else 0
        fill = " " if self._has_colors else "─"
        text = (fill * indent + label[:length]).ljust(length, fill)
        return itertools.chain(
            ((char, style) for char in text), ((" ", _NO_STYLE),) * (end - begin - length)
        )

    def _shade(self, stage: int) -> int:
        """How many stages its rank has before this one."""
        return self._ranks[:stage].count(self._ranks[stage])

    def _style(self, op: Op, shade: int) -> Style:
        most = -(-len(self._ranks) // self._prediction.program.world_size) - 1
        color = tinted(OP_COLORS[op], LIGHTEST * shade / max(1, most))
        return Style(color=ink_on(color), bgcolor=color)

    def _time_line(self, block: int) -> list[Cell]:
        line = [" "] * self.width
        per_tick = Fraction(self.scale.num_chars, self.scale.ticks)
        step = _nice_step(_LEAST_TICK_GAP / (per_tick * self._prediction.ticks_per_s))
        for count in itertools.count():
            at = int(count * step * self._prediction.ticks_per_s * per_tick)
            label = amount(count * step)
            if at + len(label) > self.width:
                break
            if at % block + len(label) <= block:
                line[at : at + len(label)] = label
        return [(char, _DIM) for char in line]

    def legend(self) -> Text:
        """What each colour is; with several stages per rank, a shade for each."""
        stages = self._prediction.program.placement.stages_of(0)
        parts = []
        for op in self._ops:
            tiles = [Text(f" {op} ", self._style(op, shade)) for shade in range(len(stages))]
            name = Text.assemble(*tiles) if self._has_colors else Text(op)
            parts.append(Text.assemble(name, " ", OP_WORDS[op]))
        parts.append(Text.assemble((".", _DIM), " idle"))
        if len(stages) > 1 and self._has_colors:
            parts.append(Text("lighter: later stages of a rank"))
        return Text("   ").join(parts)

    def notes(self) -> list[str]:
        """What the drawing leaves out."""
        ranks = range(self._prediction.program.world_size)
        num_hidden = sum(begin == end for rank in ranks for _, begin, end in self._extents(rank))
        return [f"{num_hidden:,} actions are too short to be drawn"] if num_hidden else []


def _nice_step(least: Fraction) -> Fraction:
    """The smallest of 1, 2, 5, 10, 20, ... (or .1, .01, ...) that is no less."""
    power = Fraction(1)
    while power >= least:
        power /= 10
    while power * 10 < least:
        power *= 10
    return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)


def _joined(cells: list[Cell]) -> Text:
    text = Text()
    for style, run in itertools.groupby(cells, key=lambda cell: cell[1]):
        text.append("".join(char for char, _ in run), style)
    return text
