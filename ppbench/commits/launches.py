"""Looks up the launches of commits in a store, which costs far less than a start.

Launches are found by what they measured, not by the key with which sweeps resume: that includes
files of the tree and the code that measures, which differ between the commits that are compared.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from ppbench.config.sweep import Sweep
from ppbench.errors import first_line
from ppbench.git import Commit
from ppbench.store import Store


@dataclass(frozen=True)
class Failure:
    """How a launch failed."""

    status: str
    error: str  # its first line

    def __str__(self) -> str:
        return f"{self.status}: {self.error}"


@dataclass(frozen=True, eq=False)
class Launches:
    """The launches of one commit: the newest row of each case in each launch, launch by launch."""

    rows: pd.DataFrame  # of `runs`, and `place`: that of the case in the sweep

    def of_case(self, case: int) -> pd.DataFrame:
        return self.rows[self.rows["place"] == case]

    def measured(self, case: int, metric: str) -> pd.DataFrame:
        """The launches of a case that are `ok` and have the metric."""
        rows = self.of_case(case)
        return rows[(rows["status"] == "ok") & rows[metric].notna()]

    def figures(self, case: int, metric: str) -> tuple[float, ...]:
        return tuple(map(float, self.measured(case, metric)[metric]))

    def num_ok(self, case: int) -> int:
        return int((self.of_case(case)["status"] == "ok").sum())

    def num_done(self, case: int, others: Sequence[Launches] = ()) -> int:
        """How many launches are finished: ok, or failed for a reason of their own.

        Beside `others` this commit is their reference, and has no launch of its own. In turns with
        itself it has one.
        """
        rows = self.of_case(case)
        done = rows[rows["status"].isin(("ok", *FINAL))]
        if not others:
            return len(done)
        beside = {start for one in others for start in one.rows["process_start"].dropna()}
        starts = done.loc[~done["process_start"].isin(beside), "process_start"]
        return starts.nunique() + int(starts.isna().sum())

    @property
    def fails_now(self) -> bool:
        """Whether the last launch failed, of every case."""
        last = self.rows.sort_values("run_id").drop_duplicates("place", keep="last")
        return bool(len(last)) and not last["status"].eq("ok").any()

    def num_pairs(self, case: int) -> int:
        """How many launches are ok in which two sets of processes of this commit took turns."""
        rows = self.of_case(case)
        in_start = rows[rows["status"] == "ok"].groupby("process_start").size()
        return int((in_start > 1).sum())

    def last_failure(self, case: int) -> Failure | None:
        """The last failed launch of a case, whether or not others are ok."""
        rows = self.of_case(case)
        failed = rows[rows["status"] != "ok"]
        if failed.empty:
            return None
        last = failed.iloc[-1]
        return Failure(str(last["status"]), first_line(key_text(last["error"])))

    def failure(self, case: int) -> Failure | None:
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
        self._columns = list(dict.fromkeys([*COLUMNS, "process_start", "rounds", *metrics]))
        self._places = {key_of(*planned): place for place, planned in enumerate(sweep.cases)}

    def of(self, commits: Sequence[Commit]) -> list[Launches]:
        """The launches of each commit with the same uncommitted changes."""
        found = self._rows(commits)
        if self._is_fresh:
            found = [fresh(self._of_code(rows), self._begun) for rows in found]
            found = [rows[rows["run_id"] > self._after] for rows in found]
        newest = map(newest_launches, found)
        return [Launches(rows.sort_values("launch", kind="stable")) for rows in newest]

    def next_launches(self, commits: Sequence[Commit]) -> list[int]:
        """The first launch number of each, of all cases, that a sweep would not find."""
        numbers = []
        for rows in self._rows(commits):
            own = self._of_code(rows[rows["status"].isin(("ok", *FINAL))])
            numbers.append(0 if own.empty else int(own["launch"].max()) + 1)
        return numbers

    def _rows(self, commits: Sequence[Commit]) -> list[pd.DataFrame]:
        """The rows of each commit's cases, without the failures that do not count."""
        runs = self._store.runs(self._columns)
        runs["place"] = [self._places.get(key, -1) for key in keys_of(runs)]
        is_counted = runs["status"].eq("ok") | (runs["run_id"] > self._fails_after)
        runs = runs[is_counted & (runs["place"] >= 0)]
        shas, changes = (runs[name].map(key_text) for name in ("commit", "changes"))
        return [runs[(shas == one.commit) & (changes == one.changes)] for one in commits]

    def _of_code(self, runs: pd.DataFrame) -> pd.DataFrame:
        if runs.empty:
            return runs
        codes = runs["code"].map(key_text)
        return runs[codes == (codes.iloc[-1] if self._code is None else self._code)]
