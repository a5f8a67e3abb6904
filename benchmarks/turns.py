"""Measures several arms in turn, so that whatever slows the machine slows all of them."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import count, takewhile
from typing import TypeVar

from benchmarks.outcome import Figure, Goal, Ratio, Standing
from ppbench.run.rounds import order_of

Result = TypeVar("Result")


@dataclass(frozen=True)
class Turns:
    """The values that each arm measured, round by round."""

    values: dict[str, list[float]]
    unit: str = "s"

    def ratio(self, name: str, numerator: str, denominator: str, goal: Goal | None = None) -> Ratio:
        """The ratio of two arms, in each round."""
        return Ratio.of(name, self.values[numerator], self.values[denominator], goal)

    def figures(self) -> list[Figure]:
        return [Figure(arm, tuple(taken), self.unit) for arm, taken in self.values.items()]


@dataclass(frozen=True)
class Aim:
    """A ratio of two arms with a goal; `scale` multiplies it."""

    name: str
    numerator: str
    denominator: str
    goal: Goal
    scale: float = 1.0

    def ratio(self, turns: Turns, num_looks: int = 1) -> Ratio:
        """The ratio in each round; it may have been looked at so often."""
        scaled = [self.scale * value for value in turns.values[self.numerator]]
        ratio = Ratio.of(self.name, scaled, turns.values[self.denominator], self.goal)
        return replace(ratio, num_looks=num_looks)


@dataclass(frozen=True)
class Rounds:
    """How many rounds are measured: the fewest, or more while the goal of an aim is not decided."""

    fewest: int
    most: int = 0  # no more than the fewest
    aims: tuple[Aim, ...] = ()

    @property
    def looks(self) -> tuple[int, ...]:
        """The rounds after which one may stop: each twice as many as the one before."""
        if not self.aims or self.most <= self.fewest:
            return (self.fewest,)
        doubled = takewhile(
            lambda num: num < self.most, (self.fewest * 2**place for place in count())
        )
        return (*doubled, self.most)

    def ratios(self, turns: Turns) -> list[Ratio]:
        """The ratios of the aims, judged by intervals that hold at all looks."""
        return [aim.ratio(turns, len(self.looks)) for aim in self.aims]

    def is_open(self, values: Mapping[str, list[float]]) -> bool:
        """Whether any goal is not decided yet."""
        ratios = self.ratios(Turns(dict(values)))
        return any(ratio.standing is Standing.undecided for ratio in ratios)


def in_turns(
    arms: Mapping[str, Callable[[], float]],
    rounds: int | Rounds,
    num_warmup: int = 1,
    unit: str = "s",
    agree: Callable[[bool], bool] = bool,
) -> Turns:
    """Measure each arm once in a round; the values of the first rounds are not kept.

    Where several ranks do this together, `agree` gives all of them the first one's answer to
    whether more rounds are measured.
    """
    planned = rounds if isinstance(rounds, Rounds) else Rounds(rounds)
    return Turns(_measured(arms, planned, num_warmup, agree), unit)


def _measured(
    arms: Mapping[str, Callable[[], float]],
    rounds: Rounds,
    num_warmup: int,
    agree: Callable[[bool], bool],
) -> dict[str, list[float]]:
    values: dict[str, list[float]] = {name: [] for name in arms}
    first = 0
    for num_rounds in rounds.looks:
        for round_index in range(first, num_warmup + num_rounds):
            _measure_round(arms, round_index, values, is_kept=round_index >= num_warmup)
        first = num_warmup + num_rounds
        if num_rounds < rounds.looks[-1] and not agree(rounds.is_open(values)):
            break
    return values


def results_in_turns(
    arms: Mapping[str, Callable[[], Result]], num_rounds: int, num_warmup: int = 1
) -> dict[str, list[Result]]:
    """Like `in_turns`, for arms that return anything but one number.

    The order depends on the names of the arms only, so several ranks can do this together.
    """
    results: dict[str, list[Result]] = {name: [] for name in arms}
    for round_index in range(num_warmup + num_rounds):
        _measure_round(arms, round_index, results, is_kept=round_index >= num_warmup)
    return results


def _measure_round(
    arms: Mapping[str, Callable[[], Result]],
    round_index: int,
    results: dict[str, list[Result]],
    *,
    is_kept: bool,
) -> None:
    names = list(arms)
    for name in (names[place] for place in order_of(len(names), round_index)):
        result = arms[name]()
        if is_kept:
            results[name].append(result)


def timed_in_turns(
    arms: Mapping[str, Callable[[], object]], rounds: int | Rounds, num_warmup: int = 1
) -> Turns:
    """Measure the seconds that each arm takes."""
    timed = {name: functools.partial(seconds_of, work) for name, work in arms.items()}
    return in_turns(timed, rounds, num_warmup)


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of the work, begun after a garbage collection; its result is freed afterwards."""
    gc.collect()
    began = time.perf_counter()
    kept = work()
    took = time.perf_counter() - began
    del kept
    return took
