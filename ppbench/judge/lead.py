"""Which of several arms are the best, and what is known between the others.

    zb_h1 --beats--> 1f1b --same--> afab          best: zb_h1, interleaved_1f1b
    zb_h1 --open---- interleaved_1f1b             known: zb_h1 beats 1f1b by 7 %

An arm is among the best if no other is faster. The first choice is the one of them with the largest
mean gain over all others; its regret is what the fastest rival may gain on it, by the deciding
interval. Which arm to take is known once that is within the resolution: all others are slower then,
or the same.

Two or three launches say little about their spread, and the arms beside them more. So the spread of
a pair is pooled with that of the arms which are not in it, where none is known from elsewhere and
they do not scatter clearly more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ppbench.judge.differences import additive, group, is_larger
from ppbench.judge.disturbances import places_apart
from ppbench.judge.estimates import level_of, noise_in_rounds
from ppbench.judge.evidence import Evidence, Metric, Noise
from ppbench.judge.looks import ONE_LOOK, Looks
from ppbench.judge.noise import noise_beyond
from ppbench.judge.verdicts import Change, Verdict, judge

_LARGEST_LOG = 700.0

Pair = tuple[int, int]
"""An arm, which is the head, and its rival, which is the base."""


@dataclass(frozen=True)
class Regret:
    """Bounds what a rival may gain on an arm: the share of its figure by which it could be better.

    The interval is the deciding one, of all looks together. The estimate is 0 for the best arm.
    """

    estimate: float
    low: float
    high: float  # infinite where nothing is known
    rival: int | None  # the arm that gains the most; None without one


@dataclass(frozen=True)
class Lead:
    """The best of several arms, as far as pairwise evidence shows it."""

    changes: Mapping[Pair, Change]  # both orders of each pair
    arms: tuple[int, ...]  # from the best; those that are beaten after the others
    best: tuple[int, ...]  # not beaten by any, from the likeliest
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
        return self.regret(arm).high <= self.resolution * (1 + 1e-9)

    @property
    def equals(self) -> tuple[int, ...]:
        """The arms that are the same as the first choice."""
        return tuple(arm for arm in self.arms[1:] if self._verdict(arm, self.first) is Verdict.same)

    @property
    def open(self) -> tuple[int, ...]:
        """The arms of which it is not known whether they are better than the first choice."""
        return tuple(arm for arm in self.arms[1:] if self._verdict(arm, self.first) is Verdict.open)

    def regret(self, arm: int, rivals: Sequence[int] | None = None) -> Regret:
        """Return what the best of the others, or of these rivals, may gain on an arm."""
        others = self.arms if rivals is None else rivals
        gains = {rival: self._gain(rival, arm) for rival in others if rival != arm}
        if not gains:
            return Regret(0.0, 0.0, 0.0, None)
        rival = max(gains, key=lambda one: (gains[one][0], gains[one][2]))
        estimate, low, high = (
            _expm1(max(0.0, *(gain[end] for gain in gains.values()), -math.inf)) for end in range(3)
        )
        return Regret(estimate, low, high, rival)

    def _verdict(self, arm: int, rival: int) -> Verdict:
        change = self.changes.get((arm, rival))
        return Verdict.open if change is None else change.verdict

    def _gain(self, arm: int, rival: int) -> tuple[float, float, float]:
        return gain_of(self.changes.get((arm, rival)), higher_is_better=self.higher_is_better)


def gain_of(change: Change | None, *, higher_is_better: bool) -> tuple[float, float, float]:
    """By how much the head is better, with the deciding interval; as logarithms, or in points."""
    if change is None or change.exact is None:
        return -math.inf, -math.inf, math.inf
    estimate, (low, high) = change.exact.estimate, change.ends
    return (estimate, low, high) if higher_is_better else (-estimate, -high, -low)


def lead(
    metric: Metric, pairs: Mapping[Pair, Evidence], num_arms: int, looks: Looks = ONE_LOOK
) -> Lead:
    """Judge all pairs of arms together, each pair in one of its orders.

    Raises ValueError for a metric of which neither direction is better.
    """
    judged = judge(metric, with_shared_noise(metric, pairs, num_arms), looks)
    return lead_of(metric, dict(zip(pairs, judged, strict=True)), num_arms)


def lead_of(metric: Metric, judged: Mapping[Pair, Change], num_arms: int) -> Lead:
    """Order arms whose pairs are judged already, each pair in one of its orders.

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
    best = tuple(arm for arm in arms if arm not in beaten)
    resolution = max((change.resolution for change in judged.values()), default=0.0)
    return Lead(changes, tuple(arms), best, resolution, is_better)


