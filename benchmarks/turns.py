"""Several things measured in turn, so that what slows the machine slows them all."""

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
    """What each arm measured, round by round."""

    values: dict[str, list[float]]
    unit: str = "s"

    def ratio(self, name: str, numerator: str, denominator: str, goal: Goal | None = None) -> Ratio:
        """Of two arms, in each round."""
        return Ratio.of(name, self.values[numerator], self.values[denominator], goal)

    def figures(self) -> list[Figure]:
        return [Figure(arm, tuple(taken), self.unit) for arm, taken in self.values.items()]


def in_turns(
    arms: Mapping[str, Callable[[], float]], num_rounds: int, num_warmup: int = 1, unit: str = "s"
) -> Turns:
    """What the arms measure, each once in a round; the first rounds are not kept."""
    return Turns(results_in_turns(arms, num_rounds, num_warmup), unit)


def results_in_turns(
    arms: Mapping[str, Callable[[], Result]], num_rounds: int, num_warmup: int = 1
) -> dict[str, list[Result]]:
    """What the arms return, whatever it is, where more than one figure is taken from it.

    The order is the same in every process that asks for the same arms, so ranks may do it together.
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
    """The seconds that each arm takes."""
    timed = {name: functools.partial(seconds_of, work) for name, work in arms.items()}
    return in_turns(timed, num_rounds, num_warmup)


def order(names: tuple[str, ...], round_index: int) -> Iterator[str]:
    """Forwards and backwards by turns, beginning with another one every second round.

    So each comes first, last and after each neighbour equally often.
    """
    first = round_index // 2 % len(names)
    turned = names[first:] + names[:first]
    return iter(turned if round_index % 2 == 0 else turned[::-1])


def seconds_of(work: Callable[[], object]) -> float:
    """From a clean heap, and with what it returns still alive."""
    gc.collect()
    began = time.perf_counter()
    kept = work()
    took = time.perf_counter() - began
    del kept
    return took
