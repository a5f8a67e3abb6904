"""Series over commits: the runs of a store in the order of a repository's commits.

Only commits of the first-parent line of HEAD count, unless all are asked for: what a branch has
been at one time. A commit of a branch that was merged lies beside what came into the line
meanwhile; put between, it would look as if that had been undone.

A commit beyond the end of a shallow clone stands where its author date is, as all do where there is
no repository. What a whole clone does not know was never on its line, and is left out.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from ppbench.analysis.compare import FLOOR, METRICS, Metric, Noise, effective_floor
from ppbench.analysis.history import Launch, Point, Series
from ppbench.config.sweep_file import read_sweep
from ppbench.errors import PpbenchError, RepositoryError, UsageError, nearest
from ppbench.report.cases import (
    NOT_FINITE,
    SETTINGS,
    WHERE_NOT_FINITE,
    case_text,
    varying_axes,
    without_not_finite,
)
from ppbench.report.units import counted, is_missing
from ppbench.repository import Commit, Repository
from ppbench.store import TABLES, Condition, Store
from ppbench.store.noise import read_noise
from ppbench.tracking.replicates import SETTINGS as MEASURED_BY
from ppbench.tracking.replicates import keys_of, newest_launches

_PROVENANCE = ("commit", "author_date", "subject", "is_dirty", "changes")
_COLUMNS = (
    *("run_id", "case_id", "fingerprint", "launch", "status", "created_at", "sweep_file"),
    *_PROVENANCE,
    *("code", "error", "cautions", *WHERE_NOT_FINITE, *MEASURED_BY),
)
_NUMBERS = ("int64", "double")
_NO_FIGURES = (
    *("schema_version", "launch", "position", "attempt", "error_rank", *SETTINGS),
    *("not_finite_step", "not_finite_rank"),
)
_MOST_NAMED = 3
_MOST_FOLDERS = 8  # of sweep files that are asked which repository they track
Notes = list[str]


@dataclass(frozen=True)
class Wanted:
    """What of a store is asked for."""

    metric: Metric
    where: Sequence[Condition] = ()
    has_all: bool = False  # also commits off the first-parent line
    has_dirty: bool = False  # also work trees with uncommitted changes
    repo: Path | None = None  # a folder in it; by default one that knows the commits is found


@dataclass(frozen=True)
class History:
    """What was found; without any series the last note says why."""

    series: tuple[Series, ...]
    notes: tuple[str, ...]
    line: str  # in what order the commits are, in words


def metric_called(name: str) -> Metric:
    """A column of `runs` that holds a figure. Raises UsageError.

    Only of those of METRICS is it known which direction is better.
    """
    known = _figures()
    if name not in known:
        raise UsageError(f'--metric: no figure is called "{name}"{nearest(name, known)}')
    unknown = Metric(name, higher_is_better=True, in_points=name.startswith("bubble_"))
    return METRICS.get(name, unknown)


def _figures() -> list[str]:
    """The columns that have numbers, but for what was set, or counts files and tries."""
    return [
        column.name
        for column in TABLES["runs"]
        if str(column.type) in _NUMBERS
        and column.name not in _NO_FIGURES
        and not column.name.startswith("measure_")
    ]


def read_history(store: Store, wanted: Wanted) -> History:
    """The series of a metric, the one measured last first. Raises RepositoryError for `repo`."""
    notes: Notes = []
    runs = _runs(store, wanted, notes)
    if runs.empty:
        return History((), tuple(notes), "")
    order = _order_of(runs, wanted, notes)
    clean, dirty = _told_apart(_kept(runs, order, wanted, notes), wanted, notes)
    _note_code(clean, order, notes)
    every = pd.concat([clean, dirty])
    if every.empty:
        return History((), tuple(notes), order.line)
    texts = _case_texts(store, every["run_id"].groupby(every["case_id"]).last())
    machines = _machines(store, every["run_id"].groupby(every["fingerprint"]).last())
    _note_machines(machines, notes)
    series = [
        replace(
            _series(str(case_id), str(fingerprint), clean, dirty, wanted.metric, order),
            case=texts.get(str(case_id), str(case_id)),  # its row may be damaged
            machine=machines[str(fingerprint)],
            floor=_floor(store, str(fingerprint), str(case_id), wanted.metric),
        )
        for case_id, fingerprint in _keys(every)
    ]
    return History(tuple(series), tuple(notes), order.line)


def _runs(store: Store, wanted: Wanted, notes: Notes) -> pd.DataFrame:
    """The newest run of each launch that tells its commit, and its figure if it was `ok`."""
    name = wanted.metric.name
    columns = list(dict.fromkeys([*_COLUMNS, name]))
    read = store.runs(columns, tuple(wanted.where))
    if read.empty:
        is_there = bool(wanted.where) and not store.runs(["run_id"]).empty
        what = "no run meets the conditions" if is_there else "no runs here yet"
        notes.append(f"{store.folder}: {what}; measure with: ppbench sweep FILE")
        return read
    read = without_not_finite(read)
    runs = _measured_alike(newest_launches(read, by_state=True), notes)
    if num := int((runs["status"] == NOT_FINITE).sum()):
        notes.append(
            f"{counted(num, 'run')} with a loss or gradient that was NaN or infinite: counted as "
            "failed, their figures left out"
        )
    told = runs[runs["commit"].notna()]
    if num := len(runs) - len(told):
        notes.append(f"{counted(num, 'run')} without a commit: left out")
    if num := int(told["case_id"].isna().sum()):
        notes.append(f"{counted(num, 'run')} without a case: left out")
        told = told[told["case_id"].notna()]
    has_figure = (told["status"] != "ok") | told[name].notna()
    if num := int((~has_figure).sum()):
        notes.append(f"{counted(num, 'run')} without {name}: left out")
    return told[has_figure].assign(fingerprint=told["fingerprint"].fillna("unknown"))


def _measured_alike(runs: pd.DataFrame, notes: Notes) -> pd.DataFrame:
    """Of each case and machine those over the same steps: as most are, of as many the newest."""
    key = ["case_id", "fingerprint"]
    settings = pd.Series(keys_of(runs), runs.index, dtype=object)
    usual = [
        settings[rows.index[::-1]].value_counts(sort=False).idxmax()
        for _, rows in runs.groupby(key, dropna=False, sort=False)
    ]
    is_usual = settings.isin(usual)
    if num := int((~is_usual).sum()):
        notes.append(f"{counted(num, 'run')} over other steps than most of the case: left out")
    return runs[is_usual]


def _note_code(runs: pd.DataFrame, order: _Order, notes: Notes) -> None:
    """Where ppbench itself changed within a series: a change there may be its own."""
    told = runs[runs["code"].notna() & runs["status"].eq("ok")]
    if told["code"].nunique() < 2:
        return
    places = told["commit"].map(order.places)
    told = told.assign(place=places).sort_values("place", kind="stable")
    firsts: dict[str, None] = {}
    for _, rows in told.groupby(["case_id", "fingerprint"]):
        is_other = rows["code"].ne(rows["code"].shift()) & rows["code"].shift().notna()
        firsts |= dict.fromkeys(str(sha)[:9] for sha in rows.loc[is_other, "commit"])
    if firsts:
        shown = ", ".join(list(firsts)[:_MOST_NAMED]) + ", …" * (len(firsts) > _MOST_NAMED)
        notes.append(
            f"measured by {told['code'].nunique()} versions of ppbench's code, which changes at "
            f"{shown}: a change of the figure there may be its own"
        )


@dataclass(frozen=True)
class _Order:
    """Where commits stand."""

    places: Mapping[str, int]  # of those that the repository knows
    line: str
    on_line: Mapping[str, int]  # places on the first-parent line of HEAD
    repository: Repository | None


def _order_of(runs: pd.DataFrame, wanted: Wanted, notes: Notes) -> _Order:
    commits = list(map(str, runs["commit"].unique()))
    for repository in _repositories(runs, wanted):
        places = repository.positions(commits)
        if not places and wanted.repo is None:
            continue
        on_line = {sha: n for n, sha in enumerate(repository.line("HEAD"))}
        state = repository.state()
        name = state.branch or f"{state.commit[:9]} (no branch is checked out)"
        if repository.is_shallow() or wanted.has_all:
            _note_unknown(len(commits) - len(places), repository, notes)
        num_off = len(places.keys() - on_line.keys()) if wanted.has_all else 0
        if num_off:
            notes.append(
                f"{counted(num_off, 'commit')} of other branches: shown among those of {name}; "
                "a change may be no more than what one branch has and the other lacks"
            )
        words = "all commits" if wanted.has_all else f"first-parent line of {name}"
        return _Order(places, words, on_line, repository)
    notes.append(
        "no git repository here knows these commits: they are in the order of their author dates, "
        "and which were not measured is not known; name the repository with --repo"
    )
    return _Order({}, "by author date", {}, None)


def _repositories(runs: pd.DataFrame, wanted: Wanted) -> Iterator[Repository]:
    """The one asked for; else the one around here, then those that the sweeps track."""
    if wanted.repo is not None:
        yield Repository.around(wanted.repo)
        return
    files = map(Path, reversed(runs["sweep_file"].dropna().unique()))
    for folder in itertools.chain([Path.cwd()], itertools.islice(_tracked(files), _MOST_FOLDERS)):
        with contextlib.suppress(RepositoryError):
            found = Repository.around(folder)
            found.resolve("HEAD")
            yield found


def _tracked(files: Iterable[Path]) -> Iterator[Path]:
    for file in files:
        with contextlib.suppress(PpbenchError):
            yield read_sweep(file, (), "cpu").track.repo


def _note_unknown(num: int, repository: Repository, notes: Notes) -> None:
    if not num:
        return
    why = "the clone is shallow: git fetch --unshallow" if repository.is_shallow() else "rebased?"
    notes.append(
        f"{counted(num, 'commit')} not in {repository.root} ({why}): placed by author date, open "
        "in the chart"
    )


def _kept(runs: pd.DataFrame, order: _Order, wanted: Wanted, notes: Notes) -> pd.DataFrame:
    """Without what lies off the line; what is unknown lies off it, but in a shallow clone."""
    if wanted.has_all or order.repository is None:
        return runs
    is_off = runs["commit"].isin(set(order.places) - set(order.on_line))
    if num := int(is_off.sum()):
        commits = counted(runs.loc[is_off, "commit"].nunique(), "commit")
        notes.append(
            f"{counted(num, 'run')} of {commits} off the {order.line}: left out; --all shows them"
        )
    if order.repository.is_shallow():
        return runs[~is_off]
    is_unknown = ~runs["commit"].isin(set(order.places))
    if num := int(is_unknown.sum()):
        commits = counted(runs.loc[is_unknown, "commit"].nunique(), "commit")
        notes.append(
            f"{counted(num, 'run')} of {commits} not in {order.repository.root} (rebased away, or "
            "another project's): left out; --all shows them"
        )
    return runs[~is_off & ~is_unknown]


def _told_apart(
    runs: pd.DataFrame, wanted: Wanted, notes: Notes
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Clean runs, and those of work trees with uncommitted changes as far as they are asked for."""
    is_dirty = runs["is_dirty"].eq(True)  # null where it is not told
    clean, dirty = runs[~is_dirty], runs[is_dirty]
    if wanted.has_dirty or dirty.empty:
        return clean, dirty
    notes.append(
        f"{counted(len(dirty), 'run')} with uncommitted changes: left out; --dirty shows them"
    )
    return clean, dirty.head(0)


