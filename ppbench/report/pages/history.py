"""The page of a metric over commits: a chart per series, and a panel of details per commit.

The page is one HTML file with the same bytes for the same runs. Panels are embedded as data, which
`history.js` renders after a click: hundreds of panels as HTML would load slowly. Timelines are
embedded up to a few megabytes, those of the newest changes first; for all other commits the panel
names the command that draws them.
"""

from __future__ import annotations

import contextlib
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ppbench.display.changes import discount_text
from ppbench.display.commands import from_anywhere
from ppbench.display.fields import figure
from ppbench.display.units import counted
from ppbench.errors import StoreError, UsageError
from ppbench.judge.evidence import Metric
from ppbench.report.charts.history import (
    SHORT,
    difference_text,
    failure_text,
    history_chart,
    interval_text,
    size_text,
)
from ppbench.report.pages.provenance import HISTORY, about_runs
from ppbench.report.pages.templates import render
from ppbench.report.timeline.timelines import Timeline, timeline
from ppbench.statistics.change_points import Step
from ppbench.statistics.series import Point, Series, State
from ppbench.store import Store

MOST_PAIRS = 24
MOST_BYTES = 6_000_000  # of packed timelines
_REV = 12  # characters of a hash in a command
Facts = list[tuple[str, str]]
Pair = tuple[tuple[str, str], ...]
"""The id and the name of each of two runs (or one) whose timelines share a time axis."""


@dataclass(frozen=True)
class HistoryPage:
    """The content of a history page."""

    metric: Metric
    series: Sequence[Series]
    notes: Sequence[str]
    line: str  # the order of the commits, in words
    command: str  # reproduces the page
    options: str = ""  # appended to the commands on the page, such as `--results DIR`


def render_history(store: Store, page: HistoryPage) -> str:
    """Return the page as HTML. Timelines that are not in the store are left out."""
    metric, title = page.metric, f"{page.metric.name} over commits"
    every = page.series
    points = [point for series in every for point in series.points]
    run_ids = [launch.run_id for point in points for launch in point.launches]
    num_cases = len({series.case_id for series in every})
    days = sorted(point.author_date[:10] for point in points if point.author_date)
    subtitle = [
        counted(len({point.commit for point in points}), "commit"),
        " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "",
        page.line,
        f"{len(every)} series of {counted(num_cases, 'case')}",
    ]
    newest = [series.points[-1].commit for series in every if series.points]
    states = Counter(series.state for series in every)
    embedded, num_left_out = _embedded(store, every)
    return render(
        "history.html",
        title=title,
        about=replace(
            about_runs(HISTORY, title, store.table("runs", [max(run_ids)])),
            num_runs=len(run_ids),
            num_cases=num_cases,
            commit=newest[0][:10] if newest else "",
        ),
        subtitle=" · ".join(part for part in subtitle if part),
        answer=_answer(page, states),
        notes=page.notes,
        series=[
            {
                "line": series,
                "level": series.current and figure(metric.name, series.current.estimate),
                "last_change": (
                    size_text(series.changes.steps[-1], metric) if series.changes.steps else ""
                ),
                "figure": history_chart(series),
                "data": _panels(series, page, embedded),
            }
            for series in every
        ],
        states=[(state.value, states[state]) for state in State if state in states],
        timelines=list(embedded.values()),
        num_left_out=num_left_out,
        has_direction=metric.higher_is_better is not None,
        command=page.command,
    )


def _answer(page: HistoryPage, states: Mapping[State, int]) -> list[str]:
    """Summarise the newest change."""
    changed = [series for series in page.series if series.changes.steps]
    if not changed:
        unclear = states[State.unclear]
        if not states[State.steady] + unclear:
            return []
        rest = f" In {unclear} of the series, noise may hide one." if unclear else ""
        return [f"No change was found.{rest}"]
    latest = max(changed, key=lambda series: _date_of(series, series.changes.steps[-1]))
    step = latest.changes.steps[-1]
    many = f"{len(changed)} of {len(page.series)} series changed. " if len(page.series) > 1 else ""
    where = latest.points[step.first]
    subject = f", “{where.subject}”" if where.subject else ""
    sure = "with" if step.num_commits == 1 else "most likely with"
    change = f"{size_text(step, page.metric)} {sure} {where.commit[:SHORT]}{subject}"
    return [f"{many}The newest change: {change}, in {latest.case}."]


def _date_of(series: Series, step: Step) -> str:
    return series.points[step.first].author_date or ""


