"""How far the first of several choices is from the best, by launches that take turns in rounds.

    two rounds of all --who is clearly longer is set aside--> a round of the rest --...--> decided

The regret is the first choice's time over that of the best, less 1. It is decided once its interval
lies on one side of 2 %. Every round is a look at the same launches: the interval holds the true
regret at all looks with 95 %, by Bonferroni's inequality. Its low end is the highest over the
rivals, so each of them has a share of the chance to be wrong. Its high end is wrong only if that of
the true best one is, and needs no such share.

The spread of a pair's launches is pooled with that of the other arms, as `verdicts` does with a
machine's noise: two launches alone say next to nothing about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from ppbench.statistics.noise import noise_of
from ppbench.statistics.sequential import Stop
from ppbench.judge.differences import (
    Difference,
    Group,
    Ratio,
    group,
    student,
    t_quantile,
)
from ppbench.statistics.verdicts import Noise, difference_of

MARGIN = 0.02
"""A first choice that takes at most so much longer than the best is as good as it."""
CHANCE = 0.05
"""Chance that the interval of the regret is wrong at any look, half of it at either end."""
FIRST_ROUNDS = 2
"""Launches of every arm before any is set aside."""

Steps = Sequence[Sequence[float]]
"""The steps of each arm's launches, the first choice's first; none of an arm that failed."""


class Finding(StrEnum):
    """What launches say about the first choice."""

    best = "best"
    within = "within 2 %"
    slower = "slower"
    undecided = "not decided"


@dataclass(frozen=True)
class Regret:
    """The first arm's step over that of the best, less 1; `rival` is the best of the others."""

    finding: Finding
    estimate: float
    low: float
    high: float  # infinite where the spread of launches is unknown
    rival: int | None  # None where all others are set aside


class SetAside(NamedTuple):
    """An arm that is not measured further, after how many launches of each, and why."""

    arm: int
    num_launches: int
    best: int  # the arm that is quicker
    longer: Ratio | None  # the arm's step over that of the quicker one; None where its runs failed


@dataclass(frozen=True)
class Outcome:
    """The launches of all arms, and what they say; no regret where the first choice failed."""

    steps: Steps
    regret: Regret | None

    def stop(self, most: int) -> Stop:
        """Why no more launches are made, where each arm may have this many."""
        if self.regret is None:
            return Stop.failed
        if self.regret.finding is not Finding.undecided:
            return Stop.decided
        return Stop.most if max(map(len, self.steps)) >= most else Stop.failed


def race(
    measured: Callable[[Sequence[int], int], Steps],
    num_arms: int,
    most: int,
    on_set_aside: Callable[[SetAside], None] = lambda _: None,
    on_first_rounds: Callable[[Steps], None] = lambda _: None,
) -> Outcome:
    """Measure arms in rounds until it is decided how far the first one is from the best.

    `measured` is given arms and a number of launches, brings each of these arms to so many, and
    returns the steps of all arms. No arm has more than `most` launches. `on_first_rounds` is given
    the launches before any arm is set aside.
    """
    going = list(range(num_arms))
    steps: Steps = [()] * num_arms
    regret = None
    for count in range(min(FIRST_ROUNDS, most), most + 1):
        known = sum(map(len, steps))
        steps = measured(going, count)
        if known == 0:
            on_first_rounds(steps)
        if not steps[0] or sum(map(len, steps)) == known:
            break
        for one in losers(steps, going, count, _num_looks(most)):
            going.remove(one.arm)
            on_set_aside(one)
        regret = regret_of(steps, going, _num_looks(most))
        if regret.finding is not Finding.undecided:
            break
    return Outcome(steps, regret)


def reach(noise: Noise, num_arms: int, most: int) -> list[tuple[int, float]]:
    """Rounds, and how far above 2 % a regret is that half of all trials have decided by then."""
    confidence = _confidence(_num_looks(most) * max(num_arms - 1, 1))
    reached = []
    for num in sorted({max(2, min(FIRST_ROUNDS, most)), (FIRST_ROUNDS + most) // 2, most} - {1}):
        # Of two arms alone, Welch's test may have the freedom of one; more share their spread.
        quantile = t_quantile((num - 1) * (num_arms if num_arms > 2 else 1), (1 + confidence) / 2)
        width = quantile * noise.deviation * math.sqrt(2 / num)
        reached.append((num, (1 + MARGIN) * math.expm1(width)))
    return reached


def _num_looks(most: int) -> int:
    return max(1, most - FIRST_ROUNDS + 1)


def losers(steps: Steps, going: Sequence[int], num_launches: int, num_looks: int) -> list[SetAside]:
    """The arms, but the first, that are clearly longer than the best one, or have failed."""
    best = min((arm for arm in going if steps[arm]), key=lambda arm: _group(steps[arm]).mean)
    found = []
    for arm in going:
        if arm in (0, best):
            continue
        if not steps[arm]:
            found.append(SetAside(arm, num_launches, best, None))
            continue
        difference = _longer(steps, arm, best)
        low, high = difference.ends(_confidence(num_looks * (len(steps) - 1)))
        if low > 0:
            longer = Ratio(*map(math.exp, (difference.estimate, low, high)))
            found.append(SetAside(arm, num_launches, best, longer))
    return found


def regret_of(steps: Steps, going: Sequence[int], num_looks: int = 1) -> Regret:
    """What the launches say about the first arm; arms that are not `going` are not the best."""
    rivals = [arm for arm in going if arm != 0 and steps[arm]]
    if not rivals:
        return Regret(Finding.best, 0.0, 0.0, 0.0, None)
    differences = {arm: _longer(steps, 0, arm) for arm in rivals}
    shared, whole = _confidence(num_looks * (len(steps) - 1)), _confidence(num_looks)
    low = max(0.0, *(one.ends(shared)[0] for one in differences.values()))
    high = max(0.0, *(one.ends(whole)[1] for one in differences.values()))
    rival = max(rivals, key=lambda arm: differences[arm].estimate)
    estimate, low, high = map(math.expm1, (max(0.0, differences[rival].estimate), low, high))
    finding = Finding.undecided
    if high <= MARGIN or low > MARGIN:
        finding = Finding.within if high <= MARGIN else Finding.slower
    return Regret(finding, estimate, low, high, rival)


def interval_of(steps: Steps, arm: int) -> Ratio:
    """The geometric mean of an arm's launches with its 95 % interval, by the spread of all."""
    own, noise = _group(steps[arm]), noise_of(steps)
    freedom = 0 if noise is None else noise.freedom
    error = 0.0 if noise is None else noise.deviation / math.sqrt(own.num)
    mean = Difference(own.mean, error, freedom)
    return Ratio(*np.exp([mean.estimate, *mean.ends()]).tolist())


def _longer(steps: Steps, arm: int, than: int) -> Difference:
    """The logarithm of an arm's step over that of another."""
    one, other = _group(steps[arm]), _group(steps[than])
    noise = noise_of([own for at, own in enumerate(steps) if at not in (arm, than)])
    if min(one.num, other.num) > 1:
        return difference_of(one, other, noise)
    return student(one, other, *((noise.deviation**2, noise.freedom) if noise else ()))


def _group(steps: Sequence[float]) -> Group:
    return group(np.log(steps))


def _confidence(num_shares: int) -> float:
    return 1 - CHANCE / num_shares
