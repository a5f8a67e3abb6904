"""Two stages per rank, placed in a V: rank r owns stages r (down) and 2p-1-r (back up).

The last rank turns the pipeline round, so loss and embeddings meet on rank 0, and the backward of
the second half comes back to a rank soon after its forward.

ZBV is Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241, section 6. It fills the
pipeline for max(2p - 1, m) microbatches; those beyond m are left out. p = 2, m = 3, an F, I and W
of a stage of one time unit each (`.` is idle):

    rank 0: 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2 .
    rank 1: .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

DualPipeV is the V-shaped half of DeepSeek's DualPipe, arXiv 2412.19437 (github.com/deepseek-ai/
DualPipe; the cut is sail-sg's). A forward and a full backward of the other direction stand side
by side in its main part, where they may overlap; here they run in order.
"""

from __future__ import annotations

from collections import defaultdict, deque

from engine.plan.action import Action, Op
from engine.plan.program import Placement

DOWN, UP = 0, 1
"""Which of a rank's two stages."""


class _Row:
    """A rank's row as it grows: each op of each stage takes the next microbatch."""

    def __init__(self, stages: tuple[int, ...]) -> None:
        self.actions: list[Action] = []
        self._stages = stages
        self._next: dict[tuple[int, Op], int] = defaultdict(int)
        self._due: deque[Action] = deque()  # the W whose I is done, oldest first

    def add(self, way: int, *ops: Op) -> None:
        for op in ops:
            counted = Op.I if op is Op.B else op  # a B is an I whose W is not put off
            action = Action(self._stages[way], op, self._count(way, counted))
            self.actions.append(action)
            if op is Op.I:
                self._due.append(action._replace(op=Op.W))

    def count(self, way: int, op: Op) -> int:
        return self._next[way, op]

    def add_oldest_due(self) -> None:
        """The W that has waited longest, if there is one."""
        if self._due:
            self.actions.append(self._due.popleft())

    def _count(self, way: int, op: Op) -> int:
        self._next[way, op] += 1
        return self._next[way, op] - 1


def zbv(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Rows of actions by rank. No rank holds more than p microbatches' activations."""
    rows = []
    for rank in range(placement.world_size):
        filled = max(2 * placement.world_size - 1, num_microbatches)
        row = _zbv_row(rank, placement, filled)
        rows.append([action for action in row if action.microbatch < num_microbatches])
    return rows


def _zbv_row(rank: int, placement: Placement, num_microbatches: int) -> list[Action]:
    row, hops = _Row(placement.stages_of(rank)), placement.world_size - rank
    for _ in range(2 * hops - 1):
        row.add(DOWN, Op.F)
    for _ in range(rank):
        row.add(UP, Op.F)
        row.add(DOWN, Op.F)
    for _ in range(hops):
        row.add(UP, Op.F, Op.I, Op.W)
    while row.count(UP, Op.F) < num_microbatches:
        if row.count(DOWN, Op.F) < num_microbatches:
            row.add(DOWN, Op.F)
        row.add(DOWN, Op.I, Op.W)
        row.add(UP, Op.F, Op.I, Op.W)
    for _ in range(rank):
        row.add(DOWN, Op.I)
        row.add(UP, Op.I)
    for _ in range(hops):
        row.add(DOWN, Op.I, Op.W)
    for way in (UP, DOWN):
        while row.count(way, Op.W) < num_microbatches:
            row.add(way, Op.W)
    return row.actions


def dualpipev(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Rows of actions by rank; needs m >= 2p."""
    return [
        _dualpipev_row(rank, placement, num_microbatches) for rank in range(placement.world_size)
    ]


def _dualpipev_row(rank: int, placement: Placement, num_microbatches: int) -> list[Action]:
    row, hops = _Row(placement.stages_of(rank)), placement.world_size - rank - 1
    for _ in range(2 * hops):
        row.add(DOWN, Op.F)
    for _ in range(rank + 1):
        row.add(DOWN, Op.F)
        row.add(UP, Op.F)
    for _ in range(hops):
        row.add(UP, Op.I)
        row.add_oldest_due()
        row.add(UP, Op.F)
    for _ in range(num_microbatches - 2 * placement.world_size + rank + 1):
        row.add(DOWN, Op.F)
        row.add(UP, Op.B, Op.F)
        row.add(DOWN, Op.B)
    for _ in range(hops):
        row.add(UP, Op.B, Op.F)
        row.add(DOWN, Op.B)
    _drain_dualpipev(row, rank, hops)
    return row.actions


def _drain_dualpipev(row: _Row, rank: int, hops: int) -> None:
    """The last backwards; from the middle of them on, W is put off to where the rank would wait."""
    for backward in range(2 * (rank + 1)):
        row.add(UP if backward % 2 == 0 else DOWN, Op.B if backward <= rank else Op.I)
    for _ in range(hops):
        row.add_oldest_due()
        row.add(DOWN, Op.I)
    for _ in range(rank + 1):
        row.add_oldest_due()