def _keys(runs: pd.DataFrame) -> list[tuple[object, object]]:
    """Case and fingerprint of each series: machines by their last run, newest first, then cases."""
    order = runs.groupby("fingerprint")["run_id"].max().sort_values(ascending=False)
    machines = {fingerprint: place for place, fingerprint in enumerate(order.index)}
    pairs = runs[["case_id", "fingerprint"]].drop_duplicates().itertuples(index=False, name=None)
    return sorted(pairs, key=lambda pair: machines[pair[1]])


def _case_texts(store: Store, run_ids: pd.Series) -> dict[str, str]:
    """What each case is called, from one run of each."""
    rows = store.table("runs", run_ids)
    axes = varying_axes(rows) if len(rows) > 1 else ()
    return {str(row["case_id"]): case_text(row, axes) for _, row in rows.iterrows()}


def _machines(store: Store, run_ids: pd.Series) -> dict[str, str]:
    """What each fingerprint stands for, in words."""
    rows = store.table("runs", run_ids).set_index("run_id")
    return {
        str(name): _machine(rows.loc[run_id]) if run_id in rows.index else "damaged in the store"
        for name, run_id in run_ids.items()
    }


def _machine(run: pd.Series) -> str:
    facts: dict[str, object] = {}
    with contextlib.suppress(ValueError, TypeError):  # of a file that something else has touched
        facts = json.loads(str(run["environment"]))
    gpus = facts.get("gpus")
    listed = gpus if isinstance(gpus, list) else []
    names = [str(gpu["name"]) for gpu in listed if isinstance(gpu, dict) and "name" in gpu]
    told = [f"{len(names)} x {names[0]}"] if names and run["device"] == "cuda" else []
    words = [*told, facts.get("cpu"), facts.get("num_cores") and f"{facts['num_cores']} cores"]
    return ", ".join([str(run["device"]), *(str(word) for word in words if word)])


