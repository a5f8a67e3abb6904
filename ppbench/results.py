"""Runs of a store as DataFrames, for notebooks and scripts; each table is read when first used.

    results = ppbench.load("results").last().select(schedule=["afab", "1f1b"])
    results.steps.groupby("run_id")["step_ns"].median()
    ppbench.figures.throughput(results)

Columns and units are those of the store: `docs/reference/columns.md`.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppbench.config.case import unknown_settings
from ppbench.config.toml import SYNONYMS, column_named
from ppbench.display.rows import as_records
from ppbench.errors import UsageError, nearest
from ppbench.store import LAST, TABLES, Store, in_order, last_sweep_in, newest_of


@dataclass(frozen=True, eq=False)
class Results:
    """Some runs of a store, at least one, oldest first or in the order of their names.

    Every table of the store is an attribute: `steps`, `ranks`, `edges`, `attribution`, `memory`,
    `planned` and others. `spans` has every timed action; `table("spans", ["RUN"])` reads a few.
    """

    store: Store
    runs: pd.DataFrame
    """A row per run: its workload, figures and circumstances."""

    def __getattr__(self, name: str) -> pd.DataFrame:
        """A table of the store, such as `steps`: its rows of these runs, read once."""
        if name not in TABLES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        rows = self.__dict__[name] = self.table(name)
        return rows

    def __dir__(self) -> list[str]:
        """The tables too: what an interactive session offers."""
        return [*super().__dir__(), *TABLES]

    def table(self, name: str, runs: str | Iterable[str] | None = None) -> pd.DataFrame:
        """A table of the store, for all these runs or for those of the given ids or prefixes."""
        if name not in TABLES:
            raise UsageError(f'table: unknown "{name}"{nearest(name, TABLES)}')
        chosen = self if runs is None else self.named(runs)
        if name == "runs":
            return chosen.runs
        return self.store.table(name, chosen.runs["run_id"])

    def run(self, name: str) -> Results:
        """A single run, by its id, a unique prefix of it, or `last`. Raises UsageError."""
        return self.named([name])

    def last(self) -> Results:
        """The newest run of each case and launch in the sweep of the last run."""
        last, _ = last_sweep_in(self.store.folder, self.runs)
        return Results(self.store, in_order(newest_of(last)))

    def select(self, **wanted: object) -> Results:
        """The runs whose columns have these values: `select(schedule="1f1b", ranks=[2, 4])`.

        Raises UsageError for an unknown column, and when no run is left.
        """
        runs = self.runs
        for name, value in wanted.items():
            column = column_named(name)
            if column not in runs:
                known = [*map(str, runs), *SYNONYMS]
                raise UsageError(f'select: unknown column "{name}"{nearest(name, known)}')
            cells = runs[column]
            allowed = value if isinstance(value, list | tuple | set | range) else [value]
            runs = runs[cells.isin(list(allowed))]
            if runs.empty:
                values = ", ".join(map(str, cells.drop_duplicates().head(8)))
                raise UsageError(f"select: no run has {column} {value!r}; there are: {values}")
        return Results(self.store, runs)

    def named(self, names: str | Iterable[str]) -> Results:
        """The runs of these names (see `run`), each once, in this order. Raises UsageError."""
        names = [names] if isinstance(names, str) else list(names)
        if not names:
            raise UsageError(f'runs: none is named; give ids, prefixes of ids or "{LAST}"')
        ids = list(dict.fromkeys(self.store.id_of(name, self.runs["run_id"]) for name in names))
        chosen = self.runs[self.runs["run_id"].isin(ids)]
        return Results(
            self.store,
            chosen.sort_values("run_id", key=lambda run: run.map(ids.index), kind="stable"),
        )

    def __len__(self) -> int:
        return len(self.runs)

    def __repr__(self) -> str:
        schedules = ", ".join(dict.fromkeys(map(str, self.runs["schedule"])))
        return f"Results({len(self)} runs in {self.store.folder}; {schedules})"


STAGE_LISTS = {
    "num_layers": "layers_per_stage",
    "num_parameters": "parameters_per_stage",
    "stage_share": "stage_shares",
}
"""A column of the table of stages, and the run's column that holds it as a list."""
NOT_VERIFIED = "no: nothing is recorded"
"""Shown as the verification of training that ppbench did not start."""


@dataclass(frozen=True)
class RunDetails:
    """Everything that a store holds of one run."""

    row: dict[str, object]
    """Its row of `runs`, with missing values as None, and the folder of its `profiles`."""
    stages: pd.DataFrame
    """A row per stage with its layers, parameters and share; null if not stored with the run."""
    ranks: pd.DataFrame
    steps: pd.DataFrame
    flight: pd.DataFrame
    """The last action of each rank of a failed run; empty for any other."""

    @property
    def unknown_settings(self) -> frozenset[str]:
        """The settings that are not recorded, in a run that ppbench did not start."""
        return unknown_settings(self.row["settings_told"])


def details_of(store: Store, name: str) -> RunDetails:
    """The details of a run, by its id, a unique prefix of it, or `last`. Raises UsageError."""
    run = store.find(name)
    profiles = store.profiles_of(run["run_id"])
    row = as_records(pd.DataFrame([run]))[0]
    row["profiles"] = str(profiles) if profiles.is_dir() else None
    row["verified"] = row["verified"] or NOT_VERIFIED
    tables = (store.table(table, [run["run_id"]]) for table in ("ranks", "steps", "flight"))
    lists = {name: row[column] for name, column in STAGE_LISTS.items()}
    columns = {name: json.loads(str(text)) for name, text in lists.items() if text is not None}
    stages = pd.DataFrame(columns).reindex(columns=list(STAGE_LISTS))
    return RunDetails(row, stages.rename_axis("stage").reset_index(), *tables)


def load(results: str | Path = "results") -> Results:
    """Every run of a results folder. Raises UsageError if there is none.

    A file that cannot be read is left out, with a warning.
    """
    store = Store(Path(results), functools.cache(warnings.warn))
    return Results(store, store.every_run())
