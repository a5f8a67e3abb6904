"""At which commits a figure changed, and by how much: change points in a series over commits.

    0. apart     a commit far above or far below both commits beside it is a spike; a launch far on
                 the slow side of those before and after it was disturbed; neither is in a level
    1. cutting   the series into the levels around which the sum of squares is least, with a penalty
                 for each cut (optimal partitioning, Jackson et al. 2005)
    2. merging   the weakest of these points is dropped and its neighbours are tested anew, until
                 the rest are significant and beyond the floor
    3. placing   each point moves to the likeliest place between its neighbours; then 2. once more

A comparison with the previous commit alone would miss small changes or alarm on noise; here both
levels are means over all launches up to the next change. The tests are corrected for the number of
places and of doublings of the length, so that a longer series alarms no more often. Student's test
is used, since a segment may have two launches only, so that the newest change shows early; Welch's
where one segment scatters clearly more than the other, as one with a disturbed launch does.

Launches of one commit may be correlated:

    launches of one commit    o o o        of the next   o o o        of the next o o o
    its mean                   |                            |                       |

They often share a session, a build, a layout of memory, and a test that takes them for independent
finds a change at every other commit. So there are two readings: levels of independent launches,
and levels of commits, whose launches share their luck (one-way random effects). The one whose fit
has the higher likelihood is taken, each with a penalty for its changes (Zhang and Siegmund 2007).

A disturbed launch is told from a change by those beside it: two launches that agree are a new level
at the end of a series, and three within it (`ppbench.judge.disturbances`). A commit that is the
only one of its level, while the levels before and after it lie on the same side, is a spike: the
change was undone, and the levels beside it are one unless they differ themselves.

How likely each cut is follows from the fit of two levels with one spread, all three of which are
integrated out: what is left is the sum of squares around the two means, to a power. Levels need not
be known in advance, and their uncertainty makes the place less certain too.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ppbench.judge.differences import (
    CONFIDENCE,
    Difference,
    Group,
    Ratio,
    group,
    ratio_of_logs,
    smallest_difference,
    student_or_welch,
)
from ppbench.judge.disturbances import disturbed_in_series
from ppbench.judge.evidence import Noise

LEAST_DEVIATION = 1e-9
"""Smallest deviation assumed: launches that agree to the last digit do so by rounding."""

Values = npt.NDArray[np.float64]
Places = npt.NDArray[np.intp]

FLOOR = 0.01
"""Smallest change of a history that matters: 1 %, or one percentage point."""
LEVEL = 0.05
"""Level of each point's test, corrected for the number of places and lengths."""
WEAK = 16.0
"""Penalty of a weak point, in squares of the deviation between launches."""
SHORTEST = 2
"""Fewest launches of a segment: a single one is as likely disturbed as changed."""
_MOST_ROUNDS = 10


@dataclass(frozen=True)
class Step:
    """A change of level, made by one of the commits after `good`, up to `last`."""

    good: int  # with 95 % confidence, the commit that made the change comes after this one
    first: int  # the likeliest: the first commit of the new level
    last: int
    num_commits: int  # that may have made it
    size: Ratio  # the relative change, or in points the difference; 0 is no change
    p: float  # corrected for the number of places and lengths
    is_spike: bool = False  # of its commit alone: the next one undid it


@dataclass(frozen=True)
class Level:
    """Commits between which nothing changed."""

    first: int
    last: int
    num_launches: int
    estimate: float  # the geometric mean, of a figure in points the mean
    interval: tuple[float, float] | None  # 95 %; None with too few launches


@dataclass(frozen=True)
class Changes:
    """The changes of a series, the levels between them, and what is in no level."""

    steps: tuple[Step, ...]  # that last
    spikes: tuple[Step, ...] = ()
    levels: tuple[Level, ...] = ()  # together they hold all commits, if there is any launch
    apart: tuple[tuple[int, int], ...] = ()  # commit, and place among its launches


