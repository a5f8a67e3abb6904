"""The time of a step in a running training: steps in a row, each rank going on when it is done.

    rank 0   F0 F1 .  I0 W0 I1 W1 |OPT F0 F1 .  I0 W0 ...
    rank 1   .  F0 I0 F1 I1 W0 W1 |OPT .  F0 I0 ...
             <---- the makespan ----->
                                  <-- the period: from step to step, once they are alike -->

Each rank ends its step with an optimizer. Where ranks meet before, as for the norm of all gradients
or for what replicas sum, all wait for each other; else a rank begins while others end.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import NamedTuple

from engine.arrays import Ints, run
from engine.plan import kernels
from engine.plan.action import NO_INDEX, Action, Op
from engine.plan.check import check, explain
from engine.plan.kernels import NONE
from engine.plan.program import Program
from engine.plan.rules import check_facts
from engine.plan.simulate import FREE_TRANSFERS, Durations, TransferModel
from engine.plan.walk import FREE, Moving, Walk, of_kinds, walk_all

MOST_STEPS = 64
"""Steps in a row that are looked at for two that are alike."""


class Step(NamedTuple):
    """A program with the nanoseconds of each of its actions, by replica, and how a step ends.

    `optimizer_ns` is by rank, or the same for all.
    """

    program: Program
    took_ns: Sequence[Ints]
    optimizer_ns: Sequence[int] | int = 0
    meets: bool = False


def periods(steps: Iterable[Step], moving: Moving = FREE) -> list[Fraction]:
    """The nanoseconds from a step to the next of each training, as given.

    They are exact where all times of a step are those of an earlier one, so much later: all further
    steps are alike then. If none of `MOST_STEPS` are, it is the mean over the second half of them.
    Raises ProgramError for a program that hangs.
    """
    ended: dict[tuple[int, bool], Program] = {}
    given: list[tuple[Program, list[Ints]]] = []
    found: dict[int, Fraction] = {}
    meeting, free = list[int](), list[int]()
    for at, step in enumerate(steps):
        key = id(step.program), step.meets
        if key not in ended:
            ended[key] = with_end(step.program, meets=step.meets)
        given.append((ended[key], [_with_last(step, took) for took in step.took_ns]))
        (meeting if step.meets else free).append(at)
    for at, walked in _walked(given, meeting, moving, 2):
        # The first meeting decides where each rank begins all further steps.
        ends = [max(walked.step_ends_ns[step::2]) for step in range(2)]
        found[at] = Fraction(ends[1] - ends[0])
    num_steps = 3
    while left := [at for at in free if at not in found]:
        for at, walked in _walked(given, left, moving, num_steps):
            if (period := _repeated(walked)) is not None:
                found[at] = period
            elif num_steps >= MOST_STEPS:
                half, last = num_steps // 2, num_steps - 1
                ends = [max(walked.step_ends_ns[step::num_steps]) for step in (half, last)]
                found[at] = Fraction(ends[1] - ends[0], last - half)
        num_steps *= 2
    return [found[at] for at in range(len(given))]


def with_end(program: Program, *, meets: bool) -> Program:
    """The program with the optimizer of each rank, and before it the meeting if there is one."""
    norm, opt = (Action(NO_INDEX, op, NO_INDEX) for op in (Op.NORM, Op.OPT))
    tails = [
        ([norm] if meets else []) + ([opt] if meets or end > begin else [])
        for begin, end in itertools.pairwise(program.table.offset)
    ]
    return replace(program, actions=program.table.with_tails(tails))


def _with_last(step: Step, took: Ints) -> Ints:
    """The times of a replica's actions with those of meetings and optimizers."""
    offset, ranks = step.program.table.offset, step.program.world_size
    each = step.optimizer_ns
    lasts = [each] * ranks if isinstance(each, int) else each
    whole = took[:0]
    for (begin, end), last in zip(itertools.pairwise(offset), lasts, strict=True):
        ending = [0, last] if step.meets else [last] * (end > begin)
        whole.extend(took[begin:end])
        whole.extend(ending)
    return whole


def _walked(
    given: Sequence[tuple[Program, list[Ints]]], some: Sequence[int], moving: Moving, num_steps: int
) -> Iterator[tuple[int, Walk]]:
    """Some of the trainings by their places, walked over for so many steps."""
    walks = walk_all((given[at] for at in some), moving, steps=num_steps)
    for at, walked in zip(some, walks, strict=True):
        if not walked.is_over:  # then a single step hangs too, and the check says where
            check(walked.program)
            explain(walked)
        yield at, walked


def _repeated(walked: Walk) -> Fraction | None:
    """The period, if the last step is as one of those before."""
    last, size = walked.steps - 1, walked.program.table.num_actions
    for before in range(last - 1, -1, -1):
        arguments = walked.starts_ns, walked.moves_ns, size, last, before
        later = run(size, kernels.later_by, *arguments)
        if later != NONE:
            return Fraction(later, last - before)
    return None


def period_ns(
    program: Program,
    durations: Durations,
    transfers: TransferModel = FREE_TRANSFERS,
    optimizer_ns: Sequence[int] | int = 0,
    *,
    meets: bool = False,
) -> Fraction:
    """The period of one program's computations. Raises ProgramError if it is illegal."""
    compute = program.compute_only()
    check_facts(compute)
    step = Step(compute, [of_kinds(compute, durations.by_kind(program.num_stages))])
    step = step._replace(optimizer_ns=optimizer_ns, meets=meets)
    return periods([step], Moving(transfers.duration_ns, transfers.overlaps))[0]
