"""Finds the rows of `runs` that are launches of the same case, so that their figures compare."""

from __future__ import annotations

from datetime import datetime, timedelta

import pandas as pd

from ppbench.config.case import TIMES, Case, Measure
from ppbench.display.cases import (
    FAILED_FINALLY,
    FIGURES,
    INTERVAL,
    NOT_FINITE,
    NOT_GIVEN,
    WHERE_NOT_FINITE,
    without_not_finite,
)
from ppbench.display.units import is_missing

SETTINGS = tuple(Measure().of_figures())
"""The measurement settings that figures depend on."""
MEASURED_ALIKE = ("case_id", "fingerprint", *SETTINGS)
"""The columns that must be equal for figures to compare."""
STATE = ("commit", "is_dirty", "changes")
"""The columns that identify the tree that was measured."""
COLUMNS = (
    *("run_id", "launch", "status", "error", "cautions", *WHERE_NOT_FINITE),
    *("created_at", "code", *STATE, *MEASURED_ALIKE),
)
"""The columns of `runs` that the functions of this file need."""
CONTROLS = (
    *("reference", "reference_ns", "cores_short"),
    *("steal_fraction", "cpu_throttled_fraction", "gpu_sm_mhz"),
)
"""The columns of `runs` that show by how much a run was slowed."""
SIDE_COLUMNS = (
    *COLUMNS,
    *("sweep_id", "sweep_name", "sweep_file", "position", "subject", "author_date"),
    *Case().settings(),
    *FIGURES,
    *INTERVAL,
    *("process_start", "rounds", "origin", "measure_resolution", "measure_budget"),
)
"""The columns of `runs` that sides and their comparison need."""
FRESH_S = 3600.0
FINAL = (*FAILED_FINALLY, NOT_FINITE)
"""The states of a run that failed for a reason of its own."""
Key = tuple[str, ...]


def newest_launches(runs: pd.DataFrame, *, by_state: bool = False) -> pd.DataFrame:
    """Return the newest row of each launch; one with a NaN or infinite number has failed.

    Interrupted runs do not count. `runs` are those of one side, or with `by_state` of many commits,
    in the order of time.
    """
    whole = without_not_finite(runs[runs["status"] != "interrupted"])
    key = [*(STATE if by_state else ()), *MEASURED_ALIKE, "launch"]
    return whole.drop_duplicates(key, keep="last")


def without_times_of_files(cases: pd.DataFrame) -> pd.DataFrame:
    """The cases without the times of a file of costs, which are no part of a case."""
    settled = cases.copy()
    settled.loc[settled["emulated_costs"].fillna("") != "", list(TIMES)] = NOT_GIVEN
    return settled


def keys_of(runs: pd.DataFrame) -> list[Key]:
    """Return the values of `MEASURED_ALIKE` of each row, as text; empty where null."""
    columns = (map(key_text, runs[name]) for name in MEASURED_ALIKE)
    return list(zip(*columns, strict=True))


def key_of(case: Case, measure: Measure) -> Key:
    """The values of `MEASURED_ALIKE` of a case on this machine, as text."""
    from ppbench.run.machine.environment import fingerprint_here

    measured = measure.of_figures().values()
    threads = case.launch_threads_per_rank
    fingerprint = fingerprint_here(case.device, case.num_processes, threads)
    return (case.case_id, fingerprint, *map(str, measured))


def states_of(runs: pd.DataFrame) -> list[Key]:
    """What was measured in each row, and how: the tree, the code that measured, the settings."""
    columns = (map(key_text, runs[name]) for name in (*STATE, "code", *MEASURED_ALIKE))
    return list(zip(*columns, strict=True))


def fresh(runs: pd.DataFrame, now: datetime) -> pd.DataFrame:
    """Return the runs made within `FRESH_S` before `now`, by the same code as the newest.

    Between sessions a machine drifts by more than launches differ within one.
    """
    made = pd.to_datetime(runs["created_at"], utc=True, format="ISO8601")
    late = runs[made >= now - timedelta(seconds=FRESH_S)]
    codes = late["code"].map(key_text)
    return late if late.empty else late[codes == codes.iloc[-1]]


def key_text(cell: object) -> str:
    """The text of a cell; an integer reads the same in a column with nulls, which is of floats."""
    if is_missing(cell) or cell is pd.NA:
        return ""
    return str(int(cell)) if isinstance(cell, float) else str(cell)
