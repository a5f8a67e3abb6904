"""Launches until the answer is clear: after how many one looks, and why no more are made.

    launches a side    3 ------> 4 ------> 5 ------ ... ------> 12, the most
                      look      look      look: decided

Every look shares the chance of a false claim (`statistics.sequential`), so the looks are planned
before the first launch, and each is at the first launches of a side, however many there are. A
measurement that was stopped and goes on thus takes the looks that it would have taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from ppbench.statistics import sequential
from ppbench.statistics.significance import FEWEST_LAUNCHES
from ppbench.statistics.verdicts import Change, Metric, Pair

MOST_LAUNCHES = 12
"""Launches of a side after which an open answer stays open, unless another number is asked for."""

Result = TypeVar("Result")


class Stop(StrEnum):
    """Why no more launches are made."""

    decided = "decided"
    most = "most launches reached"
    failed = "launches failed"


@dataclass(frozen=True)
class Look:
    """One look of those that were planned, at the first launches of either side."""

    place: int
    planned: tuple[int, ...]  # launches a side at each look

    @property
    def num_launches(self) -> int:
        return self.planned[self.place]

    def judge(self, metric: Metric, pairs: Sequence[Pair]) -> list[Change]:
        """The verdicts at this look; error rates hold over all looks."""
        return sequential.judge(metric, pairs, self.place, self.planned)


@dataclass(frozen=True)
class Looks:
    """The looks that were taken, and why the last of them was the last."""

    last: Look
    stop: Stop

    @property
    def num_taken(self) -> int:
        return self.last.place + 1

    @property
    def num_launches(self) -> int:
        """Launches of each side at the last look."""
        return self.last.num_launches

    @property
    def most_launches(self) -> int:
        return self.last.planned[-1]

    @property
    def is_decided(self) -> bool:
        return self.stop is Stop.decided

    @property
    def level_spent(self) -> float:
        """The chance of a false claim that the looks so far have spent, of `sequential.LEVEL`."""
        share = self.num_launches / self.most_launches
        return float(sequential.LEVEL * share**sequential.SPENDING)

    def values_of(self, change: Change) -> dict[str, object]:
        """What a table says of one change, beside the change itself."""
        return {
            "num_looks": self.num_taken,
            "level_spent": self.level_spent,
            "is_decided": sequential.is_decided([change]),
        }

    def as_dict(self) -> dict[str, object]:
        """The looks, as JSON has them."""
        return {
            "num_looks": self.num_taken,
            "launches": list(self.last.planned[: self.num_taken]),
            "max_launches": self.most_launches,
            "level_spent": self.level_spent,
            "is_decided": self.is_decided,
            "stop": str(self.stop),
        }


def planned_looks(most_launches: int) -> tuple[int, ...]:
    """The launches a side at each look. Raises ValueError for fewer launches than a verdict needs.

    They are as many as `most_launches` if these are the only ones.
    """
    if most_launches < FEWEST_LAUNCHES:
        raise ValueError(
            f"{most_launches} launches; a verdict needs {FEWEST_LAUNCHES} launches of each side"
        )
    return tuple(sequential.looks(most_launches, FEWEST_LAUNCHES))


def look_until_decided(
    planned: tuple[int, ...],
    bring_to: Callable[[int], object],
    judged: Callable[[Look], Result],
    changes_of: Callable[[Result], Sequence[Change]],
) -> tuple[Result, Looks]:
    """Launch and look in turns until every change is decided, or the planned looks are taken.

    `bring_to` launches both sides until each has so many launches; `judged` is the result of a
    look, and `changes_of` the changes in it that must be decided.
    """
    for place, num_launches in enumerate(planned):
        bring_to(num_launches)
        look = Look(place, planned)
        result = judged(look)
        if sequential.is_decided(changes_of(result)):
            return result, Looks(look, Stop.decided)
    return result, Looks(look, Stop.most)
