"""At which commits a figure changed, and by how much: change points in a series over commits.

    1. windows   4, 8, 16, ... launches wide, half over one another; in each the best cut after
                 E-divisive (Matteson and James 2014), kept if a t-test finds it worth a look
    2. merging   all these weak points cut the series into segments; the weakest is dropped and its
                 neighbours are judged anew, until each that is left is beyond chance and the floor
    3. placing   each point moves to the likeliest place between its neighbours; then 2. once more

A point that is judged against the previous commit alone drowns in noise, or alarms with it; here
both levels are means over all launches up to the next change. Wide windows find small changes,
narrow ones find those that were soon undone. The tests count how many places and widths were
looked at, so that a longer series alarms no more often. Student's test judges, since a segment may
be of two launches, so that the newest change shows early; Welch's where one segment scatters
clearly more than the other, as one does with a disturbed launch in it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ppbench.analysis.commit_spread import share_luck
from ppbench.analysis.compare import FLOOR
from ppbench.analysis.differences import Difference, Group, group, is_larger, student, welch
from ppbench.analysis.levels import LEAST_DEVIATION, Places, Values, cut_chances
from ppbench.analysis.ratios import Ratio, ratio_of_logs
from ppbench.analysis.stats import CONFIDENCE

LEVEL = 0.05
"""Of each point's test, after all places and widths were counted."""
WEAK = 0.02
"""Of a weak point's test in its window, as if it were the only place."""
NARROWEST, WIDEST = 4, 512
"""Windows, in launches."""
SHORTEST = 2
"""Segment, in launches: a single one is as likely to be disturbed as to show a change."""
_MOST_ROUNDS = 10


@dataclass(frozen=True)
class ChangePoint:
    """A change of level, and the commits that may have made it."""

    index: int  # the likeliest: the first commit of the new level
    earliest: int  # the change came with one of these commits, both ends included, with 95 %
    latest: int
    ratio: Ratio | None  # after / before; None for a figure in points
    p: float  # corrected for the number of places and widths
    difference: Ratio | None = None  # after - before, of a figure in points


@dataclass(frozen=True)
class Level:
    """Commits between which nothing changed."""

    first: int
    last: int
    num_launches: int
    estimate: float | None  # the geometric mean, of a figure in points the mean
    interval: tuple[float, float] | None  # of 95 %; None where too few launches tell the spread


@dataclass(frozen=True)
class _Launches:
    """All launches in the order of their commits, on the scale on which they are compared.

    Or the means of each commit's.
    """

    values: Values
    commits: Places  # of each launch
    in_points: bool

    @functools.cached_property
    def cuts(self) -> Places:
        """Numbers of launches before which another commit begins."""
        return np.flatnonzero(np.diff(self.commits)) + 1

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The launches of each commit that has some."""
        parts = np.split(self.values, self.cuts)
        return [group(part) for part in parts if len(part)]

    @property
    def means(self) -> _Launches:
        """With each commit's mean in place of its launches; itself where each has one."""
        if len(self.values) <= len(self.cuts) + 1:
            return self
        means = np.array([commit.mean for commit in self.groups])
        return _Launches(means, np.unique(self.commits), self.in_points)

    @functools.cached_property
    def widths(self) -> list[int]:
        """Of the windows."""
        num = min(len(self.values), WIDEST)
        doubled = range((num - 1).bit_length())
        return [*(2**power for power in doubled if 2**power >= NARROWEST), num]

    @property
    def num_tests(self) -> int:
        """How often chance may make a change: a short one, there and back, at each width."""
        return max(len(self.cuts), 1) * len(self.widths)

    def of(self, first: int, behind: int) -> Values:
        """The values of the commits from `first` on and before `behind`."""
        return self.values[slice(*np.searchsorted(self.commits, (first, behind)))]

    def gap(self, cut: int) -> tuple[int, int]:
        """The commits with one of which the level changed if it did at this cut."""
        return int(self.commits[cut - 1]) + 1, int(self.commits[cut])


def change_points(
    series: Sequence[Sequence[float]],
    floor: float = FLOOR,
    *,
    in_points: bool = False,
    level: float = LEVEL,
) -> list[ChangePoint]:
    """The changes of level in the figures of each commit's launches, oldest commit first.

    A commit that was not measured has none. A figure that is not finite, or where ratios are taken
    not positive, is no figure. `floor` is relative, for `in_points` a fraction.
    """
    launches = _launches(series, in_points=in_points)
    size = _size(floor, in_points=in_points)
    commits = launches.means
    cuts = _cuts(commits, size, level)
    if commits is launches or share_luck(launches.groups, cuts, size):
        return _described(commits, cuts)
    return _described(launches, _cuts(launches, size, level))


