"""The runs of a report that failed: why, at which rank, and what each rank was doing."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from ppbench.analysis.post_mortem import in_words
from ppbench.errors import first_line
from ppbench.report.cases import Axes, case_text
from ppbench.report.units import MISSING, counted, is_missing
from ppbench.store import Store

_HEADINGS = {
    "rank": "rank",
    "hostname": "node",
    "process": "process",
    "phase": "phase",
    "step": "step",
    "action": "action",
    "waits_for": "waits for",
    "since_s": "for",
}


@dataclass(frozen=True)
class Flight:
    """What each rank was doing when it was last seen, a row each, in words."""

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Failure:
    """A run that did not succeed: its headline, and everything that was said."""

    run_id: str
    case_id: str
    case: str
    status: str
    rank: str  # `rank 1`, or nothing where that cannot be told or the headline tells it
    headline: str
    error: str  # where there is more of it than the headline
    flight: Flight | None


def failures(store: Store, runs: pd.DataFrame, axes: Axes) -> list[Failure]:
    """The runs whose status is not `ok`."""
    return [_failure(store, run, axes) for _, run in runs[runs["status"] != "ok"].iterrows()]


def _failure(store: Store, run: pd.Series, axes: Axes) -> Failure:
    error = "" if is_missing(run["error"]) else str(run["error"]).strip()
    headline = first_line(error) or "no error was recorded"
    rank = "" if is_missing(run["error_rank"]) else f"rank {int(run['error_rank'])}"
    return Failure(
        str(run["run_id"]),
        str(run["case_id"]),
        case_text(run, axes),
        str(run["status"]),
        "" if rank in headline else rank,
        headline,
        error if error != headline else "",
        flight_of(store, run),
    )


def counts(runs: pd.DataFrame) -> str:
    """`3 of 12 runs failed: 2 timeout, 1 oom.`; the most frequent first."""
    failed = runs.loc[runs["status"] != "ok", "status"]
    by_status = ", ".join(f"{count} {status}" for status, count in failed.value_counts().items())
    return f"{len(failed)} of {counted(len(runs), 'run')} failed: {by_status}."


def flight_of(store: Store, run: pd.Series) -> Flight | None:
    """None for a run that left no record of its ranks."""
    table = store.table("flight", [run["run_id"]])
    if table.empty:
        return None
    told = in_words(table)
    rows = (
        tuple(_written(str(name), value) for name, value in row.items())
        for _, row in told.iterrows()
    )
    return Flight(tuple(_HEADINGS[str(name)] for name in told), tuple(rows))


def _written(name: str, value: object) -> str:
    if is_missing(value) or value is pd.NA:
        return MISSING
    return f"{value:,.3f} s" if name == "since_s" else str(value)
