"""A comparison tells of throughput in sentences, one for each pair of sides or values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ppbench.comparison.lines import COMMIT, Comparison, Line
from ppbench.display.cases import axis_text
from ppbench.display.changes import change_text
from ppbench.display.units import counted, percent
from ppbench.judge.estimates import Doubt
from ppbench.judge.verdicts import SPEED, Verdict


def sentences(comparison: Comparison) -> Iterator[str]:
    """Say for each pair of sides whether one is faster, and by how much."""
    axis, sides = comparison.axis, dict[tuple[str, str], list[Line]]()
    for line in comparison.lines:
        if line.metric.name == SPEED:
            ends = line.series.base_value, line.series.head_value
            base, head = (axis_text(axis, value) for value in ends)
            if axis == COMMIT:
                base, head = comparison.base.name, comparison.head.name
            sides.setdefault((base, head), []).append(line)
    for (base, head), lines in sides.items():
        yield _sentence(base, head, lines)


def _sentence(base: str, head: str, lines: Sequence[Line]) -> str:
    """`1f1b against afab in 4 cases: faster in 3 (+1.2 to +4.0 %), open in 1.`."""
    if len(lines) == 1:
        (line,) = lines
        change = change_text(line.metric, line.change)
        pair = f"{head} against {base}"
        match line.change.verdict:
            case Verdict.faster | Verdict.slower:
                return f"{head} is {line.change.verdict} than {base}: {change} tokens/s."
            case Verdict.same:
                return f"{head} is as fast as {base}: {change} tokens/s."
        if line.change.has_interval:
            known = f"known within {percent(line.change.within)}; measure more launches"
            if line.change.doubt is Doubt.cautioned:
                known = "a caution forbids a verdict"
            return f"Open: {pair}: {change} tokens/s, {known}."
        return f"Open: {pair} has too few launches for a verdict ({change} tokens/s)."
    counts = []
    for verdict in Verdict:
        some = [line for line in lines if line.change.verdict is verdict]
        if some:
            ratios = [100 * (line.change.ratio.estimate - 1) for line in some if line.change.ratio]
            spread = ""
            if ratios and verdict.is_claim:
                ends = dict.fromkeys(f"{end:+.1f}" for end in (min(ratios), max(ratios)))
                spread = f" ({' to '.join(ends)} %)"
            counts.append(f"{verdict} in {len(some)}{spread}")
    return f"{head} against {base} in {counted(len(lines), 'case')}: {', '.join(counts)}."