@dataclass(frozen=True)
class _Launches:
    """Launches in the order of their commits, as logarithms or fractions.

    They may be the means of each commit's launches.
    """

    values: Values
    commits: Places  # of each launch
    numbers: Values  # of each commit, measured or not, among all that may have made a change
    in_points: bool

    @functools.cached_property
    def cuts(self) -> Places:
        """Indexes of launches before which another commit begins."""
        return np.flatnonzero(np.diff(self.commits)) + 1

    @functools.cached_property
    def groups(self) -> list[Group]:
        """The launches of each commit that has some."""
        parts = np.split(self.values, self.cuts)
        return [group(part) for part in parts if len(part)]

    @property
    def means(self) -> _Launches:
        """Each commit's mean in place of its launches; itself where each has one launch."""
        if len(self.values) <= len(self.cuts) + 1:
            return self
        means = np.array([commit.mean for commit in self.groups])
        return replace(self, values=means, commits=np.unique(self.commits))

    @property
    def num_tests(self) -> int:
        """Number of places at which chance may make a change, with a factor for their lengths."""
        num = len(self.values)
        return max(len(self.cuts), 1) * max(1, (num - 1).bit_length() - 1)

    def of(self, first: int, behind: int) -> Values:
        """The values of the commits from `first` on and before `behind`."""
        return self.values[slice(*np.searchsorted(self.commits, (first, behind)))]

    def step(
        self, before: Group, after: Group, good: int, first: int, last: int, *, is_spike: bool
    ) -> Step:
        """The change from one level to another, by the commits that may have made it."""
        difference = student_or_welch(after, before)
        size = difference.interval()
        if not self.in_points:
            ratio = ratio_of_logs(difference)
            size = Ratio(ratio.estimate - 1, ratio.low - 1, ratio.high - 1)
        num_commits = int(self.numbers[last] - self.numbers[good])
        p = min(1.0, difference.p * self.num_tests)
        return Step(good, first, last, num_commits, size, p, is_spike)


def find_changes(
    series: Sequence[Sequence[float]],
    floor: float = FLOOR,
    *,
    numbers: Sequence[int] | None = None,
    in_points: bool = False,
    slow_sign: int = 0,
    level: float = LEVEL,
) -> Changes:
    """The changes of level in the figures of each commit's launches, oldest commit first.

    A commit that was not measured has no figures, or is left out; then `numbers` are those of the
    others among all. Figures that are not finite, or not positive where ratios are taken, are
    ignored. `floor` is relative; with `in_points`, a fraction. With a `slow_sign` (1 if slower
    launches have higher figures, else -1), disturbed launches are left out.
    """
    size = smallest_difference(floor, in_points=in_points)
    values = np.array([value for figures in series for value in figures], dtype=float)
    nums = [len(figures) for figures in series]
    commits = np.repeat(np.arange(len(series)), nums)
    places = np.array([place for num in nums for place in range(num)], dtype=np.intp)
    is_figure = np.isfinite(values) & (in_points | (values > 0))
    commits, places = commits[is_figure], places[is_figure]
    values = values[is_figure] if in_points else np.log(values[is_figure])
    every = np.array(range(len(series)) if numbers is None else numbers, dtype=float)
    spikes = _far_from_both(values, commits, size)
    while True:
        is_kept = ~np.isin(commits, spikes)
        if slow_sign:
            is_kept[is_kept] = ~disturbed_in_series(slow_sign * values[is_kept])
        launches = _Launches(values[is_kept], commits[is_kept], every, in_points)
        shown, cuts = _likeliest(launches, size, level)
        bounds = [0, *cuts, len(shown.values)]
        means = [float(shown.values[a:b].mean()) for a, b in itertools.pairwise(bounds) if a < b]
        alone = [
            int(shown.commits[bounds[n]])
            for n in range(1, len(means) - 1)
            if shown.commits[bounds[n]] == shown.commits[bounds[n + 1] - 1]
            and (means[n] > means[n - 1]) == (means[n] > means[n + 1])
        ]
        if not alone:
            break
        spikes = [*spikes, *alone]
    if not len(launches.values):
        return Changes(())
    steps = [_step_at(shown, bounds, place) for place in range(1, len(bounds) - 1)]
    levels = []
    for first, behind in itertools.pairwise([0, *(step.first for step in steps), len(series)]):
        own = group(shown.of(first, behind))
        interval: tuple[float, float] | None = None
        if own.freedom:
            error = math.sqrt(own.variance / own.num)
            difference = Difference(own.mean, error, own.freedom)
            ends = difference.interval() if in_points else ratio_of_logs(difference)
            interval = ends.low, ends.high
        estimate = own.mean if in_points else math.exp(own.mean)
        num = len(launches.of(first, behind))
        levels.append(Level(first, behind - 1, num, estimate, interval))
    found = []
    for spike in sorted(spikes):
        own = values[commits == spike]
        if len(own) >= SHORTEST:
            around = next(one for one in levels if one.first <= spike <= one.last)
            beside = group(launches.of(around.first, around.last + 1))
            good = int(commits[commits < spike].max())
            step = launches.step(beside, group(own), good, spike, spike, is_spike=True)
            found.append(step)
    is_apart = ~is_kept & ~np.isin(commits, [spike.first for spike in found])
    apart = zip(commits[is_apart].tolist(), places[is_apart].tolist(), strict=True)
    return Changes(tuple(steps), tuple(found), tuple(levels), tuple(apart))


