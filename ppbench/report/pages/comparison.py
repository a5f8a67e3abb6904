"""The page of a comparison: what it says, its intervals, what moved, every figure.

It holds no chart of plotly, so it is small and opens at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from ppbench.analysis.breakdown import DURATION
from ppbench.comparison.axes import key_of
from ppbench.comparison.lines import COMMIT, Breakdown, Comparison, Line
from ppbench.display.cases import axis_text
from ppbench.display.changes import (
    BY_AXIS,
    BY_COMMIT,
    change_text,
    figure_text,
    moved_sentences,
    ms_text,
    span_name,
    verdict_text,
)
from ppbench.display.commands import command as command_of
from ppbench.display.fields import field_of
from ppbench.display.metrics import METRICS
from ppbench.display.units import MISSING, counted, percent
from ppbench.judge.evidence import Metric
from ppbench.judge.verdicts import SPEED, Change, Verdict
from ppbench.report.charts.forest import Scale, mark_of, scale_of
from ppbench.report.pages.provenance import COMPARISON, about_runs, environments
from ppbench.report.pages.templates import render

_HEADINGS = {"peak_memory_bytes": "peak memory"}
"""Metrics whose label says too little where no figure is beside it."""
_COLORS = {Verdict.faster: "better", Verdict.slower: "worse"}


def render_comparison(compared: Comparison, breakdowns: Sequence[Breakdown], command: str) -> str:
    """Return the page as HTML; `command` makes it again."""
    lines, axis, is_commit = compared.lines, compared.axis, compared.axis == COMMIT
    stores = {side.store.folder: side.store for side in (compared.base, compared.head)}
    tables = [store.table("runs", compared.run_ids) for store in stores.values()]
    runs = pd.concat(tables).drop_duplicates("run_id").sort_values("run_id")
    values = ", ".join(axis_text(axis, value) for value in compared.axis_values)
    title = f"Along {key_of(axis)}: {values}"
    if is_commit:
        title = f"{compared.base.name} and {compared.head.name}"
    metrics = list(dict.fromkeys(line.metric for line in lines))
    scales = {m: scale_of(m, [line.change for line in lines if line.metric == m]) for m in metrics}
    series = compared.series()
    cells = {}  # a metric of a series: its mark and its words
    for line in lines:
        metric, change = line.metric, line.change
        base, head = (figure_text(metric, value) for value in (change.base, change.head))
        discounts = f", {len(line.discounted)} discounted" if line.discounted else ""
        cells[line.series, metric] = {
            **cell_of(metric, change, scales[metric]),
            "name": field_of(metric.name).heading,
            "figures": f"{base} → {head}",
            "counts": f"{change.num_base} and {counted(change.num_head, 'launch')}{discounts}",
        }
    by_sides: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line.metric.name == SPEED:
            of_line = (line.series.base_value, line.series.head_value)
            base, head = (axis_text(axis, value) for value in of_line)
            sides = (compared.base.name, compared.head.name) if is_commit else (base, head)
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
        title=title,
        about=about_runs(COMPARISON, title, runs),
        facts=facts_of(compared),
        answer=[_sentence(*sides, own) for sides, own in by_sides.items()],
        panels=panels,
        rows=[
            (
                one.text,
                one.fingerprint if has_machines else "",
                [cells.get((one, metric)) for metric in metrics],
            )
            for one in series
        ],
        notes=compared.notes,
        parts=[_part(breakdown, compared) for breakdown in breakdowns],
        environments=environments(runs),
        command=command,
    )


def cell_of(metric: Metric, change: Change, scale: Scale) -> dict[str, object]:
    """Return a change in words, and its mark on the scale of its strips."""
    return {
        "change": change_text(metric, change),
        "verdict": verdict_text(metric, change.verdict),
        "color": _COLORS.get(change.verdict, str(change.verdict)),
        "mark": mark_of(metric, change, scale),
    }


def pairs_of(
    names: Sequence[str], changes: Mapping[tuple[int, int], Change], arms: Sequence[int]
) -> dict[str, object] | None:
    """Return how the first of these names compares with each other; None where nothing is known.

    `arms` are the numbers that `changes` has for the names.
    """
    metric = METRICS[SPEED]
    known = [
        (name, changes[arms[0], arm])
        for name, arm in zip(names[1:], arms[1:], strict=True)
        if (arms[0], arm) in changes
    ]
    if not any(change.has_interval for _, change in known):
        return None
    scale = scale_of(metric, [change for _, change in known])
    panel = {"scale": scale, "ends": ("slower", "faster")}
    rows = [(name, cell_of(metric, change, scale)) for name, change in known]
    return {"first": names[0], "panel": panel, "rows": rows}


def facts_of(compared: Comparison) -> list[tuple[str, str]]:
    """Return what is compared and how many runs of it, by its name."""
    axis = compared.axis
    if axis == COMMIT:
        facts = []
        for word, side in (("base", compared.base), ("head", compared.head)):
            failed = f", {len(side.failed)} failed" if len(side.failed) else ""
            facts.append((word, f"{side.title}, {counted(len(side.runs), 'run')}{failed}"))
        only = compared.series()
        return [*facts, ("case", only[0].text)] if len(only) == 1 else facts
    values = ", ".join(
        f"{axis_text(axis, value)}{' (base)' if value == compared.base_value else ''}"
        for value in compared.axis_values
    )
    changes = [line.change for line in compared.lines]
    nums = {num for change in changes for num in (change.num_base, change.num_head)}
    each = f", {counted(min(nums), 'launch')} of each case" if len(nums) == 1 else ""
    facts = [("across", f"{key_of(axis)}: {values}"), ("runs", f"{compared.base.title}{each}")]
    return [*facts, ("all", compared.shared)] if compared.shared else facts


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


def _part(breakdown: Breakdown, compared: Comparison) -> dict[str, object]:
    """Return the spans of a series that moved, and the command that draws both sides."""
    folder = compared.base.store.folder
    ids = []  # the launch of each side whose throughput is the median, or next to it
    for runs in (breakdown.series.base, breakdown.series.head):
        known = runs.dropna(subset=[SPEED]).sort_values([SPEED, "run_id"])
        ids += [str(run_id) for run_id in known["run_id"].iloc[(len(known) - 1) // 2 :][:1]]
    return {
        "name": breakdown.series.text,
        "sentences": moved_sentences(breakdown.moved, why_idle(compared)),
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
        "command": command_of("timeline", *ids, results=folder) if ids else "",
    }


def why_idle(compared: Comparison) -> str:
    """Why only idle time changed, if it did."""
    return BY_COMMIT if compared.axis == COMMIT else BY_AXIS
