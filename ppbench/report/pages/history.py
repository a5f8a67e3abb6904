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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go

from ppbench.display.changes import discount_text
from ppbench.display.fields import figure
from ppbench.display.units import counted
from ppbench.errors import StoreError, UsageError
from ppbench.report.charts.history import (
    SHORT,
    difference_text,
    failure_text,
    history_chart,
    interval_text,
    size_text,
)
from ppbench.report.pages.provenance import about_history
from ppbench.report.pages.templates import render, write_page
from ppbench.report.timeline.timelines import timeline
from ppbench.statistics.series import Point, Series, SeriesAnalysis, State, Step, discounts_of
from ppbench.statistics.verdicts import DiscountReason, Metric
from ppbench.store import Store

MOST_PAIRS = 24
MOST_BYTES = 6_000_000  # of packed timelines
_REV = 12  # characters of a hash in a command
Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class HistoryPage:
    """The content of a history page."""

    metric: Metric
    analyses: Sequence[SeriesAnalysis]
    notes: Sequence[str]
    line: str  # the order of the commits, in words
    command: str  # reproduces the page
    options: str = ""  # appended to the commands on the page, such as `--results DIR`


@dataclass(frozen=True)
class _Pair:
    """Two runs (or one) whose timelines share a time axis."""

    run_ids: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Embedded:
    """The packed figure of a pair, and the packed columns that it needs."""

    name: str
    figure: str
    height: int
    columns: tuple[str, str] | None  # name and content

    @property
    def num_bytes(self) -> int:
        return len(self.figure) + (len(self.columns[1]) if self.columns else 0)


@dataclass(frozen=True)
class _Panel:
    """The details that a click on a commit or a change opens."""

    title: str
    subject: str
    sentences: list[str]
    facts: Facts
    commands: Facts  # purpose and command
    pair: _Pair | None


@dataclass(frozen=True)
class _Section:
    """A series on the page, with its chart and its panels."""

    number: int
    analysis: SeriesAnalysis
    level: str
    last_change: str
    figure: go.Figure
    data: Mapping[str, object]  # panels by the clicked mark's `customdata`


def write_history(path: Path, store: Store, page: HistoryPage) -> None:
    """Write the page. Raises StoreError when the file cannot be written."""
    write_page(path, render_history(store, page))


def render_history(store: Store, page: HistoryPage) -> str:
    """Return the page as HTML. Timelines that are not in the store are left out."""
    run_ids = [
        launch.run_id
        for analysis in page.analyses
        for point in (*analysis.series.points, *analysis.series.dirty)
        for launch in point.launches
    ]
    newest = [point.commit for analysis in page.analyses for point in analysis.series.points[-1:]]
    states = Counter(analysis.state for analysis in page.analyses)
    panels = [_panels(analysis, page.metric) for analysis in page.analyses]
    embedded, num_left_out = _embedded(store, _pairs(page.analyses))
    sections = [
        _section(number, analysis, page, series_panels, embedded)
        for number, (analysis, series_panels) in enumerate(
            zip(page.analyses, panels, strict=True), 1
        )
    ]
    title = f"{page.metric.name} over commits"
    return render(
        "history.html",
        title=title,
        about=about_history(
            title,
            store.table("runs", [max(run_ids)]),
            num_runs=len(run_ids),
            num_cases=_num_cases(page.analyses),
            newest=newest[0] if newest else "",
        ),
        subtitle=_subtitle(page),
        answer=_answer(page),
        notes=page.notes,
        series=sections,
        states=[(state.value, states[state]) for state in State if state in states],
        timelines=list(embedded.values()),
        num_left_out=num_left_out,
        has_direction=page.metric.higher_is_better is not None,
        command=page.command,
    )


def _num_cases(analyses: Sequence[SeriesAnalysis]) -> int:
    return len({analysis.series.case_id for analysis in analyses})


def _subtitle(page: HistoryPage) -> str:
    measured = {point.commit for analysis in page.analyses for point in analysis.series.points}
    days = sorted(
        point.author_date[:10]
        for analysis in page.analyses
        for point in analysis.series.points
        if point.author_date
    )
    parts = [
        counted(len(measured), "commit"),
        " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "",
        page.line,
        f"{len(page.analyses)} series of {counted(_num_cases(page.analyses), 'case')}",
    ]
    return " · ".join(part for part in parts if part)


