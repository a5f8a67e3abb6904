"""Lets the solver make the program of a shape, within what each rank has left for activations.

Problems reserve the most that any action of a rank takes while it runs. Where that leaves too
little, one microbatch after the other still fits: that program needs the least memory of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from engine.plan.action import Action, Op
from engine.plan.model_costs import LinkCosts, StageCosts
from engine.plan.program import Placement, Program
from ppbench.planning.fitting import Candidate, Fit, Layout
from ppbench.planning.memory import message_bytes, static_bytes
from ppbench.planning.solver.problem import NoProgramError, Problem
from ppbench.planning.solver.solver import solve
from ppbench.planning.space import Shape
from ppbench.planning.stages import StageTable, durations_of, optimizers_of, steps_ns, transfers_of


def problem_of(
    shape: Shape,
    stages: Sequence[StageCosts],
    link: LinkCosts,
    memory_bytes: int | None,
    *,
    meets: bool,
    is_cautious: bool = False,
    is_for_bound: bool = False,
) -> Problem:
    """The problem of a shape's stages; its limits are what is left of a rank's memory.

    Where layers recompute, the half of a backward leaves more than the forward took, which no
    problem knows: it counts too little, or, if it is cautious, too much. For a bound, the limits
    are such that every program that fits keeps within them.
    """
    forward = [stage.held_after_forward for stage in stages]
    after_input = [stage.held_after_input for stage in stages]
    if is_cautious:
        forward = list(map(max, forward, after_input))
    placement = shape.placement
    limits = []
    for rank, besides in enumerate(bytes_besides(placement, stages)):
        own = [stages[stage] for stage in placement.stages_of(rank)]
        held = (max(stage.held_after_forward, stage.held_after_input) for stage in own)
        limit = everything = shape.num_microbatches * sum(held)
        if memory_bytes is not None:
            transients = [stage.transient_bytes for stage in own]
            reserved = besides + (min(transients) if is_for_bound else max(transients))
            limit = min(everything, memory_bytes - reserved)
        limits.append(limit)
    return Problem(
        placement,
        shape.num_microbatches,
        durations_of(stages),
        tuple(limits),
        tuple(forward),
        tuple(map(min, forward, after_input)),
        transfers_of(link, stages),
        optimizers_of(stages, placement),
        meets,
    )


def bytes_besides(placement: Placement, stages: Sequence[StageCosts]) -> list[int]:
    """By rank, what its memory has besides activations and actions that run, at most."""
    messages = message_bytes(placement, stages)
    return [
        static_bytes([stages[stage] for stage in placement.stages_of(rank)]) + most
        for rank, (_, most) in enumerate(messages)
    ]


def least_memory(placement: Placement, stages: Sequence[StageCosts]) -> int:
    """The memory of every rank with which there is a program: for one microbatch at once."""
    besides = bytes_besides(placement, stages)
    held, peaks = [0] * placement.world_size, [0] * placement.world_size
    for stage, rank in zip(stages, placement.ranks, strict=True):
        again = max(0, stage.held_after_input - stage.held_after_forward)
        held[rank] += stage.held_after_forward
        peaks[rank] = max(peaks[rank], held[rank] + again + stage.transient_bytes)
    return max(map(sum, zip(besides, peaks, strict=True)))


def one_by_one(placement: Placement, num_microbatches: int) -> Program:
    """The program that needs the least memory: one microbatch is done before the next begins."""
    rows = []
    for rank in range(placement.world_size):
        own = placement.stages_of(rank)
        way = [(Op.F, stage) for stage in own] + [(Op.B, stage) for stage in reversed(own)]
        numbered = itertools.product(range(num_microbatches), way)
        rows.append(tuple(Action(stage, op, number) for number, (op, stage) in numbered))
    return Program("solved", placement, num_microbatches, tuple(rows))


def solved(
    shape: Shape,
    layout: Layout,
    table: StageTable,
    link: LinkCosts,
    memory_bytes: int | None,
    effort: float,
    *,
    meets: bool,
) -> Candidate | None:
    """The candidate with the solver's program, or None where no program fits."""
    stages = table.of_all(*layout)

    def candidate(program: Program, step_ns: int) -> Candidate | None:
        fit = Fit(shape, program, table, link, "none", meets=meets)
        one = fit.candidate(layout, stages, step_ns)
        return one if memory_bytes is None or one.most_bytes <= memory_bytes else None

    for is_cautious in (False, True):
        how = {"meets": meets, "is_cautious": is_cautious}
        problem = problem_of(shape, stages, link, memory_bytes, **how)
        try:
            solution = solve(problem, effort)
        except NoProgramError:
            break
        if (found := candidate(solution.program, solution.step_ns)) is not None:
            return found
    program = one_by_one(shape.placement, shape.num_microbatches)
    (step_ns,) = steps_ns([(program, stages)], transfers_of(link, stages), meets=meets)
    return candidate(program, step_ns)


def least_step_of(shape: Shape, stages: Sequence[StageCosts], *, meets: bool) -> int:
    """A bound on the step of all programs for these stages, quicker than the solver's.

    A rank does all its work; where ranks meet, not before the first microbatch has come to it.
    """
    least, arrived = [0] * shape.ranks, 0
    first: dict[int, int] = {}
    for rank, stage in zip(shape.placement.ranks, stages, strict=True):
        first.setdefault(rank, arrived)
        arrived += stage.forward_ns
        least[rank] += shape.num_microbatches * stage.quickest_ns
    return max(load + (first[rank] if meets else 0) for rank, load in enumerate(least))
