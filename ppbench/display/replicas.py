"""Keeps tables of ranks readable where a job has many replicas of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS = 16
"""A table with more rows is folded: a terminal shows it without scrolling."""
REPLICA = "replica_shown"
_MEDIAN = "median"


def folded(
    frame: pd.DataFrame, key: str, columns: Sequence[str], leading: str
) -> tuple[pd.DataFrame, list[str]]:
    """Return a table that has a row per replica of each rank, or edge, as people read it.

    One replica: as it is. Few rows: with the replica of each. Else two rows for each `key`: the
    median over replicas, and the replica that is worst, by the highest value of `leading`.
    """
    import pandas as pd
    from pandas.api.types import is_bool_dtype, is_numeric_dtype

    if "replica" not in frame or frame["replica"].nunique() < 2:
        return frame, list(columns)
    shown = [key, REPLICA, *(name for name in columns if name != key)]
    rows = frame.assign(**{REPLICA: frame["replica"].astype(int).astype(str)})
    if len(rows) <= MOST_ROWS:
        return rows.sort_values([key, "replica"], ignore_index=True), shown

    def middle(values: pd.Series) -> object:
        """Return the median of numbers; of anything else the value, if it is the same in all."""
        if is_bool_dtype(values) or not is_numeric_dtype(values):
            known = values.dropna().unique()
            return (
                known[0] if len(known) == 1 else f"{len(known)} different" if len(known) else None
            )
        return values.median()

    groups = rows.groupby(key, sort=False)
    worst = rows.loc[groups[leading].idxmax().dropna()] if rows[leading].notna().any() else None
    medians = groups.agg(middle).reset_index().assign(**{REPLICA: _MEDIAN})
    every = medians if worst is None else pd.concat([medians, worst], ignore_index=True)
    return every.sort_values(key, kind="stable", ignore_index=True), shown


def folding_note(frame: pd.DataFrame, key: str) -> str | None:
    """Return what `folded` has left out of a table, in a sentence; None if nothing."""
    if "replica" not in frame or frame["replica"].nunique() < 2 or len(frame) <= MOST_ROWS:
        return None
    return (
        f"Of each {key}: the median of {frame['replica'].nunique()} replicas, and the worst one; "
        "--format json shows all."
    )
