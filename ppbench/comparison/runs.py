"""The runs that a comparison along an axis is asked for, by their names.

20261121T20    a run id, or its beginning; `last`     demo         a sweep by its name
3f2a91c07b1d   a sweep by its id                      demo.toml    a sweep file: its cases
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppbench.comparison.launches import SIDE_COLUMNS, key_text, keys_of, newest_launches
from ppbench.config.reader import read_sweep
from ppbench.display.cases import without_not_finite
from ppbench.display.units import counted
from ppbench.errors import UsageError, nearest
from ppbench.run.machine.environment import default_device
from ppbench.store import LAST, Condition, Store

_STATE = ("commit", "changes", "code")


@dataclass(frozen=True)
class Chosen:
    """The runs that are compared: of named runs each, of a sweep the newest of each launch."""

    store: Store
    title: str
    runs: pd.DataFrame  # ok, in the order of the sweep
    failed: pd.DataFrame
    notes: tuple[str, ...] = ()

    @property
    def sweep_file(self) -> str | None:
        """The sweep file of all these runs, if it is one."""
        files = pd.concat([self.runs, self.failed])["sweep_file"].dropna().unique()
        return str(files[0]) if len(files) == 1 else None


def choose_runs(names: Sequence[str], store: Store, *, has_older_programs: bool = False) -> Chosen:
    """Return the runs of these names; without names, those of the last sweep.

    Of a program file that was edited in between, the runs of its newest content are returned,
    unless `has_older_programs`.

    Raises UsageError for a name that means nothing, and for a store without runs.
    """
    if not names:
        runs = newest_launches(store.last_sweep().runs.sort_values("run_id"))
        title = f"the last sweep, {runs['sweep_name'].iloc[-1]}"
    else:
        parts = [_named(name, store) for name in names]
        runs = pd.concat(parts).drop_duplicates("run_id").sort_values("run_id")
        title = ", ".join(names)
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
    title = f"{title}: {counted(int(is_ok.sum()), 'run')}"
    return Chosen(store, title, in_order[is_ok], in_order[~is_ok], tuple(notes))


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
