"""The launches of a commit that a store has, and what came of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from ppbench.comparison.launches import FINAL, key_text
from ppbench.errors import first_line


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

    def summary(self, case: int, metric: str) -> dict[str, object]:
        """The number of launches, how they ended, and the median of the metric, as columns."""
        figures, failure = self.figures(case, metric), self.failure(case)
        status = "ok" if self.num_ok(case) else "not measured"
        return {
            "num_launches": len(figures),
            "status": failure.status if failure else status,
            metric: statistics.median(figures) if figures else None,
        }

    def beside(self, other: Launches) -> Launches:
        """The launches in which this commit and another took turns, and those that failed.

        Of a case that does not run at the other, all.
        """
        columns = ["place", "process_start"]
        shared = pd.MultiIndex.from_frame(other.rows[columns].dropna())
        is_shared = pd.MultiIndex.from_frame(self.rows[columns]).isin(shared)
        alone = [place for place in self.rows["place"].unique() if other.does_not_run(place)]
        counts = is_shared | self.rows["status"].ne("ok") | self.rows["place"].isin(alone)
        return Launches(self.rows[counts])

    def does_not_run(self, case: int) -> bool:
        """Whether a case failed for a reason of its own and is ok in no launch, so none will be."""
        return not self.num_ok(case) and self.num_done(case) > 0
