"""Times of lone stages, sampled in rounds until their medians are known well enough.

    round    F F F F   B B B B (back to front)   F F F F   I I I I   W W W W   OPT OPT OPT OPT
             of all parts, one after another

A round takes one sample of every action of every part, so that whatever slows the machine for
longer than a round slows all parts alike, and in the order of a real step, so that caches hold what
they hold there. Repeating each action by itself would be simpler, but a part that was measured
while the machine was busy would look heavy, and all would run on warm caches.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from engine.run.clock import Clock, Mark
from engine.run.lone_stage import LoneStage

TARGET_ERROR = 0.02
"""The relative standard error of a part's times below which no more rounds are run."""
WARM_UP_ROUNDS = 2
FEWEST_ROUNDS, MOST_ROUNDS = 5, 200
FEWEST_LONG_ROUNDS = 3
"""Rounds at least where the first alone takes more time than there is: long ones scatter less."""
MANY_ERRORS = 4
"""By so many errors the slowest of many equal parts hardly ever differs from the fastest."""

_Interval = tuple[Mark, Mark]


class PartTimes(NamedTuple):
    """Nanoseconds of a part's actions on one microbatch, and of its optimizer.

    `split_forward` is the forward before a backward in halves.
    """

    forward: float
    backward: float
    split_forward: float
    input: float
    weight: float
    optimizer: float

    @property
    def total_ns(self) -> float:
        """A microbatch's time, once with a whole and once with a split backward."""
        return sum(self) - self.optimizer


def sample(parts: Sequence[LoneStage], clock: Clock, budget_s: float) -> list[list[PartTimes]]:
    """Every part's times, one sample per round.

    Goes on until the medians of all parts are within TARGET_ERROR or the time is over, but takes at
    least FEWEST_ROUNDS, or FEWEST_LONG_ROUNDS after a single one to warm up where that took longer.
    Every part has run afterwards as often as another.
    """
    began_s = time.monotonic()
    run_round(parts, clock)
    is_long = time.monotonic() - began_s > budget_s
    for _ in range(0 if is_long else WARM_UP_ROUNDS - 1):
        run_round(parts, clock)
    fewest = FEWEST_LONG_ROUNDS if is_long else FEWEST_ROUNDS
    end_s = time.monotonic() + budget_s
    rounds: list[list[PartTimes]] = []
    while len(rounds) < fewest or (
        len(rounds) < MOST_ROUNDS and time.monotonic() < end_s and not _are_known(rounds)
    ):
        rounds.append(run_round(parts, clock))
    return [list(of_part) for of_part in zip(*rounds, strict=True)]


def run_round(parts: Sequence[LoneStage], clock: Clock) -> list[PartTimes]:
    """One sample of every part. Blocks until the device is done with it."""
    clock.begin()
    columns = [
        *_run_microbatch(parts, clock, is_split=False),
        *_run_microbatch(parts, clock, is_split=True),
        [_timed(clock, part.update) for part in parts],
    ]
    clock.end()
    return [
        PartTimes(*(clock.read_ns(end) - clock.read_ns(start) for start, end in of_part))
        for of_part in zip(*columns, strict=True)
    ]


def _run_microbatch(
    parts: Sequence[LoneStage], clock: Clock, *, is_split: bool
) -> list[list[_Interval]]:
    """Run F of all parts and B, or I and then W; returns when each began and ended, by action."""
    for part in parts:
        part.use(is_split=is_split)
    forward, backward = [], []
    for part in parts:
        part.prepare_forward()
        forward.append(_timed(clock, part.forward))
        part.send()
    for part in reversed(parts):
        part.prepare_backward()
        backward.append(_timed(clock, part.backward_input if is_split else part.backward))
        part.send()
    weight = [[_timed(clock, part.backward_weight) for part in parts]] if is_split else []
    return [forward, backward[::-1], *weight]


def _timed(clock: Clock, work: Callable[[], None]) -> _Interval:
    start = clock.mark()
    work()
    return start, clock.mark()


def median_times(samples: Sequence[PartTimes]) -> PartTimes:
    """The median of each action's samples."""
    return PartTimes(*map(statistics.median, zip(*samples, strict=True)))


def relative_error(samples: Sequence[PartTimes]) -> float:
    """The relative standard error of a part's medians: the mean of its actions', by their time."""
    times = median_times(samples)
    return _error_ns(samples) / times.total_ns if times.total_ns else 0.0


def median_error(values: Iterable[float]) -> float:
    """The standard error of the median of some values, from those around it.

    Of n ordered values, half the distance between those that lie half a root of n before and after
    the middle: the number of values below the true median scatters by so much. It assumes no
    distribution, and outliers, of which times have many, do not move it.
    """
    ordered = sorted(values)
    middle = (len(ordered) - 1) / 2
    reach = min(middle, math.sqrt(len(ordered)) / 2)
    return (_at(ordered, middle + reach) - _at(ordered, middle - reach)) / 2


def are_told_apart(totals: Sequence[Sequence[float]]) -> bool:
    """Whether the slowest of some groups differs from the fastest by more than chance.

    `totals[group][round]`: the two are compared round by round, since what slows a round slows
    both. Medians within TARGET_ERROR of their middle are taken for equal anyway: so much differs
    between any two launches.
    """
    fastest, *_, slowest = sorted(totals, key=statistics.median)
    least = TARGET_ERROR * (statistics.median(fastest) + statistics.median(slowest))
    differences = [slow - fast for fast, slow in zip(fastest, slowest, strict=False)]
    return statistics.median(differences) > max(least, MANY_ERRORS * median_error(differences))


def _are_known(rounds: Sequence[Sequence[PartTimes]]) -> bool:
    """Whether no part's error is above the target; small parts may be off by more of their time."""
    by_part = list(zip(*rounds, strict=True))
    totals = [median_times(samples).total_ns for samples in by_part]
    usual_ns = statistics.mean(totals)
    return all(
        _error_ns(samples) <= TARGET_ERROR * max(total_ns, usual_ns)
        for samples, total_ns in zip(by_part, totals, strict=True)
    )


def _error_ns(samples: Sequence[PartTimes]) -> float:
    """The sum of the standard errors of a microbatch's actions."""
    *actions, _optimizer = zip(*samples, strict=True)
    return sum(map(median_error, actions))


def _at(ordered: Sequence[float], position: float) -> float:
    """The value at a position, between two of them a mean of both."""
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
