"""Figures over commits made by hand: a line of commits, and runs of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from repositories import FIRST_S, commit, make_repository
from stored_runs import run_row, spans, store_together

from ppbench.config.case import Case
from ppbench.store import Store

DAY_S = 86_400


def repository(folder: Path, subjects: Sequence[str]) -> list[str]:
    """A repository with a line of commits, one a day, checked out at the last; their hashes."""
    make_repository(folder)
    return [commit(folder, {}, subject, day=n) for n, subject in enumerate(subjects)]


@dataclass(frozen=True)
class CommitFacts:
    """The commit of a run, as its columns describe it."""

    commit: str
    number: int  # its day
    subject: str = "a change"
    is_dirty: bool = False
    changes: str = ""


def dated(number: int) -> str:
    return pd.Timestamp(FIRST_S + number * DAY_S, unit="s", tz="UTC").isoformat()


class Runs:
    """Runs put into a store, one after the other."""

    def __init__(self, folder: Path) -> None:
        self.store = Store(folder)
        self.num = 0

    def add(
        self,
        facts: CommitFacts,
        case: Case,
        figure: float | None,
        *,
        has_spans: bool = False,
        **changes: object,
    ) -> str:
        """Add a launch, failed if it has no figure; returns its id."""
        row, tables = self._launch(facts, case, figure, has_spans=has_spans, **changes)
        self.store.write_run(row, tables)
        return str(row["run_id"])

    def add_launches(
        self, facts: CommitFacts, case: Case, figures: Sequence[float | None], **changes: object
    ) -> list[str]:
        """Add launches, of which only the median one has spans; returns their ids."""
        measured = sorted(value for value in figures if value is not None)
        middle = measured[(len(measured) - 1) // 2] if measured else None
        launches = []
        for n, value in enumerate(figures):
            has_spans = value is not None and value == middle
            settings = {"launch": n, **changes}
            launches.append(self._launch(facts, case, value, has_spans=has_spans, **settings))
        store_together(self.store, launches)
        return [str(row["run_id"]) for row, _ in launches]

    def _launch(
        self,
        facts: CommitFacts,
        case: Case,
        figure: float | None,
        *,
        has_spans: bool,
        **changes: object,
    ) -> tuple[dict, dict[str, pd.DataFrame]]:
        self.num += 1
        row = {
            **run_row(1, case),
            "run_id": f"20260101T{self.num:09d}-abcdef",
            "launch": self.num,
            "created_at": dated(facts.number),
            "commit": facts.commit,
            "author_date": dated(facts.number),
            "subject": facts.subject,
            "is_dirty": facts.is_dirty,
            "changes": facts.changes,
            "status": "error" if figure is None else "ok",
            "tokens_per_s": figure,
            "error": "cannot start" if figure is None else None,
            **changes,
        }
        return row, _tables(row) if has_spans else {}


def _tables(row: Mapping[str, object]) -> dict[str, pd.DataFrame]:
    steps = pd.DataFrame([{"step": 1, "step_ns": row["step_ns"], "is_outlier": False}])
    return {"steps": steps, "spans": spans(1)}


NOISE = (0.0, 0.004, -0.003, 0.001, -0.002)


def five(level: float, number: int) -> list[float]:
    """Launches about a level, other ones for each commit, and the same each time."""
    turned = NOISE[number % 5 :] + NOISE[: number % 5]
    sign = 1 if number % 2 else -1
    return [level * (1 + sign * noise + 0.0005 * (number % 3)) for noise in turned]


CASE = Case(schedule="1f1b")
OTHER = replace(CASE, num_microbatches=CASE.num_microbatches * 2)