def _answer(page: HistoryPage) -> list[str]:
    """Summarise the newest change."""
    changed = [analysis for analysis in page.analyses if analysis.steps]
    if not changed:
        states = Counter(analysis.state for analysis in page.analyses)
        if not states[State.steady] + states[State.unclear]:
            return []
        unclear = states[State.unclear]
        rest = f" In {unclear} of the series, noise may hide one." if unclear else ""
        return [f"No change was found.{rest}"]
    latest = max(changed, key=lambda analysis: _date_of(analysis.series, analysis.steps[-1]))
    step = latest.steps[-1]
    many = (
        f"{len(changed)} of {len(page.analyses)} series changed. " if len(page.analyses) > 1 else ""
    )
    where = latest.series.points[step.first]
    subject = f", “{where.subject}”" if where.subject else ""
    sure = "with" if step.num_commits == 1 else "most likely with"
    change = f"{size_text(step, page.metric)} {sure} {where.commit[:SHORT]}{subject}"
    return [f"{many}The newest change: {change}, in {latest.series.case}."]


def _date_of(series: Series, step: Step) -> str:
    return series.points[step.first].author_date or ""


def _section(
    number: int,
    analysis: SeriesAnalysis,
    page: HistoryPage,
    panels: Mapping[str, _Panel],
    embedded: Mapping[_Pair, _Embedded],
) -> _Section:
    level, metric = analysis.current, page.metric
    last = analysis.steps[-1] if analysis.steps else None
    data = {key: _data(panel, page.options, embedded) for key, panel in panels.items()}
    return _Section(
        number,
        analysis,
        "" if level is None else figure(metric.name, level.estimate),
        "" if last is None else size_text(last, metric),
        history_chart(analysis, metric),
        data,
    )


def _data(panel: _Panel, options: str, embedded: Mapping[_Pair, _Embedded]) -> dict[str, object]:
    drawn = embedded.get(panel.pair) if panel.pair is not None else None
    return {
        "title": panel.title,
        "subject": panel.subject,
        "sentences": panel.sentences,
        "facts": panel.facts,
        "commands": [
            (name, f"{text} {options}" if options and text.startswith("ppbench ") else text)
            for name, text in panel.commands
        ],
        "figure": None if drawn is None else drawn.name,
        "height": None if drawn is None else drawn.height,
    }


def _panels(analysis: SeriesAnalysis, metric: Metric) -> dict[str, _Panel]:
    """Return the panels by the index of a commit, or by `change N`."""
    series = analysis.series
    discounts = discounts_of(series, metric)
    points = {str(n): _of_point(series, n, metric, discounts) for n in range(len(series.points))}
    dirty = {
        str(number): _of_dirty(point, metric)
        for number, point in enumerate(series.dirty, len(series.points))
    }
    steps = {f"change {n}": _of_step(series, step, metric) for n, step in enumerate(analysis.steps)}
    return points | dirty | steps


def _of_point(
    series: Series, place: int, metric: Metric, discounts: Mapping[str, DiscountReason]
) -> _Panel:
    point, before = series.points[place], series.before(place)
    other = None if before is None else series.points[before]
    sentences = [failure_text(point) + "."] if point.failures else []
    for launch in point.launches:
        if reason := discounts.get(launch.run_id):
            why = discount_text(reason, launch.slowdown)
            sentences.append(f"Run {launch.run_id} counts for no level and no change: {why}.")
    if point.num_before:
        commits = counted(point.num_before, "commit")
        sentences.append(f"Not measured between the point before and this one: {commits}.")
    if not point.is_known:
        sentences.append("The commit is not in the repository; it is placed by its author date.")
    change = difference_text(series, place, metric)
    facts = _facts_of(point, metric) + ([("difference", change)] if change else [])
    pair = _pair_of(other, point)
    commands = [("commit", point.commit)]
    if other is not None and point.figures:
        commands.append(("compare with the one before", _compare(other, point)))
    return _Panel(
        point.commit[:SHORT],
        point.subject or "",
        sentences,
        facts,
        [*commands, *_timeline_command(pair), *_show_command(point)],
        pair,
    )


def _facts_of(point: Point, metric: Metric) -> Facts:
    value = figure(metric.name, point.value)
    many = f", median of {len(point.figures)}" if len(point.figures) > 1 else ""
    listed = ", ".join(figure(metric.name, value) for value in sorted(point.figures))
    facts = [("author date", (point.author_date or "").replace("T", " ")[:16])]
    if point.figures:
        facts.append((metric.name.replace("_", " "), f"{value}{many}"))
    if len(point.figures) > 1:
        facts.append(("launches", listed))
    return [(name, text) for name, text in facts if text]


def _of_dirty(point: Point, metric: Metric) -> _Panel:
    return _Panel(
        f"{point.commit[:SHORT]} and uncommitted changes",
        point.subject or "",
        ["Not part of any level, as the measured code is in no commit."],
        [("changes", point.changes), *_facts_of(point, metric)],
        [("commit", point.commit), *_show_command(point)],
        None,
    )


