"""The cases of a sweep launched in turns until those that differ in one setting are told apart.

    sweep file --rounds of launches, every case once in each--> chosen runs --> Across

Launches of the last hour count, so that a measurement that was stopped goes on; older ones do not,
since a machine drifts by more than launches differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pandas as pd

from ppbench.comparison.across import Across, AxisQuestion, compare_along
from ppbench.comparison.known import known_of
from ppbench.comparison.launches import FRESH_S
from ppbench.comparison.measurement import measure_until_decided
from ppbench.comparison.repeats import is_lacking
from ppbench.comparison.runs import Chosen, choose_runs
from ppbench.comparison.slowdowns import find_disturbed, first_launches
from ppbench.config.reader import read_sweep
from ppbench.config.sweep import Sweep
from ppbench.errors import UsageError
from ppbench.run.machine.environment import default_device
from ppbench.run.sweep.control import run_sweep
from ppbench.run.sweep.plan import Choice
from ppbench.run.sweep.progress import Display
from ppbench.statistics.verdicts import SPEED
from ppbench.store import Store, check_writable


def measure_across(
    question: AxisQuestion,
    names: Sequence[str],
    launches: int | None,
    max_launches: int | None,
    say: Callable[[str], None],
    display: Display | None = None,
) -> Across:
    """Launch the cases of a sweep file, so often each or until decided, and compare them.

    Raises UsageError for names other than one sweep file, and what running a sweep raises.
    """
    if len(names) != 1 or not names[0].endswith(".toml"):
        raise UsageError(
            f"--run: measures the cases of a sweep file; give one, got {' '.join(names) or 'none'}"
        )
    check_writable(question.results, "--results")
    sweep = read_sweep(Path(names[0]), [], default_device())
    an_hour_ago = (
        f"{datetime.now(UTC) - timedelta(seconds=FRESH_S):%Y%m%dT%H%M%S}"  # as run ids are
    )
    rounds = SweepRounds(sweep, Store(question.results), an_hour_ago, display)
    if max_launches is None:
        rounds.bring_to(launches or 0)
        return compare_along(question, rounds.first(names, launches or 0))
    result, looks = measure_until_decided(
        max_launches,
        rounds.bring_to,
        lambda look: compare_along(question, rounds.first(names, look.num_launches), look.judge),
        lambda across: across,
        set(question.metrics or (SPEED,)),
        known_of(sweep, question.results, num_sides=1),
        say,
    )
    return replace(result, looks=looks)


@dataclass
class SweepRounds:
    """The cases of a sweep, each launched once in a round; only runs since a moment count."""

    sweep: Sweep
    store: Store
    since: str
    display: Display | None = None
    num_planned: dict[str, int] = field(default_factory=dict)
    """Launches of each case, by its id: disturbed ones are made again."""

    def bring_to(self, num_launches: int) -> float:
        """Launch every case until it has so many undisturbed launches; return the rounds made."""
        ids = [case.case_id for case, _ in self.sweep.cases]
        self.num_planned = dict.fromkeys(ids, num_launches)
        num_made = self._launched()
        while lacking := self._lacking(num_launches):
            for case_id in lacking:
                self.num_planned[case_id] += 1
            num_made += self._launched()
        return num_made / len(ids)

    def _launched(self) -> int:
        """Make the launches that are planned; return how many were missing."""
        planned = tuple(
            (case, replace(own, launches=self.num_planned[case.case_id]))
            for case, own in self.sweep.cases
        )
        sweep, choice = replace(self.sweep, cases=planned), Choice(since=self.since)
        return len(run_sweep(sweep, self.store, choice, self.display).plan.missing)

    def _lacking(self, num_launches: int) -> list[str]:
        """The cases with a disturbed launch that is to be made again."""
        lacking = []
        made = self._made()
        made["is_disturbed"] = find_disturbed(self.store, made)
        for case_id, runs in made.groupby("case_id", sort=False):
            disturbed = runs["is_disturbed"].tolist()
            is_full = len(disturbed) >= self.num_planned[str(case_id)]
            if any(disturbed) and is_full and is_lacking(disturbed, num_launches):
                lacking.append(str(case_id))
        return lacking

    def _made(self) -> pd.DataFrame:
        """The rows of the cases since the moment from which they count."""
        runs = self.store.runs(["run_id", "case_id", "launch", "status"])
        is_ours = runs["case_id"].isin(self.num_planned) & (runs["run_id"] > self.since)
        return runs[is_ours & (runs["status"] == "ok")].sort_values("launch")

    def first(self, names: Sequence[str], num_launches: int) -> Chosen:
        """The first launches of each case, so many undisturbed ones."""
        chosen = choose_runs(names, self.store)
        runs, failed = (rows[rows["run_id"] > self.since] for rows in (chosen.runs, chosen.failed))
        in_order = runs.sort_values("launch")
        ids = first_launches(self.store, in_order, in_order["case_id"], num_launches)
        return replace(chosen, runs=runs[runs["run_id"].isin(ids)], failed=failed)
