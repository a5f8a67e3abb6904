"""Looks up the launches of commits in a store, which costs far less than a start.

Launches are found by what they measured, not by the key with which sweeps resume: that includes
files of the tree and the code that measures, which differ between the commits that are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import pandas as pd

from ppbench.comparison.launches import (
    COLUMNS,
    fresh,
    key_of,
    key_text,
    keys_of,
    newest_launches,
)
from ppbench.config.sweep import Sweep
from ppbench.display.cases import NOT_FINITE
from ppbench.git import Commit
from ppbench.run.sweep.plan import FINAL as FAILED_FINALLY
from ppbench.store import Store

FINAL = (*FAILED_FINALLY, NOT_FINITE)


@dataclass(frozen=True)
class Launch:
    """The newest row of a case in a launch."""

    run_id: str
    status: str
    error: str
    figures: Mapping[str, float]  # by metric; what is null is left out
    process_start: str  # launches in turns with one another have the same; "" if it is not known
    rounds: str  # their figures, as JSON; "" if it had none

    @property
    def is_ok(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True)
class Launches:
    """The launches of one commit."""

    rows: Mapping[tuple[int, int], Launch]  # (place of the case in the sweep, launch) -> row

    def of_case(self, case: int) -> list[Launch]:
        """The launches of a case in order, ok or not."""
        return [row for (place, _), row in sorted(self.rows.items()) if place == case]

    def measured(self, case: int, metric: str) -> dict[int, Launch]:
        """The launches of a case that are `ok` and have the metric, by their number, in order."""
        return {
            launch: row
            for (place, launch), row in sorted(self.rows.items())
            if place == case and row.is_ok and metric in row.figures
        }

    def figures(self, case: int, metric: str) -> tuple[float, ...]:
        """A metric of the launches of a case that are `ok`, in order."""
        return tuple(row.figures[metric] for row in self.measured(case, metric).values())

    def num_ok(self, case: int) -> int:
        return sum(row.is_ok for row in self.of_case(case))

    def num_done(self, case: int) -> int:
        """How many launches are finished: ok, or failed for a reason of their own."""
        return sum(row.status in ("ok", *FINAL) for row in self.of_case(case))

    def last_failure(self, case: int) -> Launch | None:
        """The last failed launch of a case, whether or not others are ok."""
        return next((row for row in reversed(self.of_case(case)) if not row.is_ok), None)

    def failure(self, case: int) -> Launch | None:
        """The last failed launch of a case that is ok in none."""
        return None if self.num_ok(case) else self.last_failure(case)

    def does_not_run(self, case: int) -> bool:
        """Whether a case failed for a reason of its own and is ok in no launch, so none will be."""
        return not self.num_ok(case) and self.num_done(case) > 0


class StoredLaunches:
    """Looks launches up in a store: of any age, or with `is_fresh` only those just made.

    Fresh ones were made within the hour, by the same code, and `after` this run; failures count if
    they were made after the run `fails_after`. `code` is the code that will measure; None where
    each commit has its own, which then is that of the newest launch.
    """

    def __init__(
        self,
        store: Store,
        sweep: Sweep,
        metrics: Sequence[str],
        *,
        is_fresh: bool = False,
        fails_after: str = "",
        code: str | None = None,
        after: str = "",
    ) -> None:
        self._store, self._is_fresh, self._code = store, is_fresh, code
        self._after, self._fails_after = after, fails_after
        # Later launches stay fresh, however long measuring takes.
        self._begun = datetime.now(UTC)
        self._metrics = list(dict.fromkeys(metrics))
        self._places = {key_of(*planned): place for place, planned in enumerate(sweep.cases)}

    def of(self, commits: Sequence[Commit]) -> list[Launches]:
        """The launches of each commit with the same uncommitted changes."""
        runs = self._rows()
        return [self._chosen(self._of_commit(runs, commit)) for commit in commits]

    def next_launches(self, commits: Sequence[Commit]) -> list[int]:
        """The first launch number of each, of all cases, that a sweep would not find."""
        runs, numbers = self._rows(), []
        for commit in commits:
            own = self._of_code(self._of_commit(runs, commit))
            own = own[own["status"].isin(("ok", *FINAL))]
            numbers.append(0 if own.empty else int(own["launch"].max()) + 1)
        return numbers

    def _rows(self) -> pd.DataFrame:
        """The rows of the sweep's cases, without the failures that do not count."""
        columns = [*COLUMNS, "process_start", "rounds", *self._metrics]
        runs = self._store.runs(list(dict.fromkeys(columns)))
        is_case = pd.Series([key in self._places for key in keys_of(runs)], runs.index, dtype=bool)
        return runs[is_case & (runs["status"].eq("ok") | (runs["run_id"] > self._fails_after))]

    def _chosen(self, rows: pd.DataFrame) -> Launches:
        """The launches in these rows of a commit."""
        if self._is_fresh:
            rows = fresh(self._of_code(rows), self._begun)
            rows = rows[rows["run_id"] > self._after]
        rows = newest_launches(rows)
        return Launches(
            {
                (self._places[key], int(row["launch"])): Launch(
                    str(row["run_id"]),
                    str(row["status"]),
                    key_text(row["error"]),
                    {name: float(row[name]) for name in self._metrics if not pd.isna(row[name])},
                    key_text(row["process_start"]),
                    key_text(row["rounds"]),
                )
                for key, row in zip(keys_of(rows), rows.to_dict("records"), strict=True)
            }
        )

    def _of_commit(self, runs: pd.DataFrame, commit: Commit) -> pd.DataFrame:
        is_its = runs["commit"].eq(commit.commit)
        return runs[is_its & (runs["changes"].map(key_text) == commit.changes)]

    def _of_code(self, runs: pd.DataFrame) -> pd.DataFrame:
        if runs.empty:
            return runs
        codes = runs["code"].map(key_text)
        return runs[codes == (codes.iloc[-1] if self._code is None else self._code)]
