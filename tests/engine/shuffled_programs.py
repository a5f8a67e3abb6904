"""Legal programs whose ranks come to their actions in an order of chance.

A program is drawn action by action: of all that can be done next, on whichever rank, one is chosen.
So receivers take microbatches in another order than they were sent, and forwards, backwards and
their halves lie about as no schedule would have them.
"""

from __future__ import annotations

import random

from engine.plan.action import Action, Op
from engine.plan.lower import lower
from engine.plan.program import Placement, Program

MAX_STAGES_PER_RANK = 3
HALVES = ((Op.B,), (Op.I, Op.W))


def shuffled_program(
    seed: int, world_size: int | None = None, num_microbatches: int | None = None
) -> Program:
    """A legal program of 2 to 6 ranks, each with 1 to 3 stages anywhere in the model."""
    drawn = random.Random(seed)
    placement = _placement(drawn, world_size or drawn.randint(2, 6))
    num_microbatches = num_microbatches or drawn.randint(3, 6)
    rows: list[list[Action]] = [[] for _ in range(placement.world_size)]
    ways = {
        (stage, microbatch): drawn.choice(HALVES)
        for stage in range(placement.num_stages)
        for microbatch in range(num_microbatches)
    }
    waiting = [Action(0, Op.F, microbatch) for microbatch in range(num_microbatches)]
    while waiting:
        action = waiting.pop(drawn.randrange(len(waiting)))
        rows[placement.ranks[action.stage]].append(action)
        waiting += _made_possible(action, placement.num_stages, ways)
    actions = tuple(tuple(row) for row in rows)
    return Program(f"shuffled {seed}", placement, num_microbatches, actions)


def _placement(drawn: random.Random, world_size: int) -> Placement:
    ranks = [
        rank for rank in range(world_size) for _ in range(drawn.randint(1, MAX_STAGES_PER_RANK))
    ]
    drawn.shuffle(ranks)
    return Placement(tuple(ranks), world_size)


def _made_possible(
    action: Action, num_stages: int, ways: dict[tuple[int, int], tuple[Op, ...]]
) -> list[Action]:
    """The actions that become possible after an action; each is named by exactly one other."""
    stage, op, microbatch = action

    def backward(at: int) -> Action:
        return Action(at, ways[at, microbatch][0], microbatch)

    if op is Op.F:
        is_last = stage == num_stages - 1
        return [backward(stage) if is_last else Action(stage + 1, Op.F, microbatch)]
    if op is Op.W:
        return []
    before = [backward(stage - 1)] if stage else []
    return [*before, Action(stage, Op.W, microbatch)] if op is Op.I else before


def with_own_transfers(program: Program, seed: int) -> Program:
    """The program as an author would write it who places the transfers himself."""
    return lower(program, look_ahead=random.Random(seed).randint(0, 4))