def _panels(
    series: Series, page: HistoryPage, embedded: Mapping[Pair, tuple[str, Timeline]]
) -> dict[str, dict[str, object]]:
    """Return the details that a click opens, by the index of a commit, or by `change N`."""
    metric = page.metric

    def panel(
        title: str,
        point: Point,
        sentences: list[str],
        facts: Facts,
        commands: Facts,
        pair: Pair = (),
        *,
        has_failures: bool = True,
    ) -> dict[str, object]:
        name, line = embedded.get(pair, (None, None))
        commands = [("commit", point.commit), *commands]
        if pair:
            what = "both timelines" if len(pair) > 1 else "its timeline"
            commands.append((what, f"ppbench timeline {' '.join(run_id for run_id, _ in pair)}"))
        if point.failures and has_failures:
            commands.append(("why it did not run", f"ppbench show {point.failures[-1].run_id}"))
        return {
            "title": title,
            "subject": point.subject or "",
            "sentences": sentences,
            "facts": facts,
            "commands": [
                (
                    name,
                    from_anywhere(f"{text} {page.options}".rstrip())
                    if text.startswith("ppbench ")
                    else text,
                )
                for name, text in commands
            ],
            "figure": name,
            "height": line and line.height,
        }

    panels: dict[str, dict[str, object]] = {}
    for place, point in enumerate(series.points):
        before = series.before(place)
        sentences = [failure_text(point) + "."] if point.failures else []
        for launch in point.launches:
            if reason := series.discounts.get(launch.run_id):
                why = discount_text(reason, launch.slowdown)
                sentences.append(f"Run {launch.run_id} counts for no level and no change: {why}.")
        if point.num_before:
            commits = counted(point.num_before, "commit")
            sentences.append(f"Not measured between the point before and this one: {commits}.")
        facts, commands = _facts_of(point, metric), []
        if change := difference_text(series, place):
            facts.append(("difference", change))
        if before is not None and point.figures:
            commands.append(("compare with the one before", _compare(before, point)))
        title = point.commit[:SHORT]
        panels[str(place)] = panel(title, point, sentences, facts, commands, _pair(series, place))
    for number, step in enumerate((*series.changes.steps, *series.changes.spikes)):
        first, last, good = (series.points[n] for n in (step.first, step.last, step.good))
        sentence = "No other commit can have caused it (95 % confidence)."
        if step.num_commits > 1:
            commits, num = counted(step.num_commits, "commit"), series.num_unmeasured_of(step)
            sentence = (
                f"With 95 % confidence, one of the {commits} after {good.commit[:SHORT]} up to "
                f"{last.commit[:SHORT]} caused it{f', {num} of them not measured' * bool(num)}."
            )
        if step.is_spike:
            sentence += " A spike: the next measured commit undid it, so it is part of no level."
        facts = [
            ("change", f"{size_text(step, metric)}, {interval_text(step, metric)}"),
            ("by chance alone", "p < 0.001" if step.p < 0.001 else f"p = {step.p:.2g}"),
            ("author date", (first.author_date or "").replace("T", " ")[:16]),
        ]
        commands = [("compare", _compare(series.before(step.first) or good, first))]
        if command := backfill_command(series, step):
            commands.append(("measure the commits between", command))
        title = f"{'Spike, ' * step.is_spike}{size_text(step, metric)} at {first.commit[:SHORT]}"
        pair = _pair(series, step.first)
        panels[f"change {number}"] = panel(
            title, first, [sentence], facts, commands, pair, has_failures=False
        )
    return panels


def _facts_of(point: Point, metric: Metric) -> Facts:
    value = figure(metric.name, point.value)
    many = f", median of {len(point.figures)}" if len(point.figures) > 1 else ""
    facts = [("author date", (point.author_date or "").replace("T", " ")[:16])]
    if point.figures:
        facts.append((metric.name.replace("_", " "), f"{value}{many}"))
    if many:
        each = ", ".join(figure(metric.name, value) for value in sorted(point.figures))
        facts.append(("launches", each))
    return [(name, text) for name, text in facts if text]


def backfill_command(series: Series, step: Step) -> str:
    """Return the command that measures the commits that may have caused a change, if any."""
    if not series.num_unmeasured_of(step):
        return ""
    good, last = (series.points[place].commit[:_REV] for place in (step.good, step.last))
    return f"ppbench backfill {good}..{last} {shlex.quote(series.sweep_file or 'SWEEP')}"


def _compare(base: Point, head: Point) -> str:
    return f"ppbench compare {base.commit[:_REV]} {head.commit[:_REV]}"


def _pair(series: Series, place: int) -> Pair:
    """Pair the median launches of a commit and of the one before; empty if it has no launch."""
    point = series.points[place]
    if point.middle is None:
        return ()
    return tuple(
        (side.middle.run_id, f"{side.commit[:SHORT]} {side.subject or ''}".strip())
        for side in (series.before(place), point)
        if side is not None and side.middle is not None
    )


def _embedded(
    store: Store, every: Sequence[Series]
) -> tuple[dict[Pair, tuple[str, Timeline]], int]:
    """Return the named timelines that fit the size limit of the page, and how many do not.

    First come those that are most likely to be opened: newest changes, then newest commits.
    """
    steps = [(series, step) for series in every for step in series.changes.steps]
    steps.sort(key=lambda item: _date_of(*item), reverse=True)
    places = [(series, step.first) for series, step in steps]
    for series in every:
        measured = [n for n, point in enumerate(series.points) if point.figures]
        places += [(series, place) for place in measured[-1:]]
    pairs = filter(None, (_pair(*place) for place in places))
    drawn: dict[Pair, tuple[str, Timeline]] = {}
    room, num_left_out = MOST_BYTES, 0
    for pair in dict.fromkeys(pairs):
        if len(drawn) == MOST_PAIRS or room <= 0:
            num_left_out += 1
            continue
        names = dict(pair)
        rows = store.table("runs", list(names))
        if rows.empty:  # they are damaged
            continue
        with contextlib.suppress(StoreError, UsageError):  # runs without spans
            runs = [run for _, run in rows.iterrows()]
            line = timeline(store, runs, [names[run_id] for run_id in rows["run_id"]])
            room -= len(line.meta) + len(line.columns)
            if room < 0:
                num_left_out += 1
            else:
                drawn[pair] = f"pair-{len(drawn) + 1}", line
    return drawn, num_left_out
