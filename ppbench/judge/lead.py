"""Which of several arms are the best, and what is known between the others.

    zb_h1 --beats--> 1f1b --same--> afab          best: zb_h1, interleaved_1f1b
    zb_h1 --open---- interleaved_1f1b             known: zb_h1 beats 1f1b by 7 %

An arm is among the best if no other is faster. The first choice is the one of them with the largest
mean gain over all others. The most that is lost by it is what a rival may gain on it, by the
deciding interval. Which arm to take is known once that is within the resolution: all others are
slower then, or the same.

Two or three launches say little about their spread, and the arms beside them more. So the spread of
a pair is pooled with that of the arms which are not in it, where none is known from elsewhere and
they do not scatter clearly more.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ppbench.judge.differences import group, is_larger
from ppbench.judge.estimates import Doubt, level_of, noise_in_rounds
from ppbench.judge.evidence import Evidence, Metric, Noise
from ppbench.judge.noise import noise_beyond, noise_of_launches
from ppbench.judge.verdicts import Change, Verdict

_LARGEST_LOG = 700.0

Pair = tuple[int, int]
"""An arm, which is the head, and its rival, which is the base."""
Arms = TypeVar("Arms", bound=tuple[Hashable, Hashable])


@dataclass(frozen=True)
class Lead:
    """The best of several arms, as far as pairwise evidence shows it."""

    changes: Mapping[Pair, Change]  # both orders of each pair
    arms: tuple[int, ...]  # from the likeliest to be best; those that are beaten after the others
    resolution: float
    higher_is_better: bool

    @property
    def first(self) -> int:
        """The arm to take."""
        return self.arms[0]

    @property
    def is_decided(self) -> bool:
        """Whether it is known that the first choice can be taken."""
        return self.can_take(self.first)

    def can_take(self, arm: int) -> bool:
        """Whether no rival can be better than this arm by more than the resolution."""
        return self.most_lost(arm) <= self.resolution * (1 + 1e-9)

    def most_lost(self, arm: int) -> float:
        """By which share the best rival may be better than an arm; infinite if nothing is known.

        It is the end of the deciding interval, of all looks together.
        """
        ends = [
            gain_of(self.changes.get((rival, arm)), higher_is_better=self.higher_is_better)[1]
            for rival in self.arms
            if rival != arm
        ]
        most = max([0.0, *ends])
        return math.expm1(most) if most < _LARGEST_LOG else math.inf

    @property
    def equals(self) -> tuple[int, ...]:
        """The arms that are the same as the first choice."""
        changes = ((arm, self.changes.get((arm, self.first))) for arm in self.arms[1:])
        return tuple(arm for arm, change in changes if change and change.verdict is Verdict.same)


def gain_of(change: Change | None, *, higher_is_better: bool) -> tuple[float, float]:
    """By how much the head is better, and may be; as logarithms, or in points.

    Nothing bounds it where a caution forbids a verdict.
    """
    if change is None or change.exact is None or change.doubt is Doubt.cautioned:
        return -math.inf, math.inf
    estimate, (low, high) = change.exact.estimate, change.ends
    return (estimate, high) if higher_is_better else (-estimate, -low)


def lead_of(metric: Metric, judged: Mapping[Pair, Change], num_arms: int) -> Lead:
    """Order arms whose pairs are judged together, each pair in one of its orders.

    Raises ValueError for a metric of which neither direction is better.
    """
    if metric.higher_is_better is None:
        raise ValueError(f"{metric.name}: expected a metric of which one direction is better")
    is_better = metric.higher_is_better
    changes: dict[Pair, Change] = {}
    for (arm, rival), change in judged.items():
        changes[arm, rival] = change
        changes[rival, arm] = change.reversed()
    beaten = {arm for (arm, _), change in changes.items() if change.verdict is Verdict.slower}
    score: dict[int, float] = {}
    for arm in range(num_arms):
        gains = [
            gain_of(change, higher_is_better=is_better)[0]
            for (head, _), change in changes.items()
            if head == arm and change.exact is not None
        ]
        score[arm] = float(np.mean(gains)) if gains else -math.inf
    arms = sorted(range(num_arms), key=lambda arm: (arm in beaten, -score[arm], arm))
    resolution = max((change.resolution for change in judged.values()), default=0.0)
    return Lead(changes, tuple(arms), resolution, is_better)


def with_shared_noise(metric: Metric, pairs: Mapping[Arms, Evidence]) -> dict[Arms, Evidence]:
    """Give each pair whose noise is not known the spread of the arms that are not in it."""
    scatters = {pair: _scatter(metric, evidence) for pair, evidence in pairs.items()}
    figures: dict[Hashable, tuple[float, ...]] = {}
    for (head, base), evidence in pairs.items():
        figures |= {head: evidence.head.figures, base: evidence.base.figures}
    shared = dict(pairs)
    for pair, evidence in pairs.items():
        if evidence.paired and evidence.starts is None:
            apart = {
                other: own
                for other, own in scatters.items()
                if own is not None and not set(other) & set(pair)
            }
            own = scatters[pair] or _Scatter(0.0, 0.0, 0.0, 0.0)
            if apart:
                known = apart.values()
                freedom = math.fsum(each.freedom for each in known)
                # Each arm is in many pairs, so that these have less freedom than their sum.
                share = 2 / len({arm for other in apart for arm in other})
                within = math.fsum(each.within_freedom for each in known) * share
                scatter, explained = (
                    Noise(math.sqrt(math.fsum(squares) / freedom), own_freedom)
                    for squares, own_freedom in (
                        ((each.squares for each in known), freedom * share),
                        ((each.within for each in known), max(within, 1.0)),
                    )
                )
                if not _is_quieter(own.squares, own.freedom, scatter):
                    shared[pair] = replace(evidence, starts=noise_beyond(scatter, explained))
        elif not evidence.paired and evidence.noise is None:
            others = [own for arm, own in figures.items() if arm not in pair]
            level = noise_of_launches(metric, others)
            both = noise_of_launches(metric, [figures[arm] for arm in pair])
            own_noise = both.noise if both else Noise(0.0, 0)
            if level and not _is_quieter(own_noise.squares, own_noise.freedom, level.noise):
                shared[pair] = replace(evidence, noise=level.noise)
    return shared


@dataclass(frozen=True)
class _Scatter:
    """How much launches of a pair in turns differ, and how much of it their rounds explain."""

    squares: float  # between launches
    freedom: float
    within: float  # of these squares, what rounds explain
    within_freedom: float


def _scatter(metric: Metric, evidence: Evidence) -> _Scatter | None:
    found = [level_of(metric, rounds) for rounds in evidence.paired]
    levels = [level for level in found if level is not None and level.freedom > 0]
    rounds = noise_in_rounds(levels)
    if rounds is None or len(levels) < 2:
        return None
    own = group([level.estimate for level in levels])
    share = float(np.mean([1 / level.num_rounds for level in levels]))
    within = own.freedom * rounds.deviation**2 * share
    return _Scatter(own.squares, own.freedom, within, rounds.freedom)


def _is_quieter(squares: float, freedom: float, noise: Noise) -> bool:
    """Whether launches of a pair scatter clearly less than those of other arms."""
    variance = squares / freedom if freedom else 0.0
    return is_larger(noise.deviation**2, noise.freedom, variance, freedom)
