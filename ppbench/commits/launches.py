"""Looks up the launches of a commit in a store, which costs far less than a start.

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
    FINAL,
    fresh,
    key_of,
    key_text,
    keys_of,
    newest_launches,
)
from ppbench.comparison.slowdowns import recorded, slowdowns_by_run
from ppbench.config.sweep import Sweep
from ppbench.git import Commit
from ppbench.judge.slowdowns import NOT_KNOWN, Slowdown, is_disturbed
from ppbench.store import Condition, Store


@dataclass(frozen=True)
class Launch:
    """The newest row of a case in a launch."""

    run_id: str
    status: str
    error: str
    figures: Mapping[str, float]  # by metric; what is null is left out
    slowdown: Slowdown = NOT_KNOWN  # of its machine

    @property
    def is_disturbed(self) -> bool:
        """Whether something else on its machine slowed it."""
        return is_disturbed(self.slowdown)


@dataclass(frozen=True)
class Launches:
    """The launches of one commit."""

    rows: Mapping[tuple[int, int], Launch]  # (place of the case in the sweep, launch) -> row

    @property
    def run_ids(self) -> set[str]:
        return {row.run_id for row in self.rows.values()}

    def of_case(self, case: int) -> list[Launch]:
        """The launches of a case in order, ok or not."""
        return [row for (place, _), row in sorted(self.rows.items()) if place == case]

    def figures(self, case: int, metric: str) -> tuple[float, ...]:
        """A metric of the launches of a case that are `ok`, in order."""
        return tuple(row.figures[metric] for row in self.measured(case, metric).values())

    def measured(self, case: int, metric: str) -> dict[int, Launch]:
        """The launches of a case that are `ok` and have the metric, by their number, in order."""
        return {
            launch: row
            for (place, launch), row in sorted(self.rows.items())
            if place == case and row.status == "ok" and metric in row.figures
        }

    def num_done(self, case: int) -> int:
        """How many launches are finished: ok, or failed for a reason of their own."""
        return sum(row.status in ("ok", *FINAL) for row in self.of_case(case))

    def disturbed(self, case: int) -> list[bool]:
        """Whether each finished launch of a case was disturbed, in order."""
        rows = self.of_case(case)
        return [row.is_disturbed for row in rows if row.status in ("ok", *FINAL)]

    def num_ok(self, case: int) -> int:
        return sum(row.status == "ok" for row in self.of_case(case))

    def failure(self, case: int) -> Launch | None:
        """The last failed launch of a case that is ok in none."""
        return None if self.num_ok(case) else self.last_failure(case)

    def last_failure(self, case: int) -> Launch | None:
        """The last failed launch of a case, whether or not others are ok."""
        rows = [row for row in self.of_case(case) if row.status != "ok"]
        return rows[-1] if rows else None

    def does_not_run(self, case: int) -> bool:
        """Whether a case failed for a reason of its own and is ok in no launch, so none will be."""
        return not self.num_ok(case) and any(row.status in FINAL for row in self.of_case(case))

    def is_missing(self, case: int, launch: int, *, retries_failed: bool = False) -> bool:
        """Whether a launch has to be made: it has no row, or failed for an outside reason."""
        row = self.rows.get((case, launch))
        done = ("ok",) if retries_failed else ("ok", *FINAL)
        return row is None or row.status not in done


class StoredLaunches:
    """Looks launches up in a store: of any age, or with `is_fresh` only those just made.

    Fresh ones count if they were made `after` this run.

    `code` is the code that will measure; None where each commit has its own, which then is that of
    the newest launch.
    """

    def __init__(
        self,
        store: Store,
        sweep: Sweep,
        metrics: Sequence[str],
        *,
        is_fresh: bool = False,
        code: str | None = None,
        after: str = "",
    ) -> None:
        self._store, self._is_fresh, self._code = store, is_fresh, code
        self._after = after
        # Later launches stay fresh, however long measuring takes.
        self._begun = datetime.now(UTC)
        self._metrics = list(dict.fromkeys(metrics))
        self._places = {key_of(*planned): place for place, planned in enumerate(sweep.cases)}

    def of(self, commit: Commit) -> Launches:
        """The launches of a commit with the same uncommitted changes."""
        return self._chosen(self._rows(commit), commit, self._slowdowns())

    def of_all(self, commits: Sequence[Commit]) -> list[Launches]:
        """The launches of many commits, read at once."""
        rows, slowdowns = self._rows(), self._slowdowns()
        by_commit = {str(sha): of_commit for sha, of_commit in rows.groupby("commit")}
        return [
            self._chosen(by_commit.get(commit.commit, rows[:0]), commit, slowdowns)
            for commit in commits
        ]

    def next_launch(self, commit: Commit) -> int:
        """The first launch number, of all cases, that a sweep would not find in the store."""
        runs = self._of_state(self._rows(commit), commit)
        runs = self._of_code(runs[runs["status"].isin(("ok", *FINAL))])
        return 0 if runs.empty else int(runs["launch"].max()) + 1

    def _rows(self, commit: Commit | None = None) -> pd.DataFrame:
        """The rows of a commit, or of all."""
        is_commit = [] if commit is None else [Condition("commit", "=", commit.commit)]
        return self._store.runs([*COLUMNS, *self._metrics], is_commit)

    def _slowdowns(self) -> dict[str, Slowdown]:
        """By how much the runs of the sweep's machines were slowed, whatever their commit."""
        machines = {fingerprint for _, fingerprint, *_ in self._places}
        return slowdowns_by_run(recorded(self._store, machines))

    def _chosen(
        self, runs: pd.DataFrame, commit: Commit, slowdowns: Mapping[str, Slowdown]
    ) -> Launches:
        """The launches in these rows of a commit."""
        rows = self._of_state(runs, commit)
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
                    slowdowns.get(str(row["run_id"]), NOT_KNOWN),
                )
                for key, row in zip(keys_of(rows), rows.to_dict("records"), strict=True)
            }
        )

    def _of_state(self, runs: pd.DataFrame, commit: Commit) -> pd.DataFrame:
        """The runs of the sweep's cases with the same uncommitted changes."""
        is_case = pd.Series([key in self._places for key in keys_of(runs)], runs.index, dtype=bool)
        return runs[is_case & (runs["changes"].map(key_text) == commit.changes)]

    def _of_code(self, runs: pd.DataFrame) -> pd.DataFrame:
        if runs.empty:
            return runs
        codes = runs["code"].map(key_text)
        return runs[codes == (codes.iloc[-1] if self._code is None else self._code)]
