"""Stores of commits made by hand: so many launches of a case, figures and spans as given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from stored_runs import MS, run_row, spans, store_together

from ppbench.config.case import Case
from ppbench.store import Store

CASE = Case()
STEADY = (1000.0, 1004.0, 997.0, 1002.0, 999.0)
"""Tokens/s of five launches: they differ by 0.3 %."""


def scattered(deviation: float, middle: float = 1000.0) -> tuple[float, ...]:
    """Twelve launches with about this relative deviation, none of them apart from the others."""
    return tuple(middle * (1 + deviation * (n - 5.5) / 3.6) for n in range(12))


SWEEP = """name = "demo"
[grid]
schedule = ["1f1b", "afab"]
"""


_NUM_WRITTEN: dict[Path, int] = {}
"""By the store's folder."""


def num_written(store: Store) -> int:
    """How many runs were written, whichever files they are in now."""
    found = sum(1 for _ in (store.folder / "runs").glob("*"))
    return max(found, _NUM_WRITTEN.get(store.folder, 0))


def note_written(store: Store, count: int) -> None:
    _NUM_WRITTEN[store.folder] = num_written(store) + count


def in_one_file(store: Store) -> None:
    """Put all runs into one file: a command reads them several times, and many files take long."""
    if len(list((store.folder / "runs").rglob("*.parquet"))) > 4:
        store.compact(lambda _note: None)


def slower(by: float, figures: Iterable[float] = STEADY) -> tuple[float, ...]:
    """Figures that are lower by about `by`, by slightly different amounts."""
    return tuple(f * (1 - by) * (1 + n % 3 / 1000) for n, f in enumerate(figures))


def add_launches(
    store: Store,
    speeds: Sequence[float | None],
    commit: str | None,
    case: Case = CASE,
    *,
    stretch: Mapping[tuple[int, str], float] | None = None,
    **changes: object,
) -> list[str]:
    """A run for each of the tokens/s; their ids.

    With spans if `stretch` is given: by how much longer an op of a stage takes.
    """
    runs = []
    first = num_written(store)
    for launch, speed in enumerate(speeds):
        row = {
            **run_row(0, case),
            "run_id": f"20260101T{first + launch:06d}000-abcdef",
            "launch": launch,
            "resume_key": f"{case.case_id} {launch} {commit} {changes.get('fingerprint')}",
            "commit": commit,
            "changes": None if commit is None else "",
            "is_dirty": None if commit is None else False,
            "subject": "a subject",
            "code": "c0de",
            "tokens_per_s": speed,
            **changes,
        }
        timed = {} if stretch is None else {"spans": stretched(stretch, 1 + launch % 3 / 1000)}
        runs.append((row, timed))
    note_written(store, len(runs))
    store_together(store, runs)
    return [str(row["run_id"]) for row, _ in runs]


def stretched(stretch: Mapping[tuple[int, str], float], jitter: float) -> pd.DataFrame:
    """Two steps of `stored_runs.ACTIONS`; ops longer than there end later, nothing else moves."""
    timed = pd.concat([spans(1), spans(2, 100)], ignore_index=True)
    factors = [
        jitter * stretch.get((stage, op), 1.0)
        for stage, op in zip(timed["stage"], timed["op"], strict=True)
    ]
    longer = (timed["end_ns"] - timed["start_ns"]) * factors
    is_alone = timed["lane"] == "compute"
    timed["end_ns"] = timed["end_ns"].mask(is_alone, timed["start_ns"] + longer.astype("int64"))
    assert (timed["end_ns"] < 300 * MS).all()
    return timed


def store_in(folder: Path) -> Store:
    return Store(folder / "results")
