"""Every schedule by name: the one place to add a line when a schedule is added.

An explicit table rather than a decorator, so that reading this file tells what exists.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.plan.action import Action
from engine.plan.program import Placement, Program, loop_placement
from engine.plan.schedules.afab import afab
from engine.plan.schedules.one_f_one_b import one_f_one_b

Generator = Callable[[Placement, int], list[list[Action]]]
BubbleFormula = Callable[[int, int, float, float], float]


@dataclass(frozen=True)
class Schedule:
    """What the suite knows of a schedule besides its rows."""

    name: str
    generate: Generator
    bubble_time: BubbleFormula  # (p, m, F, B) -> idle time of a rank; F, B per microbatch and rank
    peak_activations: Callable[[int, int, int], int]  # (p, m, rank) -> microbatches held at once
    source: str


def _fill_and_drain(world_size: int, _m: int, forward: float, backward: float) -> float:
    return (world_size - 1) * (forward + backward)


SCHEDULES: dict[str, Schedule] = {
    schedule.name: schedule
    for schedule in (
        Schedule("afab", afab, _fill_and_drain, lambda p, m, rank: m, "arXiv 1811.06965"),
        Schedule(
            "1f1b",
            one_f_one_b,
            _fill_and_drain,
            lambda p, m, rank: min(p - rank, m),
            "arXiv 2006.09503",
        ),
    )
}
ALIASES = {"gpipe": "afab"}


class UnknownScheduleError(ValueError):
    """No schedule of that name is registered."""


def find_schedule(name: str) -> Schedule:
    """The schedule called `name` or aliased by it; raises UnknownScheduleError naming all known."""
    schedule = SCHEDULES.get(ALIASES.get(name, name))
    if schedule is None:
        raise UnknownScheduleError(f'unknown schedule "{name}"; known: {", ".join(known_names())}')
    return schedule


def known_names() -> list[str]:
    return [*SCHEDULES, *ALIASES]


def build_program(name: str, world_size: int, num_microbatches: int) -> Program:
    """The program of a registered schedule for p ranks and m microbatches, both at least 1."""
    if world_size < 1 or num_microbatches < 1:
        raise ValueError(
            f"a program needs at least 1 rank and 1 microbatch, "
            f"got world_size={world_size}, num_microbatches={num_microbatches}"
        )
    schedule = find_schedule(name)
    placement = loop_placement(world_size)
    rows = schedule.generate(placement, num_microbatches)
    actions = tuple(tuple(row) for row in rows)
    return Program(schedule.name, placement, num_microbatches, actions)


def theoretical_bubble_fraction(
    name: str, world_size: int, num_microbatches: int, forward: float = 1.0, backward: float = 2.0
) -> float:
    """Idle share of rank-time with equal stages and free transfers, in [0, 1).

    `forward` and `backward` are the times of one microbatch on one rank; for AFAB and 1F1B the
    fraction (p - 1) / (m + p - 1) does not depend on them.
    """
    schedule = find_schedule(name)
    idle = schedule.bubble_time(world_size, num_microbatches, forward, backward)
    return idle / (idle + num_microbatches * (forward + backward))
