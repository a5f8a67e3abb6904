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
from collections import Counter
from collections.abc import Hashable, Sequence
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
from ppbench.comparison.rounds import rounds_beside
from ppbench.config.sweep import read_share
from ppbench.display.metrics import METRICS
from ppbench.display.units import counted
from ppbench.errors import ExitCode, LaunchError, SweepInterruptedError, UsageError
from ppbench.judge.evidence import Rounds
from ppbench.statistics.bisection import Finding, Search, search_first_bad

MOST_FRUITLESS = 2
"""Launches of a commit in a row without a figure after which it counts as not running."""


@dataclass(frozen=True)
class Discounted:
    """A launch that does not count, since it lies far from the others."""

    place: int  # of its commit
    launch: int
    run_id: str


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
    discounted: tuple[Discounted, ...]
    num_made: int  # launches that this search made itself, in however many cases

    def __repr__(self) -> str:
        commits = ", ".join(target.commit.commit[:9] for target in self.first_bad)
        answer = f"{self.search.finding.value} {commits}".strip()
        return f"<BisectionResult {answer}: {self.num_launches} launches>"

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.ok if self.first_bad else ExitCode.insufficient

    @property
    def num_launches(self) -> int:
        """Launches of this case that the result is based on."""
        return sum(launches.num_ok(0) for launches in self.launches)

    @property
    def first_bad(self) -> tuple[Target, ...]:
        """The first bad commit, if it was found; several where all but the last do not run."""
        is_found = self.search.finding is Finding.found
        return self.targets[self.search.earliest : self.search.latest + 1] if is_found else ()

    def run_id(self, place: int) -> str | None:
        """The newest run of a commit that is ok."""
        runs = self.launches[place].measured(0, self.metric)["run_id"]
        return None if runs.empty else str(runs.iloc[-1])

    @property
    def frame(self) -> pd.DataFrame:
        """One row per commit that was measured, or tried."""
        discounted = Counter(one.place for one in self.discounted)
        rows = [
            {
                **commit_values(target.commit),
                **launches.summary(0, self.metric),
                "num_discounted": discounted[place],
                "chance": self.search.chances[place],
            }
            for place, (target, launches) in enumerate(
                zip(self.targets, self.launches, strict=True)
            )
            if len(launches.rows)
        ]
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
    budget_s: float = 0.0,
    overrides: Sequence[str] = (),
    results: Path | str = Path("results"),
    retries_failed: bool = False,
    progress: Progress = SILENT,
) -> BisectionResult:
    """Search the first commit after `good`, up to `bad`, that changed a metric.

    Ends when the answer is known with this confidence; with a budget no launch is begun that would
    end after so many seconds. Raises UsageError, SweepInterruptedError, RepositoryError, and
    LaunchError for an end that does not run.
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
        ends = (0, len(targets) - 1)

        def in_turns(launches: Sequence[Launches], place: int, case: int) -> dict[Hashable, Rounds]:
            """The launches of a commit in turns with the good one, by row; of that one none."""
            good, own = (launches[at].measured(case, metric) for at in (0, place))
            return rounds_beside(good, own, metric) if place else {}

        def runs(launches: Sequence[Launches], case: int) -> list[bool]:
            """Whether each commit can be measured, as far as is known."""
            found = []
            for place, own in enumerate(launches):
                is_ok = own.of_case(case).index.isin(own.measured(case, metric).index)
                is_failing = len(is_ok) >= MOST_FRUITLESS and not is_ok[-MOST_FRUITLESS:].any()
                is_started = bench.starts[targets[place].name] >= MOST_FRUITLESS
                if is_started and place:  # each launch with the good one left nothing to compare
                    is_failing = is_failing or not in_turns(launches, place, case)
                found.append(not (own.does_not_run(case) or is_failing))
            return found

        def searched(launches: Sequence[Launches], case: int) -> Search:
            """The state of the search in a case."""
            places, measurable = range(len(launches)), runs(launches, case)
            rounds = [list(in_turns(launches, place, case).values()) for place in places]
            for end in ends:
                if not measurable[end]:
                    why = launches[end].last_failure(case) or f"Its runs have no {metric}."
                    raise LaunchError(
                        f"{targets[end].label}: does not run, and so cannot be an end of the "
                        f"search; name another commit, or try again with --retry-failed. {why}"
                    )
            return search_first_bad(METRICS[metric], rounds, measurable, confidence=sure)

        def search_each(launches: Sequence[Launches]) -> dict[int, Search]:
            """The search in each case that runs at both ends, else in the first one."""
            cases = [
                case
                for case in range(len(bench.sweep.cases))
                if all(runs(launches, case)[end] for end in ends)
            ]
            return {case: searched(launches, case) for case in cases or [0]}

        def until_a_case_differs(launches: list[Launches]) -> Part:
            """Both ends, until one case differs between them, or none will."""
            searches = search_each(launches).values()
            is_known = any(each.ends and each.ends.verdict.is_claim for each in searches)
            is_open = any(each.finding is Finding.searching for each in searches)
            return Part(ends) if is_open and not is_known else Part()

        def until_found(launches: list[Launches]) -> Part:
            """The good commit with the one that tells most, until the search is over."""
            search = searched(launches, 0)
            if bench.starts:
                so_far = "the ends are measured first"
                if search.ends is not None and search.earliest <= search.latest:
                    last = targets[search.latest].label
                    so_far = f"likeliest so far: {last} ({search.confidence:.0%})"
                progress.say(f"  {so_far}".replace("%", " %"))
            return Part() if search.next_commit is None else Part((0, search.next_commit))

        try:
            if len(bench.sweep.cases) > 1:
                searches = search_each(bench.measure(targets, until_a_case_differs))
                case = max(searches, key=lambda at: _distance(searches[at]))
                bench.select(bench.conditions_of_case(case))
            launches = bench.measure(targets, until_found)
        except KeyboardInterrupt:
            made = counted(bench.starts.total(), "launch")
            raise SweepInterruptedError(
                f"interrupted after {made}, not decided; what was measured is kept"
            ) from None
        search = searched(launches, 0)
        discounted = []
        for place, numbers in enumerate(search.apart):
            rows = launches[place].rows.loc[list(in_turns(launches, place, 0))]
            found = rows.iloc[list(numbers)]
            for launch, run_id in zip(found["launch"], found["run_id"], strict=True):
                discounted.append(Discounted(place, int(launch), str(run_id)))
        return BisectionResult(
            metric,
            bench.sweep.cases[0][0].case_id,
            tuple(bench.conditions_of_case(0)),
            targets,
            tuple(launches),
            tuple(runs(launches, 0)),
            search,
            tuple(discounted),
            bench.starts.total(),
        )


def _distance(search: Search) -> float:
    """The smallest difference between the ends that the interval allows."""
    if search.ends is None:
        return -math.inf
    low, high = search.ends.ends
    return max(low, -high)
