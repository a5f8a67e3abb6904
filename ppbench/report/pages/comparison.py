"""The page of a comparison: what it says, its intervals, what moved, every figure.

It holds no chart of plotly, so it is small and opens at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from ppbench.analysis.breakdown import DURATION
from ppbench.comparison.lines import Breakdown, Comparison, Line
from ppbench.display.changes import (
    change_text,
    figure_text,
    moved_sentences,
    ms_text,
    span_name,
    verdict_text,
)
from ppbench.display.fields import field_of
from ppbench.display.units import MISSING, counted, percent
from ppbench.judge.verdicts import SPEED, Verdict
from ppbench.report.charts.forest import mark_of, scale_of
from ppbench.report.pages.provenance import COMPARISON, about_runs, environments
from ppbench.report.pages.templates import render

_HEADINGS = {"peak_memory_bytes": "peak memory"}
"""Metrics whose label says too little where no figure is beside it."""
_COLORS = {Verdict.faster: "better", Verdict.slower: "worse"}


@dataclass(frozen=True)
class ComparisonPage:
    """The content of a page."""

    title: str
    facts: Sequence[tuple[str, str]]  # what was compared, by its name
    sides: Sequence[tuple[str, str]]  # of each line, what base and head are called
    compared: Comparison
    breakdowns: Sequence[Breakdown]
    why: str  # what moved where only idle time did
    runs: pd.DataFrame  # whole rows of all that was compared
    command: str  # makes the page again


def render_comparison(page: ComparisonPage) -> str:
    """Return the page as HTML."""
    lines = page.compared.lines
    metrics = list(dict.fromkeys(line.metric for line in lines))
    scales = {m: scale_of(m, [line.change for line in lines if line.metric == m]) for m in metrics}
    series = page.compared.series()
    cells = {}  # a metric of a series: its mark and its words
    for line in lines:
        metric, change = line.metric, line.change
        base, head = (figure_text(metric, value) for value in (change.base, change.head))
        discounts = f", {len(line.discounted)} discounted" if line.discounted else ""
        cells[line.series, metric] = {
            "name": field_of(metric.name).heading,
            "change": change_text(metric, change),
            "verdict": verdict_text(metric, change.verdict),
            "color": _COLORS.get(change.verdict, str(change.verdict)),
            "mark": mark_of(metric, change, scales[metric]),
            "figures": f"{base} → {head}",
            "counts": f"{change.num_base} and {counted(change.num_head, 'launch')}{discounts}",
        }
    by_sides: dict[tuple[str, str], list[Line]] = {}
    for sides, line in zip(page.sides, lines, strict=True):
        if line.metric.name == SPEED:
            by_sides.setdefault(sides, []).append(line)
    panels = []
    for metric in metrics:
        left, right = (verdict_text(metric, end) for end in (Verdict.slower, Verdict.faster))
        if metric.higher_is_better is False:
            left, right = right, left
        heading = _HEADINGS.get(metric.name, field_of(metric.name).label)
        unit = "points" if metric.in_points else "%"
        panel = {"heading": heading, "unit": unit, "scale": scales[metric]}
        panels.append({**panel, "ends": (left, right)})
    has_machines = len({one.fingerprint for one in series}) > 1
    return render(
        "comparison.html",
        title=page.title,
        about=about_runs(COMPARISON, page.title, page.runs),
        facts=page.facts,
        answer=[_sentence(*sides, compared) for sides, compared in by_sides.items()],
        panels=panels,
        rows=[
            (
                one.text,
                one.fingerprint if has_machines else "",
                [cells.get((one, metric)) for metric in metrics],
            )
            for one in series
        ],
        notes=page.compared.notes,
        parts=[_part(breakdown, page) for breakdown in page.breakdowns],
        environments=environments(page.runs),
        command=page.command,
    )


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
            known = f"known within {percent(line.change.within)}"
            return f"Open: {pair}: {change} tokens/s, {known}; measure more launches."
        return f"Open: {pair} has too few launches for a verdict ({change} tokens/s)."
    counts = []
    for verdict in Verdict:
        some = [line for line in lines if line.change.verdict is verdict]
        if some:
            ratios = [100 * (line.change.ratio.estimate - 1) for line in some if line.change.ratio]
            spread = ""
            if ratios and verdict in _COLORS:
                ends = dict.fromkeys(f"{end:+.1f}" for end in (min(ratios), max(ratios)))
                spread = f" ({' to '.join(ends)} %)"
            counts.append(f"{verdict} in {len(some)}{spread}")
    return f"{head} against {base} in {counted(len(lines), 'case')}: {', '.join(counts)}."


def _part(breakdown: Breakdown, page: ComparisonPage) -> dict[str, object]:
    """Return the spans of a series that moved, and the command that draws both sides."""
    ids = []  # the launch of each side whose throughput is the median, or next to it
    pairing = page.compared.pairings[breakdown.series]
    for runs in (pairing.base, pairing.head):
        known = runs.dropna(subset=[SPEED]).sort_values([SPEED, "run_id"])
        ids += [str(run_id) for run_id in known["run_id"].iloc[(len(known) - 1) // 2 :][:1]]
    return {
        "name": breakdown.series.text,
        "sentences": moved_sentences(breakdown.moved, page.why),
        "rows": [
            (
                span_name(part),
                part.of.op or MISSING,
                ms_text(part.change.base),
                ms_text(part.change.head),
                change_text(DURATION, part.change),
                f"{part.contribution_ns / 1e6:+z,.2f}",
            )
            for part in breakdown.moved
            if part.has_moved
        ],
        "command": f"ppbench timeline {' '.join(ids)}" if ids else "",
    }