def levels(
    series: Sequence[Sequence[float]],
    points: Sequence[ChangePoint],
    floor: float = FLOOR,
    *,
    in_points: bool = False,
) -> list[Level]:
    """The levels between the points, for drawing; together they hold all commits."""
    launches = _launches(series, in_points=in_points)
    starts = [point.index for point in points]
    cuts = np.searchsorted(np.unique(launches.commits), starts).tolist()
    is_shared = share_luck(launches.groups, cuts, _size(floor, in_points=in_points))
    figures = launches.means if is_shared else launches
    return [
        _level(launches, figures, first, behind)
        for first, behind in itertools.pairwise([0, *starts, len(series)])
        if first < behind
    ]


def _size(floor: float, *, in_points: bool) -> float:
    return floor if in_points else float(np.log1p(floor))


def _launches(series: Sequence[Sequence[float]], *, in_points: bool) -> _Launches:
    values = np.array([value for figures in series for value in figures], dtype=float)
    commits = np.repeat(np.arange(len(series)), [len(figures) for figures in series])
    is_figure = np.isfinite(values) & (in_points | (values > 0))
    kept = values[is_figure]
    return _Launches(kept if in_points else np.log(kept), commits[is_figure], in_points)


def _cuts(launches: _Launches, size: float, level: float) -> list[int]:
    """Steps 1 to 3."""
    if len(launches.values) < 2 * SHORTEST:
        return []
    bars = _Bars(level / launches.num_tests, size)
    cuts = _merged(launches, _weak_cuts(launches), bars)
    for _ in range(_MOST_ROUNDS):
        placed = _merged(launches, _placed(launches, cuts), bars)
        if placed == cuts:
            break
        cuts = placed
    return cuts


