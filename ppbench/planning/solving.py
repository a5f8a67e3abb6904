"""Lets the solver make the program of a shape, within what each rank has left for activations.

The solver knows microbatches in flight, not messages, temporaries or gradients. What is left for it
follows from the one memory model: of a program that runs one microbatch after the other, all that
is not its microbatch's activations. What the solver finds is then counted by the model; where it
takes more, it is asked once more with as much less, and in the end that program is taken, which
needs the least memory of all.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from engine.plan.action import Action, Op
from engine.plan.model_costs import LinkCosts, StageCosts
from engine.plan.program import Placement, Program
from ppbench.planning.fitting import Candidate, Fit, Layout
from ppbench.planning.solver.problem import NoProgramError, Problem
from ppbench.planning.solver.solver import solve
from ppbench.planning.space import Shape
from ppbench.planning.stages import durations_of, optimizers_of, steps_ns, transfers_of

NUM_TRIES = 2


def problem_of(
    shape: Shape,
    stages: Sequence[StageCosts],
    link: LinkCosts,
    room: Sequence[int] | None,
    *,
    meets: bool,
) -> Problem:
    """The problem of a shape's stages; each rank has room for so many bytes of activations.

    A microbatch holds on a stage what is left after its F, and after its I; where layers recompute,
    that is more than before, which no problem knows: it counts too little.
    """
    placement, taken = shape.placement, [stage.held_after_forward for stage in stages]
    left = [stage.held_after_input for stage in stages]
    everything = [0] * shape.ranks
    for rank, most in zip(placement.ranks, map(max, taken, left), strict=True):
        everything[rank] += shape.num_microbatches * shape.num_slices // shape.directions * most
    return Problem(
        placement,
        shape.num_microbatches * shape.num_slices,
        durations_of(stages),
        tuple(everything if room is None else map(min, everything, room)),
        tuple(taken),
        tuple(map(min, taken, left)),
        transfers_of(link, stages),
        optimizers_of(stages, placement),
        meets,
    )


def most_room(
    placement: Placement, stages: Sequence[StageCosts], memory_bytes: int | None
) -> list[int] | None:
    """By rank, the bytes that activations have at most in any program that fits: for a bound.

    When an F is at its highest, the rank has its parameters, what is in flight, and what that F
    takes besides.
    """
    if memory_bytes is None:
        return None
    room = []
    for rank in range(placement.world_size):
        own = [stages[stage] for stage in placement.stages_of(rank)]
        besides = (one.memory.rise[0] + one.input_bytes - one.held_after_forward for one in own)
        room.append(memory_bytes - sum(one.static_bytes for one in own) - min(besides))
    return room


def one_by_one(placement: Placement, num_microbatches: int) -> Program:
    """The program that needs the least memory: one microbatch is done before the next begins."""
    rows = []
    for rank in range(placement.world_size):
        own = placement.stages_of(rank)
        way = [(Op.F, stage) for stage in own] + [(Op.B, stage) for stage in reversed(own)]
        numbered = itertools.product(range(num_microbatches), way)
        rows.append(tuple(Action(stage, op, number) for number, (op, stage) in numbered))
    return Program("solved", placement, num_microbatches, tuple(rows))


def solved(alone: Fit, layout: Layout, memory_bytes: int | None, effort: float) -> Candidate | None:
    """The candidate with the solver's program, or None where no program fits.

    `alone` is the shape with the program that needs the least memory.
    """
    shape, table, costs, meets = alone.shape, alone.table, alone.costs, alone.meets
    stages = table.of_all(*layout)
    room, peaks = None, alone.peaks(layout)
    if memory_bytes is not None:
        room = [memory_bytes - peak for peak in peaks]
        for rank, stage in zip(shape.placement.ranks, stages, strict=True):
            room[rank] += stage.held_after_forward
    for _ in range(NUM_TRIES):
        problem = problem_of(shape, stages, costs.link, room, meets=meets)
        try:
            solution = solve(problem, effort)
        except NoProgramError:
            break
        fit = Fit(shape, solution.program, table, costs, alone.mode, meets=meets)
        found = fit.candidate(layout, solution.step_ns)
        if memory_bytes is None or found.most_bytes <= memory_bytes:
            return found
        room = [
            limit - max(0, peak - memory_bytes)
            for limit, peak in zip(problem.limits, found.peak_bytes, strict=True)
        ]
    if memory_bytes is not None and max(peaks) > memory_bytes:
        return None
    transfers = transfers_of(costs.link, stages)
    (step_ns,) = steps_ns([(alone.program, stages)], transfers, meets=meets)
    return alone.candidate(layout, step_ns)


def least_step_of(shape: Shape, stages: Sequence[StageCosts], *, meets: bool) -> int:
    """A bound on the step of all programs for these stages, quicker than the solver's.

    A rank does all its work; where ranks meet, not before the first microbatch has come to it.
    """
    least, arrived = [0] * shape.ranks, 0
    first: dict[int, int] = {}
    for rank, stage in zip(shape.placement.ranks, stages, strict=True):
        first.setdefault(rank, arrived)
        arrived += round(stage.forward_ns)
        least[rank] += shape.num_microbatches * shape.num_slices * round(stage.quickest_ns)
    return max(load + (first[rank] if meets else 0) for rank, load in enumerate(least))
