"""A metric over commits as tables, and its page: a chart per series, and what is known of commits.

The page is one HTML file with the same bytes for the same runs. Its tables of changes and of
commits open what is known of each: figures, commands, and both timelines. Timelines are embedded up
to a few megabytes, those of the newest changes first; for all other commits a command draws them.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ppbench.display.changes import discount_text
from ppbench.display.document import Block, Code, Facts, Fold, Result, Section, Text
from ppbench.display.fields import Field, field_of, figure
from ppbench.display.rows import Rows, Written
from ppbench.display.tables import ALL_IN_MARKDOWN, Detail, Table
from ppbench.display.units import counted
from ppbench.errors import StoreError, UsageError, shortened
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
from ppbench.report.pages.templates import page
from ppbench.report.timeline.timelines import Timeline, timeline
from ppbench.statistics.change_points import Step
from ppbench.statistics.series import Point, Series, State
from ppbench.store import Store

SERIES = [
    *("number", "case", "fingerprint", "commits", "launches", "failed", "gaps"),
    *("level", "state"),
]
STEPS = ["number", "change_text", "interval", "commits", "unmeasured", "since", "last", "likeliest"]
COMMITS = ["commit", "author_date", "subject", "value", "difference", "launches", "failed"]
_LONGEST_SUBJECT = 50
_LEGEND = (
    "Large points are medians over launches, small points single launches; a ring is around those "
    "that count for no level and no change, since something slowed them. Lines are levels, with "
    "their 95 % intervals. A triangle marks a change; the commits that may have caused it are "
    "shaded. Below each chart, crosses mark launches that did not run, and numbers count the "
    "unmeasured commits in between. Click a point or a triangle for details. Drag to zoom, "
    "double-click to reset."
)
MOST_PAIRS = 24
MOST_BYTES = 6_000_000  # of packed timelines
_REV = 12  # characters of a hash in a command
Pair = tuple[tuple[str, str], ...]
"""The id and the name of each of two runs (or one) whose timelines share a time axis."""
Drawn = Mapping[Pair, tuple[str, Timeline]]
_BETTER = {True: "faster", False: "slower", None: ""}
"""The verdicts of a change, by whether it is better."""


@dataclass(frozen=True)
class HistoryPage:
    """The content of a history page."""

    metric: Metric
    series: Sequence[Series]
    notes: Sequence[str]
    line: str  # the order of the commits, in words
    command: str  # reproduces the page
    options: str = ""  # appended to the commands on the page, such as `--results DIR`


def render_history(store: Store, told: HistoryPage) -> str:
    """Return the page as HTML. Timelines that are not in the store are left out."""
    metric, every = told.metric, told.series
    title = f"{metric.name} over commits"
    points = [point for series in every for point in series.points]
    run_ids = [launch.run_id for point in points for launch in point.launches]
    num_cases = len({series.case_id for series in every})
    days = sorted(point.author_date[:10] for point in points if point.author_date)
    subtitle = [
        counted(len({point.commit for point in points}), "commit"),
        " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "",
        told.line,
        f"{len(every)} series of {counted(num_cases, 'case')}",
    ]
    newest = [series.points[-1].commit for series in every if series.points]
    about = replace(
        about_runs(HISTORY, title, store.table("runs", [max(run_ids)])),
        num_runs=len(run_ids),
        num_cases=num_cases,
        commit=newest[0][:10] if newest else "",
    )
    embedded, num_left_out = _embedded(store, every)
    answer: list[Block] = [Text(line, kind="lead") for line in _answer(told)]
    answer += [Text(list(told.notes), "Notes")] if told.notes else []
    blocks = [
        Section("answer", "", answer),
        Section(
            "list",
            "Series",
            [
                series_table(every, is_page=True),
                Text(_LEGEND, kind="note"),
            ],
        ),
    ]
    for number, series in enumerate(every, 1):
        name, own = f"series-{number}", f"History of {series.case}"
        details, of_commits = _details(name, series, told, embedded)
        parts: list[Block] = [
            Text(f"{series.machine} · {series.fingerprint}", kind="note"),
            history_chart(series).picture(own),
        ]
        if details:
            parts.append(replace(changes_table([series]), name=f"Changes, {own}", details=details))
        commits = replace(_commits_table(series), name=f"Commits, {own}", details=of_commits)
        parts.append(Fold(counted(len(series.points), "commit"), [commits]))
        blocks.append(Section(name, series.case, parts))
    left_out = (
        f"{num_left_out} more pairs of timelines are left out to limit the size of this page; the "
        "commands beside them draw them."
    )
    end: list[Block] = [Text(left_out)] if num_left_out else []
    blocks.append(Section("reproduce", "Reproduction", [*end, Code(told.command)]))
    return page(
        Result(blocks),
        about,
        " · ".join(part for part in subtitle if part),
        timelines=dict(embedded.values()),
    )


def series_table(every: Sequence[Series], *, is_page: bool = False) -> Table:
    """Return a row for each series: how much is known of it, its level and its state.

    A page has room for the last change too, which a terminal names in the next table.
    """
    rows: list[dict[str, object]] = []
    for number, series in enumerate(every, 1):
        level, steps = series.current, series.changes.steps
        change = _BETTER[series.is_better(steps[-1])] if steps else None
        rows.append(
            {
                "number": number,
                "case": Written(series.case, series.case, f"#series-{number}"),
                "fingerprint": series.fingerprint,
                "commits": series.num_measured,
                "launches": series.num_launches,
                "failed": series.num_failures,
                "gaps": series.num_unmeasured,
                "level": Written(
                    level and level.estimate,
                    "" if level is None else figure(series.metric.name, level.estimate),
                ),
                "state": series.state.value,
                "last_change": Written(
                    change, size_text(steps[-1], series.metric) if steps else ""
                ),
            }
        )
    shown = [
        name
        for name in (*SERIES, *["last_change"] * is_page)
        if name not in ("failed", "gaps") or any(row[name] for row in rows)
    ]
    names = [f"series-{number}" for number in range(1, len(every) + 1)]
    essential = ["case", "level", "state"]
    table = Table(Rows.of_records(rows), shown, essential, remedy=ALL_IN_MARKDOWN)
    is_searched = is_page and len(every) > 1
    return replace(table, name="Series", cases=names, searched="series" if is_searched else "")


def changes_table(every: Sequence[Series]) -> Table:
    """Return a row for each change of each series, in the order of the commits."""
    steps: list[dict[str, object]] = []
    for number, series in enumerate(every, 1):
        unit = "points" if series.metric.in_points else "%"
        for _, step in changes_of(series):
            size, first, is_better = step.size, series.points[step.first], series.is_better(step)
            judged = {True: ", better", False: ", worse", None: ""}[is_better]
            date = (first.author_date or "")[:10]
            subject = shortened(first.subject or "", _LONGEST_SUBJECT)
            text = f"{'spike ' * step.is_spike}{100 * size.estimate:+.1f} {unit}{judged}"
            steps.append(
                {
                    "number": number,
                    "change_text": Written(_BETTER[is_better], text),
                    "interval": f"{100 * size.low:+.1f} to {100 * size.high:+.1f}",
                    "commits": step.num_commits,
                    "unmeasured": series.num_unmeasured_of(step),
                    "since": series.points[step.good].commit[:SHORT],
                    "last": series.points[step.last].commit[:SHORT],
                    "likeliest": " ".join(filter(None, [first.commit[:SHORT], date, subject])),
                }
            )
    shown = STEPS if len(every) > 1 else STEPS[1:]
    essential = ["change_text", "likeliest"]
    return Table(Rows.of_records(steps), shown, essential, remedy=ALL_IN_MARKDOWN)


def changes_of(series: Series) -> list[tuple[int, Step]]:
    """Return the changes in the order of the commits, with the numbers that the chart has."""
    numbered = enumerate((*series.changes.steps, *series.changes.spikes))
    return sorted(numbered, key=lambda pair: pair[1].first)


def _commits_table(series: Series) -> Table:
    """Return a row for each commit, the newest first."""
    name = series.metric.name
    rows = [
        {
            "commit": point.commit,
            "author_date": point.author_date or "",
            "subject": point.subject or "",
            "value": Written(point.value, figure(name, point.value) if point.figures else ""),
            "difference": difference_text(series, place),
            "launches": len(point.figures),
            "failed": len(point.failures),
        }
        for place, point in reversed([*enumerate(series.points)])
    ]
    value = Field(field_of(name).label, is_number=True)
    fields = {column: value if column == "value" else field_of(column) for column in COMMITS}
    return Table(Rows.of_records(rows), fields)


def _answer(told: HistoryPage) -> list[str]:
    """Summarise the newest change."""
    changed = [series for series in told.series if series.changes.steps]
    if not changed:
        states = [series.state for series in told.series]
        unclear = states.count(State.unclear)
        if not states.count(State.steady) + unclear:
            return []
        rest = f" In {unclear} of the series, noise may hide one." if unclear else ""
        return [f"No change was found.{rest}"]
    latest = max(changed, key=lambda series: _date_of(series, series.changes.steps[-1]))
    step = latest.changes.steps[-1]
    many = f"{len(changed)} of {len(told.series)} series changed. " if len(told.series) > 1 else ""
    where = latest.points[step.first]
    subject = f", “{where.subject}”" if where.subject else ""
    sure = "with" if step.num_commits == 1 else "most likely with"
    change = f"{size_text(step, told.metric)} {sure} {where.commit[:SHORT]}{subject}"
    return [f"{many}The newest change: {change}, in {latest.case}."]


def _date_of(series: Series, step: Step) -> str:
    return series.points[step.first].author_date or ""


def _details(
    name: str, series: Series, told: HistoryPage, embedded: Drawn
) -> tuple[list[Detail], list[Detail]]:
    """Return what the page opens below each change, and below each commit, as the tables are."""
    metric = told.metric

    def detail(
        key: object,
        title: str,
        point: Point,
        sentences: list[str],
        facts: Mapping[str, str],
        commands: list[tuple[str, str]],
        pair: Pair,
        *,
        has_failures: bool = True,
    ) -> Detail:
        known = embedded.get(pair)
        if pair:
            what = "both timelines" if len(pair) > 1 else "its timeline"
            commands.append((what, f"ppbench timeline {' '.join(run_id for run_id, _ in pair)}"))
        if point.failures and has_failures:
            commands.append(("why it did not run", f"ppbench show {point.failures[-1].run_id}"))
        blocks: list[Block] = [Text(text) for text in (point.subject, *sentences) if text]
        blocks += [Facts({key: text for key, text in facts.items() if text})]
        blocks += [Code(f"{text} {told.options}".rstrip(), what) for what, text in commands]
        if known:
            blocks.append(known[1].picture(known[0], f"Timelines, {title}"))
        return Detail(f"{name}-{key}", title, "\n".join(block.html() for block in blocks))

    of_commits = []
    for place, point in reversed([*enumerate(series.points)]):
        before = series.before(place)
        sentences = [failure_text(point) + "."] if point.failures else []
        for launch in point.launches:
            if reason := series.discounts.get(launch.run_id):
                why = discount_text(reason, launch.slowdown)
                sentences.append(f"Run {launch.run_id} counts for no level and no change: {why}.")
        if point.num_before:
            commits = counted(point.num_before, "commit")
            sentences.append(f"Not measured between the point before and this one: {commits}.")
        facts = {
            "commit": point.commit,
            "author date": (point.author_date or "").replace("T", " ")[:16],
            "difference": difference_text(series, place),
        }
        if point.figures:
            many = f", median of {len(point.figures)}" if len(point.figures) > 1 else ""
            facts[metric.name.replace("_", " ")] = f"{figure(metric.name, point.value)}{many}"
            each = ", ".join(figure(metric.name, value) for value in sorted(point.figures))
            facts["launches"] = each if many else ""
        commands = []
        if before is not None and point.figures:
            commands.append(("compare with the one before", _compare(before, point)))
        title, pair = point.commit[:SHORT], _pair(series, place)
        of_commits.append(detail(place, title, point, sentences, facts, commands, pair))
    of_changes = []
    for number, step in changes_of(series):
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
        facts = {
            "commit": first.commit,
            "change": f"{size_text(step, metric)}, {interval_text(step, metric)}",
            "by chance alone": "p < 0.001" if step.p < 0.001 else f"p = {step.p:.2g}",
            "author date": (first.author_date or "").replace("T", " ")[:16],
        }
        commands = [("compare", _compare(series.before(step.first) or good, first))]
        if command := backfill_command(series, step):
            commands.append(("measure the commits between", command))
        title = f"{'Spike, ' * step.is_spike}{size_text(step, metric)} at {first.commit[:SHORT]}"
        key, pair = f"change-{number}", _pair(series, step.first)
        rest = (first, [sentence], facts, commands, pair)
        of_changes.append(detail(key, title, *rest, has_failures=False))
    return of_changes, of_commits


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
