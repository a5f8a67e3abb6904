"""Comparisons in words: figures in their units, verdicts, sentences about what moved.

Apart from what prints them, so that a terminal, a pull request and a report say the same.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ppbench.analysis.breakdown import DURATION, Kind, Moved
from ppbench.analysis.compare import Change, Metric, Verdict
from ppbench.analysis.ratios import Ratio
from ppbench.tracking.comparison import Breakdown

_PER = {
    Kind.compute: "a microbatch",
    Kind.optimizer: "a step",
    Kind.transfer: "a message",
    Kind.waiting: "a step",
}
_OF_LESS = {Verdict.faster: "less", Verdict.slower: "more"}
_MOST_TOLD = 6


@dataclass(frozen=True)
class Unit:
    """How people see a metric."""

    heading: str
    pattern: str
    factor: float
    is_speed: bool = False  # faster and slower are words for it


UNITS = {
    "tokens_per_s": Unit("tokens/s", "{:,.0f}", 1.0, is_speed=True),
    "bubble_fraction": Unit("bubble", "{:.1f} %", 100.0),
    "peak_memory_bytes": Unit("peak MiB", "{:,.1f}", 1 / 2**20),
    "step_ns": Unit("step ms", "{:,.2f}", 1e-6, is_speed=True),
}


def figure_text(metric: Metric, value: float | None) -> str:
    unit = UNITS[metric.name]
    pattern = re.sub(r"\{:", "{:z", unit.pattern)  # no -0.0
    return "–" if value is None else pattern.format(value * unit.factor)


def verdict_text(metric: Metric, verdict: Verdict) -> str:
    """A bubble is no slower than another: it is more."""
    return verdict if UNITS[metric.name].is_speed else _OF_LESS.get(verdict, verdict)


def change_text(metric: Metric, change: Change) -> str:
    """`-7.7 % [-8.1, -7.2]`; of what was not tested the medians' change alone."""
    if metric.in_points and change.difference is not None:
        return _with_interval(change.difference, " points", lambda value: value)
    if change.ratio is not None and not metric.in_points:
        return ratio_text(change.ratio)
    if change.base is None or change.head is None:
        return "–"
    if metric.in_points:
        return f"{_signed(change.head - change.base)} points"
    return f"{_signed(change.head / change.base - 1)} %" if change.base else "–"


def ratio_text(ratio: Ratio) -> str:
    """As a change: `+8.0 % [+7.8, +8.2]`."""
    return _with_interval(ratio, " %", lambda value: value - 1)


def _with_interval(ratio: Ratio, unit: str, less: Callable[[float], float]) -> str:
    estimate, low, high = (_signed(less(one)) for one in (ratio.estimate, ratio.low, ratio.high))
    return f"{estimate}{unit} [{low}, {high}]"


def _signed(fraction: float) -> str:
    return f"{fraction * 100:+z.1f}"


def moved_sentences(found: Breakdown) -> list[str]:
    """What moved in a case: causes by what they add to a step, then who waits for them."""
    moved = [one for one in found.moved if one.has_moved]
    causes = [one for one in moved if one.of.kind is not Kind.waiting]
    waits = [one for one in moved if one.of.kind is Kind.waiting]
    if not any(one.is_tested for one in found.moved):
        return _untested(found.moved)
    told = [_sentence(group) for group in _by_place(causes)]
    if not causes:
        told = ["no computation, optimizer or transfer moved beyond chance and 1 %"]
    return told + ([_of_waiting(waits, has_causes=bool(causes))] if waits else [])


def _untested(moved: Sequence[Moved]) -> list[str]:
    causes = [one for one in moved if one.of.kind is not Kind.waiting]
    told = [_sentence(group, "differs") for group in _by_place(causes[:_MOST_TOLD])]
    return ["untested, since that takes 3 launches a side; the largest differences:", *told]


def _by_place(causes: Sequence[Moved]) -> list[list[Moved]]:
    """Ops of one stage together, in the order of what they contribute."""
    groups: dict[tuple[Kind, int, int], list[Moved]] = {}
    for one in causes:
        groups.setdefault((one.of.kind, one.of.place, one.of.target), []).append(one)
    return sorted(groups.values(), key=lambda of: -abs(sum(one.contribution_ns for one in of)))


def _sentence(group: Sequence[Moved], verb: str = "moved") -> str:
    """`compute of stage 2 moved: F 20.1 -> 21.7 ms a microbatch, +8.0 % [+7.8, +8.2]; ...`."""
    total_ms = sum(one.contribution_ns for one in group) / 1e6
    parts = [_times(one, is_first=index == 0) for index, one in enumerate(group)]
    whole = f"{total_ms:+z,.2f} ms of its rank's time in a step"
    return f"{_name(group[0])} {verb}: {'; '.join(parts)}; in all {whole}"


def _name(one: Moved) -> str:
    match one.of.kind:
        case Kind.compute:
            return f"compute of stage {one.of.place}"
        case Kind.optimizer:
            return f"optimizer of rank {one.of.place}"
        case Kind.transfer:
            return f"transfer from stage {one.of.place} to {one.of.target}"
        case Kind.waiting:
            return f"waiting of rank {one.of.place}"


def _times(one: Moved, *, is_first: bool) -> str:
    change, op = one.change, f"{one.of.op} " if one.of.op else ""
    per = f" {_PER[one.of.kind]}" if is_first else ""
    times = f"{op}{_ms(change.base)} -> {_ms(change.head)} ms{per}"
    return f"{times}, {change_text(DURATION, change)}"


def _ms(duration_ns: float | None) -> str:
    """Three digits; all of those before the point."""
    if duration_ns is None:
        return "–"
    ms = duration_ns / 1e6
    return f"{ms:,.1f}" if ms >= 10 else f"{ms:.3g}"


def _of_waiting(waits: Sequence[Moved], *, has_causes: bool) -> str:
    ordered = sorted(waits, key=lambda one: one.of.place)
    times = (
        f"rank {one.of.place} {_ms(one.change.base)} -> {_ms(one.change.head)}" for one in ordered
    )
    told = f"idle ms a step: {', '.join(itertools.islice(times, _MOST_TOLD))}"
    if len(waits) > _MOST_TOLD:
        told += f" and {len(waits) - _MOST_TOLD} more"
    if has_causes:
        return f"waiting followed, as it does from any of these; {told}"
    return f"only waiting moved, so the order or the host between actions has changed; {told}"