def _note_machines(machines: Mapping[str, str], notes: Notes) -> None:
    if len(machines) > 1:
        told = "; ".join(f"{name}: {text}" for name, text in machines.items())
        notes.append(
            f"results of {len(machines)} fingerprints, which do not compare: each case has a "
            f"series for each ({told})"
        )


def _floor(store: Store, fingerprint: str, case_id: str, metric: Metric) -> float:
    """What is no change: 1 %, or the noise that was measured of the case on the machine."""
    stored = read_noise(store.folder, fingerprint, case_id)
    deviation = None if stored is None else stored.deviations.get(metric.name)
    if stored is None or deviation is None:
        return FLOOR
    return effective_floor(FLOOR, Noise(deviation, stored.num_launches))


def _series(
    case_id: str,
    fingerprint: str,
    clean: pd.DataFrame,
    dirty: pd.DataFrame,
    metric: Metric,
    order: _Order,
) -> Series:
    own, changed = (
        runs[(runs["case_id"] == case_id) & (runs["fingerprint"] == fingerprint)]
        for runs in (clean, dirty)
    )
    points = [_point(rows, metric, order) for _, rows in own.groupby("commit", sort=False)]
    moments = {str(row["commit"]): _moment(row) for _, row in own.iterrows()}
    ordered = _with_gaps(_ordered(points, moments, order), order)
    by_state = changed.groupby(["commit", "changes"], sort=False, dropna=False)
    extra = tuple(_point(rows, metric, order, is_dirty=True) for _, rows in by_state)
    last = pd.concat([own, changed])["sweep_file"].dropna()
    return Series(
        case_id,
        "",
        fingerprint,
        ordered,
        extra,
        sweep_file=str(last.iloc[-1]) if len(last) else "",
        num_behind=_num_behind(ordered, order),
    )


