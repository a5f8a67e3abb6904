"""AFAB, all forward then all backward: the GPipe schedule.

Source: Huang et al., "GPipe", arXiv 1811.06965. p = 3, m = 3, a forward and a backward of one
time unit each (`.` is idle):

    rank 0: F0 F1 F2 .  .  .  .  B0 B1 B2
    rank 1: .  F0 F1 F2 .  .  B0 B1 B2 .
    rank 2: .  .  F0 F1 F2 B0 B1 B2 .  .
"""

from __future__ import annotations

from engine.plan.action import Action, Op
from engine.plan.program import Placement


def afab(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Rows of actions by rank: every forward in order, then every backward in order.

    A rank holds all m microbatches' activations when its forwards are done.
    """
    return [_row(stage, num_microbatches) for stage in range(placement.num_stages)]


def _row(stage: int, num_microbatches: int) -> list[Action]:
    forwards = [Action(stage, Op.F, m) for m in range(num_microbatches)]
    backwards = [Action(stage, Op.B, m) for m in range(num_microbatches)]
    return forwards + backwards
