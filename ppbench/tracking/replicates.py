"""Which rows of `runs` are launches of the same, so that their figures may stand side by side.

Not the key by which sweeps resume: that takes in files of the tree and the code that measures,
which differ between the commits that are to be compared.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import pandas as pd

from ppbench.report.units import is_missing

SETTINGS = tuple(
    f"measure_{name}"
    for name in ("warmup_steps", "max_warmup_steps", "steps", "verify", "profile_steps")
)
"""How it was measured, as far as figures depend on it."""
MEASURED_ALIKE = ("case_id", "fingerprint", *SETTINGS)
"""Columns in which launches agree whose figures compare."""
STATE = ("commit", "is_dirty", "changes")
"""Columns of the tree that was measured."""
FRESH_S = 3600.0
Key = tuple[str, ...]


def newest_launches(runs: pd.DataFrame, *, by_state: bool = False) -> pd.DataFrame:
    """The newest row of each launch; one that was interrupted tells nothing.

    `runs` are of one side, or with `by_state` of many commits; the store's order is that of time.
    """
    whole = runs[runs["status"] != "interrupted"]
    key = [*(STATE if by_state else ()), *MEASURED_ALIKE, "launch"]
    return whole.drop_duplicates(key, keep="last")


def keys_of(runs: pd.DataFrame) -> list[Key]:
    """`MEASURED_ALIKE` of each row, as text; empty where it is not told."""
    columns = (map(_text, runs[name]) for name in MEASURED_ALIKE)
    return list(zip(*columns, strict=True))


def _text(cell: object) -> str:
    """The same of an integer, whether or not others of its column are null."""
    if is_missing(cell) or cell is pd.NA:
        return ""
    return str(int(cell)) if isinstance(cell, float) else str(cell)


def fresh(runs: pd.DataFrame, now: datetime) -> pd.DataFrame:
    """Those of a side that were made within `FRESH_S` before `now`, by the code of the newest.

    Machines drift by more between sessions than launches differ within one.
    """
    made = pd.to_datetime(runs["created_at"], utc=True, format="ISO8601")
    late = runs[made >= now - timedelta(seconds=FRESH_S)]
    return late if late.empty else late[late["code"].map(_text) == _text(late["code"].iloc[-1])]