def _weak_cuts(launches: _Launches) -> list[int]:
    """Step 1: the best cut of each window, where it is worth a look."""
    num = len(launches.values)
    may_cut = np.zeros(num + 1, dtype=bool)
    may_cut[launches.cuts] = True
    found: set[int] = set()
    for width in launches.widths:
        starts = np.append(np.arange(0, num - width, width // 2), num - width)
        found.update(_best_cuts(launches.values, may_cut, starts, width))
    return sorted(found)


def _best_cuts(
    values: Values, may_cut: npt.NDArray[np.bool_], starts: Places, width: int
) -> list[int]:
    """Of windows of one width."""
    windows = values[starts[:, None] + np.arange(width)]
    before = np.arange(SHORTEST, width - SHORTEST + 1)
    allowed = may_cut[starts[:, None] + before]
    energy = np.where(allowed, _energies(windows)[:, before], -np.inf)
    best = before[energy.argmax(axis=1)]
    is_weak = allowed.any(axis=1) & (_t_chances(windows, best) < WEAK)
    return [int(cut) for cut in (starts + best)[is_weak]]


def _energies(windows: Values) -> Values:
    """How far apart in distribution what is before each place is from what is behind it.

    Shape (windows, places); the divergence of Matteson and James (2014), equation 6, with exponent
    1. Places with less than two values on a side have none.
    """
    width = windows.shape[1]
    distances = np.abs(windows[:, :, None] - windows[:, None, :])
    within = np.tril(distances).sum(axis=2)  # of each value to those before it
    all_pairs = within.sum(axis=1, keepdims=True)
    energies = np.full_like(windows, -np.inf)
    places = np.arange(SHORTEST, width - SHORTEST + 1)
    num, rest = places, width - places
    before = np.cumsum(within, axis=1)[:, places - 1]
    across = np.cumsum(distances.sum(axis=2), axis=1)[:, places - 1] - 2 * before
    behind = all_pairs - before - across
    means = 2 * before / (num * (num - 1)) + 2 * behind / (rest * (rest - 1))
    energies[:, places] = num * rest / width * (2 * across / (num * rest) - means)
    return energies


def _t_chances(windows: Values, cuts: Places) -> Values:
    """p-values of Student's test at one cut in each window."""
    from scipy.special import stdtr

    width = windows.shape[1]
    apart = windows - windows.mean(axis=1, keepdims=True)
    sums = np.take_along_axis(np.cumsum(apart, axis=1), cuts[:, None] - 1, axis=1)[:, 0]
    between = np.square(sums) * width / (cuts * (width - cuts))
    rest = np.maximum(np.square(apart).sum(axis=1) - between, width * LEAST_DEVIATION**2)
    chances = 2 * stdtr(width - 2, -np.sqrt(between * (width - 2) / rest))
    return np.asarray(chances, dtype=float)


@dataclass(frozen=True)
class _Bars:
    """What a cut has to pass to be a change point."""

    p: float  # below, of one test
    size: float  # beyond


def _merged(launches: _Launches, cuts: Sequence[int], bars: _Bars) -> list[int]:
    """Step 2: without the cuts that chance or a trifle made."""
    bounds = [0, *cuts, len(launches.values)]
    tests = [_test(launches, bounds, place) for place in range(1, len(bounds) - 1)]
    while tests:
        weakest = max(range(len(tests)), key=lambda place: tests[place].weakness(bars))
        if tests[weakest].holds(bars):
            break
        del bounds[weakest + 1], tests[weakest]
        for place in (weakest - 1, weakest):
            if 0 <= place < len(tests):
                tests[place] = _test(launches, bounds, place + 1)
    return bounds[1:-1]


@dataclass(frozen=True)
class _Test:
    """Of the segments on both sides of a cut."""

    difference: Difference
    p: float
    shortest: int

    def holds(self, bars: _Bars) -> bool:
        is_long = self.shortest >= SHORTEST
        return is_long and self.p < bars.p and abs(self.difference.estimate) > bars.size

    def weakness(self, bars: _Bars) -> tuple[int, float]:
        """Larger for what is to go first: beside a short segment, then by chance, then trifles."""
        size = abs(self.difference.estimate)
        if self.shortest < SHORTEST:
            return 3, -size
        if self.p >= bars.p:
            return 2, self.p
        return (1 if size <= bars.size else 0), -size


def _test(launches: _Launches, bounds: Sequence[int], place: int) -> _Test:
    before, after = _groups(launches, bounds, place)
    difference = _difference(after, before)
    return _Test(difference, difference.p, min(before.num, after.num))


def _groups(launches: _Launches, bounds: Sequence[int], place: int) -> tuple[Group, Group]:
    """The launches of the segments before and behind a bound."""
    start, cut, end = bounds[place - 1 : place + 2]
    return group(launches.values[start:cut]), group(launches.values[cut:end])


def _difference(one: Group, other: Group) -> Difference:
    """By Student's test, or by Welch's where it is needed and finds less.

    Of two launches that agree by chance it would find far too much.
    """
    narrow, wide = sorted((one, other), key=lambda side: side.variance)
    pooled = student(one, other)
    if not is_larger(wide.variance, wide.freedom, narrow.variance, narrow.freedom):
        return pooled
    return max(pooled, welch(one, other), key=lambda difference: difference.p)


def _placed(launches: _Launches, cuts: Sequence[int]) -> list[int]:
    """Step 3: each cut at its likeliest place between its neighbours, one after the other."""
    bounds = [0, *cuts, len(launches.values)]
    for place in range(1, len(bounds) - 1):
        between, chances = _places(launches, bounds, place)
        bounds[place] = int(between[chances.argmax()])
    return bounds[1:-1]


def _places(launches: _Launches, bounds: Sequence[int], place: int) -> tuple[Places, Values]:
    """Where between its neighbours a bound may lie, and how likely it does at each place."""
    start, end = bounds[place - 1], bounds[place + 1]
    cuts = launches.cuts
    cuts = cuts[(cuts >= start + SHORTEST) & (cuts <= end - SHORTEST)]
    num_commits = launches.commits[cuts] - launches.commits[cuts - 1]
    chances = cut_chances(launches.values[start:end], cuts - start, num_commits.astype(float))
    return cuts, chances


def _described(launches: _Launches, cuts: Sequence[int]) -> list[ChangePoint]:
    bounds = [0, *cuts, len(launches.values)]
    return [_point(launches, bounds, place) for place in range(1, len(bounds) - 1)]


def _point(launches: _Launches, bounds: Sequence[int], place: int) -> ChangePoint:
    before, after = _groups(launches, bounds, place)
    difference = _difference(after, before)
    between, chances = _places(launches, bounds, place)
    likely = between[_likely(chances)]
    interval = Ratio(difference.estimate, *difference.ends())
    return ChangePoint(
        index=launches.gap(bounds[place])[1],
        earliest=launches.gap(int(likely.min()))[0],
        latest=launches.gap(int(likely.max()))[1],
        ratio=None if launches.in_points else ratio_of_logs(difference),
        p=min(1.0, difference.p * launches.num_tests),
        difference=interval if launches.in_points else None,
    )


def _likely(chances: Values) -> Places:
    """The fewest places that together hold the change with 95 %."""
    order = np.argsort(-chances, kind="stable")
    num = int(np.searchsorted(np.cumsum(chances[order]), CONFIDENCE)) + 1
    return order[:num]


def _level(launches: _Launches, figures: _Launches, first: int, behind: int) -> Level:
    """Of the commits from `first` on and before `behind`; `figures` may be their means."""
    num, values = len(launches.of(first, behind)), figures.of(first, behind)
    if not num:
        return Level(first, behind - 1, 0, None, None)
    found = group(values)
    estimate = found.mean if launches.in_points else float(np.exp(found.mean))
    if not found.freedom:
        return Level(first, behind - 1, num, estimate, None)
    ends = Difference(found.mean, np.sqrt(found.variance / found.num), found.freedom).ends()
    if launches.in_points:
        return Level(first, behind - 1, num, estimate, ends)
    with np.errstate(over="ignore"):
        low, high = np.exp(ends).tolist()
    return Level(first, behind - 1, num, estimate, (low, high))
