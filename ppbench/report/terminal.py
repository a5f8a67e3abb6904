"""Timelines in the terminal: a row per rank, time to the right, steps stacked on one scale.

    1f1b · step 3, the median one · 120.0 ms
            0          30          60          90          120 ms
    rank 0  F0──F1──...............B0──────B1──────
    rank 1      F0──B0──────F1──B1──────

A character is a slice of time and shows what took most of it. With colours the ops have those of
every figure, and their microbatches stand inside; without, an op is its letter and a line for as
long as it lasts. Idle time is a dot for each character that waits for a stage, `~` for a message,
`:` for the host, and blank once a rank has nothing left to do.

Of a run that failed, what a rank never finished goes on to the end in a sign of its own, and under
the rows stands what each of them was doing:

    rank 0  F0──F1──...............1B0////////////
    rank 1      F0──1B0xxxxxxxxxxxxxxxxxxxxxxxxxxx
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.style import Style
from rich.text import Text

from engine.plan.action import Op
from ppbench.analysis.gaps import Cause
from ppbench.report.marks import (
    CAUSE_WORDS,
    OPEN_WORDS,
    Ints,
    Marks,
    Sizes,
    Step,
    marks_of,
)
from ppbench.report.overview import overview
from ppbench.report.palette import OP_COLORS, OP_WORDS, ink_on
from ppbench.report.units import NS_PER_MS

_IDLE_SIGNS = {Cause.STAGE: ".", Cause.TRANSFER: "~", Cause.HOST: ":", Cause.NO_WORK: " "}
_OPEN_SIGNS = {"waiting": "/", "working": "=", "stopped": "#", "dead": "x"}
_PIPED_WIDTH = 120  # of a file or a pipe, which has no edge
_LEAST_WIDTH = 8
_LEAST_TICK_GAP = 12
_DIM, _BOLD = Style(dim=True), Style(bold=True)
_OP_OF = {words: op for op, words in OP_WORDS.items()}
_SIGN_OF = {words: _IDLE_SIGNS[cause] for cause, words in CAUSE_WORDS.items()} | {
    words: _OPEN_SIGNS[way] for way, words in OPEN_WORDS.items()
}


def draw_steps(steps: Sequence[Step], console: Console) -> str:
    """The steps, one above the other, as wide and as colourful as the console is."""
    has_colors = console.color_system is not None and not console.no_color
    width = console.width if console.is_terminal else _PIPED_WIDTH
    gutter = len(f"rank {max(step.num_ranks for step in steps) - 1}  ")
    num_slices = max(_LEAST_WIDTH, width - gutter - 1)
    end_ns = max(step.end_ns for step in steps)
    ruler = Text(" " * gutter + _ruler(num_slices, end_ns), _DIM)
    lines = [_legend(steps, has_colors=has_colors)]
    for step in steps:
        lines += [Text(), *([Text(step.title, _BOLD)] if step.title else []), ruler]
        rows = _rows(step, num_slices, end_ns, has_colors=has_colors)
        for rank, row in enumerate(rows):
            lines.append(Text(f"rank {rank}".ljust(gutter)).append_text(row))
        lines += _accounts(step)
    with console.capture() as capture:
        for line in lines:
            line.rstrip()
            console.print(line, soft_wrap=not console.is_terminal, highlight=False)
    return capture.get().rstrip("\n")


def _accounts(step: Step) -> list[Text]:
    """What the ranks of a run that failed were doing, which a page tells when hovered over."""
    if step.flight is None or step.flight.empty:
        return []
    told = step.flight.sort_values("rank")["account"].dropna()
    return [Text(), *(Text(str(account)) for account in told)]


def _ruler(num_slices: int, end_ns: int) -> str:
    """A tick at every round number of milliseconds that has room for it."""
    end_ms = max(end_ns, 1) / NS_PER_MS
    gap_ms = _round_up(end_ms * _LEAST_TICK_GAP / num_slices)
    ruler = [" "] * (num_slices + _LEAST_TICK_GAP)
    for number in range(int(end_ms / gap_ms) + 1):
        ms = number * gap_ms
        text = f"{ms:,.6g}" + (" ms" if number == 0 else "")
        at = round(ms / end_ms * num_slices)
        ruler[at : at + len(text)] = text
    return "".join(ruler).rstrip()


def _round_up(ms: float) -> float:
    """To 1, 2 or 5 times a power of ten."""
    power = 10.0 ** np.floor(np.log10(ms))
    return float(next(factor * power for factor in (1, 2, 5, 10) if factor * power >= ms))


def _legend(steps: Sequence[Step], *, has_colors: bool) -> Text:
    names = [marks.kind.name for step in steps for marks in _computations_and_idle(step)]
    legend = Text()
    for name in dict.fromkeys(names):
        if name in _OP_OF:
            op = _OP_OF[name]
            sign = Text(" 0 ", _filled(op)) if has_colors else Text(op.value)
        else:
            sign = Text(_SIGN_OF[name] if _SIGN_OF[name] != " " else "blank", _DIM)
        legend.append_text(sign).append(f" {name}   ")
    return legend


def _computations_and_idle(step: Step) -> list[Marks]:
    """The ops first, in their order."""
    marks = [one for one in marks_of(step, Sizes()) if one.kind.lane == "compute"]
    return sorted(marks, key=lambda one: one.kind.name not in _OP_OF)


def _rows(step: Step, num_slices: int, end_ns: int, *, has_colors: bool) -> list[Text]:
    kinds = _computations_and_idle(step)
    seen = overview(kinds, step.num_ranks, 0, end_ns, num_slices)
    mostly = np.where(seen.shares.sum(axis=0) > 0, seen.shares.argmax(axis=0), len(kinds))
    rows = [_signs(kinds, mostly[rank], has_colors=has_colors) for rank in range(step.num_ranks)]
    has_stages = step.num_stages > step.num_ranks
    for number, marks in enumerate(kinds):
        if marks.kind.has_text:
            texts = _Labels(has_colors, has_stages).texts(marks)
            _put_labels(rows, marks, number, mostly, end_ns, texts)
        elif marks.kind.hatch:
            _put_labels(rows, marks, number, mostly, end_ns, marks.labels)
    return [_painted(row, kinds, mostly[n], has_colors) for n, row in enumerate(rows)]


class _Labels:
    """What is written at the start of a computation."""

    def __init__(self, has_colors: bool, has_stages: bool) -> None:
        self._has_colors, self._has_stages = has_colors, has_stages

    def texts(self, marks: Marks) -> list[str]:
        """The microbatch; without colours the action, its stage told where a rank has several."""
        op = _OP_OF[marks.kind.name]
        stages, microbatches = (marks.numbers[name][0] for name in ("stage", "microbatch"))
        if self._has_colors:
            return [str(microbatch) for microbatch in microbatches]
        return [
            f"{stage if self._has_stages else ''}{op.value}{microbatch}"
            for stage, microbatch in zip(stages, microbatches, strict=True)
        ]


def _signs(kinds: Sequence[Marks], mostly: Ints, *, has_colors: bool) -> list[str]:
    line = " " if has_colors else "─"
    signs = [line if m.kind.name in _OP_OF else _SIGN_OF[m.kind.name] for m in kinds]
    return [[*signs, " "][kind] for kind in mostly]


def _put_labels(
    rows: list[list[str]],
    marks: Marks,
    number: int,
    mostly: Ints,
    end_ns: int,
    texts: Sequence[str],
) -> None:
    """Into every bar: its text or, where there is no room, its op's letter if the text has one."""
    op = _OP_OF.get(marks.kind.name)
    num_slices = mostly.shape[1]
    first = np.round(marks.begin_ns / end_ns * num_slices).astype(np.int64)
    after = np.round((marks.begin_ns + marks.width_ns) / end_ns * num_slices).astype(np.int64)
    if op is None:
        first = np.maximum(first - 1, 0)  # it may have most of the slice that it begins in
    for rank, begin, end, text in zip(marks.rank, first, after, texts, strict=True):
        mine = np.flatnonzero(mostly[rank, begin:end] == number)
        if not len(mine):
            continue
        at = begin + int(mine[0])
        if len(text) < min(end, num_slices) - at + (0 if text.isdecimal() else 1):
            rows[rank][at : at + len(text)] = text
        elif op is not None and not text.isdecimal():
            rows[rank][at] = op.value


def _painted(row: list[str], kinds: Sequence[Marks], mostly: Ints, has_colors: bool) -> Text:
    if not has_colors:
        return Text("".join(row))
    styles = [*map(_style, kinds), Style.null()]
    text = Text()
    for sign, kind in zip(row, mostly, strict=True):
        text.append(sign, styles[kind])
    return text


def _style(marks: Marks) -> Style:
    """At fault is more likely what does not wait."""
    if marks.kind.name in _OP_OF:
        return _filled(_OP_OF[marks.kind.name])
    is_bold = marks.kind.hatch and marks.kind.name != OPEN_WORDS["waiting"]
    return _BOLD if is_bold else _DIM


def _filled(op: Op) -> Style:
    return Style(color=ink_on(OP_COLORS[op]), bgcolor=OP_COLORS[op])
