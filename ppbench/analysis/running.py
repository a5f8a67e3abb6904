"""Steps of a run in a row, as they are modelled: each rank goes on when it is done with one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from engine.arrays import Ints
from engine.plan.action import Op
from engine.plan.period import Step, periods
from engine.plan.predict import computing_ns
from engine.plan.program import Program

Idle = list[list[int]]
"""Nanoseconds by replica and rank."""


@dataclass(frozen=True)
class Following:
    """Steps follow each other with an optimizer of each rank between their computations.

    `meets`: before it ranks wait for each other, as for the norm of all gradients.
    """

    optimizer_ns: tuple[int, ...]
    meets: bool

    def balanced(self) -> Following:
        """The same with equal optimizers, on the ranks that have one."""
        known = [ns for ns in self.optimizer_ns if ns]
        mean = round(sum(known) / len(known)) if known else 0
        return Following(tuple(mean if ns else 0 for ns in self.optimizer_ns), self.meets)

    def as_json(self) -> str:
        """Return it as `runs` stores it."""
        return json.dumps({"optimizer_ns": self.optimizer_ns, "meets": self.meets})


def stored_following(run: pd.Series) -> Following | None:
    """How the steps of a run were modelled to follow each other, where that is stored."""
    text = run.get("following")
    if not isinstance(text, str):
        return None
    known = json.loads(text)
    return Following(tuple(known["optimizer_ns"]), known["meets"])


def measured_following(spans: pd.DataFrame, world_size: int, *, meets: bool) -> Following:
    """The mean optimizers of some steps, of all replicas."""
    optimizer = spans[spans["op"] == Op.OPT.value]
    took = (optimizer["end_ns"] - optimizer["start_ns"]).groupby(optimizer["rank"]).mean()
    means = took.reindex(range(world_size)).fillna(0.0).tolist()
    return Following(tuple(map(round, means)), meets)


def steps_of(
    lowered: Program, many: Sequence[tuple[Sequence[Ints], Following | None]]
) -> list[tuple[int, Idle]]:
    """The nanoseconds of a program's step with each of some times of its replicas, and its idle.

    A step that follows another is the period of steps in a row, and idle is what a rank neither
    computes nor optimizes in it; one that stands alone is a makespan, without an optimizer.
    """
    alone = Following((0,) * lowered.world_size, meets=True)  # all ranks, after each step
    times = [(took, following or alone) for took, following in many]
    steps = (as_step(lowered, took, each) for took, each in times)
    found = []
    for (took, following), period in zip(times, map(round, periods(steps)), strict=True):
        lasts = following.optimizer_ns
        busy = computing_ns(lowered, took)
        idle = [[period - sum(each) for each in zip(ranks, lasts, strict=True)] for ranks in busy]
        found.append((period, idle))
    return found


def as_step(lowered: Program, took: Sequence[Ints], following: Following) -> Step:
    """A program's step as it follows another."""
    return Step(lowered, took, following.optimizer_ns, following.meets)
