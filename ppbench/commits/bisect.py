"""Finds the first bad commit by measuring; `statistics.bisection` decides what to launch next.

    GOOD and BAD, in turn --> differ? --> the most informative commit, again --> sure enough?
                               no: stop                 ^------------ no -----------'

Stored launches count, and none is made twice: a search that was stopped goes on. With several
cases, the one that differs most between the ends is searched, since it takes the fewest launches;
whichever commit changed it changed them all, or others did.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppbench.commits.bench import SILENT, Bench, Progress, Target, commit_values, opened
from ppbench.commits.launches import Launches
from ppbench.config.sweep import read_fraction
from ppbench.display.metrics import METRICS
from ppbench.errors import (
    ExitCode,
    LaunchError,
    SweepInterruptedError,
    UsageError,
    first_line,
    nearest,
)
from ppbench.run.machine.environment import read_environment
from ppbench.statistics.bisection import Finding, Search, search_first_bad
from ppbench.statistics.verdicts import Noise
from ppbench.store.noise import read_noise

MOST_FRUITLESS = 2
"""Starts of a commit without any figure after which it counts as not running."""


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
    num_made: int  # launches that this search made itself, in however many cases

    def __repr__(self) -> str:
        commits = ", ".join(target.commit.commit[:9] for target in self.candidates)
        found = f" {commits}" if self.search.finding is Finding.found else ""
        return f"<BisectionResult {self.search.finding.value}{found}: {self.num_launches} launches>"

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.ok if self.search.finding is Finding.found else ExitCode.insufficient

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
        runs = [row.run_id for row in self.launches[place].of_case(0) if row.status == "ok"]
        return runs[-1] if runs else None

    @property
    def frame(self) -> pd.DataFrame:
        """One row per commit that was measured, or tried."""
        rows = []
        for place, (target, launches) in enumerate(zip(self.targets, self.launches, strict=True)):
            figures = launches.figures(0, self.metric)
            failure = launches.failure(0)
            if launches.rows:
                rows.append(
                    {
                        **commit_values(target.commit),
                        "num_launches": len(figures),
                        "status": failure.status if failure else "ok",
                        self.metric: statistics.median(figures) if figures else None,
                        "chance": self.search.chances[place],
                    }
                )
        return pd.DataFrame(rows)


def bisect(
    good: str,
    bad: str,
    sweep: Path | str,
    *,
    metric: str = "tokens_per_s",
    only: Sequence[str] = (),
    confidence: str | float = "95%",
    max_launches: int | None = None,
    overrides: Sequence[str] = (),
    results: Path | str = Path("results"),
    retries_failed: bool = False,
    progress: Progress = SILENT,
) -> BisectionResult:
    """Search the first commit after `good`, up to `bad`, that changed a metric.

    Ends when the answer is known with this confidence, or after so many launches. Raises
    UsageError, SweepInterruptedError, RepositoryError, and LaunchError for an end that does not
    run.
    """
    sure = _confidence(confidence)
    if metric not in METRICS:
        known = nearest(metric, METRICS)
        raise UsageError(f'--metric "{metric}": is none that is compared{known}')
    folder, metrics = Path(results), (metric, "tokens_per_s")
    with opened(
        Path(sweep), overrides, folder, progress, metrics=metrics, retries_failed=retries_failed
    ) as bench:
        bench.select(only)
        path = bench.repository.between(good, bad)
        targets = [bench.target(sha) for sha in (bench.repository.resolve(good), *path)]
        bisection = _Bisection(
            bench, targets, metric, sure, max_launches, retries_failed=retries_failed
        )
        try:
            return bisection.run()
        except KeyboardInterrupt:
            raise SweepInterruptedError("stopped; what was measured is kept") from None


def _confidence(text: str | float) -> float:
    try:
        value = read_fraction(text)
    except ValueError as error:
        raise UsageError(f"--confidence {text}: {error}") from None
    if not 0.5 <= value < 1:
        raise UsageError(f"--confidence {text}: expected 50% or more, and less than 100%")
    return value


class _Bisection:
    """One search, on the commits from the good one to the bad one."""

    def __init__(
        self,
        bench: Bench,
        targets: Sequence[Target],
        metric: str,
        confidence: float,
        max_launches: int | None,
        *,
        retries_failed: bool,
    ) -> None:
        self._bench, self._targets = bench, tuple(targets)
        self._metric, self._confidence, self._most = metric, confidence, max_launches
        self._fruitless = [0] * len(targets)  # starts in a row without a figure, of each commit
        self._retried = [not retries_failed] * len(targets)
        self._launches: list[Launches] = []
        self._num_made = 0

    def run(self) -> BisectionResult:
        """Measure until the answer is known, or no more launches are allowed."""
        self._launches = self._bench.launches(self._targets)
        if len(self._bench.sweep.cases) > 1:
            self._bench.select_case(self._case_that_differs_most())
            self._launches = self._bench.launches(self._targets)
        search = self._search(0)
        while search.next_commit is not None and self._may_launch():
            self._launch(search.next_commit)
            search = self._search(0)
            self._bench.progress.say(f"  {self._so_far(search)}")
        case = self._bench.sweep.cases[0][0]
        return BisectionResult(
            self._metric,
            case.case_id,
            tuple(self._bench.conditions_of_case(0)),
            self._targets,
            tuple(self._launches),
            tuple(self._runs(0)),
            search,
            self._num_made,
        )

    def _case_that_differs_most(self) -> int:
        """Measure the ends until one case differs significantly, or none will."""
        while True:
            searches = {
                place: self._search(place, ends_only=True)
                for place in range(len(self._bench.sweep.cases))
                if all(self._runs_at(end, place) for end in (0, -1))
            }
            if not searches:
                self._check_runs(0, 0)
                self._check_runs(len(self._targets) - 1, 0)
            known = {p: s for p, s in searches.items() if s.finding is Finding.found}
            open_ends = [s.next_commit for s in searches.values() if s.next_commit is not None]
            if known or not open_ends or not self._may_launch():
                return max(known or searches, key=lambda place: _distance(searches[place]))
            self._launch(-1 if open_ends[0] else 0)

    def _search(self, place: int, *, ends_only: bool = False) -> Search:
        """The state of the search in a case, from its launches so far."""
        self._check_runs(0, place)
        self._check_runs(-1, place)
        figures = [launches.figures(place, self._metric) for launches in self._launches]
        runs = self._runs(place)
        if ends_only:
            figures, runs = [figures[0], figures[-1]], [True, True]
        return search_first_bad(
            figures,
            runs,
            self._noise(place),
            confidence=self._confidence,
            in_points=METRICS[self._metric].in_points,
        )

    def _noise(self, place: int) -> Noise | None:
        """The stored noise of a case on this machine."""
        case, _ = self._bench.sweep.cases[place]
        threads = case.launch_threads_per_rank
        fingerprint = read_environment().fingerprint(case.device, case.world_size, threads)
        stored = read_noise(self._bench.results, fingerprint, case.case_id)
        deviation = None if stored is None else stored.deviations.get(self._metric)
        if stored is None or deviation is None:
            return None
        return Noise(deviation, stored.num_launches)

    def _runs(self, place: int) -> list[bool]:
        return [self._runs_at(commit, place) for commit in range(len(self._targets))]

    def _runs_at(self, commit: int, place: int) -> bool:
        """Whether a commit can be measured, as far as is known."""
        if self._fruitless[commit] >= MOST_FRUITLESS:
            return False
        launches = self._launches[commit]
        has_figures = bool(launches.figures(place, self._metric))
        return has_figures or not (launches.does_not_run(place) and self._retried[commit])

    def _check_runs(self, end: int, place: int) -> None:
        """Raises LaunchError for an end that does not run: nothing can be compared with it."""
        if not self._runs_at(end, place):
            raise LaunchError(
                f"{self._targets[end].label}: does not run, and so cannot be an end of the search; "
                f"name another commit. {self._why(end, place)}"
            )

    def _why(self, commit: int, place: int) -> str:
        failure = self._launches[commit].last_failure(place)
        if failure is None:
            return f"Its runs have no {self._metric}."
        return f"{failure.status}: {first_line(failure.error)}"

    def _may_launch(self) -> bool:
        return self._most is None or self._num_made < self._most

    def _launch(self, commit: int) -> None:
        """Launch a commit once more, and count starts in a row that yield no figure."""
        before = self._num_figures(commit)
        launches = [launch for _, launch in self._launches[commit].rows]
        starts = self._bench.num_starts
        target = self._targets[commit]
        self._launches[commit] = self._bench.measure(target, max(launches, default=-1) + 2)
        self._num_made += self._bench.num_starts - starts
        self._retried[commit] = True
        has_more = self._num_figures(commit) > before
        self._fruitless[commit] = 0 if has_more else self._fruitless[commit] + 1

    def _num_figures(self, commit: int) -> int:
        cases = range(len(self._bench.sweep.cases))
        launches = self._launches[commit]
        return sum(len(launches.figures(place, self._metric)) for place in cases)

    def _so_far(self, search: Search) -> str:
        if (search.ratio is None and search.difference is None) or search.earliest > search.latest:
            return "the ends are measured first"
        last = self._targets[search.latest].label
        return f"likeliest so far: {last} ({search.confidence:.0%})".replace("%", " %")


def _distance(search: Search) -> float:
    """The smallest difference between the ends that the interval allows."""
    if search.ratio is not None:
        low, high = math.log(search.ratio.low), math.log(search.ratio.high)
    elif search.difference is not None:
        low, high = search.difference.low, search.difference.high
    else:
        return -math.inf
    return max(low, -high)
