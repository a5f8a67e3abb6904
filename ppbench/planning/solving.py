"""Lets the solver make the program of a shape, within what each rank has left for activations."""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan.model_costs import LinkCosts, StageCosts
from engine.plan.problem import NoProgramError, Problem
from engine.plan.program import Placement
from engine.plan.solver import solve
from ppbench.planning.fitting import Candidate, Fit, Layout
from ppbench.planning.memory import message_bytes, static_bytes
from ppbench.planning.space import Shape
from ppbench.planning.stages import StageTable, durations_of, transfers_of


def problem_of(
    shape: Shape,
    stages: Sequence[StageCosts],
    link: LinkCosts,
    memory_bytes: int | None,
    *,
    is_cautious: bool = False,
) -> Problem:
    """The problem of a shape's stages; its limits are what is left of a rank's memory.

    Where layers recompute, the half of a backward leaves more than the forward took, which no
    problem knows: it counts too little, or, if it is cautious, too much.
    """
    forward = [stage.held_after_forward for stage in stages]
    after_input = [stage.held_after_input for stage in stages]
    if is_cautious:
        forward = list(map(max, forward, after_input))
    placement = shape.placement
    return Problem(
        placement,
        shape.num_microbatches,
        durations_of(stages),
        _limits(shape, stages, memory_bytes),
        tuple(forward),
        tuple(map(min, forward, after_input)),
        transfers_of(link, stages),
    )


def _limits(
    shape: Shape, stages: Sequence[StageCosts], memory_bytes: int | None
) -> tuple[int, ...]:
    """By rank, the bytes that activations may take; without a limit, what all of them take."""
    limits = []
    besides = bytes_besides(shape.placement, stages)
    for rank in range(shape.ranks):
        own = [stages[stage] for stage in shape.placement.stages_of(rank)]
        held = (max(stage.held_after_forward, stage.held_after_input) for stage in own)
        everything = shape.num_microbatches * sum(held)
        limit = everything if memory_bytes is None else memory_bytes - besides[rank]
        limits.append(min(limit, everything))
    return tuple(limits)


def bytes_besides(placement: Placement, stages: Sequence[StageCosts]) -> list[int]:
    """By rank, what its memory has besides activations, at most."""
    messages = message_bytes(placement, stages)
    besides = []
    for rank in range(placement.world_size):
        own = [stages[stage] for stage in placement.stages_of(rank)]
        transient = max(stage.transient_bytes for stage in own)
        besides.append(static_bytes(own) + transient + messages[rank][1])
    return besides


def least_memory(placement: Placement, stages: Sequence[StageCosts]) -> int:
    """The memory of every rank with which the solver has a program: for one microbatch at once."""
    besides = bytes_besides(placement, stages)
    for stage, rank in enumerate(placement.ranks):
        besides[rank] += max(stages[stage].held_after_forward, stages[stage].held_after_input)
    return max(besides)


def solved(
    shape: Shape,
    layout: Layout,
    table: StageTable,
    link: LinkCosts,
    memory_bytes: int | None,
    effort: float,
) -> Candidate | None:
    """The candidate with the solver's program, or None where no program fits."""
    stages = table.of_all(*layout)
    for is_cautious in (False, True):
        problem = problem_of(shape, stages, link, memory_bytes, is_cautious=is_cautious)
        try:
            solution = solve(problem, effort)
        except NoProgramError:
            return None
        fit = Fit(shape, solution.program, table, link, "none")
        candidate = fit.candidate(layout, stages, solution.makespan_ns)
        if memory_bytes is None or candidate.most_bytes <= memory_bytes:
            return candidate
    return None


def least_makespan_of(shape: Shape, stages: Sequence[StageCosts]) -> int:
    """A bound on the makespan of all programs for these stages, quicker than the solver's.

    A rank does all its work, but not before the first microbatch has come to it.
    """
    least, arrived = [0] * shape.ranks, 0
    first: dict[int, int] = {}
    for rank, stage in zip(shape.placement.ranks, stages, strict=True):
        first.setdefault(rank, arrived)
        arrived += stage.forward_ns
        backward = min(stage.backward_ns, stage.input_ns + stage.weight_ns)
        least[rank] += shape.num_microbatches * (stage.forward_ns + backward)
    return max(first[rank] + load for rank, load in enumerate(least))
