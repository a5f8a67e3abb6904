"""AFAB and looped BFS: every forward that can run before any backward.

AFAB, all forward then all backward, is the GPipe schedule: Huang et al., arXiv 1811.06965. p = 3,
m = 3, a forward and a backward of one time unit each (`.` is idle):

    rank 0: F0 F1 F2 .  .  .  .  B0 B1 B2
    rank 1: .  F0 F1 F2 .  .  B0 B1 B2 .
    rank 2: .  .  F0 F1 F2 B0 B1 B2 .  .

Looped BFS runs the same way stage after stage of a rank: Lamy-Poirier, "Breadth-First Pipeline
Parallelism", arXiv 2211.05953. Backwards come in reversed order, as torch has them. p = 2, m = 2,
two stages per rank, a stage's forward one unit and its backward two:

    rank 0: 0F0 0F1 2F0 2F1 .   .   .   2B1 2B1 2B0 2B0 0B1 0B1 0B0 0B0
    rank 1: .   1F0 1F1 3F0 3F1 3B1 3B1 3B0 3B0 1B1 1B1 1B0 1B0 .   .

Both hold the activations of all m microbatches when the forwards are done.
"""

from __future__ import annotations

from array import array

from engine.plan.action import Op
from engine.plan.program import Placement
from engine.plan.table import Row, woven


def afab(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank: every forward in order, then every backward in order."""
    microbatches = array("q", range(num_microbatches))
    return [
        woven(
            (0, Row.alike(Op.F, stage, microbatches)),
            (num_microbatches, Row.alike(Op.B, stage, microbatches)),
        )
        for stage in range(placement.num_stages)
    ]


def looped_bfs(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows by rank: per stage every forward; then per stage, last first, every backward."""
    microbatches = array("q", range(num_microbatches))
    rows = []
    for rank in range(placement.world_size):
        row = Row.of(())
        for stage in placement.stages_of(rank):
            row.append(Row.alike(Op.F, stage, microbatches))
        row.append(Row.alike(Op.B, row.stage[::-1], row.microbatch[::-1]))
        rows.append(row)
    return rows
