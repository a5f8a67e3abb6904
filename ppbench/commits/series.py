"""Orders the runs of a store by a repository's commits, as one series per case and machine.

Only commits on the first-parent line of HEAD count, unless all are asked for. A commit of a merged
branch was never a state of the line: placed between its commits, it would look as if what came into
the line meanwhile had been undone.

A commit beyond the end of a shallow clone is placed by its author date, as all are without a
repository. A commit that a whole clone does not know was never on its line, and is excluded.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from ppbench.comparison.launches import COLUMNS, CONTROLS, keys_of, newest_launches
from ppbench.comparison.rounds import shared_rounds
from ppbench.comparison.sides import SHORT
from ppbench.comparison.slowdowns import slowdowns_by_run
from ppbench.config.reader import read_sweep
from ppbench.display.cases import NOT_FINITE, SETTINGS, case_text, varying_axes
from ppbench.display.changes import discount_text
from ppbench.display.metrics import metric_of
from ppbench.display.units import counted, is_missing
from ppbench.errors import PpbenchError, RepositoryError, UsageError, nearest
from ppbench.git import Repository
from ppbench.judge.estimates import level_of
from ppbench.judge.evidence import DiscountReason, Metric, Rounds
from ppbench.judge.slowdowns import NOT_KNOWN, Slowdown
from ppbench.statistics.series import (
    Launch,
    Point,
    Series,
    SeriesAnalysis,
    Step,
    analyse,
)
from ppbench.store import TABLES, Condition, Store, read_conditions

_NUMBERS = ("int64", "double")
_NO_FIGURES = (
    *("schema_version", "launch", "position", "attempt", "error_rank", *SETTINGS),
    *("not_finite_step", "not_finite_rank"),
)
_MOST_NAMED = 3
_MOST_FOLDERS = 8  # of sweep files that are asked which repository they track


@dataclass(frozen=True, repr=False)
class History:
    """The series of a metric; without any, the last note says why."""

    metric: Metric
    series: tuple[Series, ...]
    notes: tuple[str, ...]
    line: str = ""  # the order of the commits, in words

    def __repr__(self) -> str:
        states = ", ".join(str(analysis.state) for analysis in self.analyses)
        return f"<History of {self.metric.name}: {states or 'no series'}>"

    @functools.cached_property
    def analyses(self) -> tuple[SeriesAnalysis, ...]:
        """The steps and levels of each series."""
        return tuple(analyse(series, self.metric) for series in self.series)

    @functools.cached_property
    def discounts(self) -> dict[str, DiscountReason]:
        """The runs of all series that count for no level and no change, by id."""
        return {run: why for analysis in self.analyses for run, why in analysis.discounts.items()}

    @property
    def has_figures(self) -> bool:
        return any(series.num_launches or series.dirty for series in self.series)

    @property
    def frame(self) -> pd.DataFrame:
        """One row per launch, and per change or spike, whose commit is the likeliest."""
        rows: list[dict[str, object]] = []
        for series in self.values()["series"]:
            key = {name: series[name] for name in ("case_id", "fingerprint")}
            for point in series["points"]:
                commit = {name: value for name, value in point.items() if name != "launches"}
                rows += [{"kind": "launch", **key, **commit, **own} for own in point["launches"]]
            for kind in ("change", "spike"):
                rows += [{"kind": kind, **key, **step} for step in series[f"{kind}s"]]
        return pd.DataFrame(rows)

    def values(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "metric": self.metric.name,
            "order": self.line,
            "notes": list(self.notes),
            "series": [_series_values(analysis) for analysis in self.analyses],
        }


def history(
    metric: str = "tokens_per_s",
    *,
    where: Sequence[str] = (),
    has_all: bool = False,
    has_dirty: bool = False,
    repo: Path | str | None = None,
    results: Path | str = Path("results"),
) -> History:
    """Return a metric over commits, with the commits that changed it.

    `metric` is a column of `runs`, and `where` are conditions as for `ppbench ls`. `has_all` adds
    commits off the first-parent line of HEAD, `has_dirty` work trees with uncommitted changes. The
    repository is found by the commits unless `repo` names a folder in it. Raises UsageError for an
    unknown metric or condition, StoreError, and RepositoryError for `repo`.
    """
    column, store = metric_called(metric), Store(Path(results))
    folder = None if repo is None else Path(repo)
    conditions = read_conditions(where)
    read = read_history(
        store, column, where=conditions, has_all=has_all, has_dirty=has_dirty, repo=folder
    )
    notes, numbered = list(read.notes), list(enumerate(read.series, 1))
    behind: dict[tuple[str, int], list[int]] = {}
    for number, line in numbered:
        if line.num_behind:
            newest = line.points[-1].commit[:SHORT]
            behind.setdefault((newest, line.num_behind), []).append(number)
    for (newest, num), numbers in behind.items():
        which = _in(numbers, read.series)
        notes.append(f"{counted(num, 'commit')} after {newest}: not measured yet{which}")
    if single := [number for number, line in numbered if line.num_measured == 1]:
        which = _in(single, read.series)
        notes.append(f"only one commit is measured, and a change takes two{which}")
    discounted = [
        f"run {launch.run_id} of {point.commit[:SHORT]} counts for no level and no change: "
        f"{discount_text(reason, launch.slowdown)}{_in([number], read.series)}"
        for number, line in numbered
        for point in line.points
        for launch in point.launches
        if (reason := read.discounts.get(launch.run_id))
    ]
    notes += discounted[:_MOST_NAMED]
    if (more := len(discounted) - _MOST_NAMED) > 0:
        notes.append(f"{counted(more, 'more run')} discounted: --format csv names them")
    if not read.has_figures:
        num_failed = sum(series.num_failures for series in read.series)
        failed = f"; {counted(num_failed, 'run')} failed: ppbench ls, ppbench show RUN"
        missing = f"no commit has {read.metric.name} in {store.folder}"
        notes.append(f"nothing to show: {missing}{failed if read.series else ''}")
    return replace(read, notes=tuple(notes))


def _in(numbers: Sequence[int], series: Sequence[Series]) -> str:
    if len(numbers) == len(series):
        return ""
    return f", in series {', '.join(map(str, numbers))}"


def metric_called(name: str) -> Metric:
    """Return a column of `runs` that holds a figure. Raises UsageError."""
    known = [
        column.name
        for column in TABLES["runs"]
        if str(column.type) in _NUMBERS
        and column.name not in _NO_FIGURES
        and not column.name.startswith("measure_")
    ]
    if name not in known:
        raise UsageError(f'--metric: no figure is called "{name}"{nearest(name, known)}')
    return metric_of(name)


def read_history(
    store: Store,
    metric: Metric,
    *,
    where: Sequence[Condition] = (),
    has_all: bool = False,
    has_dirty: bool = False,
    repo: Path | None = None,
) -> History:
    """Read the series of a metric, the one measured last first. Raises RepositoryError for `repo`.

    The arguments are those of `history`.
    """
    notes: list[str] = []
    runs = _runs(store, metric, where, notes)
    if runs.empty:
        return History(metric, (), tuple(notes))
    order = order_of(runs, repo, notes, has_all=has_all)
    kept = runs if has_all else runs_on_line(runs, order, notes)
    is_dirty = kept["is_dirty"].eq(True)  # null where it is unknown
    dirty = kept[is_dirty & has_dirty]
    clean = exclude(
        kept, is_dirty, "with uncommitted changes", [] if has_dirty else notes, "--dirty"
    )
    slowdowns = slowdowns_by_run(runs)
    _note_code(clean, order, notes)
    clean, reference = in_turns(clean, metric)
    for commit, run_ids in reference.items():
        slowdowns = {run_id: own for run_id, own in slowdowns.items() if run_id not in run_ids}
        notes.append(
            f"{counted(len(run_ids), 'launch')} took turns with {commit[:SHORT]}: their figure is "
            "that of its launches together, changed by what the rounds of both show"
        )
    every = pd.concat([clean, dirty])
    if every.empty:
        return History(metric, (), tuple(notes), order.line)
    cases = store.table("runs", every["run_id"].groupby(every["case_id"]).last())
    axes = varying_axes(cases) if len(cases) > 1 else ()
    texts = {str(row["case_id"]): case_text(row, axes) for _, row in cases.iterrows()}
    by_machine = every.groupby("fingerprint")["run_id"]
    last_runs = by_machine.last()
    by_run = store.table("runs", last_runs).set_index("run_id")
    machines = {str(name): _machine_text(by_run.loc[one]) for name, one in last_runs.items()}
    if len(machines) > 1:
        named = "; ".join(f"{name}: {text}" for name, text in machines.items())
        notes.append(
            f"results of {len(machines)} fingerprints, which cannot be compared: each case has a "
            f"series for each ({named})"
        )
    newest_first = by_machine.max().sort_values(ascending=False).index
    series = [
        replace(
            _series(str(case_id), str(fingerprint), (clean, dirty), slowdowns, metric, order),
            case=texts[str(case_id)],
            machine=machines[str(fingerprint)],
        )
        for fingerprint in newest_first
        for case_id in every.loc[every["fingerprint"] == fingerprint, "case_id"].unique()
    ]
    return History(metric, tuple(series), tuple(notes), order.line)


def _machine_text(run: pd.Series) -> str:
    """The device, and the processors, of a row of `runs`."""
    facts = json.loads(run["environment"])
    gpus = [gpu["name"] for gpu in facts.get("gpus") or ()]
    words = [
        run["device"],
        f"{len(gpus)} x {gpus[0]}" if gpus and run["device"] == "cuda" else None,
        facts.get("cpu"),
        facts.get("num_cores") and f"{facts['num_cores']} cores",
    ]
    return ", ".join(map(str, filter(None, words)))


def _runs(
    store: Store, metric: Metric, where: Sequence[Condition], notes: list[str]
) -> pd.DataFrame:
    """Read the newest run of each launch that has a commit, and its figure if it was `ok`."""
    name = metric.name
    columns = (*COLUMNS, *CONTROLS, "sweep_file", "author_date", "subject", name, "process_start")
    columns += ("rounds",)
    read = store.runs(list(dict.fromkeys(columns)), tuple(where))
    if read.empty:
        is_there = bool(where) and not store.runs(["run_id"]).empty
        what = "no run meets the conditions" if is_there else "no runs here yet"
        notes.append(f"{store.folder}: {what}; measure with: ppbench sweep FILE")
        return read
    runs = newest_launches(read, by_state=True)
    # Per case and machine the most common measurement settings count; of ties the newest.
    settings = pd.Series(keys_of(runs), runs.index, dtype=object)
    usual = [
        settings[rows.index[::-1]].value_counts(sort=False).idxmax()
        for _, rows in runs.groupby(["case_id", "fingerprint"], dropna=False, sort=False)
    ]
    runs = exclude(runs, ~settings.isin(usual), "with other measurement settings", notes)
    if num := int((runs["status"] == NOT_FINITE).sum()):
        notes.append(
            f"{counted(num, 'run')} with a loss or gradient that was NaN or infinite: counted as "
            "failed, their figures excluded"
        )
    runs = exclude(runs, runs["commit"].isna(), "without a commit", notes)
    runs = exclude(runs, runs["case_id"].isna(), "without a case", notes)
    has_no_figure = (runs["status"] == "ok") & runs[name].isna()
    runs = exclude(runs, has_no_figure, f"without {name}", notes)
    return runs.assign(fingerprint=runs["fingerprint"].fillna("unknown"))


def in_turns(
    runs: pd.DataFrame, metric: Metric
) -> tuple[pd.DataFrame, Mapping[str, frozenset[str]]]:
    """Give launches beside a reference the figure that follows from their difference to it.

    The reference of a case and machine is the commit that took turns with most others, if it has
    launches of its own too: alone, or in turns with itself. Its launches beside others are no
    figures of its own, and are left out. Returns the runs, and by reference those that it changed.
    """
    changed: dict[str, set[str]] = {}
    if not metric.slow_sign:
        return runs, {}
    runs = runs.copy()
    left_out = list[object]()
    for _, rows in runs[runs["status"] == "ok"].groupby(["case_id", "fingerprint"]):
        by_start = rows.groupby("process_start")
        num_together = by_start["commit"].transform("nunique")  # null where no start is known
        partners: dict[str, set[str]] = {}
        for _, own in rows[num_together > 1].groupby("process_start"):
            for commit in own["commit"]:
                partners.setdefault(commit, set()).update(own["commit"])
        known = set(partners) & set(rows.loc[~(num_together > 1), "commit"])
        if not known:
            continue
        reference = max(sorted(known), key=lambda commit: len(partners[commit]))
        is_reference = rows["commit"] == reference
        level = float(rows.loc[is_reference, metric.name].median())
        for _, own in by_start:
            base = own[is_reference[own.index]].iloc[:1]
            if base.empty or len(own) == 1:
                continue
            left_out.append(base.index[0])
            for index in own.index.difference(base.index):
                head = own.loc[[index]]
                figures = (tuple(map(float, one[metric.name])) for one in (base, head))
                rounds = next(iter(shared_rounds(base, head, metric.name)), Rounds(*figures))
                difference = level_of(metric, rounds)
                if difference is not None:
                    by = difference.estimate
                    value = level + by if metric.in_points else level * math.exp(by)
                    runs.loc[index, metric.name] = value
                    changed.setdefault(reference, set()).add(str(runs.loc[index, "run_id"]))
    return runs.drop(left_out), {one: frozenset(ids) for one, ids in changed.items()}


def _note_code(runs: pd.DataFrame, order: Order, notes: list[str]) -> None:
    """Note where ppbench itself changed within a series: a change there may be due to it."""
    measured = runs[runs["code"].notna() & runs["status"].eq("ok")]
    if measured["code"].nunique() < 2:
        return
    places = measured["commit"].map(order.places)
    measured = measured.assign(place=places).sort_values("place", kind="stable")
    firsts: dict[str, None] = {}
    for _, rows in measured.groupby(["case_id", "fingerprint"]):
        is_other = rows["code"].ne(rows["code"].shift()) & rows["code"].shift().notna()
        firsts |= dict.fromkeys(str(sha)[:9] for sha in rows.loc[is_other, "commit"])
    if firsts:
        shown = ", ".join(list(firsts)[:_MOST_NAMED]) + ", …" * (len(firsts) > _MOST_NAMED)
        notes.append(
            f"measured by {measured['code'].nunique()} versions of ppbench, changing at "
            f"{shown}: a change of the figure there may be due to that"
        )


def _series(
    case_id: str,
    fingerprint: str,
    clean_and_dirty: tuple[pd.DataFrame, pd.DataFrame],
    slowdowns: Mapping[str, Slowdown],
    metric: Metric,
    order: Order,
) -> Series:
    own, changed = (
        runs[(runs["case_id"] == case_id) & (runs["fingerprint"] == fingerprint)]
        for runs in clean_and_dirty
    )

    def point_of(rows: pd.DataFrame, *, is_dirty: bool = False) -> Point:
        """The point of one commit, whose runs are `rows`."""
        run = rows.iloc[-1]
        commit = str(run["commit"])
        statuses = zip(rows["run_id"], rows["status"], rows[metric.name], strict=True)
        launches = tuple(
            Launch(
                str(run_id),
                str(status),
                float(value) if status == "ok" else None,
                slowdowns.get(str(run_id), NOT_KNOWN),
            )
            for run_id, status, value in statuses
        )
        return Point(
            commit,
            _text(run["author_date"]),
            _text(run["subject"]),
            launches,
            is_known=order.repository is None or commit in order.places,
            changes="" if not is_dirty else _text(run["changes"]) or "unknown",
        )

    points = [point_of(rows) for _, rows in own.groupby("commit", sort=False)]
    moments = {str(row["commit"]): _moment(row) for _, row in own.iterrows()}
    placed: list[Point] = []  # each with the unmeasured commits of the line before it
    last_place: int | None = None
    for point in ordered(points, moments, order):
        place = order.on_line.get(point.commit)
        num = 0 if place is None or last_place is None else place - last_place - 1
        placed.append(replace(point, num_before=num))
        last_place = last_place if place is None else place
    num_behind = 0 if last_place is None else len(order.on_line) - 1 - last_place
    by_state = changed.groupby(["commit", "changes"], sort=False, dropna=False)
    extra = tuple(point_of(rows, is_dirty=True) for _, rows in by_state)
    last = pd.concat([own, changed])["sweep_file"].dropna()
    return Series(
        case_id,
        "",
        fingerprint,
        tuple(placed),
        extra,
        sweep_file=str(last.iloc[-1]) if len(last) else "",
        num_behind=num_behind,
    )


def _text(value: object) -> str | None:
    return None if is_missing(value) or value is pd.NA or value == "" else str(value)


def _moment(run: pd.Series) -> float:
    """When the commit was written, else when it was measured, in s."""
    for column in ("author_date", "created_at"):
        with contextlib.suppress(ValueError, TypeError):
            moment = datetime.fromisoformat(str(run[column]))
            return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    return 0.0


def _series_values(analysis: SeriesAnalysis) -> dict[str, Any]:
    series, points = analysis.series, analysis.series.points
    return {
        "case_id": series.case_id,
        "case": series.case,
        "fingerprint": series.fingerprint,
        "machine": series.machine,
        "state": analysis.state.value,
        "floor": series.floor,
        "num_behind": series.num_behind,
        "points": [
            {
                "commit": point.commit,
                "author_date": point.author_date,
                "subject": point.subject,
                "changes": point.changes,
                "is_known": point.is_known,
                "num_unmeasured_before": point.num_before,
                "launches": [
                    _launch_values(launch, analysis.discounts.get(launch.run_id))
                    for launch in point.launches
                ],
            }
            for point in (*points, *series.dirty)
        ],
        "changes": [_step_values(series, step) for step in analysis.steps],
        "spikes": [_step_values(series, step) for step in analysis.spikes],
        "levels": [
            {
                "first": points[level.first].commit,
                "last": points[level.last].commit,
                "num_launches": level.num_launches,
                "estimate": level.estimate,
                **dict(zip(("low", "high"), level.interval or (None, None), strict=True)),
            }
            for level in analysis.levels
        ],
    }


def _launch_values(launch: Launch, discount: DiscountReason | None) -> dict[str, object]:
    slowdown = launch.slowdown
    is_known = not math.isnan(slowdown.fraction)
    return {
        "run_id": launch.run_id,
        "status": launch.status,
        "value": launch.value,
        "slowdown": slowdown.fraction if is_known else None,
        "slowdown_cause": str(slowdown.cause) if is_known else None,
        "discount": None if discount is None else str(discount),
    }


def _step_values(series: Series, step: Step) -> dict[str, object]:
    """A change of level; its commit is the likeliest."""
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


@dataclass(frozen=True)
class Order:
    """The order of the commits."""

    places: Mapping[str, int]  # of the commits that the repository has
    line: str
    on_line: Mapping[str, int]  # places on the first-parent line of HEAD
    repository: Repository | None


def order_of(runs: pd.DataFrame, repo: Path | None, notes: list[str], *, has_all: bool) -> Order:
    """Order the commits of runs by the repository that knows them, or by their author dates."""
    commits = list(map(str, runs["commit"].unique()))
    for repository in _repositories(runs, repo):
        places = repository.positions(commits)
        if not places and repo is None:
            continue
        on_line = {sha: n for n, sha in enumerate(repository.line("HEAD"))}
        state = repository.state()
        name = state.branch or f"{state.commit[:9]} (no branch is checked out)"
        if (repository.is_shallow() or has_all) and (num := len(commits) - len(places)):
            is_shallow = repository.is_shallow()
            why = "the clone is shallow: git fetch --unshallow" if is_shallow else "rebased?"
            notes.append(
                f"{counted(num, 'commit')} not in {repository.root} ({why}): placed by author "
                "date, open in the chart"
            )
        num_off = len(places.keys() - on_line.keys()) if has_all else 0
        if num_off:
            notes.append(
                f"{counted(num_off, 'commit')} of other branches: shown among those of {name}; "
                "a change may be no more than what one branch has and the other lacks"
            )
        words = "all commits" if has_all else f"first-parent line of {name}"
        return Order(places, words, on_line, repository)
    notes.append(
        "no git repository here knows these commits, so they are ordered by author date, and "
        "unmeasured commits are unknown; name the repository with --repo"
    )
    return Order({}, "by author date", {}, None)


def _repositories(runs: pd.DataFrame, repo: Path | None) -> Iterator[Repository]:
    """Yield the named repository, or the one around here and those that the sweeps track."""
    if repo is not None:
        yield Repository.around(repo)
        return

    def tracked() -> Iterator[Path]:
        for file in map(Path, reversed(runs["sweep_file"].dropna().unique())):
            with contextlib.suppress(PpbenchError):
                yield read_sweep(file, (), "cpu").track.repo

    for folder in itertools.chain([Path.cwd()], itertools.islice(tracked(), _MOST_FOLDERS)):
        with contextlib.suppress(RepositoryError):
            repository = Repository.around(folder)
            repository.resolve("HEAD")
            yield repository


def runs_on_line(runs: pd.DataFrame, order: Order, notes: list[str]) -> pd.DataFrame:
    """Keep the runs of commits on the line; unknown commits are kept only in a shallow clone."""
    if order.repository is None:
        return runs
    is_off = runs["commit"].isin(set(order.places) - set(order.on_line))
    num = counted(runs.loc[is_off, "commit"].nunique(), "commit")
    known = exclude(runs, is_off, f"of {num} off the {order.line}", notes, "--all")
    if order.repository.is_shallow():
        return known
    is_unknown = ~known["commit"].isin(set(order.places))
    place = f"not in {order.repository.root} (rebased away, or another project's)"
    num = counted(known.loc[is_unknown, "commit"].nunique(), "commit")
    return exclude(known, is_unknown, f"of {num} {place}", notes, "--all")


def exclude(
    runs: pd.DataFrame, is_excluded: pd.Series, reason: str, notes: list[str], option: str = ""
) -> pd.DataFrame:
    """Drop runs, and note how many and why; `option` is the one that shows them."""
    if num := int(is_excluded.sum()):
        hint = f"; {option} shows them" if option else ""
        notes.append(f"{counted(num, 'run')} {reason}: excluded{hint}")
    return runs[~is_excluded]


def ordered(
    points: Sequence[Point], moments: Mapping[str, float], order: Order
) -> tuple[Point, ...]:
    """Sort the points: known commits by their place, the others by date between them."""
    known = sorted(
        (point for point in points if point.commit in order.places),
        key=lambda point: order.places[point.commit],
    )
    # Dates need not rise along the line: an amended commit keeps its old one.
    reached = list(itertools.accumulate((moments[point.commit] for point in known), max))
    others = sorted(
        (point for point in points if point.commit not in order.places),
        key=lambda point: (moments[point.commit], point.commit),
    )
    merged = list(known)
    for point in reversed(others):
        merged.insert(bisect.bisect_right(reached, moments[point.commit]), point)
    return tuple(merged)
