"""The page of a figure over commits: a chart per series, and what stands behind each commit.

One HTML file, the same bytes for the same runs. What a click on a commit tells is data, made into
a panel by `history.js`: hundreds of panels as HTML would be slower to open. Timelines are embedded
where they are likely to be looked at, those of the newest changes first, as far as a page of some
megabytes goes; for all other commits there is the command that draws them.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go

from ppbench.analysis.compare import METRICS, Metric
from ppbench.analysis.history import Point, Series, State, Step, Told
from ppbench.errors import StoreError, UsageError
from ppbench.report.about import about_history
from ppbench.report.history_chart import (
    SHORT,
    difference_text,
    failure_text,
    history_chart,
    interval_text,
    size_text,
)
from ppbench.report.packed import pack_bytes
from ppbench.report.timelines import timeline
from ppbench.report.units import counted, figure
from ppbench.report.writing import packed_figure, render, write_page
from ppbench.store import Store

MOST_PAIRS = 24
MOST_BYTES = 6_000_000  # of packed timelines
_REV = 12  # characters of a hash in a command
Facts = list[tuple[str, str]]


@dataclass(frozen=True)
class HistoryPage:
    """What a page is made from."""

    metric: Metric
    told: Sequence[Told]
    notes: Sequence[str]
    line: str  # in what order the commits are, in words
    command: str  # that makes the page
    options: str = ""  # that its commands need, such as where the results are


@dataclass(frozen=True)
class _Pair:
    """Runs whose timelines are drawn on one time axis."""

    run_ids: tuple[str, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class _Embedded:
    """A figure of a pair, packed, and the columns that it asks for."""

    name: str
    figure: str
    height: int
    columns: tuple[str, str] | None  # their name, and they

    @property
    def num_bytes(self) -> int:
        return len(self.figure) + (len(self.columns[1]) if self.columns else 0)


@dataclass(frozen=True)
class _Panel:
    """What a click on a commit or a change tells."""

    title: str
    subject: str
    sentences: list[str]
    facts: Facts
    commands: Facts  # what for, and the command
    pair: _Pair | None


@dataclass(frozen=True)
class _Shown:
    """A series on the page."""

    number: int
    told: Told
    level: str
    last_change: str
    figure: go.Figure
    data: Mapping[str, object]  # by what is clicked


def write_history(path: Path, store: Store, page: HistoryPage) -> None:
    """Write the page. Raises StoreError when the file cannot be written."""
    write_page(path, render_history(store, page))


def render_history(store: Store, page: HistoryPage) -> str:
    """The page as HTML. Timelines that the store does not have are left out."""
    run_ids = _run_ids(page.told)
    panels = [_panels(told, page.metric) for told in page.told]
    embedded, num_left_out = _embedded(store, _pairs(page.told))
    shown = [
        _shown(number, told, page, of_series, embedded)
        for number, (told, of_series) in enumerate(zip(page.told, panels, strict=True), 1)
    ]
    title = f"{page.metric.name} over commits"
    return render(
        "history.html",
        title=title,
        about=about_history(
            title,
            store.table("runs", [max(run_ids)]),
            num_runs=len(run_ids),
            num_cases=_num_cases(page.told),
            newest=_newest(page.told),
        ),
        subtitle=_subtitle(page),
        answer=_answer(page),
        notes=page.notes,
        series=shown,
        states=_states(page.told),
        timelines=list(embedded.values()),
        num_left_out=num_left_out,
        has_direction=page.metric.name in METRICS,
        command=page.command,
    )


def _run_ids(told: Sequence[Told]) -> list[str]:
    return [
        launch.run_id
        for one in told
        for point in (*one.series.points, *one.series.dirty)
        for launch in point.launches
    ]


def _num_cases(told: Sequence[Told]) -> int:
    return len({one.series.case_id for one in told})


def _newest(told: Sequence[Told]) -> str:
    points = [point for one in told for point in one.series.points[-1:]]
    return points[0].commit if points else ""


def _subtitle(page: HistoryPage) -> str:
    measured = {point.commit for one in page.told for point in one.series.points}
    days = sorted(
        point.author_date[:10]
        for one in page.told
        for point in one.series.points
        if point.author_date
    )
    parts = [
        counted(len(measured), "commit"),
        " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "",
        page.line,
        f"{len(page.told)} series of {counted(_num_cases(page.told), 'case')}",
    ]
    return " · ".join(part for part in parts if part)


def _answer(page: HistoryPage) -> list[str]:
    """What has changed, the newest change first."""
    changed = [one for one in page.told if one.steps]
    if not changed:
        if not _could_see(page.told):
            return []
        unclear = sum(one.state is State.unclear for one in page.told)
        rest = f" In {unclear} of the series the noise may hide one." if unclear else ""
        return [f"No change was found.{rest}"]
    latest = max(changed, key=lambda one: _date_of(one.series, one.steps[-1]))
    step = latest.steps[-1]
    many = f"{len(changed)} of {len(page.told)} series changed. " if len(page.told) > 1 else ""
    where = latest.series.points[step.first]
    subject = f", “{where.subject}”" if where.subject else ""
    sure = "with" if step.num_commits == 1 else "most likely with"
    told = f"{size_text(step, page.metric)} {sure} {where.commit[:SHORT]}{subject}"
    return [f"{many}The newest change: {told}, in {latest.series.case}."]


def _could_see(told: Sequence[Told]) -> bool:
    return any(one.state in (State.steady, State.unclear) for one in told)


def _date_of(series: Series, step: Step) -> str:
    return series.points[step.first].author_date or ""


def _states(told: Sequence[Told]) -> list[tuple[str, int]]:
    """Each state that some series are in, and how many are."""
    counts = [(state.value, sum(one.state is state for one in told)) for state in State]
    return [(state, number) for state, number in counts if number]


def _shown(
    number: int,
    told: Told,
    page: HistoryPage,
    panels: Mapping[str, _Panel],
    embedded: Mapping[_Pair, _Embedded],
) -> _Shown:
    level, metric = told.current, page.metric
    last = told.steps[-1] if told.steps else None
    data = {key: _data(panel, page.options, embedded) for key, panel in panels.items()}
    return _Shown(
        number,
        told,
        "" if level is None else figure(metric.name, level.estimate),
        "" if last is None else size_text(last, metric),
        history_chart(told, metric),
        data,
    )


def _data(panel: _Panel, options: str, embedded: Mapping[_Pair, _Embedded]) -> dict[str, object]:
    drawn = embedded.get(panel.pair) if panel.pair is not None else None
    return {
        "title": panel.title,
        "subject": panel.subject,
        "sentences": panel.sentences,
        "facts": panel.facts,
        "commands": [(name, _with(options, text)) for name, text in panel.commands],
        "figure": None if drawn is None else drawn.name,
        "height": None if drawn is None else drawn.height,
    }


def _with(options: str, text: str) -> str:
    return f"{text} {options}" if options and text.startswith("ppbench ") else text


def _panels(told: Told, metric: Metric) -> dict[str, _Panel]:
    """By what is clicked: the place of a commit, or `change N`."""
    series = told.series
    points = {str(n): _of_point(series, n, metric) for n in range(len(series.points))}
    dirty = {
        str(number): _of_dirty(point, metric)
        for number, point in enumerate(series.dirty, len(series.points))
    }
    steps = {f"change {n}": _of_step(series, step, metric) for n, step in enumerate(told.steps)}
    return points | dirty | steps


def _of_point(series: Series, place: int, metric: Metric) -> _Panel:
    point, before = series.points[place], series.before(place)
    other = None if before is None else series.points[before]
    sentences = [failure_text(point) + "."] if point.failures else []
    if point.num_before:
        commits = counted(point.num_before, "commit")
        sentences.append(f"{commits} between it and the point before: not measured.")
    if not point.is_known:
        sentences.append("The repository does not know it; it stands where its author date is.")
    change = difference_text(series, place, metric)
    facts = [
        *_facts_of(point, metric),
        *([("difference", change)] if change else []),
    ]
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
        ["Not part of any level: what was measured is in no commit."],
        [("changes", point.changes), *_facts_of(point, metric)],
        [("commit", point.commit), *_show_command(point)],
        None,
    )


def _of_step(series: Series, step: Step, metric: Metric) -> _Panel:
    first, last, good = (series.points[n] for n in (step.first, step.last, step.good))
    commits = counted(step.num_commits, "commit")
    if step.num_commits == 1:
        sentences = ["With 95 % no other commit made it."]
    else:
        sentences = [
            f"It came, with 95 %, with one of the {commits} after {good.commit[:SHORT]} up to "
            f"{last.commit[:SHORT]}"
            + (f", {step.num_unmeasured} of them not measured." if step.num_unmeasured else ".")
        ]
    facts = [
        ("change", f"{size_text(step, metric)}, {interval_text(step, metric)}"),
        ("by chance alone", _chance(step.p)),
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


def _chance(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.2g}"


def backfill_command(series: Series, step: Step) -> str:
    """What measures the commits that may have made a change; nothing where all are measured."""
    if not step.num_unmeasured:
        return ""
    good, last = (series.points[place].commit[:_REV] for place in (step.good, step.last))
    return f"ppbench backfill {good}..{last} {shlex.quote(series.sweep_file or 'SWEEP')}"


def _compare(one: Point, other: Point) -> str:
    return f"ppbench compare {one.commit[:_REV]} {other.commit[:_REV]}"


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
    """The middle launches of a commit and of the one before it; None where it has none."""
    told = [
        (one.middle.run_id, f"{one.commit[:SHORT]} {one.subject or ''}".strip())
        for one in (before, point)
        if one is not None and one.middle is not None
    ]
    if point.middle is None:
        return None
    return _Pair(tuple(run_id for run_id, _ in told), tuple(name for _, name in told))


def _pairs(told: Sequence[Told]) -> Iterator[_Pair]:
    """Those likely to be looked at: of the newest changes first, then of the newest commits."""
    steps = [(one.series, step) for one in told for step in one.steps]
    steps.sort(key=lambda item: _date_of(*item), reverse=True)
    places = [(series, step.first) for series, step in steps]
    for one in told:
        measured = [n for n, point in enumerate(one.series.points) if point.figures]
        places += [(one.series, place) for place in measured[-1:]]
    for series, place in places:
        before = series.before(place)
        pair = _pair_of(None if before is None else series.points[before], series.points[place])
        if pair is not None:
            yield pair


def _embedded(store: Store, pairs: Iterator[_Pair]) -> tuple[dict[_Pair, _Embedded], int]:
    """The figures of pairs as far as the page has room, and how many were left out for it."""
    found: dict[_Pair, _Embedded] = {}
    room, num_left_out = MOST_BYTES, 0
    for pair in dict.fromkeys(pairs):
        if len(found) == MOST_PAIRS or room <= 0:
            num_left_out += 1
            continue
        with contextlib.suppress(StoreError, UsageError):  # runs without spans
            drawn = _drawn(store, pair, f"pair-{len(found) + 1}")
            room -= drawn.num_bytes
            if room < 0:
                num_left_out += 1
                continue
            found[pair] = drawn
    return found, num_left_out


def _drawn(store: Store, pair: _Pair, name: str) -> _Embedded:
    rows = store.table("runs", pair.run_ids)
    if rows.empty:
        raise StoreError(f"{store.folder}: the rows of runs {', '.join(pair.run_ids)} are damaged")
    name_of = dict(zip(pair.run_ids, pair.names, strict=True))
    line = timeline(
        store, [run for _, run in rows.iterrows()], [name_of[run_id] for run_id in rows["run_id"]]
    )
    detail = line.detail
    columns = None if detail is None else (detail.name, pack_bytes(detail.columns))
    return _Embedded(name, packed_figure(line.figure), int(line.figure.layout.height), columns)
