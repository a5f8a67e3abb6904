"""Estimates what scatters: rounds within a launch, process starts, launches alone, sessions.

    session     Monday              Tuesday             Wednesday
    launches    o  o o o            o o  oo             o o oo
    mean           |                    |                   |

Launches of one session agree in all that sessions differ by (a boot, a temperature, a layout of
memory), so that spreads are pooled around the mean of each state of the code in each session, and
the drift between sessions is told apart. Launches that something slowed are left out, as they are
where they are judged. The range or the largest difference would grow with the number of launches.

The drift follows by one-way random effects: the mean square between sessions less that within them,
over the number of launches of each. For sessions of unequal size, the mean square is that of their
means, and the number the harmonic mean (Thomas and Hultquist 1978, Annals of Statistics 6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ppbench.judge.differences import CONFIDENCE, additive, chi_square, group
from ppbench.judge.disturbances import places_apart
from ppbench.judge.estimates import Level, level_of, noise_in_rounds
from ppbench.judge.evidence import Metric, Noise, Rounds

LEAST_SHARE = 0.25
"""Least share of its standard error for which the variance of starts is taken."""


@dataclass(frozen=True)
class NoiseLevel:
    """The deviation between launches with the ends of its 95 % interval."""

    noise: Noise
    low: float
    high: float
    left_out: tuple[tuple[int, ...], ...] = ()  # of each group: places of launches that lie apart


def noise_of_launches(metric: Metric, groups: Sequence[Sequence[float]]) -> NoiseLevel | None:
    """The noise of launches of one side, from groups of one case, state of the code and session.

    None without two kept launches in any group. The interval is that of a normal distribution's
    deviation, by chi-square. Raises ValueError for figures that have no logarithm.
    """
    values = [additive(figures, in_points=metric.in_points) for figures in groups]
    left_out = tuple(places_apart(each, metric.slow_sign) for each in values)
    kept = [
        group(np.delete(each, list(apart)))
        for each, apart in zip(values, left_out, strict=True)
        if len(each) > len(apart)
    ]
    freedom = sum(each.freedom for each in kept)
    if freedom < 1:
        return None
    squares = math.fsum(each.squares for each in kept)
    tails = (1 + CONFIDENCE) / 2, (1 - CONFIDENCE) / 2
    low, high = (math.sqrt(squares / chi_square(freedom, tail)) for tail in tails)
    return NoiseLevel(Noise(math.sqrt(squares / freedom), freedom), low, high, left_out)


@dataclass(frozen=True)
class RoundNoise:
    """The noise that paired launches show."""

    starts: Noise | None  # of the difference between starts; None without two in a group
    rounds: Noise | None  # of a round's difference; None where no launch has enough of them
    launches: Noise | None = None  # of a launch's difference: what starts and its rounds decide


@dataclass(frozen=True)
class Scatter:
    """How much launches of a pair of sides differ, and how much of it their rounds explain."""

    levels: tuple[Level, ...]  # of launches with enough rounds
    squares: float = 0.0  # of their differences
    freedom: float = 0.0
    explained: float = 0.0  # of these squares, in variances of a round


def scatter_of(metric: Metric, launches: Sequence[Rounds]) -> Scatter:
    """The scatter of launches of one pair of sides and one session."""
    found = [level_of(metric, rounds) for rounds in launches]
    levels = tuple(level for level in found if level is not None and level.freedom > 0)
    if len(levels) < 2:
        return Scatter(levels)
    own = group([level.estimate for level in levels])
    share = float(np.mean([1 / level.num_rounds for level in levels]))
    return Scatter(levels, own.squares, own.freedom, own.freedom * share)


def noise_of_rounds(metric: Metric, groups: Sequence[Sequence[Rounds]]) -> RoundNoise:
    """The noise of starts and of rounds, from launches of one pair of sides and session each."""
    return pooled([scatter_of(metric, launches) for launches in groups])


def pooled(scatters: Sequence[Scatter], share: float = 1.0) -> RoundNoise:
    """The noise that several pairs of sides show together.

    The variance of starts is that of the launches' differences less what their rounds explain
    (`noise_beyond`): launches with few rounds do not show that starts differ by nothing. Pairs that
    have arms in common have a share of their freedom.
    """
    rounds = noise_in_rounds([level for each in scatters for level in each.levels])
    squares, freedom, explained = (
        math.fsum(getattr(each, name) for each in scatters)
        for name in ("squares", "freedom", "explained")
    )
    if rounds is None or not freedom:
        return RoundNoise(None, rounds)
    own_freedom = max(rounds.freedom * share, 1.0)
    of_launch = Noise(rounds.deviation * math.sqrt(explained / freedom), own_freedom)
    scatter = Noise(math.sqrt(squares / freedom), freedom * share)
    return RoundNoise(noise_beyond(scatter, of_launch), rounds, scatter)


def noise_beyond(scatter: Noise, explained: Noise) -> Noise:
    """What launches scatter beyond what their rounds explain.

    It is at least a share of its standard error, so that its freedom says how little is known.
    """
    total, own = scatter.deviation**2, explained.deviation**2
    error = math.sqrt(2 * (total**2 / scatter.freedom + own**2 / explained.freedom))
    variance = max(total - own, LEAST_SHARE * error)
    if variance == 0:
        return Noise(0.0, scatter.freedom)
    freedom = min(2 * (variance / error) ** 2, scatter.freedom)
    return Noise(math.sqrt(variance), freedom)


def drift_of(
    metric: Metric, states: Sequence[Sequence[Sequence[float]]], num_sessions: int
) -> Noise | None:
    """The drift, from the launches of each session of each state of the code, all of one case.

    What several states say is pooled by their sessions; `num_sessions` is that of all together,
    since states that were measured in the same ones say the same twice. None where no state has two
    sessions, one of them with two launches.
    """
    variances, freedoms = list[float](), list[int]()
    for sessions in states:
        values = [additive(each, in_points=metric.in_points) for each in sessions if len(each)]
        groups = [
            group(np.delete(each, list(places_apart(each, metric.slow_sign)))) for each in values
        ]
        freedom = sum(each.freedom for each in groups)
        if len(groups) < 2 or freedom < 1:
            continue
        within = sum(each.squares for each in groups) / freedom
        size = len(groups) / sum(1 / each.num for each in groups)  # the harmonic mean
        between = float(np.var([each.mean for each in groups], ddof=1))
        variances.append(max(between - within / size, 0.0))
        freedoms.append(len(groups) - 1)
    if not variances:
        return None
    deviation = math.sqrt(np.average(variances, weights=freedoms))
    return Noise(deviation, min(num_sessions - 1, sum(freedoms)))
