"""The change of a figure in words: its interval, its verdict, and the spans that moved."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ppbench.analysis.breakdown import DURATION, EVERYWHERE, Kind, Moved
from ppbench.display.fields import field_of
from ppbench.display.units import MISSING, MS, TOKENS_PER_S
from ppbench.judge.evidence import DiscountReason, Metric
from ppbench.judge.forecast import shown_by
from ppbench.judge.slowdowns import Cause, Slowdown, is_disturbed
from ppbench.judge.verdicts import Change, Verdict

BY_COMMIT = "so the order of actions or the host between them did"
"""Why only idle time changed between two commits."""
BY_AXIS = "not the time of any action"
"""The same between two values of a setting."""
_WORDS = {
    Kind.compute: ("per microbatch", "compute of stage {place}", "compute of all stages"),
    Kind.optimizer: ("per step", "optimizer of rank {place}", "optimizer of all ranks"),
    Kind.transfer: (
        "per message",
        "transfer from stage {place} to {target}",
        "transfers between all stages",
    ),
    Kind.collective: ("each", "collectives of stage {place}", "collectives of all stages"),
    Kind.waiting: ("per step", "waiting of rank {place}", "waiting of all ranks"),
}
"""Each kind of span has the unit of its time, its name at a place, and its name everywhere."""
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


def beyond_reach(changes: Sequence[Change], most: int) -> str:
    """Say that a change is decided `after more than 30 launches of each, if at all`, and why.

    What so many would show may be more than the resolution, whatever the difference is.
    """
    text = f"after more than {most} launches of each, if at all"
    shown = {change: shown_by(change, most) or 0.0 for change in changes}
    change = max(shown, key=lambda one: shown[one] / one.resolution)
    if shown[change] <= change.resolution:
        return text
    unit = "points" if change.difference is not None else "%"
    machine, asked = (f"{100 * share:.2g} {unit}" for share in (shown[change], change.resolution))
    return f"{text}: so many show {machine} on this machine, and the resolution is {asked}"


def change_text(metric: Metric, change: Change) -> str:
    """`-7.7 % [-8.1, -7.2]`; without an interval where the change was not tested."""
    tested, unit, less = change.ratio, " %", 1
    if metric.in_points:
        tested, unit, less = change.difference, " points", 0
    if tested is not None:
        ends = (tested.estimate, tested.low, tested.high)
        estimate, low, high = (_signed(end - less) for end in ends)
        return f"{estimate}{unit} [{low}, {high}]"
    if change.base is None or change.head is None:
        return "–"
    if metric.in_points:
        return f"{_signed(change.head - change.base)} points"
    return f"{_signed(change.head / change.base - 1)} %" if change.base else "–"


def _signed(fraction: float) -> str:
    return f"{fraction * 100:+z.1f}"


def discount_text(reason: str, slowdown: Slowdown) -> str:
    """Why a launch counts for less: `its reference ran 18 % slower than usual`."""
    slower = f"{slowdown.fraction:.0%}".replace("%", " %")
    why = {
        Cause.reference: f"its reference ran {slower} slower than usual",
        Cause.steal: f"the hypervisor took its time: {slower} slower than usual",
        Cause.quota: f"a quota withheld its time: {slower} slower than usual",
        Cause.cores: f"other processes took its cores: {slower} slower than usual",
        Cause.clock: f"the clock of its GPU was lowered: {slower} slower than usual",
    }[slowdown.cause]
    if reason != DiscountReason.apart:
        return why
    also = f", and {why}" if is_disturbed(slowdown) else ""
    return f"it lies far from the others{also}"


def moved_sentences(parts: Sequence[Moved], why: str = BY_COMMIT) -> list[str]:
    """Sentences on the spans that moved: causes by their share of a step, then idle time.

    That nothing but idle time moved is said only where the intervals of all causes exclude a change
    that matters: a test that finds nothing is no evidence.
    """
    causes = [part for part in parts if part.of.kind is not Kind.waiting]
    if not any(part.is_tested for part in parts):
        first = "not tested, which takes 3 launches per side; the largest differences:"
        return [first, *_cause_sentences(causes[:_MOST_NAMED], "differs")]
    moved = [part for part in causes if part.has_moved]
    waits = [part for part in parts if part.has_moved and part.of.kind is Kind.waiting]
    sentences = _cause_sentences(moved, "changed")
    unclear = [part for part in causes if part.may_have_moved]
    if not moved and unclear:
        largest = max(unclear, key=lambda part: abs(part.contribution_ns))
        change, ratio = largest.change, largest.change.ratio
        name = span_name(largest)
        if largest.of.op:
            name = name.replace("compute", largest.of.op, 1)
        by = change_text(DURATION, change)
        if ratio is not None and ratio.high >= _MANY_TIMES:
            by = f"x{ratio.estimate:.1f} [{ratio.low:.1f}, {ratio.high:.1f}]"
        sentences = [f"too noisy to name a cause; largest: {name}, {by}, {change.verdict}"]
        return sentences + ([f"idle time changed; {_idle_text(waits)}"] if waits else [])
    if not moved:
        sentences = ["no compute, optimizer, transfer or collective time changed"]
    if not waits:
        return sentences
    is_alone = not moved and why
    reason = f"only idle time changed, {why}" if is_alone else "idle time changed as a consequence"
    return [*sentences, f"{reason}; {_idle_text(waits)}"]


def _cause_sentences(causes: Sequence[Moved], verb: str) -> list[str]:
    """A sentence for the ops of each stage, by what they contribute.

    `compute of stage 2 changed: F 20.1 -> 21.7 ms per microbatch, +8.0 % [+7.8, +8.2]; ...`
    """
    groups: dict[tuple[Kind, int, int], list[Moved]] = {}
    for part in causes:
        groups.setdefault((part.of.kind, part.of.place, part.of.target), []).append(part)
    totals_ns = {key: sum(part.contribution_ns for part in groups[key]) for key in groups}
    sentences = []
    for key in sorted(groups, key=lambda key: -abs(totals_ns[key])):
        kind, place, _ = key
        is_everywhere = place == EVERYWHERE
        per, times = f" {_WORDS[Kind.waiting if is_everywhere else kind][0]}", list[str]()
        for part in groups[key]:
            base, head = ms_text(part.change.base), ms_text(part.change.head)
            op = f"{part.of.op} " if part.of.op else ""
            by = change_text(DURATION, part.change)
            times.append(f"{op}{base} -> {head} ms{per if not times else ''}, {by}")
        of = "all ranks'" if is_everywhere else "its rank's"
        whole = f"{totals_ns[key] / 1e6:+z,.2f} ms of {of} time per step"
        name = span_name(groups[key][0])
        sentences.append(f"{name} {verb}: {'; '.join(times)}; in total {whole}")
    return sentences


def span_name(part: Moved) -> str:
    _, here, everywhere = _WORDS[part.of.kind]
    if part.of.place == EVERYWHERE:
        return everywhere
    return here.format(place=part.of.place, target=part.of.target)


def ms_text(duration_ns: float | None) -> str:
    """Milliseconds with three digits, or all those before the point."""
    if duration_ns is None:
        return "–"
    ms = duration_ns / 1e6
    return f"{ms:,.1f}" if ms >= 10 else f"{ms:.3g}"


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
