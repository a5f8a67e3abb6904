"""Measures several arms in turn, so that whatever slows the machine slows all of them."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from benchmarks.outcome import Figure, Goal, Ratio

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


def in_turns(
    arms: Mapping[str, Callable[[], float]], num_rounds: int, num_warmup: int = 1, unit: str = "s"
) -> Turns:
    """Measure each arm once in a round; the values of the first rounds are not kept."""
    return Turns(results_in_turns(arms, num_rounds, num_warmup), unit)


def results_in_turns(
    arms: Mapping[str, Callable[[], Result]], num_rounds: int, num_warmup: int = 1
) -> dict[str, list[Result]]:
    """Like `in_turns`, for arms that return anything but one number.

    The order depends on the names of the arms only, so several ranks can do this together.
    """
    results: dict[str, list[Result]] = {name: [] for name in arms}
    for round_index in range(num_warmup + num_rounds):
        for name in order(tuple(arms), round_index):
            result = arms[name]()
            if round_index >= num_warmup:
                results[name].append(result)
    return results


def timed_in_turns(
    arms: Mapping[str, Callable[[], object]], num_rounds: int, num_warmup: int = 1
) -> Turns:
    """Measure the seconds that each arm takes."""
    timed = {name: functools.partial(seconds_of, work) for name, work in arms.items()}
    return in_turns(timed, num_rounds, num_warmup)


def order(names: tuple[str, ...], round_index: int) -> Iterator[str]:
    """The names forwards and backwards in turn, beginning with the next one every second round.

    So each comes first, last and after each neighbour equally often.
    """
    first = round_index // 2 % len(names)
    turned = names[first:] + names[:first]
    return iter(turned if round_index % 2 == 0 else turned[::-1])


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of the work, begun after a garbage collection; its result is freed afterwards."""
    gc.collect()
    began = time.perf_counter()
    kept = work()
    took = time.perf_counter() - began
    del kept
    return took
