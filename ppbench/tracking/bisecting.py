"""Finds the first bad commit by measuring: what to launch next is decided by `analysis.bisection`.

    GOOD and BAD, in turn --> differ? --> the commit that tells most, once more --> sure enough?
                               no: stop                   ^------------ no -------------'

Launches that are stored count, and none is made twice: a search that was stopped goes on. Of
several cases the one is searched that differs most between the ends: all change with one commit or
another, and it takes the fewest launches.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from ppbench.analysis.bisection import Finding, Search, search_first_bad
from ppbench.analysis.compare import METRICS, Noise
from ppbench.config.track import read_fraction
from ppbench.errors import (
    LaunchError,
    SweepInterruptedError,
    UsageError,
    first_line,
    nearest,
)
from ppbench.format import Format
from ppbench.run.environment import read_environment
from ppbench.store.noise import read_noise
from ppbench.tracking.answer import Found, told
from ppbench.tracking.launches import Launches
from ppbench.tracking.measuring import Bench, opened
from ppbench.tracking.outcome import Outcome, words_of

MOST_FRUITLESS = 2
"""Starts at a commit from which no figure came, after which it is held not to run."""


@dataclass(frozen=True)
class Question:
    """What is asked: which commit changed a figure, how sure the answer must be."""

    good: str
    bad: str
    file: Path
    overrides: tuple[str, ...] = ()
    metric: str = "tokens_per_s"
    only: tuple[str, ...] = ()
    confidence: str = "95%"
    most_launches: int | None = None
    retries_failed: bool = False

    def command(self, results: Path) -> str:
        """What asks it again, and so goes on."""
        words = ["ppbench", "bisect", self.good, self.bad, str(self.file), "--metric", self.metric]
        words += [word for one in self.only for word in ("--only", one)]
        options = {"confidence": self.confidence, "max-launches": self.most_launches}
        flags = ["--retry-failed"] * self.retries_failed
        return shlex.join([*words, *words_of(options, self.overrides, results, flags)])


def bisect(question: Question, results: Path, how: Format) -> Outcome:
    """The first bad commit, or why it cannot be told.

    Raises SweepInterruptedError, RepositoryError, LaunchError for an end that does not run.
    """
    confidence = _confidence(question.confidence)
    if question.metric not in METRICS:
        known = nearest(question.metric, METRICS)
        raise UsageError(f'--metric "{question.metric}": is none that is compared{known}')
    metrics = (question.metric, "tokens_per_s")
    with opened(
        question.file,
        question.overrides,
        results,
        metrics=metrics,
        retries_failed=question.retries_failed,
    ) as bench:
        bench.select(question.only)
        try:
            found = _Bisection(bench, question, confidence, results).run()
        except KeyboardInterrupt:
            raise SweepInterruptedError(
                f"stopped; what was measured is kept. Go on with: {question.command(results)}"
            ) from None
    return told(found, how)


def _confidence(text: str) -> float:
    try:
        value = read_fraction(text)
    except ValueError as error:
        raise UsageError(f"--confidence {text}: {error}") from None
    if not 0.5 <= value < 1:
        raise UsageError(f"--confidence {text}: expected 50% or more, and less than 100%")
    return value


class _Bisection:
    """One search, on the commits from the good one to the bad one."""

    def __init__(self, bench: Bench, question: Question, confidence: float, results: Path) -> None:
        self._bench, self._question, self._confidence = bench, question, confidence
        self._results = results
        path = bench.repository.between(question.good, question.bad)
        shas = [bench.repository.resolve(question.good), *path]
        self._targets = [bench.target(sha) for sha in shas]
        self._fruitless = [0] * len(shas)  # starts in a row, of each commit
        self._retried = [not question.retries_failed] * len(shas)
        self._launches: list[Launches] = []
        self.num_made = 0

    def run(self) -> Found:
        """Measure until the answer is known, or as many launches were made as are allowed."""
        self._launches = self._bench.launches(self._targets)
        if len(self._bench.sweep.cases) > 1:
            self._bench.select_case(self._case_that_differs_most())
            self._launches = self._bench.launches(self._targets)
        search = self._search(0)
        while search.next_commit is not None and self._may_launch():
            self._launch(search.next_commit)
            search = self._search(0)
            self._bench.progress.say(f"  {self._standing(search)}")
        case = self._bench.sweep.cases[0][0]
        return Found(
            self._question.metric,
            case.case_id,
            tuple(self._bench.words_of_case(0)),
            tuple(self._targets),
            tuple(self._launches),
            tuple(self._runs(0)),
            search,
            self.num_made,
            self._question.command(self._results),
            tuple(words_of({}, (), self._results)),
        )

    def _case_that_differs_most(self) -> int:
        """Beyond doubt, if one does by now; measures the ends until one does, or none will."""
        while True:
            searches = {
                place: self._search(place, ends_only=True)
                for place in range(len(self._bench.sweep.cases))
                if all(self._runs_at(end, place) for end in (0, -1))
            }
            if not searches:
                self._check_runs(0, 0)
                self._check_runs(len(self._targets) - 1, 0)
            known = {p: one for p, one in searches.items() if one.finding is Finding.found}
            open_ends = [
                one.next_commit for one in searches.values() if one.next_commit is not None
            ]
            if known or not open_ends or not self._may_launch():
                return max(known or searches, key=lambda place: _distance(searches[place]))
            self._launch(-1 if open_ends[0] else 0)

    def _search(self, place: int, *, ends_only: bool = False) -> Search:
        """Of a case, from its launches so far."""
        metric = self._question.metric
        self._check_runs(0, place)
        self._check_runs(-1, place)
        figures = [found.figures(place, metric) for found in self._launches]
        runs = self._runs(place)
        if ends_only:
            figures, runs = [figures[0], figures[-1]], [True, True]
        return search_first_bad(
            figures,
            runs,
            self._noise(place),
            confidence=self._confidence,
            in_points=METRICS[metric].in_points,
        )

    def _noise(self, place: int) -> Noise | None:
        """That of this machine, if it was measured."""
        case, _ = self._bench.sweep.cases[place]
        threads = case.launch_threads_per_rank
        fingerprint = read_environment().fingerprint(case.device, case.world_size, threads)
        found = read_noise(self._results, fingerprint, case.case_id)
        deviation = None if found is None else found.deviations.get(self._question.metric)
        if found is None or deviation is None:
            return None
        return Noise(deviation, found.num_launches)

    def _runs(self, place: int) -> list[bool]:
        return [self._runs_at(commit, place) for commit in range(len(self._targets))]

    def _runs_at(self, commit: int, place: int) -> bool:
        """Whether a commit can be measured, as far as is known."""
        if self._fruitless[commit] >= MOST_FRUITLESS:
            return False
        found = self._launches[commit]
        has_figures = bool(found.figures(place, self._question.metric))
        return has_figures or not (found.does_not_run(place) and self._retried[commit])

    def _check_runs(self, end: int, place: int) -> None:
        """Raises LaunchError for an end that does not run: between which two is then unknown."""
        if not self._runs_at(end, place):
            raise LaunchError(
                f"{self._targets[end].label}: does not run, and so cannot be an end of the search; "
                f"name another commit. {self._why(end, place)}"
            )

    def _why(self, commit: int, place: int) -> str:
        failure = self._launches[commit].last_failure(place)
        if failure is None:
            return f"Its runs have no {self._question.metric}."
        return f"{failure.status}: {first_line(failure.error)}"

    def _may_launch(self) -> bool:
        most = self._question.most_launches
        return most is None or self.num_made < most

    def _launch(self, commit: int) -> None:
        """One launch more of a commit; one that fails again and again counts with what it has."""
        before = self._num_figures(commit)
        launches = [launch for _, launch in self._launches[commit].rows]
        starts = self._bench.num_starts
        target = self._targets[commit]
        self._launches[commit] = self._bench.measure(target, max(launches, default=-1) + 2)
        self.num_made += self._bench.num_starts - starts
        self._retried[commit] = True
        has_more = self._num_figures(commit) > before
        self._fruitless[commit] = 0 if has_more else self._fruitless[commit] + 1

    def _num_figures(self, commit: int) -> int:
        cases = range(len(self._bench.sweep.cases))
        found = self._launches[commit]
        return sum(len(found.figures(place, self._question.metric)) for place in cases)

    def _standing(self, search: Search) -> str:
        """How far the search has come, in words."""
        if (search.ratio is None and search.difference is None) or search.earliest > search.latest:
            return "the ends are to be measured first"
        last = self._targets[search.latest].label
        return f"likeliest so far: {last} ({search.confidence:.0%})".replace("%", " %")


def _distance(search: Search) -> float:
    """How far the ends are apart at least."""
    if search.ratio is not None:
        low, high = math.log(search.ratio.low), math.log(search.ratio.high)
    elif search.difference is not None:
        low, high = search.difference.low, search.difference.high
    else:
        return -math.inf
    return max(low, -high)
