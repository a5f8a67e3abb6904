"""The change of a figure in words: its interval, its verdict, and the spans that moved."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from ppbench.analysis.breakdown import DURATION, EVERYWHERE, Kind, Moved
from ppbench.display.fields import field_of
from ppbench.display.units import MISSING, MS, TOKENS_PER_S
from ppbench.statistics.significance import Ratio
from ppbench.statistics.slowdowns import Cause, Slowdown, is_disturbed
from ppbench.statistics.verdicts import Change, DiscountReason, Metric, Verdict

BY_COMMIT = "so the order of actions or the host between them did"
"""Why only idle time changed between two commits."""
BY_AXIS = "not the time of any action"
"""The same between two values of a setting."""
_PER = {
    Kind.compute: "per microbatch",
    Kind.optimizer: "per step",
    Kind.transfer: "per message",
    Kind.collective: "each",
    Kind.waiting: "per step",
}
_EVERYWHERE = {
    Kind.compute: "compute of all stages",
    Kind.optimizer: "optimizer of all ranks",
    Kind.transfer: "transfers between all stages",
    Kind.collective: "collectives of all stages",
    Kind.waiting: "waiting of all ranks",
}
_MOST_NAMED = 6
_MANY_TIMES = 2  # from which on a change is a factor, no percentage
_SPEEDS = (TOKENS_PER_S, MS)  # units of figures that are faster or slower
_AMOUNTS = {Verdict.faster: "less", Verdict.slower: "more"}


def figure_text(metric: Metric, value: float | None) -> str:
    return MISSING if value is None else field_of(metric.name).cell(value)


def verdict_text(metric: Metric, verdict: Verdict) -> str:
    """Return the verdict in words that fit the metric: a bubble is `more`, not `slower`."""
    is_speed = field_of(metric.name).unit in _SPEEDS
    return verdict if is_speed else _AMOUNTS.get(verdict, verdict)


def change_text(metric: Metric, change: Change) -> str:
    """`-7.7 % [-8.1, -7.2]`; without an interval where the change was not tested."""
    if metric.in_points and change.difference is not None:
        return _with_interval(change.difference, " points", lambda value: value)
    if change.ratio is not None and not metric.in_points:
        return _with_interval(change.ratio, " %", lambda value: value - 1)
    if change.base is None or change.head is None:
        return "–"
    if metric.in_points:
        return f"{_signed(change.head - change.base)} points"
    return f"{_signed(change.head / change.base - 1)} %" if change.base else "–"


def _with_interval(ratio: Ratio, unit: str, less: Callable[[float], float]) -> str:
    estimate, low, high = (_signed(less(end)) for end in (ratio.estimate, ratio.low, ratio.high))
    return f"{estimate}{unit} [{low}, {high}]"


def _signed(fraction: float) -> str:
    return f"{fraction * 100:+z.1f}"


def discount_text(reason: str, slowdown: Slowdown) -> str:
    """Why a launch counts for less: `its reference ran 18 % slower than usual`."""
    why = slowdown_text(slowdown)
    if reason != DiscountReason.apart:
        return why
    also = f", and {why}" if is_disturbed(slowdown) else ""
    return f"it lies far from the others, on the slow side{also}"


def slowdown_text(slowdown: Slowdown) -> str:
    """`its reference ran 18 % slower than usual`."""
    slower = f"{slowdown.fraction:.0%}".replace("%", " %")
    return {
        Cause.reference: f"its reference ran {slower} slower than usual",
        Cause.steal: f"the hypervisor took its time: {slower} slower than usual",
        Cause.quota: f"a quota withheld its time: {slower} slower than usual",
        Cause.cores: f"other processes took its cores: {slower} slower than usual",
        Cause.clock: f"the clock of its GPU was lowered: {slower} slower than usual",
    }[slowdown.cause]


def moved_sentences(parts: Sequence[Moved], why: str = BY_COMMIT) -> list[str]:
    """Sentences on the spans that moved: causes by their share of a step, then idle time.

    That nothing but idle time moved is said only where the intervals of all causes exclude a change
    that matters: a test that finds nothing is no evidence.
    """
    moved = [part for part in parts if part.has_moved]
    causes = [part for part in moved if part.of.kind is not Kind.waiting]
    waits = [part for part in moved if part.of.kind is Kind.waiting]
    if not any(part.is_tested for part in parts):
        groups = _by_place(
            [part for part in parts if part.of.kind is not Kind.waiting][:_MOST_NAMED]
        )
        first = "not tested, which takes 3 launches per side; the largest differences:"
        return [first, *(_cause_sentence(group, "differs") for group in groups)]
    sentences = [_cause_sentence(group) for group in _by_place(causes)]
    unclear = [part for part in parts if part.may_have_moved and part.of.kind is not Kind.waiting]
    if not causes and unclear:
        largest = max(unclear, key=lambda part: abs(part.contribution_ns))
        sentences = [f"too noisy to name a cause; largest: {_unclear_text(largest)}"]
        return sentences + ([f"idle time changed; {_idle_text(waits)}"] if waits else [])
    if not causes:
        sentences = ["no compute, optimizer, transfer or collective time changed"]
    if not waits:
        return sentences
    is_alone = not causes and why
    reason = f"only idle time changed, {why}" if is_alone else "idle time changed as a consequence"
    return [*sentences, f"{reason}; {_idle_text(waits)}"]


def _by_place(causes: Sequence[Moved]) -> list[list[Moved]]:
    """Group the ops of a stage, and sort the groups by their contribution."""
    groups: dict[tuple[Kind, int, int], list[Moved]] = {}
    for part in causes:
        groups.setdefault((part.of.kind, part.of.place, part.of.target), []).append(part)
    return sorted(
        groups.values(), key=lambda group: -abs(sum(part.contribution_ns for part in group))
    )


def _cause_sentence(group: Sequence[Moved], verb: str = "changed") -> str:
    """`compute of stage 2 changed: F 20.1 -> 21.7 ms per microbatch, +8.0 % [+7.8, +8.2]; ...`."""
    total_ms = sum(part.contribution_ns for part in group) / 1e6
    parts = [_times(part, is_first=index == 0) for index, part in enumerate(group)]
    of = "all ranks'" if group[0].of.place == EVERYWHERE else "its rank's"
    whole = f"{total_ms:+z,.2f} ms of {of} time per step"
    return f"{span_name(group[0])} {verb}: {'; '.join(parts)}; in total {whole}"


def span_name(part: Moved) -> str:
    if part.of.place == EVERYWHERE:
        return _EVERYWHERE[part.of.kind]
    match part.of.kind:
        case Kind.compute:
            return f"compute of stage {part.of.place}"
        case Kind.optimizer:
            return f"optimizer of rank {part.of.place}"
        case Kind.transfer:
            return f"transfer from stage {part.of.place} to {part.of.target}"
        case Kind.collective:
            return f"collectives of stage {part.of.place}"
        case Kind.waiting:
            return f"waiting of rank {part.of.place}"


def _times(part: Moved, *, is_first: bool) -> str:
    change, op = part.change, f"{part.of.op} " if part.of.op else ""
    kind = Kind.waiting if part.of.place == EVERYWHERE else part.of.kind
    per = f" {_PER[kind]}" if is_first else ""
    times = f"{op}{ms_text(change.base)} -> {ms_text(change.head)} ms{per}"
    return f"{times}, {change_text(DURATION, change)}"


def ms_text(duration_ns: float | None) -> str:
    """Milliseconds with three digits, or all those before the point."""
    if duration_ns is None:
        return "–"
    ms = duration_ns / 1e6
    return f"{ms:,.1f}" if ms >= 10 else f"{ms:.3g}"


def _unclear_text(part: Moved) -> str:
    """`B of stage 1, x2.6 [1.4, 4.7], unclear`."""
    change, op = part.change, part.of.op
    name = span_name(part).replace("compute", op, 1) if op else span_name(part)
    ratio = change.ratio
    if ratio is None or ratio.high < _MANY_TIMES:
        return f"{name}, {change_text(DURATION, change)}, {change.verdict}"
    times = f"x{ratio.estimate:.1f} [{ratio.low:.1f}, {ratio.high:.1f}]"
    return f"{name}, {times}, {change.verdict}"


def _idle_text(waits: Sequence[Moved]) -> str:
    ordered = sorted(waits, key=lambda part: part.of.place)
    ranks = (
        "all ranks" if part.of.place == EVERYWHERE else f"rank {part.of.place}" for part in ordered
    )
    times = (
        f"{rank} {ms_text(part.change.base)} -> {ms_text(part.change.head)}"
        for rank, part in zip(ranks, ordered, strict=True)
    )
    idle = f"idle ms per step: {', '.join(itertools.islice(times, _MOST_NAMED))}"
    if len(waits) > _MOST_NAMED:
        idle += f" and {len(waits) - _MOST_NAMED} more"
    return idle
