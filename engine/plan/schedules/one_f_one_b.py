"""1F1B: one forward, one backward. The bubble of AFAB with the memory of p microbatches.

Source: Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training" (PipeDream-Flush),
arXiv 2006.09503. p = 3, m = 4, a forward and a backward of one time unit each (`.` is idle):

    rank 0: F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1: .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    rank 2: .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
"""

from __future__ import annotations

from engine.plan.action import Action, Op
from engine.plan.program import Placement


def one_f_one_b(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Rows of actions by rank.

    Rank r runs min(p - 1 - r, m) forwards to warm up, then pairs of a forward and a backward, then
    the backwards that remain. It never holds more than p - r microbatches' activations.
    """
    last_rank = placement.world_size - 1
    return [
        _row(rank, min(last_rank - rank, num_microbatches), num_microbatches)
        for rank in range(placement.world_size)
    ]


def _row(stage: int, num_warmup: int, num_microbatches: int) -> list[Action]:
    row = [Action(stage, Op.F, m) for m in range(num_warmup)]
    for m in range(num_microbatches - num_warmup):
        row += [Action(stage, Op.F, num_warmup + m), Action(stage, Op.B, m)]
    row += [Action(stage, Op.B, m) for m in range(num_microbatches - num_warmup, num_microbatches)]
    return row
