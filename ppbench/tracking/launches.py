"""What the store has of a sweep's cases at each commit, launch by launch, on this machine.

A launch is looked up by what it measured, not by its resume key: that takes in files of the
commit's own tree, and the code that measures, which may have been updated since. Looking costs
far less than a start, which takes seconds.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from ppbench.config.case import Case, Measure
from ppbench.config.sweep import Sweep
from ppbench.report.cases import NOT_FINITE, WHERE_NOT_FINITE, without_not_finite
from ppbench.repository import Commit
from ppbench.run.environment import read_environment
from ppbench.run.evidence import INTERRUPTED
from ppbench.run.sweep import FINAL as FAILED_FINALLY
from ppbench.store import Condition, Store
from ppbench.tracking.replicates import MEASURED_ALIKE, SETTINGS, fresh

FINAL = (*FAILED_FINALLY, NOT_FINITE)
_KEYS = list(MEASURED_ALIKE)
_COLUMNS = [
    "run_id",
    "status",
    "error",
    "cautions",
    *WHERE_NOT_FINITE,
    "launch",
    "changes",
    "created_at",
    "code",
    *_KEYS,
]


@dataclass(frozen=True)
class Launch:
    """The newest row of a case in a launch."""

    run_id: str
    status: str
    error: str
    figures: Mapping[str, float]  # by metric; what is null is left out


@dataclass(frozen=True)
class Launches:
    """Of one commit."""

    rows: Mapping[tuple[int, int], Launch]  # (place of the case in the sweep, launch) -> row

    @property
    def run_ids(self) -> set[str]:
        return {row.run_id for row in self.rows.values()}

    def of_case(self, case: int) -> list[Launch]:
        """In order, whatever became of them."""
        return [row for (place, _), row in sorted(self.rows.items()) if place == case]

    def figures(self, case: int, metric: str) -> tuple[float, ...]:
        """A figure of the launches of a case that are `ok`, in order."""
        rows = (row for row in self.of_case(case) if row.status == "ok")
        return tuple(row.figures[metric] for row in rows if metric in row.figures)

    def num_done(self, case: int) -> int:
        """That are ok or have failed by their own fault."""
        return sum(row.status in ("ok", *FINAL) for row in self.of_case(case))

    def num_ok(self, case: int) -> int:
        return sum(row.status == "ok" for row in self.of_case(case))

    def failure(self, case: int) -> Launch | None:
        """The last launch of a case that has failed and is ok in none.

        One that was interrupted has not failed: nothing was found out.
        """
        return None if self.num_ok(case) else self.last_failure(case)

    def last_failure(self, case: int) -> Launch | None:
        """Whether or not others are ok."""
        rows = [row for row in self.of_case(case) if row.status not in ("ok", INTERRUPTED)]
        return rows[-1] if rows else None

    def does_not_run(self, case: int) -> bool:
        """Whether a case has failed by its own fault, and is ok in no launch: nor will others."""
        return not self.num_ok(case) and any(row.status in FINAL for row in self.of_case(case))

    def is_missing(self, case: int, launch: int, *, retries_failed: bool = False) -> bool:
        """Whether it is to be run: it was not, or was cut short by what is not its own fault."""
        row = self.rows.get((case, launch))
        done = ("ok",) if retries_failed else ("ok", *FINAL)
        return row is None or row.status not in done


class Stored:
    """Looks launches up in a store: of any age, or `is_fresh` those alone that were just made.

    `code` is what will measure; None where each commit has its own, which then is that of the
    newest launch.
    """

    def __init__(
        self,
        store: Store,
        sweep: Sweep,
        metrics: Sequence[str],
        *,
        is_fresh: bool = False,
        code: str | None = None,
    ) -> None:
        self._store, self._is_fresh, self._code = store, is_fresh, code
        self._begun = datetime.now(UTC)  # what is made later stays fresh, however long that takes
        self._metrics = list(dict.fromkeys(metrics))
        self._places = {_key_of(*one): place for place, one in enumerate(sweep.cases)}

    def of(self, commit: Commit) -> Launches:
        """Those of a commit with the same uncommitted changes: none, of one that is clean."""
        is_commit = Condition("commit", "=", commit.commit)
        return self._chosen(self._store.runs([*_COLUMNS, *self._metrics], [is_commit]), commit)

    def of_all(self, commits: Sequence[Commit]) -> list[Launches]:
        """Those of many commits, read at once."""
        rows = self._store.runs(["commit", *_COLUMNS, *self._metrics])
        by_commit = {str(sha): of for sha, of in rows.groupby("commit")}
        return [self._chosen(by_commit.get(one.commit, rows[:0]), one) for one in commits]

    def next_launch(self, commit: Commit) -> int:
        """The number of the first that a sweep would find none of, of any age; of all its cases."""
        is_commit = Condition("commit", "=", commit.commit)
        runs = self._of_state(self._store.runs(_COLUMNS, [is_commit]), commit)
        runs = self._of_code(runs[runs["status"].isin(("ok", *FINAL))])
        return 0 if runs.empty else int(runs["launch"].max()) + 1

    def _chosen(self, runs: pd.DataFrame, commit: Commit) -> Launches:
        """Of these rows of a commit, oldest first."""
        rows = self._of_state(without_not_finite(runs), commit)
        if self._is_fresh:
            rows = fresh(self._of_code(rows), self._begun)
        places = (self._places[tuple(row)] for row in rows[_KEYS].itertuples(index=False))
        numbers = map(int, rows["launch"])
        told = map(self._launch, rows.to_dict("records"))
        return Launches(dict(zip(zip(places, numbers, strict=True), told, strict=True)))

    def _of_state(self, runs: pd.DataFrame, commit: Commit) -> pd.DataFrame:
        """Those of the sweep's cases with the same uncommitted changes."""
        keys = runs[_KEYS].itertuples(index=False, name=None)
        is_case = pd.Series([key in self._places for key in keys], runs.index, dtype=bool)
        return runs[is_case & (runs["changes"].map(_text) == commit.changes)]

    def _of_code(self, runs: pd.DataFrame) -> pd.DataFrame:
        if runs.empty:
            return runs
        codes = runs["code"].map(_text)
        return runs[codes == (codes.iloc[-1] if self._code is None else self._code)]

    def _launch(self, row: Mapping[Hashable, Any]) -> Launch:
        figures = {name: float(row[name]) for name in self._metrics if not pd.isna(row[name])}
        return Launch(str(row["run_id"]), str(row["status"]), _text(row["error"]), figures)


def _text(cell: object) -> str:
    """Empty for null."""
    return cell if isinstance(cell, str) else ""


def _key_of(case: Case, measure: Measure) -> tuple[object, ...]:
    """The values of `_KEYS`."""
    threads = case.launch_threads_per_rank
    fingerprint = read_environment().fingerprint(case.device, case.world_size, threads)
    measured = (getattr(measure, name.removeprefix("measure_")) for name in SETTINGS)
    return (case.case_id, fingerprint, *measured)
