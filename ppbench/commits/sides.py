"""Resolves the names of `ppbench compare BASE HEAD`, each to a set of runs.

    results-before/     a results folder                 20261121T20    a run id, or its beginning
    3f2a91c07b1d        a sweep id                       worktree       the tree, changes included
    main, v1.2, HEAD~3  a revision: its clean runs       3f2a91c        also if git has lost it

An ambiguous name is refused: a gate that silently compares something else is worse than none.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pandas as pd

from ppbench.commits.advice import COMPARE, SWEEP
from ppbench.comparison.launches import SIDE_COLUMNS, newest_launches
from ppbench.comparison.sides import SHORT, WORKTREE, Side, side_of
from ppbench.errors import NotMeasuredError, RepositoryError, UsageError
from ppbench.git import Commit, Repository
from ppbench.store import LAST, Condition, Store

_HASH = re.compile(r"[0-9a-f]{4,64}")


@dataclass(frozen=True)
class Places:
    """The store and the folder in which names are looked up."""

    store: Store
    folder: Path  # in the work tree of the repository that is tracked
    sweep: str = SWEEP  # the sweep file, as it would be typed
    compare: str = COMPARE  # measures both sides
    check: str = ""  # the gate that measures both sides, if it is the gate that asks

    def repository(self) -> Repository:
        """Raises RepositoryError where there is none."""
        return Repository.around(self.folder)

    def runs(self, where: Sequence[Condition] = ()) -> pd.DataFrame:
        return self.store.runs(SIDE_COLUMNS, where)


def find_side(name: str, places: Places) -> Side:
    """Return the side that a name means.

    Raises UsageError for a name that means nothing or several things, NotMeasuredError for one
    without runs.
    """
    if name == WORKTREE:
        return worktree_side(places)
    if not name.strip():
        raise UsageError('"": is empty; give a revision, a run, a sweep or a results folder')
    meanings = list(_meanings(name, places))
    if not meanings:
        runs = places.store.runs(["run_id"])["run_id"]
        begin = runs[runs.str.startswith(name)]
        if len(begin) > 1:
            raise UsageError(
                f'"{name}" is ambiguous: {len(begin)} runs start with it: '
                f"{', '.join(begin.tail(5))}; give more characters"
            )
        try:
            places.repository().resolve(name)  # a revision would have been a meaning
        except RepositoryError as error:
            why = str(error).removeprefix(f'"{name}": ')
            folder = "; it is a folder, but holds no runs" if _is_folder(name) else ""
            raise UsageError(
                f'"{name}": not a results folder, not a run or sweep in {places.store.folder}, and '
                f"not a revision: {why}{folder}"
            ) from None
    if len(meanings) > 1:
        words = "; ".join(words for words, _ in meanings)
        raise UsageError(
            f'"{name}": could be {len(meanings)} things: {words}; write a folder as ./{name}, a '
            "commit or an id in full"
        )
    (_, side), *_ = meanings
    return side()


def _meanings(name: str, places: Places) -> Iterable[tuple[str, Callable[[], Side]]]:
    """Yield what a name may mean: in words, and a function that reads that side."""
    if _is_folder(name, "runs"):

        def folder_side() -> Side:
            store = Store(Path(name))
            runs = store.runs(SIDE_COLUMNS)
            if runs.empty:
                raise NotMeasuredError(f"{name}: holds no runs; fill it with: ppbench sweep SWEEP")
            num = runs["commit"].nunique()
            text = f"{name} holds runs of {num} commits: the newest of each case and launch counts"
            return side_of(name, f"{name}/", store, runs, (text,) if num > 1 else ())

        yield "a results folder", folder_side
    known = places.store.runs(["run_id", "sweep_id", "commit"])
    runs = known["run_id"]
    named = runs.tail(1) if name == LAST else runs[runs.str.startswith(name)]
    if len(named) == 1:
        run_id = str(named.iloc[0])

        def run_side() -> Side:
            return side_of(
                name, f"run {run_id}", places.store, places.runs([Condition("run_id", "=", run_id)])
            )

        yield f"the run {run_id}", run_side
    if (known["sweep_id"] == name).any():

        def sweep_side() -> Side:
            of_sweep = places.runs([Condition("sweep_id", "=", name)])
            title = f"sweep {name} ({of_sweep['sweep_name'].iloc[-1]})"
            return side_of(name, title, places.store, of_sweep)

        yield "a sweep", sweep_side
    repository: Repository | None = None
    sha: str | None = None
    with contextlib.suppress(RepositoryError):
        repository = places.repository()
        sha = repository.resolve(name)
    if repository is not None and sha is not None:
        revision = partial(revision_side, name, sha, repository, places)
        yield f"the commit {sha[:SHORT]}", revision
    elif _HASH.fullmatch(name):  # commits that only the store has
        for lost in sorted({str(sha) for sha in known["commit"].dropna()}):
            if lost.startswith(name):
                text = f"{lost[:SHORT]} is not in {repository and repository.root}: rebased away, "
                text += "or not fetched; its stored runs are used"
                notes = () if repository is None else (text,)
                yield (
                    f"the stored commit {lost[:SHORT]}",
                    partial(_commit_side, name, lost, places, notes),
                )


def _is_folder(*parts: str) -> bool:
    try:
        return Path(*parts).is_dir()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def revision_side(name: str, sha: str, repository: Repository, places: Places) -> Side:
    """Return the clean runs of a commit of the repository."""
    notes: tuple[str, ...] = ()
    if name == "HEAD" and repository.state().is_dirty:
        text = f"HEAD is the clean commit {sha[:SHORT]}; the tree also has uncommitted changes"
        notes = (f"{text}, which are part of `{WORKTREE}`",)
    return _commit_side(name, sha, places, notes, repository.describe(sha))


def _commit_side(
    name: str, sha: str, places: Places, notes: tuple[str, ...], commit: Commit | None = None
) -> Side:
    runs = places.runs([Condition("commit", "=", sha)])
    clean = runs[~runs["is_dirty"].eq(True)]
    subject = commit.subject if commit else next(iter(clean["subject"].dropna()), None)
    known = sha[:SHORT] if sha.startswith(name) else f"{name} = {sha[:SHORT]}"
    title = f"{known} {subject}" if subject else known
    if newest_launches(clean).empty:
        dirty = len(runs) - len(clean)
        also = f" ({dirty} runs of it had uncommitted changes)" if dirty else ""
        span = f"{sha[:SHORT]}..{sha[:SHORT]}"
        backfill = f"ppbench backfill {span} {places.sweep} --launches 5"
        advice = places.check or f"{backfill}, or both sides with: {places.compare}"
        raise NotMeasuredError(
            f"{title}: not measured in {places.store.folder}{also}; measure it with: {advice}"
        )
    return replace(side_of(name, title, places.store, clean, notes), is_clean=True)


def worktree_side(places: Places) -> Side:
    """Return the runs of the work tree: of its commit with exactly its changes."""
    try:
        repository = places.repository()
    except RepositoryError as error:
        raise RepositoryError(
            f"{WORKTREE}: {error}; without a repository, name runs, sweeps or results folders"
        ) from None
    state = repository.state()
    if not state.is_dirty:
        return _commit_side(WORKTREE, state.commit, places, (), state)
    runs = places.runs([Condition("commit", "=", state.commit)])
    mine = runs[runs["changes"] == state.changes]
    title = f"{WORKTREE} = {state.commit[:SHORT]} with changes {state.changes}"
    if newest_launches(mine).empty:
        advice = places.check or f"ppbench sweep {places.sweep} --set measure.launches=5"
        raise NotMeasuredError(
            f"{title}: not measured in {places.store.folder}; measure it with: {advice}"
        )
    return side_of(WORKTREE, title, places.store, mine)
