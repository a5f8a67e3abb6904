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
)
from engine.plan.program import Program
from engine.plan.rules import ProgramError

_GRADIENT_OPS = (Op.B, Op.W)


def check_collectives(program: Program, policy: CollectivePolicy) -> None:
    """Raise ProgramError unless the program's collectives are in places that the policy allows.

    Where it shards parameters, each stage is unsharded while it is computed on, at most once at
    a time, no more stages than the policy says, and none at the end. Gradients are summed once for
    a stage, after its last B or W, or after each, as the policy says. The optimizer, if there is
    one, is the last of its rank. What else makes a program legal is for `engine.plan.rules.check`.
    """
    for rank, row in enumerate(program.rows):
        state = _Rank(program, rank, policy)
        for position, action in enumerate(row):
            if reason := state.objection(action):
                raise ProgramError(program, rank, position, reason)
        if reason := state.objection_to_end():
            raise ProgramError(program, rank, len(row), reason)


class _Rank:
    """What has happened on a rank so far."""

    def __init__(self, program: Program, rank: int, policy: CollectivePolicy) -> None:
        self._rank, self._placement = rank, program.placement
        self._most, self._is_none = most_unsharded(policy), isinstance(policy, NoCollectives)
        self._is_every = reduces_every_backward(policy)
        self._unsharded: set[int] = set()
        row = program.rows[rank]
        self._to_come = Counter(action.stage for action in row if action.op in _GRADIENT_OPS)
        self._unshards = Counter(action.stage for action in row if action.op is Op.UNSHARD)
        self._unreduced: set[int] = set()  # stages with gradients that are not summed
        self._is_over = False

    def objection(self, action: Action) -> str | None:
        """Return why an action may not come next, or note that it did."""
        if self._is_over:
            return "comes after the optimizer"
        if action.op is Op.OPT:
            self._is_over = True
            return self.objection_to_end()
        if action.op in COMPUTE_OPS:
            return self._objection_to_computation(action)
        if action.op not in COLLECTIVE_OPS:
            return None
        if not 0 <= action.stage < self._placement.num_stages:
            return f"there are {self._placement.num_stages} stages"
        if (owner := self._placement.ranks[action.stage]) != self._rank:
            return f"stage {action.stage} is placed on rank {owner}"
        if action.op is Op.REDUCE_GRAD:
            return self._objection_to_reduction(action.stage)
        return self._objection_to_sharding(action)

    def objection_to_end(self) -> str | None:
        """Return what is not done yet, where all must be."""
        if self._unreduced:
            return f"the gradients of stage {min(self._unreduced)} are not summed"
        if self._unsharded:
            return f"stage {min(self._unsharded)} is still unsharded"
        return None

    def _objection_to_computation(self, action: Action) -> str | None:
        stage = action.stage
        if self._most is not None and stage not in self._unsharded:
            comes = "is unsharded only later" if self._unshards[stage] else "is not unsharded again"
            return f"stage {stage} is sharded, and {comes}"
        if action.op in _GRADIENT_OPS:
            if self._is_every and stage in self._unreduced:
                return f"the gradients of stage {stage} before it are not summed"
            self._to_come[stage] -= 1
            if not self._is_none:
                self._unreduced.add(stage)
        return None

    def _objection_to_reduction(self, stage: int) -> str | None:
        if stage not in self._unreduced:
            return f"stage {stage} has no gradients to sum"
        if not self._is_every and self._to_come[stage]:
            return f"comes before the last backward of stage {stage}"
        self._unreduced.remove(stage)
        return None

    def _objection_to_sharding(self, action: Action) -> str | None:
        stage, is_unsharded = action.stage, action.stage in self._unsharded
        if self._most is None:
            return "the policy shards no parameters"
        if action.op is Op.RESHARD:
            self._unsharded.discard(stage)
            return None if is_unsharded else f"stage {stage} is not unsharded"
        if is_unsharded:
            return f"stage {stage} is unsharded already"
        if len(self._unsharded) == self._most:
            held = ", ".join(map(str, sorted(self._unsharded)))
            return f"unsharded are stages {held}; at most {self._most} may be"
        self._unsharded.add(stage)
        self._unshards[stage] -= 1
        return None
