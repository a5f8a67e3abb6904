"""Orders the runs of a store by a repository's commits, as one series per case and machine.

Only commits on the first-parent line of HEAD count. A commit of a merged branch was never a state
of the line: placed between its commits, it would look as if what came into the line meanwhile had
been undone. Where no repository has the commits, they are ordered by their author dates.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppbench.comparison.evidence import slowdowns_by_run
from ppbench.comparison.launches import COLUMNS, CONTROLS, keys_of, newest_launches
from ppbench.comparison.rounds import rounds_beside
from ppbench.comparison.sides import SHORT
from ppbench.config.reader import read_sweep
from ppbench.display.cases import SETTINGS, case_text, varying_axes
from ppbench.display.metrics import metric_of
from ppbench.display.units import counted, is_missing
from ppbench.errors import PpbenchError, RepositoryError, UsageError, nearest
from ppbench.git import Repository
from ppbench.judge.estimates import level_of
from ppbench.judge.evidence import Metric
from ppbench.judge.slowdowns import NOT_KNOWN, Slowdown
from ppbench.statistics.series import Launch, Point, Series
from ppbench.store import TABLES, Condition, Store, read_conditions

_NUMBERS = ("int64", "double")
_NO_FIGURES = (
    *("launch", "position", "attempt", "error_rank", *SETTINGS),
    *("not_finite_step", "not_finite_rank"),
)
_MOST_NAMED = 3


@dataclass(frozen=True, repr=False)
class History:
    """The series of a metric; without any, the last note says why."""

    metric: Metric
    series: tuple[Series, ...]
    notes: tuple[str, ...]
    line: str = ""  # the order of the commits, in words

    def __repr__(self) -> str:
        states = ", ".join(series.state.value for series in self.series)
        return f"<History of {self.metric.name}: {states or 'no series'}>"

    @property
    def has_figures(self) -> bool:
        return any(series.num_launches for series in self.series)

    @property
    def frame(self) -> pd.DataFrame:
        """One row per launch, per change or spike, whose commit is the likeliest, and per level."""
        return pd.DataFrame([row for series in self.series for row in _rows(series)])


def _rows(series: Series) -> list[dict[str, object]]:
    """The launches, changes, spikes and levels of a series, as a program reads them."""
    changes, points = series.changes, series.points

    def row(kind: str, point: Point, **more: object) -> dict[str, object]:
        return {
            "kind": kind,
            "metric": series.metric.name,
            "case_id": series.case_id,
            "case": series.case,
            "fingerprint": series.fingerprint,
            "commit": point.commit,
            "author_date": point.author_date,
            "subject": point.subject,
            **more,
        }

    launches = [
        row(
            "launch",
            point,
            num_unmeasured_before=point.num_before,
            run_id=launch.run_id,
            status=launch.status,
            value=launch.value,
            slowdown=launch.slowdown.fraction,
            slowdown_cause=(
                None if math.isnan(launch.slowdown.fraction) else launch.slowdown.cause.value
            ),
            discount=series.discounts.get(launch.run_id),
        )
        for point in points
        for launch in point.launches
    ]
    steps = [
        row(
            "spike" if step.is_spike else "change",
            points[step.first],
            after=points[step.good].commit,
            up_to=points[step.last].commit,
            num_commits=step.num_commits,
            num_unmeasured=series.num_unmeasured_of(step),
            change=step.size.estimate,
            low=step.size.low,
            high=step.size.high,
            is_in_points=series.metric.in_points,
            is_better=series.is_better(step),
            p=step.p,
        )
        for step in (*changes.steps, *changes.spikes)
    ]
    levels = [
        row(
            "level",
            points[level.first],
            up_to=points[level.last].commit,
            num_launches=level.num_launches,
            value=level.estimate,
            **dict(zip(("low", "high"), level.interval or (None, None), strict=True)),
        )
        for level in changes.levels
    ]
    return [*launches, *steps, *levels]


def history(
    metric: str = "tokens_per_s",
    *,
    where: Sequence[str] = (),
    repo: Path | str | None = None,
    results: Path | str = Path("results"),
) -> History:
    """Return a metric over commits, with the commits that changed it, the newest machine first.

    `metric` is a column of `runs`, and `where` are conditions as for `ppbench ls`. The repository
    is found by the commits unless `repo` names a folder in it. Raises UsageError for an unknown
    metric or condition, StoreError, and RepositoryError for `repo`.
    """
    column, store, notes = metric_called(metric), Store(Path(results)), list[str]()
    runs = _runs(store, column, read_conditions(where), notes)
    if runs.empty:
        return History(column, (), tuple(notes))
    line = line_of(runs, None if repo is None else Path(repo), notes)
    is_off = ~runs["commit"].isin(line.places)
    num_off = counted(runs.loc[is_off, "commit"].nunique(), "commit")
    runs = _exclude(runs, is_off, f"of {num_off} off the {line.words}{line.hint}", notes)
    runs = _exclude(runs, runs["is_dirty"].eq(True), "with uncommitted changes", notes)
    runs = runs.assign(place=runs["commit"].map(line.places))
    if changed := _changes_of_code(runs):
        shown = ", ".join(changed[:_MOST_NAMED]) + ", …" * (len(changed) > _MOST_NAMED)
        notes.append(
            f"ppbench itself changed at {shown}: a change of the figure there may be due to that"
        )
    slowdowns = slowdowns_by_run(runs)
    runs, by_difference = in_turns(runs, column)
    for commit, run_ids in by_difference.items():
        slowdowns = {run_id: own for run_id, own in slowdowns.items() if run_id not in run_ids}
        notes.append(
            f"{counted(len(run_ids), 'launch')} took turns with {commit[:SHORT]}: their figure is "
            "that of its launches together, changed by what the rounds of both show"
        )
    series = _series(store, runs, column, slowdowns)
    by_machine = {one.fingerprint: one.machine for one in series}
    if len(by_machine) > 1:
        named = "; ".join(f"{name}: {text}" for name, text in by_machine.items())
        notes.append(
            f"results of {len(by_machine)} fingerprints, which cannot be compared: each case has a "
            f"series for each ({named})"
        )
    if num_behind := 0 if runs.empty else len(line.places) - 1 - int(runs["place"].max()):
        newest = str(runs.sort_values("place")["commit"].iloc[-1])[:SHORT]
        notes.append(f"{counted(num_behind, 'commit')} after {newest}: not measured yet")
    if num := sum(len(one.discounts) for one in series):
        notes.append(
            f"{counted(num, 'launch')} discounted, since something slowed them: in no level and no "
            "change; --format csv names them"
        )
    found = History(column, series, tuple(notes), line.words)
    if found.has_figures:
        return found
    num_failed = sum(one.num_failures for one in series)
    failed = (
        f"; {counted(num_failed, 'run')} failed: ppbench ls, ppbench show RUN" if series else ""
    )
    notes.append(f"nothing to show: no commit has {metric} in {store.folder}{failed}")
    return History(column, series, tuple(notes), line.words)


def metric_called(name: str) -> Metric:
    """Return a column of `runs` that holds a figure. Raises UsageError."""
    known = [
        column.name
        for column in TABLES["runs"]
        if column.type in _NUMBERS
        and column.name not in _NO_FIGURES
        and not column.name.startswith("measure_")
    ]
    if name not in known:
        raise UsageError(f'--metric: no figure is called "{name}"{nearest(name, known)}')
    return metric_of(name)


def _runs(
    store: Store, metric: Metric, where: Sequence[Condition], notes: list[str]
) -> pd.DataFrame:
    """Read the newest run of each launch that has a commit, and its figure if it was `ok`."""
    name = metric.name
    columns = (*COLUMNS, *CONTROLS, "sweep_file", "author_date", "subject", name)
    columns += ("process_start", "rounds")
    read = store.runs(list(dict.fromkeys(columns)), tuple(where))
    if read.empty:
        try:
            notes.append(store.unmet(where))
        except UsageError as error:  # there is no run at all
            notes.append(str(error))
        return read
    runs = newest_launches(read, by_state=True)
    # Per case and machine the most common measurement settings count; of ties the newest.
    settings = pd.Series(keys_of(runs), runs.index, dtype=object)
    usual = [
        settings[rows.index[::-1]].value_counts(sort=False).idxmax()
        for _, rows in runs.groupby(["case_id", "fingerprint"], dropna=False, sort=False)
    ]
    runs = _exclude(runs, ~settings.isin(usual), "with other measurement settings", notes)
    is_unknown = runs["commit"].isna() | runs["case_id"].isna()
    has_no_figure = (runs["status"] == "ok") & runs[name].isna()
    runs = _exclude(runs, is_unknown | has_no_figure, f"without a commit or {name}", notes)
    return runs.assign(fingerprint=runs["fingerprint"].fillna("unknown"))


def _exclude(
    runs: pd.DataFrame, is_excluded: pd.Series, reason: str, notes: list[str]
) -> pd.DataFrame:
    """Drop runs, and note how many and why."""
    if num := int(is_excluded.sum()):
        notes.append(f"{counted(num, 'run')} {reason}: excluded")
    return runs[~is_excluded]


@dataclass(frozen=True)
class Line:
    """The order of the commits."""

    words: str
    places: Mapping[str, int]  # of the commits on the line, measured or not
    hint: str = ""  # why a commit may be missing


def line_of(runs: pd.DataFrame, repo: Path | None, notes: list[str]) -> Line:
    """Order the commits by the repository that has them, or by their author dates.

    It is the one named, else the one around here, else the one that the newest sweep tracks.
    """
    folders, files = [repo or Path.cwd()], runs["sweep_file"].dropna()
    if repo is None and len(files):
        with contextlib.suppress(PpbenchError):
            folders.append(read_sweep(Path(files.iloc[-1]), (), "cpu").track.repo)
    for folder in folders:
        try:
            repository = Repository.around(folder)
            places = {sha: place for place, sha in enumerate(repository.line("HEAD"))}
        except RepositoryError:  # no repository there, or no commit yet
            if repo is not None:
                raise
            continue
        if repo is not None or runs["commit"].isin(places).any():
            state = repository.state()
            name = state.branch or f"{state.commit[:9]} (no branch is checked out)"
            hint = "; the clone is shallow: git fetch --unshallow" * repository.is_shallow()
            return Line(f"first-parent line of {name}", places, hint)
    notes.append(
        "no repository here has these commits on the line of its HEAD, so they are ordered by "
        "author date; name the repository with --repo"
    )
    dates = pd.to_datetime(
        runs["author_date"].fillna(runs["created_at"]), format="ISO8601", utc=True
    )
    dated = runs.assign(date=dates).sort_values(["date", "commit"])["commit"].unique()
    return Line("by author date", {str(commit): place for place, commit in enumerate(dated)})


def _changes_of_code(runs: pd.DataFrame) -> list[str]:
    """The commits of a series from which on ppbench itself was another one."""
    measured = runs[runs["code"].notna() & runs["status"].eq("ok")]
    measured = measured.sort_values("place", kind="stable")
    before = measured.groupby(["case_id", "fingerprint"])["code"].shift()
    is_other = before.notna() & measured["code"].ne(before)
    return [str(commit)[:SHORT] for commit in measured.loc[is_other, "commit"].unique()]


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
        in_start = rows.groupby("process_start")  # null where no start is known
        has_others = in_start["commit"].transform("nunique") > 1
        partners: dict[str, set[str]] = {}
        for _, own in rows[has_others].groupby("process_start"):
            for commit in own["commit"]:
                partners.setdefault(commit, set()).update(own["commit"])
        known = set(partners) & set(rows.loc[~has_others, "commit"])
        if not known:
            continue
        reference = max(sorted(known), key=lambda commit: len(partners[commit]))
        of_reference = rows[rows["commit"] == reference]
        level = float(of_reference[metric.name].median())
        is_beside = in_start["commit"].transform("size") > 1
        base = of_reference[is_beside[of_reference.index]].drop_duplicates("process_start")
        left_out.extend(base.index)
        beside = rounds_beside(base, rows.drop(base.index), metric.name)
        for index, rounds in beside.items():
            difference = level_of(metric, rounds)
            if difference is not None:
                by = difference.estimate
                value = level + by if metric.in_points else level * math.exp(by)
                runs.loc[[index], metric.name] = value
                run_id = str(runs.loc[[index], "run_id"].iloc[0])
                changed.setdefault(reference, set()).add(run_id)
    return runs.drop(left_out), {one: frozenset(ids) for one, ids in changed.items()}


def _series(
    store: Store, runs: pd.DataFrame, metric: Metric, slowdowns: Mapping[str, Slowdown]
) -> tuple[Series, ...]:
    """One series per case and machine, the machine that measured last first."""
    newest = runs.groupby("fingerprint")["run_id"].transform("max")
    runs = runs.assign(newest=newest).sort_values("newest", ascending=False, kind="stable")
    groups = [rows for _, rows in runs.groupby(["fingerprint", "case_id"], sort=False)]
    whole = store.table("runs", [str(rows["run_id"].iloc[-1]) for rows in groups])
    axes = varying_axes(whole) if len(groups) > 1 else ()
    by_run = whole.set_index("run_id", drop=False)
    found = []
    for rows in groups:
        last = by_run.loc[rows["run_id"].iloc[-1]]
        points: list[Point] = []
        place_before: int | None = None
        for _, own in rows.groupby("place"):
            commit, place = own.iloc[-1], int(own["place"].iloc[-1])
            launches = tuple(
                Launch(
                    str(run["run_id"]),
                    str(run["status"]),
                    float(run[metric.name]) if run["status"] == "ok" else None,
                    slowdowns.get(str(run["run_id"]), NOT_KNOWN),
                )
                for _, run in own.iterrows()
            )
            date, subject = (_text(commit[name]) for name in ("author_date", "subject"))
            num_before = 0 if place_before is None else place - place_before - 1
            points.append(Point(str(commit["commit"]), date, subject, launches, num_before))
            place_before = place
        found.append(
            Series(
                metric,
                str(last["case_id"]),
                case_text(last, axes),
                str(rows["fingerprint"].iloc[-1]),
                tuple(points),
                sweep_file=_text(last["sweep_file"]) or "",
                machine=_machine_text(last),
            )
        )
    return tuple(found)


def _text(value: object) -> str | None:
    return None if is_missing(value) or value is pd.NA or value == "" else str(value)


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