def _of_step(series: Series, step: Step, metric: Metric) -> _Panel:
    first, last, good = (series.points[n] for n in (step.first, step.last, step.good))
    commits = counted(step.num_commits, "commit")
    if step.num_commits == 1:
        sentences = ["No other commit can have caused it (95 % confidence)."]
    else:
        sentences = [
            f"With 95 % confidence, one of the {commits} after {good.commit[:SHORT]} up to "
            f"{last.commit[:SHORT]} caused it"
            + (f", {step.num_unmeasured} of them not measured." if step.num_unmeasured else ".")
        ]
    facts = [
        ("change", f"{size_text(step, metric)}, {interval_text(step, metric)}"),
        ("by chance alone", "p < 0.001" if step.p < 0.001 else f"p = {step.p:.2g}"),
        ("author date", (first.author_date or "").replace("T", " ")[:16]),
    ]
    before = series.before(step.first)
    pair = _pair_of(None if before is None else series.points[before], first)
    other = good if before is None else series.points[before]
    commands = [("commit", first.commit), ("compare", _compare(other, first))]
    if command := backfill_command(series, step):
        commands.append(("measure the commits between", command))
    return _Panel(
        f"{size_text(step, metric)} at {first.commit[:SHORT]}",
        first.subject or "",
        sentences,
        facts,
        [*commands, *_timeline_command(pair)],
        pair,
    )


def backfill_command(series: Series, step: Step) -> str:
    """Return the command that measures the commits that may have caused a change, if any."""
    if not step.num_unmeasured:
        return ""
    good, last = (series.points[place].commit[:_REV] for place in (step.good, step.last))
    return f"ppbench backfill {good}..{last} {shlex.quote(series.sweep_file or 'SWEEP')}"


def _compare(base: Point, head: Point) -> str:
    return f"ppbench compare {base.commit[:_REV]} {head.commit[:_REV]}"


def _timeline_command(pair: _Pair | None) -> Facts:
    if pair is None:
        return []
    what = "both timelines" if len(pair.run_ids) > 1 else "its timeline"
    return [(what, f"ppbench timeline {' '.join(pair.run_ids)}")]


def _show_command(point: Point) -> Facts:
    if not point.failures:
        return []
    return [("why it did not run", f"ppbench show {point.failures[-1].run_id}")]


def _pair_of(before: Point | None, point: Point) -> _Pair | None:
    """Pair the median launches of a commit and of the one before; None if it has no launch."""
    launches = [
        (side.middle.run_id, f"{side.commit[:SHORT]} {side.subject or ''}".strip())
        for side in (before, point)
        if side is not None and side.middle is not None
    ]
    if point.middle is None:
        return None
    return _Pair(tuple(run_id for run_id, _ in launches), tuple(name for _, name in launches))


def _pairs(analyses: Sequence[SeriesAnalysis]) -> Iterator[_Pair]:
    """Yield the pairs most likely to be opened: newest changes first, then newest commits."""
    steps = [(analysis.series, step) for analysis in analyses for step in analysis.steps]
    steps.sort(key=lambda item: _date_of(*item), reverse=True)
    places = [(series, step.first) for series, step in steps]
    for analysis in analyses:
        measured = [n for n, point in enumerate(analysis.series.points) if point.figures]
        places += [(analysis.series, place) for place in measured[-1:]]
    for series, place in places:
        before = series.before(place)
        pair = _pair_of(None if before is None else series.points[before], series.points[place])
        if pair is not None:
            yield pair


def _embedded(store: Store, pairs: Iterator[_Pair]) -> tuple[dict[_Pair, _Embedded], int]:
    """Return the figures that fit the size limit of the page, and how many were left out."""
    figures: dict[_Pair, _Embedded] = {}
    room, num_left_out = MOST_BYTES, 0
    for pair in dict.fromkeys(pairs):
        if len(figures) == MOST_PAIRS or room <= 0:
            num_left_out += 1
            continue
        with contextlib.suppress(StoreError, UsageError):  # runs without spans
            drawn = _drawn(store, pair, f"pair-{len(figures) + 1}")
            room -= drawn.num_bytes
            if room < 0:
                num_left_out += 1
                continue
            figures[pair] = drawn
    return figures, num_left_out


def _drawn(store: Store, pair: _Pair, name: str) -> _Embedded:
    rows = store.table("runs", pair.run_ids)
    if rows.empty:
        raise StoreError(f"{store.folder}: the rows of runs {', '.join(pair.run_ids)} are damaged")
    name_of = dict(zip(pair.run_ids, pair.names, strict=True))
    line = timeline(
        store, [run for _, run in rows.iterrows()], [name_of[run_id] for run_id in rows["run_id"]]
    )
    return _Embedded(name, line.packed, line.height, line.columns)
