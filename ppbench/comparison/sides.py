"""The two sides of a comparison, and the runs that one along a setting is asked for, by name.

    results-before/     a results folder                 20261121T20    a run id, or its beginning
    demo, 3f2a91c07b1d  a sweep, by its name or id       demo.toml      a sweep file: its cases
    worktree            the tree, changes included       main, HEAD~3   a revision: its clean runs
                                                         3f2a91c        also if git has lost it

An ambiguous name is refused: a gate that silently compares something else is worse than none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

import pandas as pd

from ppbench.comparison.launches import (
    FINAL,
    SIDE_COLUMNS,
    fresh,
    key_text,
    keys_of,
    newest_launches,
)
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import note_unmet
from ppbench.display.commands import command
from ppbench.display.units import counted
from ppbench.errors import NotMeasuredError, RepositoryError, UsageError, nearest
from ppbench.git import Repository
from ppbench.run.machine.environment import default_device
from ppbench.store import Condition, Store
from ppbench.store.columns import ATTACHED

WORKTREE = "worktree"
SHORT = 9
_HASH = re.compile(r"[0-9a-f]{4,64}")
_STATE = ("commit", "changes", "code")


@dataclass(frozen=True)
class Side:
    """One side of a comparison: the newest run of each launch."""

    name: str  # as it was typed
    title: str  # what the name was resolved to
    store: Store
    runs: pd.DataFrame  # ok
    failed: pd.DataFrame
    commit: str | None = None  # of all its runs, with or without uncommitted changes
    is_clean: bool = False  # whether it is a commit without changes
    notes: tuple[str, ...] = ()

    @property
    def revision(self) -> str | None:
        """The name under which git knows it; None if there is none."""
        if self.is_clean or self.name == WORKTREE:
            return self.name
        is_dirty = pd.concat([self.runs, self.failed])["is_dirty"].eq(True).any()
        return None if self.commit is None or is_dirty else self.commit[:SHORT]

    @property
    def origins(self) -> set[str]:
        """Where its runs come from, if not from a sweep: `attached`, `imported`."""
        return set(pd.concat([self.runs, self.failed])["origin"].dropna())

    def of_script(self, script: Path) -> Side:
        """The runs that were attached to a training script. Raises NotMeasuredError without any."""
        runs, failed = (
            rows[
                (rows["origin"] == ATTACHED)
                & (rows["sweep_file"].fillna("").map(lambda file: Path(file).name) == script.name)
            ]
            for rows in (self.runs, self.failed)
        )
        if runs.empty and failed.empty:
            raise NotMeasuredError(
                f"{self.title}: no run of {script} was attached; run it there under the same name, "
                f"with ppbench.attach(..., results={str(self.store.folder)!r})"
            )
        return replace(self, runs=runs, failed=failed)

    def of_cases(self, case_ids: Iterable[str]) -> Side:
        wanted = set(case_ids)
        runs, failed = (rows[rows["case_id"].isin(wanted)] for rows in (self.runs, self.failed))
        return replace(self, runs=runs, failed=failed)

    def first(self, num_launches: int) -> Side:
        """Reduce each case to so many of its first launches.

        Launches that failed for a reason of their own are launches too.
        """
        failed = self.failed[self.failed["status"].isin(FINAL)]
        every = pd.concat([self.runs, failed]).sort_values("run_id")
        ids = every.groupby(pd.Series(keys_of(every), every.index)).head(num_launches)["run_id"]
        is_later = self.failed["status"].isin(FINAL) & ~self.failed["run_id"].isin(ids)
        runs = self.runs[self.runs["run_id"].isin(ids)]
        return replace(self, runs=runs, failed=self.failed[~is_later])

    def fresh(self, now: datetime) -> Side:
        """Reduce to the launches made together; see `launches.fresh`.

        What failed before now has been tried again.
        """
        every = pd.concat([self.runs, self.failed]).sort_values("run_id")
        recent = fresh(every, now)
        made = pd.to_datetime(recent["created_at"], utc=True, format="ISO8601")
        ids = set(recent[(recent["status"] == "ok") | (made >= now)]["run_id"])
        runs, failed = (rows[rows["run_id"].isin(ids)] for rows in (self.runs, self.failed))
        older = len(every) - len(ids)
        text = (
            f"{counted(older, 'run')} of {self.name} excluded: made over an hour earlier, or by "
            "another version of ppbench"
        )
        return replace(self, runs=runs, failed=failed, notes=(*self.notes, *[text][: bool(older)]))


def both_fresh(base: Side, head: Side, now: datetime) -> tuple[Side, Side]:
    """Reduce both sides to fresh launches, unless either has none."""
    first, last = base.fresh(now), head.fresh(now)
    is_empty = any(side.runs.empty and side.failed.empty for side in (first, last))
    return (base, head) if is_empty else (first, last)


def the_sweep_file(*sides: Side) -> str | None:
    """The sweep file from which all runs of these sides come, if it is one."""
    every = pd.concat([rows for side in sides for rows in (side.runs, side.failed)])
    files = every["sweep_file"].dropna().unique()
    return str(files[0]) if len(files) == 1 else None


def side_of(
    name: str, title: str, store: Store, runs: pd.DataFrame, notes: tuple[str, ...] = ()
) -> Side:
    """The newest of each launch in these runs, those that are ok and those that failed."""
    newest, commits = newest_launches(runs), runs["commit"].dropna().unique()
    is_ok = newest["status"] == "ok"
    commit = str(commits[0]) if len(commits) == 1 else None
    return Side(name, title, store, newest[is_ok], newest[~is_ok], commit, notes=notes)


@dataclass(frozen=True)
class Places:
    """The store and the folder in which names are looked up."""

    store: Store
    folder: Path  # in the work tree of the repository that is tracked
    again: str = "ppbench compare BASE HEAD SWEEP --run"  # measures both sides

    def repository(self) -> Repository:
        """Raises RepositoryError where there is none."""
        return Repository.around(self.folder)

    def runs(self, *where: Condition) -> pd.DataFrame:
        return self.store.runs(SIDE_COLUMNS, where)


def choose_runs(names: Sequence[str], places: Places, *, has_older_programs: bool = False) -> Side:
    """Return the runs of these names; without names, those of the last sweep.

    Of a program file that was edited in between, the runs of its newest content are returned,
    unless `has_older_programs`.

    Raises UsageError for a name that means nothing, and for a store without runs.
    """
    if names:
        sides, name = [find_side(name, places) for name in names], ", ".join(names)
        parts = [rows for side in sides for rows in (side.runs, side.failed)]
        runs = pd.concat(parts).drop_duplicates("run_id").sort_values("run_id")
    else:
        runs = newest_launches(places.store.last_sweep().runs.sort_values("run_id"))
        name = f"the last sweep, {runs['sweep_name'].iloc[-1]}"
    notes: list[str] = []
    if not has_older_programs:
        # A schedule that is no file has one digest, which is empty.
        digests = runs["program_digest"].map(key_text)
        is_newest = digests == digests.groupby(runs["schedule"]).transform("last")
        older = runs.loc[~is_newest, "schedule"]
        notes = [
            f"{schedule} was edited: {counted(num, 'run')} of its older content left out"
            for schedule, num in older.value_counts(sort=False).items()
        ]
        runs = runs[is_newest]
    in_order = runs.sort_values("position", kind="stable")
    is_ok = in_order["status"] == "ok"
    title = f"{name}: {counted(int(is_ok.sum()), 'run')}"
    return Side(name, title, places.store, in_order[is_ok], in_order[~is_ok], notes=tuple(notes))


def find_side(name: str, places: Places) -> Side:
    """Return the side that a name means.

    Raises UsageError for a name that means nothing or several things, NotMeasuredError for one
    without runs.
    """
    if name == WORKTREE:
        return _worktree_side(places)
    if not name.strip():
        raise UsageError('"": is empty; give a revision, a run, a sweep or a results folder')
    if name.endswith(".toml"):
        return _file_side(name, places)
    store, runs = places.store, places.runs()
    ids, known = runs["run_id"], f"{places.store.folder}, not a sweep file (.toml)"
    meanings: dict[str, Callable[[], Side]] = {}
    if Path(name, "runs").is_dir():
        meanings["a results folder"] = partial(_folder_side, name)
    with contextlib.suppress(UsageError):
        if len(runs):
            run_id = store.id_of(name, ids)
            of_run = runs[ids == run_id]
            meanings[f"the run {run_id}"] = partial(side_of, name, f"run {run_id}", store, of_run)
    of_sweep = runs[(runs["sweep_id"] == name) | (runs["sweep_name"] == name)]
    if len(of_sweep):
        title = f"sweep {name} ({of_sweep['sweep_name'].iloc[-1]})"
        meanings["a sweep"] = partial(side_of, name, title, store, _newest_state(of_sweep))
    repository, why = None, ""
    try:
        repository = places.repository()
        sha = repository.resolve(name)
        words = f"the commit {sha[:SHORT]}"
        meanings[words] = partial(revision_side, name, sha, repository, places)
    except RepositoryError as error:
        why = str(error).removeprefix(f'"{name}": ')
        stored = sorted(set(map(str, runs["commit"].dropna()))) if _HASH.fullmatch(name) else []
        for lost in (sha for sha in stored if sha.startswith(name)):
            text = (
                f"{lost[:SHORT]} is not in {repository and repository.root}: rebased away, or not "
                "fetched; its stored runs are used"
            )
            notes = () if repository is None else (text,)
            words = f"the stored commit {lost[:SHORT]}"
            meanings[words] = partial(_commit_side, name, lost, places, notes)
    if len(meanings) > 1:
        raise UsageError(
            f'"{name}": could be {len(meanings)} things: {"; ".join(meanings)}; write a folder as '
            f"./{name}, a commit or an id in full"
        )
    for side in meanings.values():
        return side()
    if ids.str.startswith(name).any():
        store.id_of(name, ids)  # raises that it is ambiguous
    hint = nearest(name, dict.fromkeys(runs["sweep_name"].dropna()))
    is_empty = "; it is a folder, but holds no runs" if Path(name).is_dir() else ""
    raise UsageError(
        f'"{name}": not a results folder, not a run or sweep in {known}, and not a revision: '
        f"{why}{is_empty}{hint}"
    )


def _folder_side(name: str) -> Side:
    store = Store(Path(name))
    runs = store.runs(SIDE_COLUMNS)
    if runs.empty:
        raise NotMeasuredError(f"{name}: holds no runs; fill it with: ppbench sweep SWEEP")
    num = runs["commit"].nunique()
    text = f"{name} holds runs of {num} commits: the newest of each case and launch counts"
    return side_of(name, f"{name}/", store, runs, (text,) if num > 1 else ())


def _file_side(name: str, places: Places) -> Side:
    note_unmet(read := read_sweep(Path(name), [], default_device()))
    cases = {case.case_id for case, _ in read.cases}
    runs = places.runs()
    runs = runs[runs["case_id"].isin(cases)]
    if runs.empty:
        raise UsageError(
            f"{name}: {places.store.folder} has no run of its cases; make them with: "
            f"{command('sweep', name, results=places.store.folder)}"
        )
    return side_of(name, name, places.store, _newest_state(runs))


def _newest_state(runs: pd.DataFrame) -> pd.DataFrame:
    """The newest of each launch, of every case at the commit that it was measured at last."""
    states = pd.Series(
        list(zip(*(runs[name].map(key_text) for name in _STATE), strict=True)), runs.index
    )
    keys = pd.Series(keys_of(runs), runs.index)
    return newest_launches(runs[states == states.groupby(keys).transform("last")])


def revision_side(name: str, sha: str, repository: Repository, places: Places) -> Side:
    """Return the clean runs of a commit of the repository."""
    notes: tuple[str, ...] = ()
    if name == "HEAD" and repository.state().is_dirty:
        text = f"HEAD is the clean commit {sha[:SHORT]}; the tree also has uncommitted changes"
        notes = (f"{text}, which are part of `{WORKTREE}`",)
    return _commit_side(name, sha, places, notes, repository.describe(sha).subject)


def _commit_side(
    name: str, sha: str, places: Places, notes: tuple[str, ...], subject: str | None = None
) -> Side:
    runs = places.runs(Condition("commit", "=", (sha,)))
    clean = runs[~runs["is_dirty"].eq(True)]
    subject = subject or next(iter(clean["subject"].dropna()), None)
    known = sha[:SHORT] if sha.startswith(name) else f"{name} = {sha[:SHORT]}"
    title = f"{known} {subject}" if subject else known
    if newest_launches(clean).empty:
        dirty = len(runs) - len(clean)
        also = f" ({dirty} runs of it had uncommitted changes)" if dirty else ""
        raise _not_measured(title, places, also)
    return replace(side_of(name, title, places.store, clean, notes), is_clean=True)


def _worktree_side(places: Places) -> Side:
    """Return the runs of the work tree: of its commit with exactly its changes."""
    try:
        repository = places.repository()
    except RepositoryError as error:
        raise RepositoryError(
            f"{WORKTREE}: {error}; without a repository, name runs, sweeps or results folders"
        ) from None
    state = repository.state()
    if not state.is_dirty:
        return _commit_side(WORKTREE, state.commit, places, (), state.subject)
    runs = places.runs(Condition("commit", "=", (state.commit,)))
    mine = runs[runs["changes"] == state.changes]
    title = f"{WORKTREE} = {state.commit[:SHORT]} with changes {state.changes}"
    if newest_launches(mine).empty:
        raise _not_measured(title, places)
    return side_of(WORKTREE, title, places.store, mine)


def _not_measured(title: str, places: Places, also: str = "") -> NotMeasuredError:
    return NotMeasuredError(
        f"{title}: not measured in {places.store.folder}{also}; measure it with: {places.again}"
    )
