"""The tables of some runs, each read once for all of them, for a page that asks run by run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import pandas as pd

from ppbench.store.columns import RUN_ID
from ppbench.store.folder import Store

_OF_MOST_RUNS = frozenset({"steps", "ranks", "edges"})
"""Small tables, in which nearly every run has rows."""


class ReadOnce(Store):
    """A store that reads a small table of all these runs when one is first asked for."""

    def __init__(self, store: Store, run_ids: Iterable[str]) -> None:
        self.folder, self._reader = store.folder, store._reader
        self._ids = list(dict.fromkeys(run_ids))
        self._held: dict[str, tuple[pd.DataFrame, Mapping[str, np.ndarray]]] = {}

    def table(self, name: str, run_ids: Iterable[str]) -> pd.DataFrame:
        """The rows of the given runs in a table, in the order of the ids."""
        wanted = list(dict.fromkeys(run_ids))
        if name not in _OF_MOST_RUNS or not set(wanted) <= set(self._ids):
            return super().table(name, wanted)
        if name not in self._held:
            rows = super().table(name, self._ids)
            of_runs = rows.groupby(RUN_ID, sort=False).indices
            self._held[name] = rows, {str(run): np.asarray(own) for run, own in of_runs.items()}
        rows, places = self._held[name]
        own = [places[run_id] for run_id in wanted if run_id in places]
        return rows.iloc[np.concatenate([np.empty(0, int), *own])].reset_index(drop=True)
