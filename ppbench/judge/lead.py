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
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from ppbench.judge.differences import is_larger
from ppbench.judge.estimates import Doubt
from ppbench.judge.evidence import Evidence, Metric, Noise
from ppbench.judge.noise import noise_of_launches, pooled, scatter_of
from ppbench.judge.verdicts import Change, Verdict

_LARGEST_LOG = 700.0

Pair = tuple[Hashable, Hashable]
"""An arm, which is the head, and its rival, which is the base."""
Arms = TypeVar("Arms", bound=tuple[Hashable, Hashable])


@dataclass(frozen=True)
class Lead:
    """The best of several arms, as far as pairwise evidence shows it."""

    changes: Mapping[Pair, Change]  # both orders of each pair
    arms: tuple[
        Hashable, ...
    ]  # from the likeliest to be best; those that are beaten after the others
    resolution: float
    higher_is_better: bool

    @property
    def first(self) -> Hashable:
        """The arm to take."""
        return self.arms[0]

    @property
    def is_decided(self) -> bool:
        """Whether it is known that the first choice can be taken."""
        return self.can_take(self.first)

    def can_take(self, arm: Hashable) -> bool:
        """Whether no rival can be better than this arm by more than the resolution."""
        return self.most_lost(arm) <= self.resolution * (1 + 1e-9)

    def most_lost(self, arm: Hashable) -> float:
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
    def equals(self) -> tuple[Hashable, ...]:
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


def lead_of(metric: Metric, judged: Mapping[Pair, Change], arms: Sequence[Hashable]) -> Lead:
    """Order arms whose pairs are judged together, each pair in one of its orders or in both.

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
    score: dict[Hashable, float] = {}
    for arm in arms:
        gains = [
            gain_of(change, higher_is_better=is_better)[0]
            for (head, _), change in changes.items()
            if head == arm and change.exact is not None
        ]
        score[arm] = float(np.mean(gains)) if gains else -math.inf
    ordered = sorted(arms, key=lambda arm: (arm in beaten, -score[arm]))
    resolution = max((change.resolution for change in judged.values()), default=0.0)
    return Lead(changes, tuple(ordered), resolution, is_better)


def with_shared_noise(metric: Metric, pairs: Mapping[Arms, Evidence]) -> dict[Arms, Evidence]:
    """Give each pair whose noise is not known the spread of the arms that are not in it."""
    scatters = {pair: scatter_of(metric, evidence.paired) for pair, evidence in pairs.items()}
    figures: dict[Hashable, tuple[float, ...]] = {}
    for (head, base), evidence in pairs.items():
        figures |= {head: evidence.head.figures, base: evidence.base.figures}
    shared = dict(pairs)
    for pair, evidence in pairs.items():
        if evidence.paired and evidence.starts is None:
            apart = {
                other: scatter
                for other, scatter in scatters.items()
                if scatter.freedom and not set(other) & set(pair)
            }
            # Each arm is in many pairs, so that these have less freedom than their sum.
            share = 2 / max(len({arm for other in apart for arm in other}), 1)
            beside = pooled(list(apart.values()), share)
            own = pooled([scatters[pair]]).launches
            if beside.launches and not _is_quieter(own, beside.launches):
                shared[pair] = replace(evidence, starts=beside.starts)
        elif not evidence.paired and evidence.noise is None:
            others = [own for arm, own in figures.items() if arm not in pair]
            level = noise_of_launches(metric, others)
            both = noise_of_launches(metric, [figures[arm] for arm in pair])
            if level and not _is_quieter(both.noise if both else None, level.noise):
                shared[pair] = replace(evidence, noise=level.noise)
    return shared


def _is_quieter(own: Noise | None, others: Noise) -> bool:
    """Whether launches of a pair scatter clearly less than those of other arms."""
    own = own or Noise(0.0, 0)
    return is_larger(others.deviation**2, others.freedom, own.deviation**2, own.freedom)
