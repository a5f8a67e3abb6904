"""Finds the first bad commit by measuring; `statistics.bisection` decides what to launch next.

    GOOD and BAD, in turns --> differ? --> GOOD and the most informative commit, in turns --> sure?
                               no: stop                   ^------------ no -------------------'

A commit is known only by its differences from the good one in the same launches, so that a machine
that is slower today than yesterday has changed nothing. Launches of the last hour by the same code
count, so that a search that was stopped goes on. With several cases, the one that differs most
between the ends is searched, since it takes the fewest launches; whichever commit changed it
changed them all, or others did.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppbench.commits.bench import (
    SILENT,
    Bench,
    Part,
    Progress,
    Target,
    commit_values,
    read_tracked,
)
from ppbench.commits.launches import Launches
from ppbench.comparison.lines import read_metrics
from ppbench.comparison.rounds import shared_rounds
from ppbench.config.sweep import read_share
from ppbench.display.metrics import METRICS
from ppbench.display.units import counted
from ppbench.errors import ExitCode, LaunchError, SweepInterruptedError, UsageError
from ppbench.judge.evidence import Rounds
from ppbench.statistics.bisection import Finding, Search, fewest_launches, search_first_bad

MOST_FRUITLESS = 2
"""Launches of a commit in a row without a figure after which it counts as not running."""


@dataclass(frozen=True, repr=False)
class BisectionResult:
    """A bisection when it ended; commits from the good one to the bad one."""

    metric: str
    case_id: str
    conditions: tuple[str, ...]  # that only this case of the sweep meets
    targets: tuple[Target, ...]
    launches: tuple[Launches, ...]  # of that case
    runs: tuple[bool, ...]  # whether each commit can be measured
    search: Search
    discounted: tuple[tuple[int, int, str], ...]  # place of the commit, launch, run id
    num_made: int  # launches that this search made itself, in however many cases
    is_spent: bool = False  # whether its time ended before it was decided

    def __repr__(self) -> str:
        commits = ", ".join(target.commit.commit[:9] for target in self.candidates)
        answer = f" {commits}" if self.search.finding is Finding.found else ""
        return (
            f"<BisectionResult {self.search.finding.value}{answer}: {self.num_launches} launches>"
        )

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.ok if self.search.finding is Finding.found else ExitCode.insufficient

    @property
    def stop(self) -> str:
        """Why no more launches were made."""
        if self.search.finding is not Finding.searching:
            return "decided"
        return "budget spent" if self.is_spent else "most launches reached"

    @property
    def num_launches(self) -> int:
        """Launches of this case that the result is based on."""
        return sum(launches.num_ok(0) for launches in self.launches)

    @property
    def candidates(self) -> list[Target]:
        """The first bad commit; several where all but the last do not run."""
        return list(self.targets[self.search.earliest : self.search.latest + 1])

    def run_id(self, place: int) -> str | None:
        """The newest run of a commit that is ok."""
        runs = self.launches[place].measured(0, self.metric)["run_id"]
        return None if runs.empty else str(runs.iloc[-1])

    @property
    def frame(self) -> pd.DataFrame:
        """One row per commit that was measured, or tried."""
        rows, discounted = [], Counter(place for place, *_ in self.discounted)
        for place, (target, launches) in enumerate(zip(self.targets, self.launches, strict=True)):
            figures = launches.figures(0, self.metric)
            failure = launches.failure(0)
            if len(launches.rows):
                rows.append(
                    {
                        **commit_values(target.commit),
                        "num_launches": len(figures),
                        "num_discounted": discounted[place],
                        "status": failure.status if failure else "ok",
                        self.metric: statistics.median(figures) if figures else None,
                        "chance": self.search.chances[place],
                    }
                )
        columns = ["author_date", "commit", "subject", "num_launches", "num_discounted", "status"]
        return pd.DataFrame(rows, columns=[*columns, self.metric, "chance"])


def bisect(
    good: str,
    bad: str,
    sweep: Path | str,
    *,
    metric: str = "tokens_per_s",
    only: Sequence[str] = (),
    confidence: str | float = "95%",
    max_launches: int | None = None,
    budget_s: float = 0.0,
    overrides: Sequence[str] = (),
    results: Path | str = Path("results"),
    retries_failed: bool = False,
    progress: Progress = SILENT,
) -> BisectionResult:
    """Search the first commit after `good`, up to `bad`, that changed a metric.

    Ends when the answer is known with this confidence, or after so many launches; with a budget no
    launch is begun that would end after so many seconds. Raises UsageError, SweepInterruptedError,
    RepositoryError, and LaunchError for an end that does not run.
    """
    sure = read_share("--confidence", confidence)
    if not 0.5 <= sure < 1:
        raise UsageError(f"--confidence {confidence}: expected 50% or more, and less than 100%")
    read_metrics([metric])
    with Bench(
        read_tracked(sweep, overrides),
        Path(results),
        progress,
        overrides=overrides,
        metrics=(metric, "tokens_per_s"),
        retries_failed=retries_failed,
        is_fresh=True,
        budget_s=budget_s,
    ) as bench:
        bench.select(only)
        path = bench.repository.between(good, bad)
        targets = tuple(bench.target(sha) for sha in (bench.repository.resolve(good), *path))
        searching = _Bisection(bench, targets, metric, sure, max_launches)
        try:
            return searching.run()
        except KeyboardInterrupt:
            made = counted(bench.starts.total(), "launch")
            raise SweepInterruptedError(
                f"interrupted after {made}, not decided; what was measured is kept"
            ) from None


@dataclass
class _Bisection:
    """One search, on the commits from the good one to the bad one."""

    bench: Bench
    targets: tuple[Target, ...]
    metric: str
    confidence: float
    max_launches: int | None

    def __post_init__(self) -> None:
        self.launches: list[Launches] = []

    def run(self) -> BisectionResult:
        """Measure until the answer is known, or no more launches are allowed."""
        bench, cases = self.bench, self.bench.sweep.cases
        if self.may_launch():
            num_commits = len(self.targets) - 1
            fewest = fewest_launches(num_commits)
            commits = counted(num_commits, "commit")
            bench.progress.say(f"at least {fewest} launches for {commits}, two at a time")
        if len(cases) > 1:
            bench.measure(self.targets, self.until_a_case_differs)
            place = max(self.places(), key=lambda at: _distance(self.search(at)))
            bench.select(bench.conditions_of_case(place))
        self.launches = bench.measure(self.targets, self.until_found)
        return BisectionResult(
            self.metric,
            bench.sweep.cases[0][0].case_id,
            tuple(bench.conditions_of_case(0)),
            self.targets,
            tuple(self.launches),
            tuple(self.runs(commit, 0) for commit in range(len(self.targets))),
            search := self.search(0),
            tuple(
                (commit, *list(self.in_turns(commit, 0))[place])
                for commit, places in enumerate(search.apart)
                for place in places
            ),
            bench.starts.total(),
            bench.budget.is_spent,
        )

    def until_a_case_differs(self, launches: list[Launches]) -> Part:
        """Both ends, until one case differs between them, or none will."""
        self.launches = launches
        searches = [self.search(place) for place in self.places()]
        is_open = any(each.finding is Finding.searching for each in searches)
        is_known = any(each.ends and each.ends.verdict.is_claim for each in searches)
        if is_known or not is_open or not self.may_launch():
            return Part()
        return Part((0, len(self.targets) - 1))

    def until_found(self, launches: list[Launches]) -> Part:
        """The good commit with the one that tells most, until the search is over."""
        self.launches = launches
        search = self.search(0)
        if self.bench.starts:
            so_far = "the ends are measured first"
            if search.ends is not None and search.earliest <= search.latest:
                last = self.targets[search.latest].label
                so_far = f"likeliest so far: {last} ({search.confidence:.0%})".replace("%", " %")
            self.bench.progress.say(f"  {so_far}")
        if search.next_commit is None or not self.may_launch():
            return Part()
        return Part((0, search.next_commit))

    def may_launch(self) -> bool:
        """Whether a launch of two commits may be made."""
        return self.max_launches is None or self.bench.starts.total() + 2 <= self.max_launches

    def places(self) -> list[int]:
        """The cases that run at both ends, else the first one, which is told of."""
        cases, last = range(len(self.bench.sweep.cases)), len(self.targets) - 1
        return [at for at in cases if self.runs(0, at) and self.runs(last, at)] or [0]

    def search(self, place: int) -> Search:
        """The state of the search in a case. Raises LaunchError for an end that does not run."""
        runs = [self.runs(commit, place) for commit in range(len(self.targets))]
        for end in (0, -1):
            if not runs[end]:
                failure = self.launches[end].last_failure(place)
                why = failure or f"Its runs have no {self.metric}."
                raise LaunchError(
                    f"{self.targets[end].label}: does not run, and so cannot be an end of the "
                    f"search; name another commit, or try again with --retry-failed. {why}"
                )
        rounds = [list(self.in_turns(at, place).values()) for at in range(len(self.targets))]
        return search_first_bad(METRICS[self.metric], rounds, runs, confidence=self.confidence)

    def runs(self, commit: int, place: int) -> bool:
        """Whether a commit can be measured, as far as is known."""
        launches = self.launches[commit]
        measured = launches.measured(place, self.metric).index
        is_ok = launches.of_case(place).index.isin(measured)
        is_failing = len(is_ok) >= MOST_FRUITLESS and not is_ok[-MOST_FRUITLESS:].any()
        is_started = self.bench.starts[self.targets[commit].name] >= MOST_FRUITLESS
        is_alone = is_started and commit > 0 and not self.in_turns(commit, place)
        return not (launches.does_not_run(place) or is_failing or is_alone)

    def in_turns(self, commit: int, place: int) -> dict[tuple[int, str], Rounds]:
        """A commit's launches in turns with the good one, by number and run; of that one none.

        A figure that rounds do not have counts as one round.
        """
        good, own = (self.launches[at].measured(place, self.metric) for at in (0, commit))
        found = {}
        for start, row in own.groupby("process_start") if commit else ():
            beside = good[good["process_start"] == start]
            if len(beside):
                figures = ((float(one[self.metric].iloc[-1]),) for one in (beside, row))
                shared = shared_rounds(beside, row, self.metric)
                number, run_id = int(row["launch"].iloc[-1]), str(row["run_id"].iloc[-1])
                found[number, run_id] = next(iter(shared), Rounds(*figures))
        return found


def _distance(search: Search) -> float:
    """The smallest difference between the ends that the interval allows."""
    if search.ends is None:
        return -math.inf
    low, high = search.ends.ends
    return max(low, -high)
