"""The first bad commit, from launches in turns with the good one: what to measure, when to stop.

    commit        0   1   2   3   4   5   6   7     0 is good, 7 is bad, 6 does not run
    launches          0   1   2   2   0   x   3     in turns with a launch of commit 0
    chance            .04 .04 .05 .85 .01 .01 .01   of being the first bad one

A launch is known by its difference from the good commit, which took turns with it: whatever the
machine did just then, it did to both. So the level before the first bad commit is 0, and the one
from there on is what the bad end shows.

A plain bisection asks each commit once and believes the answer; at 2 % change and 0.9 % noise every
eighth is wrong, and one wrong answer ends at the wrong commit. Here each launch moves the chances,
and the next one is made where it halves them. Near the boundary those are the same few commits
again and again, so that the noise decides the number of launches. Neither the new level nor the
spread is assumed: both are integrated out, with flat priors on the level and on the logarithm of
the spread.

First the ends are measured until the judge says that they differ. Otherwise the search would locate
a boundary in noise, with confidence.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from ppbench.judge.differences import CONFIDENCE, FEWEST_LAUNCHES, Difference, Group, group, student
from ppbench.judge.disturbances import disturbed_in_series
from ppbench.judge.estimates import level_of
from ppbench.judge.evidence import Evidence, Metric, Rounds
from ppbench.judge.looks import Looks
from ppbench.judge.verdicts import Change, Verdict, judge
from ppbench.statistics.change_points import FLOOR, LEAST_DEVIATION, Values

FEWEST_AT_BOUNDARY = 2
MOST_AT_ENDS = 12
"""Launches of both ends after which the ends count as equal."""
SEVERAL_LEVEL = 0.001
"""Level of the test for a level in between, which is repeated with each launch."""
MOST_INNER = 4
"""Largest ratio of inner launches to launches of the ends.

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
    next_commit: int | None  # to be launched once more with commit 0; None: the search is over
    chances: tuple[float, ...]  # of each commit to be the first bad one
    earliest: int  # the first bad commit is in this range, both ends included; it has more than one
    latest: int  # commit where some do not run
    confidence: float  # that the range holds it
    ends: Change | None  # of the bad end from the good one; None: too few launches
    between: int | None = None  # of several changes: a commit with changes before and after it
    apart: tuple[tuple[int, ...], ...] = ()  # of each commit: places of the launches left out


@dataclass(frozen=True)
class _Question:
    """The differences from the good commit so far; commit 0, which is that one, has none."""

    differences: tuple[Values, ...]  # of each commit, of logarithms or fractions
    runs: tuple[bool, ...]

    @functools.cached_property
    def chances(self) -> Values:
        """Chance of each commit to be the first bad one, shared among unmeasured neighbours."""
        chances = np.zeros(len(self.differences))
        chances[1:] = 1 / (len(chances) - 1)
        measured = [commit for commit, own in enumerate(self.differences) if len(own)]
        if not self.num(-1):
            return chances
        values = np.concatenate(self.differences)
        nums = [self.num(commit) for commit in measured]
        widths = np.diff([0, *measured])
        starts = np.cumsum([0, *nums[:-1]])  # the first launch of each
        behind = [group(values[start:]) for start in starts]
        squares = np.array(
            [
                np.square(values[:start]).sum() + after.squares
                for start, after in zip(starts, behind, strict=True)
            ]
        )
        squares = np.maximum(squares, len(values) * LEAST_DEVIATION**2)
        logs = np.log(widths) - np.log([after.num for after in behind]) / 2
        logs -= (len(values) - 1) / 2 * np.log(squares)
        by_cut = np.exp(logs - logs.max())
        chances[1:] = np.repeat(by_cut / by_cut.sum() / widths, widths)
        return chances

    def num(self, commit: int) -> int:
        return len(self.differences[commit])

    def launched(self, start: int, end: int) -> Group:
        """The launches of the commits from `start` on and before `end`."""
        values = np.concatenate([np.empty(0), *self.differences[start:end]])
        return group(values) if len(values) else Group(0, 0.0, 0.0)


