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
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from ppbench.commits.bench import SILENT, Bench, Progress, Target, commit_values, read_tracked
from ppbench.commits.launches import Launch, Launches
from ppbench.comparison.known import known_of
from ppbench.comparison.launches import Key, key_of
from ppbench.comparison.lines import read_metrics
from ppbench.comparison.sessions import noises_of, slowdowns_and_launches
from ppbench.config.sweep import read_share
from ppbench.display.metrics import METRICS
from ppbench.display.units import counted, duration, percent
from ppbench.errors import (
    ExitCode,
    LaunchError,
    SweepInterruptedError,
    UsageError,
    first_line,
)
from ppbench.judge.evidence import DiscountReason, Metric, Noise
from ppbench.judge.noise import noise_of_launches
from ppbench.judge.slowdowns import Slowdown, is_disturbed
from ppbench.statistics.bisection import (
    Finding,
    Search,
    fewest_launches,
    reach_of_ends,
    search_first_bad,
)
from ppbench.store import Store

MOST_FRUITLESS = 2
"""Starts of a commit without any figure after which it counts as not running."""


@dataclass(frozen=True)
class Discounted:
    """A launch that counts for nothing, since something slowed it."""

    commit: int  # its place among the targets
    launch: int
    run_id: str
    reason: DiscountReason
    slowdown: Slowdown  # of its machine


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
        is_open = self.search.finding is Finding.searching
        return "most launches reached" if is_open else "decided"

    @property
    def num_launches(self) -> int:
        """Launches of this case that the result is based on."""
        return sum(launches.num_ok(0) for launches in self.launches)

    @property
    def discounted(self) -> list[Discounted]:
        """Those of them that count for nothing, by commit and launch."""
        result = []
        for commit, (launches, apart) in enumerate(
            zip(self.launches, self.search.apart, strict=True)
        ):
            measured = launches.measured(0, self.metric)
            counting = list(_counting(launches, 0, METRICS[self.metric]))
            reasons = dict.fromkeys(measured.keys() - counting, DiscountReason.reference)
            reasons |= dict.fromkeys((counting[place] for place in apart), DiscountReason.apart)
            result += [
                Discounted(commit, number, row.run_id, reasons[number], row.slowdown)
                for number, row in measured.items()
                if number in reasons
            ]
        return result

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
        rows, discounted = [], Counter(one.commit for one in self.discounted)
        for place, (target, launches) in enumerate(zip(self.targets, self.launches, strict=True)):
            figures = launches.figures(0, self.metric)
            failure = launches.failure(0)
            if launches.rows:
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
    ) as bench:
        bench.select(only)
        path = bench.repository.between(good, bad)
        targets = tuple(bench.target(sha) for sha in (bench.repository.resolve(good), *path))
        searching = _Bisection(bench, targets, metric, sure, max_launches, retries_failed)
        try:
            return searching.run()
        except KeyboardInterrupt:
            made = counted(searching.num_made, "launch")
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
    retries_failed: bool

    def __post_init__(self) -> None:
        self.fruitless = [0] * len(self.targets)  # starts in a row without a figure, by commit
        self.is_retry_due = [self.retries_failed] * len(self.targets)
        self.launches: list[Launches] = self.bench.launches(self.targets)
        # The noise of each case on this machine, by launches of commits that are not searched.
        self.noises: dict[Key, Noise] = {}
        if self.bench.results.exists():
            metric, keys = METRICS[self.metric], [key_of(*each) for each in self.bench.sweep.cases]
            machines = {key[1] for key in keys}
            store = Store(self.bench.results)
            slowdowns, launches = slowdowns_and_launches([store], machines, [metric])
            searched = {target.commit.commit for target in self.targets}
            others = launches[~launches["commit"].isin(searched)]
            noises = noises_of(keys, [metric], others, slowdowns)
            self.noises = {k: own[metric.name] for k, own in noises.items() if metric.name in own}
        self.num_made = 0
        self.is_reach_said = False

    def run(self) -> BisectionResult:
        """Measure until the answer is known, or no more launches are allowed."""
        if self._may_launch():  # how long a launch takes, and which change the ends show
            known = known_of(self.bench.sweep, self.bench.results, num_sides=1)
            say, num_commits = self.bench.progress.say, len(self.targets) - 1
            fewest = fewest_launches(num_commits)
            text = f"at least {fewest} launches for {counted(num_commits, 'commit')}"
            if (took_s := known.round_s) is not None:
                text += f", {duration(fewest * took_s)}: one takes about {duration(took_s)}"
            say(text)
            if known.noise is None:
                say("no noise is known yet: which change can be found is said after some launches")
            else:
                self._say_reach(known.noise, "noise of stored launches")
        if len(self.bench.sweep.cases) > 1:
            place = self._case_that_differs_most()
            self.bench.select(self.bench.conditions_of_case(place))
            self.launches = self.bench.launches(self.targets)
        search = self._search(0)
        while search.next_commit is not None and self._may_launch():
            self._launch(search.next_commit)
            search = self._search(0)
            so_far = "the ends are measured first"
            is_known = search.ratio is not None or search.difference is not None
            if is_known and search.earliest <= search.latest:
                last = self.targets[search.latest].label
                so_far = f"likeliest so far: {last} ({search.confidence:.0%})".replace("%", " %")
            self.bench.progress.say(f"  {so_far}")
        case = self.bench.sweep.cases[0][0]
        return BisectionResult(
            self.metric,
            case.case_id,
            tuple(self.bench.conditions_of_case(0)),
            self.targets,
            tuple(self.launches),
            tuple(self._runs(0)),
            search,
            self.num_made,
        )

    def _say_reach(self, noise: Noise, origin: str) -> None:
        """Say once which change between the ends is found with how many launches of each."""
        found = ", ".join(f"{percent(change)} with {num}" for num, change in reach_of_ends(noise))
        self.bench.progress.say(
            f"launches of each end show, in 80 % of searches, a change of {found} "
            f"({origin} {percent(noise.deviation)})"
        )
        self.is_reach_said = True

    def _case_that_differs_most(self) -> int:
        """Measure the ends until one case differs significantly, or none will."""
        while True:
            searches = {
                place: self._search(place, ends_only=True)
                for place in range(len(self.bench.sweep.cases))
                if all(self._runs_at(end, place) for end in (0, -1))
            }
            if not searches:
                self._check_runs(0, 0)
                self._check_runs(len(self.targets) - 1, 0)
            known = {p: s for p, s in searches.items() if s.finding is Finding.found}
            open_ends = [s.next_commit for s in searches.values() if s.next_commit is not None]
            if known or not open_ends or not self._may_launch():
                return max(known or searches, key=lambda place: _distance(searches[place]))
            self._launch(-1 if open_ends[0] else 0)

    def _search(self, place: int, *, ends_only: bool = False) -> Search:
        """The state of the search in a case, from its launches so far."""
        self._check_runs(0, place)
        self._check_runs(-1, place)
        metric, runs = METRICS[self.metric], self._runs(place)
        figures = [
            [row.figures[self.metric] for row in _counting(launches, place, metric).values()]
            for launches in self.launches
        ]
        if ends_only:
            figures, runs = [figures[0], figures[-1]], [True, True]
        return search_first_bad(
            figures,
            runs,
            self.noises.get(key_of(*self.bench.sweep.cases[place])),
            confidence=self.confidence,
            in_points=metric.in_points,
            slow_sign=metric.slow_sign,
        )

    def _runs(self, place: int) -> list[bool]:
        return [self._runs_at(commit, place) for commit in range(len(self.targets))]

    def _runs_at(self, commit: int, place: int) -> bool:
        """Whether a commit can be measured, as far as is known."""
        if self.fruitless[commit] >= MOST_FRUITLESS:
            return False
        launches = self.launches[commit]
        if launches.figures(place, self.metric) or self.is_retry_due[commit]:
            return True
        return not launches.does_not_run(place)

    def _check_runs(self, end: int, place: int) -> None:
        """Raises LaunchError for an end that does not run: nothing can be compared with it."""
        if not self._runs_at(end, place):
            failure = self.launches[end].last_failure(place)
            why = f"Its runs have no {self.metric}."
            if failure is not None:
                why = f"{failure.status}: {first_line(failure.error)}"
            raise LaunchError(
                f"{self.targets[end].label}: does not run, and so cannot be an end of the search; "
                f"name another commit. {why}"
            )

    def _may_launch(self) -> bool:
        return self.max_launches is None or self.num_made < self.max_launches

    def _launch(self, commit: int) -> None:
        """Launch a commit once more, and count starts in a row that yield no figure."""
        before = self._num_figures(commit)
        launches = [launch for _, launch in self.launches[commit].rows]
        starts = self.bench.num_starts
        target = self.targets[commit]
        self.launches[commit] = self.bench.measure(target, max(launches, default=-1) + 2)
        self.num_made += self.bench.num_starts - starts
        self.is_retry_due[commit] = False
        has_more = self._num_figures(commit) > before
        self.fruitless[commit] = 0 if has_more else self.fruitless[commit] + 1
        # Say which change is found by the noise of the launches so far, if none was known.
        cases = range(len(self.bench.sweep.cases))
        ends = (self.launches[0], self.launches[-1])
        figures = [end.figures(place, self.metric) for place in cases for end in ends]
        if not self.is_reach_said and all(len(own) > 1 for own in figures):
            level = noise_of_launches(METRICS[self.metric], figures)
            if level is not None:
                self._say_reach(level.noise, "noise so far")

    def _num_figures(self, commit: int) -> int:
        cases = range(len(self.bench.sweep.cases))
        launches = self.launches[commit]
        return sum(len(launches.figures(place, self.metric)) for place in cases)


def _counting(launches: Launches, case: int, metric: Metric) -> dict[int, Launch]:
    """The launches of a case whose machine was not slow, by number; of memory all that have it."""
    return {
        number: row
        for number, row in launches.measured(case, metric.name).items()
        if not (metric.slow_sign and is_disturbed(row.slowdown))
    }


def _distance(search: Search) -> float:
    """The smallest difference between the ends that the interval allows."""
    if search.ratio is not None:
        return max(math.log(search.ratio.low), -math.log(search.ratio.high))
    if search.difference is None:
        return -math.inf
    return max(search.difference.low, -search.difference.high)