FAR = 6.0
"""Deviations between commits beyond which one that is far from both beside it is a spike."""


def _far_from_both(values: Values, commits: Places, size: float) -> list[int]:
    """The commits all of whose launches lie far above, or far below, both commits beside them."""
    numbers = np.unique(commits)
    launches = [values[commits == number] for number in numbers]
    low, middle, high = (np.array([of(own) for own in launches]) for of in (min, np.median, max))
    found: list[int] = []
    while len(numbers) > 3:
        distances = np.sort(np.abs(np.diff(middle)))
        # The lower median: a spike makes two of the distances large.
        usual = float(distances[(len(distances) - 1) // 2]) / (0.6745 * math.sqrt(2))
        above = low[1:-1] - np.maximum(middle[:-2], middle[2:])
        below = np.minimum(middle[:-2], middle[2:]) - high[1:-1]
        height = np.maximum(above, below)
        place = int(height.argmax())
        if height[place] <= max(FAR * usual, size):
            break
        found.append(int(numbers[place + 1]))
        numbers, low, middle, high = (
            np.delete(column, place + 1) for column in (numbers, low, middle, high)
        )
    return found


RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
"""Variances that launches of a commit may share, over the variance of their own."""
HARMLESS = 0.25
"""Share of the size that matters below which a shared deviation is harmless."""
PER_CHANGE = 3.0
"""Penalty of a change, in logarithms of the number of launches."""


def _likeliest(launches: _Launches, size: float, level: float) -> tuple[_Launches, list[int]]:
    """The launches, or the means of their commits, with the cuts of the likelier reading."""
    commits = launches.means
    cuts = _cuts(commits, size, level)
    if commits is launches:
        return launches, cuts
    own_cuts = _cuts(launches, size, level)
    starts = (np.searchsorted(launches.cuts, own_cuts) + 1).tolist()
    shared = min(misfit(launches.groups, cuts, ratio, size) for ratio in RATIOS)
    independent = misfit(launches.groups, starts, 0.0, size)
    return (commits, cuts) if shared < independent else (launches, own_cuts)


def misfit(commits: Sequence[Group], cuts: Sequence[int], ratio: float, size: float) -> float:
    """Twice the negative logarithm of likelihood of levels that change at `cuts`, with penalties.

    `ratio` is the variance that launches of a commit share, over that of their own. It is infinite
    where so little is shared that a change of `size`, the smallest that matters, looks the same.
    """
    nums = np.array([commit.num for commit in commits])
    means = np.array([commit.mean for commit in commits])
    weights = nums / (1 + nums * ratio)
    squares = sum(commit.squares for commit in commits)
    for start, end in itertools.pairwise([0, *cuts, len(commits)]):
        own = weights[start:end]
        middle = own @ means[start:end] / own.sum()
        squares += float(own @ np.square(means[start:end] - middle))
    num = int(nums.sum())
    variance = max(squares / num, LEAST_DEVIATION**2)
    if ratio and math.sqrt(ratio * variance) < HARMLESS * size:
        return math.inf
    fit = num * math.log(variance) + float(np.log1p(nums * ratio).sum())
    return fit + (PER_CHANGE * len(cuts) + bool(ratio)) * math.log(num)


def _cuts(launches: _Launches, size: float, level: float) -> list[int]:
    """Steps 1 to 3."""
    if len(launches.values) < 2 * SHORTEST:
        return []
    most_p = level / launches.num_tests
    cuts = _merged(launches, _weak_cuts(launches), most_p, size)
    for _ in range(_MOST_ROUNDS):
        # Each cut moves to its likeliest place between its neighbours, one after the other.
        bounds = [0, *cuts, len(launches.values)]
        for place in range(1, len(bounds) - 1):
            between, chances = _places(launches, bounds, place)
            bounds[place] = int(between[chances.argmax()])
        placed = _merged(launches, bounds[1:-1], most_p, size)
        if placed == cuts:
            break
        cuts = placed
    return cuts


def _weak_cuts(launches: _Launches) -> list[int]:
    """Step 1: the cuts of the levels around which squares and a penalty for each cut are least."""
    values, num = launches.values - launches.values.mean(), len(launches.values)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    squares = np.concatenate([[0.0], np.cumsum(np.square(values))])
    # The deviation of normal launches with this median distance between neighbours.
    usual = float(np.median(np.abs(np.diff(values)))) / (0.6745 * math.sqrt(2))
    penalty = WEAK * max(usual, LEAST_DEVIATION) ** 2
    bounds = np.concatenate([[0], launches.cuts, [num]])
    least = np.full(len(bounds), np.inf)  # up to each bound, of the best cuts before it
    least[0], before = -penalty, np.zeros(len(bounds), dtype=np.intp)
    for place in range(1, len(bounds)):
        end, starts = bounds[place], bounds[:place]
        nums = end - starts
        within = squares[end] - squares[starts] - np.square(sums[end] - sums[starts]) / nums
        costs = np.where(nums >= SHORTEST, least[:place] + within + penalty, np.inf)
        before[place] = int(costs.argmin())
        least[place] = costs[before[place]]
    cuts, place = [], int(before[-1])
    while place > 0:
        cuts.append(int(bounds[place]))
        place = int(before[place])
    return cuts[::-1]


def _merged(
    launches: _Launches, cuts: Sequence[int], most_p: float, least_size: float
) -> list[int]:
    """Step 2: drop the cuts that are not significant or too small."""
    bounds = [0, *cuts, len(launches.values)]

    def weakness(place: int) -> tuple[int, float]:
        """Order of dropping, largest first: short segments, not significant, too small; 0: none."""
        before, after = _groups(launches, bounds, place)
        difference = student_or_welch(after, before)
        size, p = abs(difference.estimate), difference.p
        if min(before.num, after.num) < SHORTEST:
            return 3, -size
        if p >= most_p:
            return 2, p
        return (1 if size <= least_size else 0), -size

    weaknesses = [weakness(place) for place in range(1, len(bounds) - 1)]
    while weaknesses:
        weakest = max(range(len(weaknesses)), key=weaknesses.__getitem__)
        if weaknesses[weakest][0] == 0:
            break
        del bounds[weakest + 1], weaknesses[weakest]
        for place in (weakest - 1, weakest):
            if 0 <= place < len(weaknesses):
                weaknesses[place] = weakness(place + 1)
    return bounds[1:-1]


def _groups(launches: _Launches, bounds: Sequence[int], place: int) -> tuple[Group, Group]:
    """The launches of the segments before and behind a bound."""
    start, cut, end = bounds[place - 1 : place + 2]
    return group(launches.values[start:cut]), group(launches.values[cut:end])


def _places(launches: _Launches, bounds: Sequence[int], place: int) -> tuple[Places, Values]:
    """The places of a bound between its neighbours, and the chance of each."""
    start, end = bounds[place - 1], bounds[place + 1]
    cuts = launches.cuts
    cuts = cuts[(cuts >= start + SHORTEST) & (cuts <= end - SHORTEST)]
    numbers = launches.numbers[launches.commits]
    weights = numbers[cuts] - numbers[cuts - 1]
    chances = cut_chances(launches.values[start:end], cuts - start, weights)
    return cuts, chances


def _step_at(launches: _Launches, bounds: Sequence[int], place: int) -> Step:
    """The change at a bound, and the smallest set of places that holds it with 95 %."""
    between, chances = _places(launches, bounds, place)
    order = np.argsort(-chances, kind="stable")
    num = int(np.searchsorted(np.cumsum(chances[order]), CONFIDENCE)) + 1
    likely, commits = between[order[:num]], launches.commits
    of_range = (likely.min() - 1, bounds[place], likely.max())
    good, first, last = (int(commits[cut]) for cut in of_range)
    before, after = _groups(launches, bounds, place)
    return launches.step(before, after, good, first, last, is_spike=False)


def cut_chances(
    values: Values, cuts: Places, weights: Values, noise: Noise | None = None
) -> Values:
    """Chance that the level changes at each cut, given that it does at one of them; sums to 1.

    `weights` are prior chances. Priors on both levels and on the logarithm of the spread are flat;
    a measured noise counts as that many further launches.
    """
    freedom = 0.0 if noise is None else noise.freedom
    known = 0.0 if noise is None else freedom * noise.deviation**2
    least = len(values) * LEAST_DEVIATION**2
    # For each cut, the sum of squares around the means of what is before it and behind it.
    num, offsets = len(values), values - values.mean()
    sums = np.concatenate([[0.0], np.cumsum(offsets)])[cuts]
    between = np.square(sums) * num / (cuts * (num - cuts))
    squares = np.maximum(np.square(offsets).sum() - between, 0.0)
    squares = np.maximum(squares + known, least)
    power = max(len(values) - 2 + freedom, 0) / 2
    logs = np.log(weights) - np.log(cuts * (len(values) - cuts)) / 2 - power * np.log(squares)
    chances = np.exp(logs - logs.max())
    return np.asarray(chances / chances.sum(), dtype=float)