def search_first_bad(
    metric: Metric,
    launches: Sequence[Sequence[Rounds]],
    runs: Sequence[bool] | None = None,
    *,
    confidence: float = CONFIDENCE,
) -> Search:
    """Search from each commit's launches in turns with the first commit, which has none itself.

    `runs` says which commits can be measured; unknown ones count as measurable. Disturbed launches
    are left out, and made anew. The judge of the ends has looked after each of their launches, so
    that its level is spent over all of them. Raises ValueError for fewer than two commits, and for
    ends that do not run.
    """
    runs = [True] * len(launches) if runs is None else runs
    if len(launches) < 2 or len(runs) != len(launches) or not (runs[0] and runs[-1]):
        raise ValueError(
            f"{len(launches)} commits, measurable: {list(runs)}; expected at least two, with the "
            "first and the last measurable"
        )
    levels = [[level_of(metric, rounds) for rounds in own] for own in launches]
    values = [np.array([level.estimate if level else 0.0 for level in own]) for own in levels]
    apart: tuple[tuple[int, ...], ...] = ((),) * len(values)
    if metric.slow_sign:
        found = disturbed_in_series(metric.slow_sign * np.concatenate(values))
        parts = np.split(found, np.cumsum([len(each) for each in values])[:-1])
        apart = tuple(tuple(np.flatnonzero(part).tolist()) for part in parts)
    kept = (np.delete(each, list(places)) for each, places in zip(values, apart, strict=True))
    question, last = _Question(tuple(kept), tuple(runs)), len(values) - 1
    ends: Change | None = None
    if (num := question.num(last)) >= FEWEST_LAUNCHES:
        paired = [one for place, one in enumerate(launches[last]) if place not in apart[last]]
        looks = Looks(tuple(range(FEWEST_LAUNCHES, num + 1)), max(MOST_AT_ENDS, num))
        (ends,) = judge(metric, [Evidence(paired=tuple(paired), resolution=FLOOR)], looks)

    # The likeliest range of commits of which only the last runs.
    running = np.flatnonzero(question.runs)
    sums = np.diff(np.cumsum(question.chances)[running])
    best = int(sums.argmax())
    earliest, latest = int(running[best]) + 1, int(running[best + 1])
    between: int | None = None
    next_commit: int | None = last
    if ends is None or not ends.verdict.is_claim:
        is_same = ends is not None and ends.verdict is Verdict.same
        if is_same or len(launches[last]) >= MOST_AT_ENDS:
            next_commit = None
        finding = Finding.searching if next_commit is not None else Finding.no_difference
    elif (between := _level_between(question, latest)) is not None:
        finding, next_commit = Finding.several, None
    else:
        inner = [commit for commit in range(1, last) if question.runs[commit]]
        if float(sums[best]) >= confidence:
            boundary = [commit for commit in (earliest - 1, latest) if commit]
            fewest = min(boundary, key=question.num)
            next_commit = fewest if question.num(fewest) < FEWEST_AT_BOUNDARY else None
        elif sum(map(question.num, inner)) <= MOST_INNER * question.num(last):
            # The commit that halves the chances; of several, the one with the fewest launches.
            is_bad = np.cumsum(question.chances)
            next_commit = min(
                inner, key=lambda at: (round(abs(float(is_bad[at]) - 0.5), 3), question.num(at))
            )
        finding = Finding.found if next_commit is None else Finding.searching
    chances = tuple(question.chances.tolist())
    held = earliest, latest, float(sums[best])
    return Search(finding, next_commit, chances, *held, ends, between, apart)


def _level_between(question: _Question, boundary: int) -> int | None:
    """A commit with a level between the good ones' and the bad ones'; None if there is none.

    It would show as a further cut on either side of the likeliest boundary.
    """
    end = len(question.differences)
    good = [(0, cut, boundary) for cut in range(1, boundary) if question.num(cut)]
    bad = [(boundary, cut, end) for cut in range(boundary + 1, end) if question.num(cut)]
    tests = [(_further(question, *place), place) for place in good + bad]
    large = [(test.p, place) for test, place in tests if test and abs(test.estimate) > FLOOR]
    p, (start, cut, stop) = min(large, default=(1.0, (0, 0, 0)))
    if p * max(len(tests), 1) >= SEVERAL_LEVEL:
        return None
    between = range(cut, stop) if start == 0 else range(start, cut)
    return max(between, key=question.num)


def _further(question: _Question, start: int, cut: int, end: int) -> Difference | None:
    """Compare the levels before and behind a cut; None where either has a single launch.

    The level of the good commit is 0, by definition. The spread is that of all launches.
    """
    before, after = question.launched(start, cut), question.launched(cut, end)
    rest = question.launched(0, start), question.launched(end, len(question.differences))
    others = [each for each in rest if each.num > 1]
    squares = math.fsum(each.squares for each in others)
    freedom = float(sum(each.freedom for each in others))
    if after.num < FEWEST_AT_BOUNDARY or (start and before.num < FEWEST_AT_BOUNDARY):
        return None
    if start:
        return student(after, before, squares / freedom if freedom else 0.0, freedom)
    # Launches of good commits scatter around 0, which needs no estimate.
    squares += after.squares + before.squares + before.num * before.mean**2
    freedom += after.freedom + before.num
    return Difference(after.mean, math.sqrt(squares / freedom / after.num), freedom)
