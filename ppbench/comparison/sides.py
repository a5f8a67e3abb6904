"""The two sides of a comparison, and the runs that one along a setting is asked for.

    20261121T20    a run id, or its beginning; `last`     demo         a sweep by its name
    3f2a91c07b1d   a sweep by its id                      demo.toml    a sweep file: its cases

Commits are found by `commits.sides`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
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
from ppbench.comparison.slowdowns import first_launches
from ppbench.config.reader import read_sweep
from ppbench.display.cases import without_not_finite
from ppbench.display.units import counted
from ppbench.errors import NotMeasuredError, UsageError, nearest
from ppbench.run.machine.environment import default_device
from ppbench.store import LAST, Condition, Store
from ppbench.store.columns import ATTACHED

WORKTREE = "worktree"
SHORT = 9
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
        """Reduce each case to its first launches, so many undisturbed ones.

        Launches that failed for a reason of their own are launches too.
        """
        failed = self.failed[self.failed["status"].isin(FINAL)]
        every = pd.concat([self.runs, failed]).sort_values("run_id")
        ids = first_launches(self.store, every, keys_of(every), num_launches)
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


def choose_runs(names: Sequence[str], store: Store, *, has_older_programs: bool = False) -> Side:
    """Return the runs of these names; without names, those of the last sweep.

    Of a program file that was edited in between, the runs of its newest content are returned,
    unless `has_older_programs`.

    Raises UsageError for a name that means nothing, and for a store without runs.
    """
    if not names:
        runs = newest_launches(store.last_sweep().runs.sort_values("run_id"))
        name = f"the last sweep, {runs['sweep_name'].iloc[-1]}"
    else:
        parts = [_named(name, store) for name in names]
        runs = pd.concat(parts).drop_duplicates("run_id").sort_values("run_id")
        name = ", ".join(names)
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
    return Side(name, title, store, in_order[is_ok], in_order[~is_ok], notes=tuple(notes))


def _named(name: str, store: Store) -> pd.DataFrame:
    if name.endswith(".toml"):
        cases = {case.case_id for case, _ in read_sweep(Path(name), [], default_device()).cases}
        runs = store.runs(SIDE_COLUMNS)
        runs = runs[runs["case_id"].isin(cases)]
        if runs.empty:
            raise UsageError(
                f"{name}: {store.folder} has no run of its cases; make them with: ppbench sweep "
                f"{name}"
            )
        return _newest_state(runs)
    known = store.runs(["run_id", "sweep_id", "sweep_name"])
    for column in ("sweep_id", "sweep_name"):
        if (known[column] == name).any():
            return _newest_state(store.runs(SIDE_COLUMNS, [Condition(column, "=", name)]))
    if name != LAST and not known["run_id"].str.startswith(name).any():
        hint = nearest(name, dict.fromkeys(known["sweep_name"].dropna()))
        raise UsageError(
            f'"{name}": not a run, a sweep\'s name or id, or a sweep file (.toml), in '
            f"{store.folder}{hint}"
        )
    run_id = store.id_of(name, known["run_id"])
    runs = store.runs(SIDE_COLUMNS, [Condition("run_id", "=", run_id)])
    return without_not_finite(runs[runs["status"] != "interrupted"])


def _newest_state(runs: pd.DataFrame) -> pd.DataFrame:
    """The newest of each launch, of every case at the commit that it was measured at last."""
    states = pd.Series(
        list(zip(*(runs[name].map(key_text) for name in _STATE), strict=True)), runs.index
    )
    keys = pd.Series(keys_of(runs), runs.index)
    return newest_launches(runs[states == states.groupby(keys).transform("last")])