def with_shared_noise(
    metric: Metric, pairs: Mapping[Pair, Evidence], num_arms: int
) -> list[Evidence]:
    """The evidence of each pair, with the spread of all other arms where no noise is known."""
    # Of pairs in turns: sums of squares between launches, and what rounds explain of them.
    between, freedom, within, within_freedom = (np.zeros((num_arms, num_arms)) for _ in range(4))
    figures: dict[int, tuple[float, ...]] = {}
    for (arm, rival), evidence in pairs.items():
        figures[arm], figures[rival] = evidence.head.figures, evidence.base.figures
        found = [level_of(metric, rounds) for rounds in evidence.paired]
        levels = [level for level in found if level is not None and level.freedom > 0]
        rounds = noise_in_rounds(levels)
        if rounds is not None and len(levels) > 1:
            own = group([level.estimate for level in levels])
            share = float(np.mean([1 / level.num_rounds for level in levels]))
            for place in ((arm, rival), (rival, arm)):
                between[place], freedom[place] = own.squares, own.freedom
                within[place] = own.freedom * rounds.deviation**2 * share
                within_freedom[place] = rounds.freedom
    squares, free = np.zeros(num_arms), np.zeros(num_arms)
    for arm, own_figures in figures.items():
        if len(own_figures) > 1 and (metric.in_points or min(own_figures) > 0):
            values = additive(own_figures, in_points=metric.in_points)
            kept = group(np.delete(values, list(places_apart(values, metric.slow_sign))))
            squares[arm], free[arm] = kept.squares, kept.freedom
    shared = []
    for pair, evidence in pairs.items():
        others = [arm for arm in range(num_arms) if arm not in pair]
        apart = np.ix_(others, others)
        known = evidence
        if evidence.paired and evidence.starts is None and freedom[apart].any():
            # Each arm is in many pairs, so that these have less freedom than their sum.
            num = int(freedom[apart].any(axis=0).sum())
            total = float(freedom[apart].sum())
            scatter = Noise(math.sqrt(between[apart].sum() / total), total / num)
            rounds_freedom = max(float(within_freedom[apart].sum()) / num, 1.0)
            explained = Noise(math.sqrt(within[apart].sum() / total), rounds_freedom)
            if not _is_quieter(between[pair], freedom[pair], scatter):
                known = replace(evidence, starts=noise_beyond(scatter, explained))
        elif not evidence.paired and evidence.noise is None and free[others].any():
            total = float(free[others].sum())
            noise = Noise(math.sqrt(float(squares[others].sum()) / total), total)
            of_pair = list(pair)
            if not _is_quieter(squares[of_pair].sum(), free[of_pair].sum(), noise):
                known = replace(evidence, noise=noise)
        shared.append(known)
    return shared


def _is_quieter(squares: float, freedom: float, noise: Noise) -> bool:
    """Whether launches of a pair scatter clearly less than those of other arms."""
    variance = float(squares) / float(freedom) if freedom else 0.0
    return is_larger(noise.deviation**2, noise.freedom, variance, float(freedom))


def _expm1(value: float) -> float:
    return math.expm1(value) if value < _LARGEST_LOG else math.inf
