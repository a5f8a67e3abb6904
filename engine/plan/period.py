"""The time of a step in a running training: steps in a row, each rank going on when it is done.

    rank 0   F0 F1 .  I0 W0 I1 W1 |OPT F0 F1 .  I0 W0 ...
    rank 1   .  F0 I0 F1 I1 W0 W1 |OPT .  F0 I0 ...
             <---- the makespan ----->
                                  <-- the period: from step to step, once they are alike -->

Each rank ends its step with an optimizer. Where ranks meet before, as for the norm of all
gradients, all wait for each other; else a rank begins while others end. Replicas meet rank by rank
at the collectives of their program.
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
from engine.plan.predict import Durations, WalkedStep, spans_of, took_by
from engine.plan.program import Program
from engine.plan.rules import check_facts
from engine.plan.spans import Span
from engine.plan.walk import FREE_TRANSFERS, TransferModel, Walk, walk, walk_all

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


def periods(steps: Iterable[Step], transfers: TransferModel = FREE_TRANSFERS) -> list[Fraction]:
    """The nanoseconds from a step to the next of each training, as given.

    They are exact where all times of a step are those of an earlier one, so much later: all further
    steps are alike then. If none of `MOST_STEPS` are, it is the mean over the second half of them.
    Raises ProgramError for a program that hangs.
    """
    ended: dict[tuple[int, bool], tuple[Program, Program]] = {}  # the first keeps its id
    given: list[tuple[Program, list[Ints]]] = []
    found: dict[int, Fraction] = {}
    for step in steps:
        key = id(step.program), step.meets
        if key not in ended:
            ended[key] = step.program, with_end(step.program, meets=step.meets)
        given.append((ended[key][1], [_with_last(step, took) for took in step.took_ns]))
    num_steps = 1
    while left := [at for at in range(len(given)) if at not in found]:
        walks = walk_all((given[at] for at in left), transfers, steps=num_steps)
        for at, walked in zip(left, walks, strict=True):
            if not walked.is_over:
                check(walked.program)  # it says which computation of a step waits for which
                explain(walked)
            if (period := _repeated(walked)) is not None:
                found[at] = period
            elif num_steps >= MOST_STEPS:
                half, last = num_steps // 2, num_steps - 1
                ends = [max(walked.step_ends_ns[step::num_steps]) for step in (half, last)]
                found[at] = Fraction(ends[1] - ends[0], last - half)
        num_steps = min(MOST_STEPS, max(3, 2 * num_steps))
    return [found[at] for at in range(len(given))]


def with_end(program: Program, *, meets: bool, has_optimizer: bool = True) -> Program:
    """The program with the optimizer of each rank, and before it the meeting if there is one."""
    ops = [Op.NORM] * meets + [Op.OPT] * has_optimizer
    ending = [Action(NO_INDEX, op, NO_INDEX) for op in ops]
    ends = itertools.pairwise(program.table.offset)
    tails = [ending if meets or end > begin else [] for begin, end in ends]
    return replace(program, actions=program.table.with_tails(tails))


def _with_last(step: Step, took: Ints) -> Ints:
    """The times of a replica's actions with those of meetings and optimizers."""
    offset, ranks = step.program.table.offset, step.program.world_size
    each = step.optimizer_ns
    lasts = [each] * ranks if isinstance(each, int) else each
    whole = took[:0]
    for (begin, end), last in zip(itertools.pairwise(offset), lasts, strict=True):
        whole.extend(took[begin:end])
        whole.extend([0, last] if step.meets else [last] * (end > begin))
    return whole


def _repeated(walked: Walk) -> Fraction | None:
    """The period, if the last step is as one of those before, or all are as a first one.

    They are where nothing is left of a step when the next one begins, which it does on the ranks
    of stage 0; or on any rank where parameters are gathered.
    """
    program, ends = walked.program, walked.step_ends_ns
    if walked.steps == 1:
        place = program.placement
        firsts = [place.ranks[stage] for stage in place.copies_of(0)]
        of_firsts = [end for rank in firsts for end in ends[rank :: program.world_size]]
        begins = min(ends if program.has_collectives else of_firsts)
        return Fraction(begins) if begins == max(ends) else None
    last, size = walked.steps - 1, program.table.num_actions
    for before in range(last - 1, -1, -1):
        arguments = walked.starts_ns, walked.moves_ns, size, last, before
        later = run(size, kernels.later_by, *arguments)
        if later != NONE:
            return Fraction(later, last - before)
    return None


def spans_in_a_row(step: Step, transfers: TransferModel = FREE_TRANSFERS) -> Iterator[Span]:
    """The spans of three steps of a running training, -1 to 1; step 0 begins at 0 ns.

    They are the second to the fourth of a training that begins.
    """
    program = with_end(step.program, meets=step.meets)
    took = [_with_last(step, of_replica) for of_replica in step.took_ns]
    walked = walk(program, took, transfers, steps=4)
    if not walked.is_over:
        explain(walked)
    table = program.table
    computes = [at for at in range(table.num_actions) if table.op[at] <= kernels.W]
    begun = (walked.of_step(walked.starts_ns, replica, 2) for replica in range(walked.replicas))
    begin_ns = min(starts[at] for starts in begun for at in computes)
    for number in (-1, 0, 1):
        for span in spans_of(walked, transfers, 2 + number):
            start, end = span.start_ns - begin_ns, span.end_ns - begin_ns
            yield span._replace(step=number, start_ns=start, end_ns=end)


def period_of(step: WalkedStep) -> Fraction:
    """The period of a program whose ranks do not meet, without an optimizer."""
    if (period := _repeated(step.walk)) is not None:
        return period
    return periods([Step(step.program, step.took_ns)], step.transfers)[0]


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
    if durations.pair_ns is None:
        compute = compute.in_order()
    check_facts(compute)
    step = Step(compute, [took_by(compute, durations)])
    step = step._replace(optimizer_ns=optimizer_ns, meets=meets)
    return periods([step], transfers)[0]
