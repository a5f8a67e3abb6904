"""The first bad commit, from noisy launches: what to measure next, and when to stop.

    commit     0   1   2   3   4   5   6   7     0 is good, 7 is bad, 6 does not run
    launches   3       1   2   2       x   3
    chance     0  .03 .03 .04 .85 .02 .02 .02    of being the first bad one

A plain bisection asks each commit once and believes the answer; at 2 % change and 0.9 % noise every
eighth is wrong, and one wrong answer ends at the wrong commit. Here each launch moves the chances,
and the next one is made where it halves them. Near the boundary those are the same few commits
again and again, so that the noise decides the number of launches. Neither level nor spread is
assumed: `ppbench.statistics.change_points` integrates them out.

Disturbed launches are left out as in a history, so that their commit is launched anew.

First both ends are measured until they clearly differ. Otherwise the search would locate a boundary
in noise, with confidence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ppbench.judge.differences import (
    CONFIDENCE,
    Difference,
    Group,
    Ratio,
    additive,
    group,
    is_larger,
    ratio_of_logs,
    smallest_difference,
    student,
)
from ppbench.judge.disturbances import disturbed_in_series
from ppbench.judge.evidence import Noise
from ppbench.judge.forecast import found_by
from ppbench.statistics.change_points import FLOOR, Values, cut_chances, squares_around

FEWEST_AT_ENDS = 2
FEWEST_AT_BOUNDARY = 2
MOST_AT_ENDS = 12
"""Launches of each end after which the ends count as equal."""
ENDS_LEVEL = 0.005
"""Level of the test that the ends differ, which is repeated with each launch."""
SEVERAL_LEVEL = 0.001
"""Level of the test for a level in between, which is repeated as well."""
MOST_INNER = 4
"""Largest ratio of inner launches to launches of each end.