def _point(rows: pd.DataFrame, metric: Metric, order: _Order, *, is_dirty: bool = False) -> Point:
    """One commit; `rows` are its runs."""
    run = rows.iloc[-1]
    commit = str(run["commit"])
    known = _described(commit, run, order)
    statuses = zip(rows["run_id"], rows["status"], rows[metric.name], strict=True)
    changes = "" if not is_dirty else _text(run["changes"]) or "unknown"
    return Point(
        commit,
        known.author_date,
        known.subject,
        tuple(
            Launch(str(run_id), str(status), float(value) if status == "ok" else None)
            for run_id, status, value in statuses
        ),
        is_known=order.repository is None or commit in order.places,
        changes=changes,
    )


def _described(commit: str, run: pd.Series, order: _Order) -> Commit:
    """What its run tells; a run of an older version told no more than the commit."""
    date, subject = _text(run["author_date"]), _text(run["subject"])
    if date is None and order.repository is not None and commit in order.places:
        return order.repository.describe(commit)
    return Commit(commit, author_date=date, subject=subject)


def _text(value: object) -> str | None:
    return None if is_missing(value) or value is pd.NA or value == "" else str(value)


def _moment(run: pd.Series) -> float:
    """When the commit was written, else measured; in s."""
    for column in ("author_date", "created_at"):
        with contextlib.suppress(ValueError, TypeError):
            moment = datetime.fromisoformat(str(run[column]))
            return moment.replace(tzinfo=moment.tzinfo or UTC).timestamp()
    return 0.0


def _ordered(
    points: Sequence[Point], moments: Mapping[str, float], order: _Order
) -> tuple[Point, ...]:
    """Commits that are known by their place, the others by date between them."""
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


def _with_gaps(points: Sequence[Point], order: _Order) -> tuple[Point, ...]:
    """Each with the number of commits of the line that were not measured since the one before."""
    last: int | None = None
    told = []
    for point in points:
        place = order.on_line.get(point.commit)
        num = 0 if place is None or last is None else place - last - 1
        told.append(replace(point, num_before=num))
        last = last if place is None else place
    return tuple(told)


def _num_behind(points: Sequence[Point], order: _Order) -> int:
    places = [order.on_line[one.commit] for one in points if one.commit in order.on_line]
    return len(order.on_line) - 1 - max(places) if places else 0
