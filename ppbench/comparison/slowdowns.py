"""How much each run was slowed by its machine, from the columns of `runs` that say so."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pandas as pd

from ppbench.comparison.launches import CONTROLS, key_text
from ppbench.display.units import is_missing
from ppbench.judge.slowdowns import (
    NOT_KNOWN,
    UNKNOWN,
    Control,
    Slowdown,
    slowdowns,
)


def slowdowns_by_run(runs: pd.DataFrame) -> dict[str, Slowdown]:
    """The slowdown of each of these rows of `runs`, by its id; NaN where it is unknown.

    What is usual is found among those that are ok. Runs without a reference have what their
    counters say, if they have these.
    """
    if runs.empty:
        return {}
    runs = runs[runs["status"] == "ok"].drop_duplicates("run_id").sort_values("run_id")
    controls = []
    for row in runs.to_dict("records"):
        work, *numbers = (row.get(name) for name in CONTROLS)
        known = {
            name: UNKNOWN if is_missing(value) or value is pd.NA else float(str(value))
            for name, value in zip(CONTROLS[1:], numbers, strict=True)
        }
        machine = (key_text(row.get("fingerprint")), key_text(work))
        controls.append(Control(machine, key_text(row.get("case_id")), **known))
    by_place = slowdowns(controls)
    return dict(zip(map(str, runs["run_id"]), by_place, strict=True))


def in_order(runs: pd.DataFrame, by_run: Mapping[str, Slowdown]) -> tuple[float, ...] | None:
    """How much beyond what is usual these runs were slowed; None where all are unknown."""
    found = tuple(by_run.get(str(run_id), NOT_KNOWN).beyond_usual for run_id in runs["run_id"])
    return None if all(map(math.isnan, found)) else found
