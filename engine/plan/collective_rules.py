"""The rules of a program's collectives, beside those of its computations.

A stage is computed on while it is unsharded, gradients are summed when they are complete, and the
optimizer comes when all of it is done.
"""

from __future__ import annotations

from collections import Counter

from engine.plan.action import COLLECTIVE_OPS, COMPUTE_OPS, Action, Op
from engine.plan.collectives import (
    CollectivePolicy,
    NoCollectives,
    most_unsharded,
    reduces_every_backward,
    with_collectives,
)
from engine.plan.program import Program
from engine.plan.rules import ProgramError

_GRADIENT_OPS = (Op.B, Op.W)


def with_checked_collectives(
    lowered: Program, program: Program, policy: CollectivePolicy
) -> Program:
    """Add the collectives of a policy to a program with transfers, and check them.

    Those of a file are checked as they are written: positions in an error are then the file's.
    Raises ProgramError.
    """
    placed = with_collectives(lowered, program, policy)
    if placed.has_collectives:
        check_collectives(program if program.has_collectives else placed, policy)
    return placed


def check_collectives(program: Program, policy: CollectivePolicy) -> None:
    """Raise ProgramError unless the program's collectives are in places that the policy allows.

    Where it shards parameters, each stage is unsharded while it is computed on, at most once at
    a time, no more stages than the policy says, and none at the end. Gradients are summed once for
    a stage, after its last B or W, or after each, as the policy says. The optimizer, if there is
    one, is the last of its rank. What else makes a program legal is for `engine.plan.check.check`.
    """
    for rank in range(program.world_size):
        _check_rank(program, rank, policy)


def _check_rank(program: Program, rank: int, policy: CollectivePolicy) -> None:
    most, placement, row = most_unsharded(policy), program.placement, program.actions[rank]
    to_come = Counter(action.stage for action in row if action.op in _GRADIENT_OPS)
    unshards = Counter(action.stage for action in row if action.op is Op.UNSHARD)
    unsharded, unreduced = set[int](), set[int]()  # stages; these have gradients to sum

    def left() -> str | None:
        """Say what is unfinished where all must be done; None if nothing is."""
        if unreduced:
            return f"the gradients of stage {min(unreduced)} are not summed"
        return f"stage {min(unsharded)} is still unsharded" if unsharded else None

    def objection(action: Action) -> str | None:
        """Why an action may not come next."""
        stage, op, _ = action
        if op is Op.OPT:
            return left()
        if op in COMPUTE_OPS:
            if most is not None and stage not in unsharded:
                is_later = unshards[stage] > 0
                comes = "is unsharded only later" if is_later else "is not unsharded again"
                return f"stage {stage} is sharded, and {comes}"
            is_every = op in _GRADIENT_OPS and reduces_every_backward(policy)
            if is_every and stage in unreduced:
                return f"the gradients of stage {stage} before it are not summed"
            return None
        if op not in COLLECTIVE_OPS:
            return None
        if not 0 <= stage < placement.num_stages:
            return f"there are {placement.num_stages} stages"
        if (owner := placement.ranks[stage]) != rank:
            return f"stage {stage} is placed on rank {owner}"
        if op is Op.REDUCE_GRAD:
            if stage not in unreduced:
                return f"stage {stage} has no gradients to sum"
            if to_come[stage] and not reduces_every_backward(policy):
                return f"comes before the last backward of stage {stage}"
        elif most is None:
            return "the policy shards no parameters"
        elif op is Op.RESHARD:
            return None if stage in unsharded else f"stage {stage} is not unsharded"
        elif stage in unsharded:
            return f"stage {stage} is unsharded already"
        elif len(unsharded) == most:
            held = ", ".join(map(str, sorted(unsharded)))
            return f"unsharded are stages {held}; at most {most} may be"
        return None

    is_over = False
    for position, action in enumerate(row):
        stage, op, _ = action
        if is_over:
            raise ProgramError(program, rank, position, "comes after the optimizer")
        if reason := objection(action):
            raise ProgramError(program, rank, position, reason)
        is_over = op is Op.OPT
        if op is Op.UNSHARD:
            unsharded.add(stage)
            unshards[stage] -= 1
        elif op is Op.RESHARD:
            unsharded.remove(stage)
        elif op is Op.REDUCE_GRAD:
            unreduced.remove(stage)
        elif op in _GRADIENT_OPS:
            to_come[stage] -= 1
            if not isinstance(policy, NoCollectives):
                unreduced.add(stage)
    if reason := left():
        raise ProgramError(program, rank, len(row), reason)
