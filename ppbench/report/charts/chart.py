"""A chart of a sweep, and what it is drawn from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from ppbench.cautions import Caution
from ppbench.display.cases import Axes, by_case, ok_runs
from ppbench.report.charts.canvas import Drawing
from ppbench.store import Store


@dataclass(frozen=True)
class Measured:
    """Runs that are ok, their cases, and the settings in which these differ."""

    store: Store
    runs: pd.DataFrame
    cases: pd.DataFrame  # rows of `by_case`
    axes: Axes

    @classmethod
    def of(cls, store: Store, runs: pd.DataFrame, axes: Axes) -> Measured:
        return cls(store, ok_runs(runs), by_case(runs, axes), axes)

    def having(self, columns: Sequence[str]) -> Measured:
        """Return it with the runs alone that have values in these columns."""
        known = self.runs.reindex(columns=list(columns)).notna().all(axis=1)
        if known.all():
            return self
        runs = self.runs[known]
        return replace(self, runs=runs, cases=by_case(runs, self.axes))

    def table(self, name: str) -> pd.DataFrame:
        """Return the rows of these runs in a table of the store."""
        return self.store.table(name, self.runs["run_id"])


@dataclass(frozen=True)
class Chart:
    """A kind of chart, with its heading and a note on how to read it."""

    name: str
    heading: str
    note: str
    concerns: tuple[Caution, ...]
    """The cautions that concern its figures."""
    needs: str
    """It says what runs may lack for the chart; it is empty where none can lack anything."""
    draw: Callable[[Measured], Drawing | None]
    """It returns None where the runs, of which at least one is ok, lack what it needs."""