Beyond it the ends are measured again, so that a search that began by chance comes to an end.
"""


class Finding(StrEnum):
    """State of the search."""

    searching = "searching"
    found = "found"
    no_difference = "no_difference"  # between good and bad, within the noise
    several = "several"  # levels between good and bad: more than one commit changed the figure


@dataclass(frozen=True)
class Search:
    """Result of the search so far."""

    finding: Finding
    next_commit: int | None  # to be launched once more; None: the search is over
    chances: tuple[float, ...]  # of each commit to be the first bad one
    earliest: int  # the first bad commit is in this range, both ends included; it has more than one
    latest: int  # commit where some do not run
    confidence: float  # that the range holds it
    ratio: Ratio | None  # bad / good, by the ends; None for a figure in points
    difference: Ratio | None  # bad - good, of a figure in points
    between: int | None = None  # of several changes: a commit with changes before and after it
    apart: tuple[tuple[int, ...], ...] = ()  # of each commit: places of the launches left out


@dataclass(frozen=True)
class _Question:
    """The launches so far, and what is known of their noise."""

    launches: tuple[Values, ...]  # of each commit, as logarithms or fractions
    runs: tuple[bool, ...]
    noise: Noise | None
    in_points: bool
    apart: tuple[tuple[int, ...], ...]  # of each commit: places of launches that do not count

    @functools.cached_property
    def chances(self) -> Values:
        """Chance of each commit to be the first bad one, shared among unmeasured neighbours."""
        measured = np.flatnonzero([len(launches) > 0 for launches in self.launches])
        chances = np.zeros(len(self.launches))
        if len(measured) < 2 or measured[0] != 0 or measured[-1] != len(chances) - 1:
            chances[1:] = 1 / (len(chances) - 1)
            return chances
        values = np.concatenate([self.launches[commit] for commit in measured])
        nums = [len(self.launches[commit]) for commit in measured]
        cuts, widths = np.cumsum(nums)[:-1], np.diff(measured)
        least = float(squares_around(values, cuts).min())
        freedom = len(values) - 2
        noise = _believed(self.noise, least / max(freedom, 1), freedom)
        by_cut = cut_chances(values, cuts, widths.astype(float), noise)
        chances[1:] = np.repeat(by_cut / widths, widths)
        return chances

    def num(self, commit: int) -> int:
        return len(self.launches[commit])

    def fewest(self, *commits: int) -> int:
        return min(commits, key=lambda commit: (self.num(commit), -commit))

    @property
    def num_at_ends(self) -> int:
        """The launches of the end that has fewer."""
        return min(self.num(0), self.num(len(self.launches) - 1))

    @property
    def fewer_end(self) -> int:
        return self.fewest(0, len(self.launches) - 1)


def search_first_bad(
    launches: Sequence[Sequence[float]],
    runs: Sequence[bool] | None = None,
    noise: Noise | None = None,
    *,
    confidence: float = CONFIDENCE,
    floor: float = FLOOR,
    in_points: bool = False,
    slow_sign: int = 0,
) -> Search:
    """Search from the figures of each commit's launches so far, good commit first, bad one last.

    `runs` says which commits can be measured; unknown ones count as measurable. With a `slow_sign`
    (1 if slower launches have higher figures, else -1), disturbed launches are left out, and
    launched anew.
    Raises ValueError for fewer than two commits, for ends that do not run, and for figures that are
    not finite or, where ratios are taken, not positive.
    """
    runs = [True] * len(launches) if runs is None else runs
    if len(launches) < 2 or len(runs) != len(launches) or not (runs[0] and runs[-1]):
        raise ValueError(
            f"{len(launches)} commits, measurable: {list(runs)}; expected at least two, with the "
            "first and the last measurable"
        )
    values = tuple(additive(figures, in_points=in_points) for figures in launches)
    apart: tuple[tuple[int, ...], ...] = ((),) * len(values)
    if slow_sign:
        found = disturbed_in_series(slow_sign * np.concatenate(values))
        parts = np.split(found, np.cumsum([len(each) for each in values])[:-1])
        apart = tuple(tuple(np.flatnonzero(part).tolist()) for part in parts)
    kept = (np.delete(each, list(places)) for each, places in zip(values, apart, strict=True))
    question = _Question(tuple(kept), tuple(runs), noise, in_points, apart)
    if question.num_at_ends < FEWEST_AT_ENDS:
        return _search(question, None, Finding.searching, question.fewer_end)
    bad, good = group(question.launches[-1]), group(question.launches[0])
    freedom = bad.freedom + good.freedom
    noise = _believed(noise, (bad.squares + good.squares) / freedom, freedom)
    ends = student(bad, good, *((noise.deviation**2, noise.freedom) if noise else ()))
    limit = smallest_difference(floor, in_points=in_points)
    if ends.p >= ENDS_LEVEL:
        is_over = ends.is_within(limit) or question.num_at_ends >= MOST_AT_ENDS
        finding = Finding.no_difference if is_over else Finding.searching
        return _search(question, ends, finding, None if is_over else question.fewer_end)
    between = _level_between(question, limit)
    if between is not None:
        return _search(question, ends, Finding.several, None, between)
    earliest, latest, chance = _likeliest(question)
    if chance < confidence:
        # The commit that halves the chances; of several, the one with the fewest launches.
        is_bad = np.cumsum(question.chances)
        inner = [commit for commit in range(1, len(is_bad) - 1) if question.runs[commit]]
        most = MOST_INNER * question.num_at_ends
        next_commit: int | None = question.fewer_end
        if sum(map(question.num, inner)) <= most:
            next_commit = min(
                inner,
                key=lambda at: (round(abs(float(is_bad[at]) - 0.5), 3), question.num(at)),
            )
    else:
        boundary = question.fewest(earliest - 1, latest)
        next_commit = boundary if question.num(boundary) < FEWEST_AT_BOUNDARY else None
    finding = Finding.found if next_commit is None else Finding.searching
    return _search(question, ends, finding, next_commit)


def fewest_launches(num_commits: int) -> int:
    """The fewest launches of a search among so many commits: of both ends, and of each half."""
    return 2 * FEWEST_AT_ENDS + math.ceil(math.log2(max(num_commits, 1)))


def reach_of_ends(noise: Noise) -> list[tuple[int, float]]:
    """Launches of each end, and the change that 80 % of searches find with so many."""
    nums = (FEWEST_AT_ENDS, 2 * FEWEST_AT_ENDS, MOST_AT_ENDS)
    return [(num, found_by(noise, num, ENDS_LEVEL)) for num in nums]


def _believed(noise: Noise | None, variance: float, freedom: int) -> Noise | None:
    """The measured noise, unless these launches scatter clearly more."""
    if noise is None:
        return None
    known = noise.deviation**2, noise.freedom
    return None if is_larger(variance, freedom, *known) else noise


def _likeliest(question: _Question) -> tuple[int, int, float]:
    """The likeliest range of commits of which only the last runs, and its chance."""
    running = np.flatnonzero(question.runs)
    sums = np.diff(np.cumsum(question.chances)[running])
    best = int(sums.argmax())
    return int(running[best]) + 1, int(running[best + 1]), float(sums[best])


def _level_between(question: _Question, limit: float) -> int | None:
    """A commit with a level between the good ones' and the bad ones'; None if there is none.

    It would show as a further cut on either side of the likeliest boundary.
    """
    end = len(question.launches)
    boundary = _likeliest(question)[1]
    good = [(0, cut, boundary) for cut in range(1, boundary) if question.num(cut)]
    bad = [(boundary, cut, end) for cut in range(boundary + 1, end) if question.num(cut)]
    tests = [(_further(question, *place), place) for place in good + bad]
    large = [(test.p, place) for test, place in tests if test and abs(test.estimate) > limit]
    p, (start, cut, stop) = min(large, default=(1.0, (0, 0, 0)))
    if p * max(len(tests), 1) >= SEVERAL_LEVEL:
        return None
    between = range(cut, stop) if start == 0 else range(start, cut)
    return max(between, key=question.num)


def _further(question: _Question, start: int, cut: int, end: int) -> Difference | None:
    """Compare the levels before and behind a cut; None where either has a single launch.

    The spread is that of all launches and of the noise.
    """
    before, after = _launched(question, start, cut), _launched(question, cut, end)
    if min(before.num, after.num) < FEWEST_AT_BOUNDARY:
        return None
    rest = _launched(question, 0, start), _launched(question, end, len(question.launches))
    freedom = float(sum(side.freedom for side in rest if side.num))
    squares = sum(side.squares for side in rest)
    all_freedom = int(freedom) + before.freedom + after.freedom
    variance = (squares + before.squares + after.squares) / all_freedom
    noise = _believed(question.noise, variance, all_freedom)
    if noise is not None:
        squares += noise.freedom * noise.deviation**2
        freedom += noise.freedom
    return student(after, before, squares / freedom if freedom else 0.0, freedom)


def _launched(question: _Question, start: int, end: int) -> Group:
    values = np.concatenate([np.empty(0), *question.launches[start:end]])
    return group(values) if len(values) else Group(0, 0.0, 0.0)


def _search(
    question: _Question,
    ends: Difference | None,
    finding: Finding,
    next_commit: int | None,
    between: int | None = None,
) -> Search:
    earliest, latest, chance = _likeliest(question)
    return Search(
        finding=finding,
        next_commit=next_commit,
        chances=tuple(question.chances.tolist()),
        earliest=earliest,
        latest=latest,
        confidence=chance,
        ratio=None if ends is None or question.in_points else ratio_of_logs(ends),
        difference=None if ends is None or not question.in_points else ends.interval(),
        between=between,
        apart=question.apart,
    )
