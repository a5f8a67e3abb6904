"""`ppbench history`: a figure over commits, and where it changed; as text, and as a page."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppbench.analysis.compare import METRICS, Metric
from ppbench.analysis.history import Launch, Point, Series, Step, Told, tell
from ppbench.cli_options import RESULTS
from ppbench.format import Format
from ppbench.listing import Field, render
from ppbench.report.history import HistoryPage, backfill_command, write_history
from ppbench.report.history_chart import SHORT
from ppbench.report.index import check_not_index, update_index
from ppbench.report.units import counted, figure
from ppbench.store import Store, read_conditions
from ppbench.stored import open_store
from ppbench.stored import tell as say
from ppbench.tracking.series import History, Wanted, metric_called, read_history

EXIT_TOO_LITTLE = 3
SERIES = [
    "number",
    "case",
    "fingerprint",
    "commits",
    "launches",
    "failed",
    "gaps",
    "level",
    "state",
]
STEPS = ["number", "change", "interval", "commits", "unmeasured", "since", "last", "likeliest"]
_LONGEST_SUBJECT = 50
_FOR_PEOPLE = (Format.table, Format.markdown)
_FIELDS = {
    "number": Field("series"),
    "commits": Field("commits"),
    "launches": Field("launches"),
    "failed": Field("did not run"),
    "gaps": Field("not measured"),
    "unmeasured": Field("not measured"),
    "since": Field("after", is_number=False),
    "last": Field("up to", is_number=False),
    "likeliest": Field("most likely", is_number=False),
}


@dataclass(frozen=True)
class Asked:
    """What was typed."""

    metric: str
    where: Sequence[str] = ()
    has_all: bool = False
    has_dirty: bool = False
    repo: Path | None = None


@dataclass(frozen=True)
class HistoryOutcome:
    """What `ppbench history` prints, to both of its ends, and returns."""

    text: str
    notes: tuple[str, ...]
    page: Path | None
    exit_code: int


def page_name(asked: Asked) -> str:
    """One page per question: asked again later, it shows more commits."""
    question = " ".join([*asked.where, "--all" * asked.has_all, "--dirty" * asked.has_dirty])
    mark = hashlib.sha256(question.encode()).hexdigest()[:6]
    return f"history-{asked.metric}{f'-{mark}' if question.strip() else ''}.html"


def history(
    asked: Asked, results: Path, page: Path | None, reports: Path, how: Format
) -> HistoryOutcome:
    """Print a metric's series over commits, and write their page if `page` names one.

    Raises UsageError for a metric or a condition that is none, StoreError for what cannot be read
    or written.
    """
    metric = metric_called(asked.metric)
    store = open_store(results)
    where = read_conditions(asked.where)
    found = read_history(store, Wanted(metric, where, asked.has_all, asked.has_dirty, asked.repo))
    told = [tell(series, metric) for series in found.series]
    notes = (*found.notes, *_notes(told))
    if not any(one.series.num_launches or one.series.dirty for one in told):
        notes = (*notes, _nothing(told, metric, results))
        text = "" if how in _FOR_PEOPLE else _text(told, metric, notes, found, how)
        return HistoryOutcome(text, notes, None, EXIT_TOO_LITTLE)
    if page is not None:
        options = _options(results)
        command = f"{_command(asked)} {options}".strip()
        whole = HistoryPage(metric, told, notes, found.line, command, options)
        _write(page, reports, store, whole)
    text = _text(told, metric, notes, found, how)
    return HistoryOutcome(text, (*notes, *_backfills(told, _options(results))), page, 0)


def _nothing(told: Sequence[Told], metric: Metric, results: Path) -> str:
    num_failed = sum(one.series.num_failures for one in told)
    failed = f"; {counted(num_failed, 'run')} failed: ppbench ls, ppbench show RUN" * bool(told)
    return f"nothing to show: no commit has {metric.name} in {results}{failed}"


def _write(path: Path, reports: Path, store: Store, page: HistoryPage) -> None:
    check_not_index(path, reports)
    write_history(path, store, page)
    if path.parent.resolve() == reports.resolve():
        update_index(reports, say)


def _options(results: Path) -> str:
    """What every command on these results needs."""
    return "" if results == RESULTS else shlex.join(["--results", str(results)])


def _command(asked: Asked) -> str:
    words = ["ppbench", "history", "--metric", asked.metric]
    words += [word for one in asked.where for word in ("--where", one)]
    words += ["--all"] * asked.has_all + ["--dirty"] * asked.has_dirty
    return shlex.join([*words, *([] if asked.repo is None else ["--repo", str(asked.repo)])])


def _notes(told: Sequence[Told]) -> Iterator[str]:
    """Whose newest commits are missing, and of which series there is only one."""
    behind: dict[tuple[str, int], list[int]] = {}
    for number, one in enumerate(told, 1):
        series = one.series
        if series.num_behind:
            newest = series.points[-1].commit[:SHORT]
            behind.setdefault((newest, series.num_behind), []).append(number)
    for (newest, num), numbers in behind.items():
        yield f"{counted(num, 'commit')} after {newest}: not measured yet{_of(numbers, told)}"
    alone = [number for number, one in enumerate(told, 1) if one.series.num_measured == 1]
    if alone:
        yield f"only one commit is measured, and a change takes two{_of(alone, told)}"


def _of(numbers: Sequence[int], told: Sequence[Told]) -> str:
    """Which series, unless it is all."""
    return "" if len(numbers) == len(told) else f", in series {', '.join(map(str, numbers))}"


def _backfills(told: Sequence[Told], options: str) -> Iterator[str]:
    """How to find out which commit made a change; pages say it where the change is."""
    for number, one in enumerate(told, 1):
        for step in one.steps:
            if command := backfill_command(one.series, step):
                first = one.series.points[step.first].commit[:SHORT]
                commits = counted(step.num_commits, "commit")
                name = f"series {number}: " if len(told) > 1 else ""
                yield (
                    f"{name}{commits} may have made the change at {first}, "
                    f"{step.num_unmeasured} of them not measured: {command} {options}".rstrip()
                )


def _text(
    told: Sequence[Told], metric: Metric, notes: Sequence[str], found: History, how: Format
) -> str:
    match how:
        case Format.json:
            listed = [_as_json(one) for one in told]
            whole = {"metric": metric.name, "order": found.line, "notes": list(notes)}
            return json.dumps({**whole, "series": listed}, indent=2, allow_nan=False)
        case Format.csv:
            return render(_rows(told), how, [])
        case Format.table | Format.markdown:
            return "\n\n".join(_tables(told, metric, found, how))


def _tables(told: Sequence[Told], metric: Metric, found: History, how: Format) -> Iterator[str]:
    yield f"{metric.name} over commits, {found.line}"
    series = [_series_row(number, one, metric) for number, one in enumerate(told, 1)]
    shown = [name for name in SERIES if name not in ("failed", "gaps") or _is_told(series, name)]
    yield render(pd.DataFrame(series), how, shown, _FIELDS)
    steps = [
        _step_row(number, one.series, step, metric)
        for number, one in enumerate(told, 1)
        for step in one.steps
    ]
    if steps:
        yield render(pd.DataFrame(steps), how, STEPS, _FIELDS)
    elif any(one.series.num_measured > 1 for one in told):
        yield "no change found"


def _is_told(rows: Sequence[dict[str, object]], name: str) -> bool:
    return any(row[name] for row in rows)


def _series_row(number: int, one: Told, metric: Metric) -> dict[str, object]:
    series, level = one.series, one.current
    return {
        "number": number,
        "case": series.case,
        "fingerprint": series.fingerprint,
        "commits": series.num_measured,
        "launches": series.num_launches,
        "failed": series.num_failures,
        "gaps": series.num_unmeasured,
        "level": "" if level is None else figure(metric.name, level.estimate),
        "state": one.state.value,
    }


def _step_row(number: int, series: Series, step: Step, metric: Metric) -> dict[str, object]:
    size, unit = step.size, "points" if metric.in_points else "%"
    judged = "better" if step.is_better else "worse"
    points = series.points
    return {
        "number": number,
        "change": f"{100 * size.estimate:+.1f} {unit}" + f", {judged}" * (metric.name in METRICS),
        "interval": f"{100 * size.low:+.1f} to {100 * size.high:+.1f}",
        "commits": step.num_commits,
        "unmeasured": step.num_unmeasured,
        "since": points[step.good].commit[:SHORT],
        "last": points[step.last].commit[:SHORT],
        "likeliest": _in_words(points[step.first]),
    }


def _in_words(point: Point) -> str:
    subject = point.subject or ""
    if len(subject) > _LONGEST_SUBJECT:
        subject = f"{subject[: _LONGEST_SUBJECT - 1]}…"
    return " ".join(filter(None, [point.commit[:SHORT], (point.author_date or "")[:10], subject]))


def _rows(told: Sequence[Told]) -> pd.DataFrame:
    """A row per launch, and one per change, whose commit is the likeliest."""
    return pd.DataFrame([row for one in told for row in _flat(one)])


def _flat(one: Told) -> Iterator[dict[str, object]]:
    series = one.series
    key = {"case_id": series.case_id, "fingerprint": series.fingerprint}
    for point in (*series.points, *series.dirty):
        told = {name: value for name, value in _of_point(point).items() if name != "launches"}
        for launch in point.launches:
            yield {"kind": "launch", **key, **told, **_of_launch(launch)}
    for step in one.steps:
        yield {"kind": "change", **key, **_of_step(series, step)}


def _as_json(one: Told) -> dict[str, object]:
    series = one.series
    return {
        "case_id": series.case_id,
        "case": series.case,
        "fingerprint": series.fingerprint,
        "machine": series.machine,
        "state": one.state.value,
        "floor": series.floor,
        "num_behind": series.num_behind,
        "points": [_of_point(point) for point in (*series.points, *series.dirty)],
        "changes": [_of_step(series, step) for step in one.steps],
        "levels": [
            {
                "first": series.points[level.first].commit,
                "last": series.points[level.last].commit,
                "num_launches": level.num_launches,
                "estimate": level.estimate,
                "low": None if level.interval is None else level.interval[0],
                "high": None if level.interval is None else level.interval[1],
            }
            for level in one.levels
        ],
    }


def _of_point(point: Point) -> dict[str, object]:
    return {
        "commit": point.commit,
        "author_date": point.author_date,
        "subject": point.subject,
        "changes": point.changes,
        "is_known": point.is_known,
        "num_unmeasured_before": point.num_before,
        "launches": [_of_launch(launch) for launch in point.launches],
    }


def _of_launch(launch: Launch) -> dict[str, object]:
    return {"run_id": launch.run_id, "status": launch.status, "value": launch.value}


def _of_step(series: Series, step: Step) -> dict[str, object]:
    likeliest = series.points[step.first]
    return {
        "commit": likeliest.commit,
        "author_date": likeliest.author_date,
        "subject": likeliest.subject,
        "after": series.points[step.good].commit,
        "up_to": series.points[step.last].commit,
        "num_commits": step.num_commits,
        "num_unmeasured": step.num_unmeasured,
        "change": step.size.estimate,
        "low": step.size.low,
        "high": step.size.high,
        "is_in_points": step.ratio is None,
        "is_better": step.is_better,
        "p": step.p,
    }
