"""Chooses the program of `schedule = "auto"`: the solver's best over the placements there are.

stages per rank   placements
1                 a loop over the ranks
2 and more        loops, or ways down and up the ranks (a V)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from engine.plan.action import Action, Op
from engine.plan.program import Placement, Program, loop_placement, v_placement
from engine.plan.schedules.registry import AUTO
from ppbench.planning.solver.problem import Problem
from ppbench.planning.solver.solver import solve

MOST_EFFORT = 0.3
"""The effort of the solver over all placements takes about a second."""
ACTIONS_OF_MOST = 1000
"""A step of as many computations is worth that; smaller ones take their share."""


def placements_of(world_size: int, stages_per_rank: int) -> list[Placement]:
    """Where the stages may be."""
    placements = [loop_placement(world_size, stages_per_rank)]
    if stages_per_rank > 1 and world_size > 1:
        placements.append(v_placement(world_size, stages_per_rank))
    return placements


def best_program(problems: Sequence[Problem]) -> Program:
    """The fastest program found for the same step on several placements, called `auto`.

    It is the same each time. Raises NoProgramError where a problem has no program.
    """
    solutions = []
    for problem in problems:
        num_actions = 3 * problem.num_microbatches * problem.placement.num_stages
        effort = MOST_EFFORT * min(1.0, num_actions / ACTIONS_OF_MOST)
        solutions.append(solve(problem, effort / len(problems)))
    best = min(solutions, key=lambda solution: solution.step_ns)
    return dataclasses.replace(best.program, schedule=AUTO)


def with_whole_backwards(program: Program, stages: Collection[int]) -> Program:
    """The program with whole backwards in place of I on some stages, which then have no W."""

    def changed(action: Action) -> Action:
        is_whole = action.op is Op.I and action.stage in stages
        return action._replace(op=Op.B) if is_whole else action

    rows = [
        tuple(changed(a) for a in row if not (a.op is Op.W and a.stage in stages))
        for row in program.actions
    ]
    return dataclasses.replace(program, actions=rows) if stages else program
