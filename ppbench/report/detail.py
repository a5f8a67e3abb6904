"""The marks of a timeline as packed columns, from which a page takes the bars that are in view.

A step of a million spans has some two million marks. As JSON they would be hundreds of megabytes;
here each column is differences or plain integers, cut into planes of one byte each (all lowest
bytes first, then all next ones), which deflate to a few megabytes:

    begin    1000  1010  1021   ->  differences  1000 10 11  ->  planes  [232 10 11] [3 0 0]

Times are rounded to `quantumNs`, a millionth of the step or finer. `gantt.js` is the other end.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppbench.report.marks import Floats, Ints, Marks
from ppbench.report.units import NS_PER_MS

_FINEST, _STEPS_SHOWN = 1, 1_000_000
_COARSEST = 1000  # hovering tells a thousandth of a ms


@dataclass(frozen=True)
class Trace:
    """The marks that one trace of the figure draws. `lane` is added to `row` to find its bars."""

    number: int
    marks: list[Marks]
    row: Floats
    lane: float
    colors: list[str]
    shade: Ints  # which of the colours
    inks: list[str]  # of the text inside, by colour; empty where there is none


@dataclass(frozen=True)
class Detail:
    """Packed columns, and the name by which a figure asks its page for them."""

    columns: bytes

    @property
    def name(self) -> str:
        return f"columns-{hashlib.sha256(self.columns).hexdigest()[:12]}"


def packed(traces: Sequence[Trace], end_ns: int) -> tuple[dict[str, object], bytes]:
    """What the page must know to read the columns, and the columns."""
    quantum_ns = _quantum_ns(end_ns)
    buffer = bytearray()
    layouts = [_pack(trace, quantum_ns, buffer) for trace in traces]
    return {"quantumMs": quantum_ns / NS_PER_MS, "traces": layouts}, bytes(buffer)


def _quantum_ns(end_ns: int) -> int:
    quantum = _FINEST
    while quantum < _COARSEST and quantum * 10 * _STEPS_SHOWN <= end_ns:
        quantum *= 10
    return quantum


def _pack(trace: Trace, quantum_ns: int, buffer: bytearray) -> dict[str, object]:
    marks = trace.marks
    begin = _rounded(np.concatenate([m.begin_ns for m in marks]), quantum_ns)
    order = np.lexsort((begin, trace.row))
    row, begin = trace.row[order], begin[order]
    is_new = np.r_[True, row[1:] != row[:-1]]
    firsts = np.flatnonzero(is_new)
    delta = np.where(is_new, begin, np.diff(begin, prepend=0))
    width = _rounded(np.concatenate([m.width_ns for m in marks]), quantum_ns)[order]

    def column(values: Ints) -> dict[str, int]:
        return _column(values, buffer)

    layout: dict[str, object] = {
        "trace": trace.number,
        "count": len(begin),
        "rows": [[float(row[at]), int(at)] for at in firsts],
        "lane": trace.lane,
        "begin": column(delta),
        "width": column(width),
        "numbers": [_numbers(marks, name, order, quantum_ns, buffer) for name in marks[0].numbers],
        "hasText": marks[0].kind.has_text,
    }
    if len(trace.colors) > 1:
        shade = column(trace.shade[order])
        layout |= {"shade": shade, "colors": trace.colors, "inks": trace.inks}
    if marks[0].said is not None:
        layout |= {"said": _said(marks, order, quantum_ns, buffer)}
    return layout


def _numbers(
    marks: list[Marks], name: str, order: Ints, quantum_ns: int, buffer: bytearray
) -> dict[str, object]:
    values = np.concatenate([m.numbers[name][0] for m in marks])[order]
    factor = marks[0].numbers[name][1]
    if name.endswith("_ns"):
        values, factor = _rounded(values, quantum_ns), factor * quantum_ns
    return {"name": name, "factor": factor, **_column(values, buffer)}


def _said(marks: list[Marks], order: Ints, quantum_ns: int, buffer: bytearray) -> dict[str, object]:
    words: list[str] = []
    codes, amounts = [], []
    for said in (m.said for m in marks):
        assert said is not None  # all marks of a kind say something, or none
        codes.append(said.codes + len(words))
        amounts.append(said.amount_ns)
        words += said.words
    amount = _rounded(np.concatenate(amounts)[order], quantum_ns)
    return {
        "words": words,
        "codes": _column(np.concatenate(codes)[order], buffer),
        "amount": _column(amount, buffer),
    }


def _rounded(values_ns: Ints, quantum_ns: int) -> Ints:
    return (values_ns + quantum_ns // 2) // quantum_ns


def _column(values: Ints, buffer: bytearray) -> dict[str, int]:
    """Append the values less their least, a plane per byte; returns where and how to read them."""
    least = int(values.min())
    rest = (values - least).astype("<u8")
    num_planes = (int(rest.max()).bit_length() + 7) // 8
    planes = rest.view(np.uint8).reshape(-1, 8).T[:num_planes]
    place = len(buffer)
    buffer += np.ascontiguousarray(planes).tobytes()
    return {"at": place, "planes": num_planes, "least": least}
