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
by side in its main part: they are a pair, one action whose halves may overlap.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter

from engine.plan.action import CODES, Action, Op
from engine.plan.program import Placement, Program, with_pairs
from engine.plan.table import Row, woven

DOWN, UP = 0, 1
"""Which of a rank's two stages."""


class _Growing:
    """A rank's row as it grows: each op of each stage takes the next microbatches."""

    def __init__(self, stages: tuple[int, ...], firsts: tuple[int, ...] = (0, 0)) -> None:
        """`firsts`: the first microbatch of each stage."""
        self.row = Row.of(())
        self._stages, self._firsts = stages, firsts
        self._next = Counter[tuple[int, Op]]()

    def add(self, times: int, *actions: tuple[int, Op]) -> None:
        """So many times these actions, in turn."""
        self.row.append(woven(*((0, self.take(times, *action)) for action in actions)))

    def take(self, times: int, way: int, op: Op) -> Row:
        """An op of a stage for its next microbatches."""
        counted = Op.I if op is Op.B else op  # a B is an I whose W is not put off
        first = self._firsts[way] + self._next[way, counted]
        self._next[way, counted] += times
        return Row.alike(op, self._stages[way], array("q", range(first, first + times)))

    def count(self, way: int, op: Op) -> int:
        return self._next[way, op]


def zbv(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank. No rank holds more than p microbatches' activations."""
    filled = max(2 * placement.world_size - 1, num_microbatches)
    rows = [_zbv_row(rank, placement, filled) for rank in range(placement.world_size)]
    if filled == num_microbatches:
        return rows
    kept = [[microbatch < num_microbatches for microbatch in row.microbatch] for row in rows]
    return [
        Row(*(array("q", itertools.compress(column, keep)) for column in row))
        for row, keep in zip(rows, kept, strict=True)
    ]


def _zbv_row(rank: int, placement: Placement, num_microbatches: int) -> Row:
    row, hops = _Growing(placement.stages_of(rank)), placement.world_size - rank
    up = (UP, Op.F), (UP, Op.I), (UP, Op.W)
    down = (DOWN, Op.I), (DOWN, Op.W)
    row.add(2 * hops - 1, (DOWN, Op.F))
    row.add(rank, (UP, Op.F), (DOWN, Op.F))
    row.add(hops, *up)
    row.add(num_microbatches - row.count(DOWN, Op.F), (DOWN, Op.F), *down, *up)
    row.add(num_microbatches - row.count(UP, Op.F), *down, *up)
    row.add(rank, (DOWN, Op.I), (UP, Op.I))
    row.add(hops, *down)
    for way in (UP, DOWN):
        row.add(num_microbatches - row.count(way, Op.W), (way, Op.W))
    return row.row


def dualpipev(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank; needs m >= 2p."""
    p = placement.world_size
    return [
        dualpipev_row(rank, placement.stages_of(rank), p, num_microbatches) for rank in range(p)
    ]


def dualpipev_row(
    rank: int,
    stages: tuple[int, ...],
    world_size: int,
    num_microbatches: int,
    firsts: tuple[int, ...] = (0, 0),
) -> Row:
    """The row of a rank with a stage down and one up; `firsts`: the first microbatch of each."""
    row, hops = _Growing(stages, firsts), world_size - rank - 1
    backwards = (UP, Op.B), (UP, Op.F), (DOWN, Op.B)
    row.add(2 * hops, (DOWN, Op.F))
    row.add(rank + 1, (DOWN, Op.F), (UP, Op.F))
    row.add(hops, (UP, Op.I), (UP, Op.W), (UP, Op.F))
    row.add(num_microbatches - 2 * world_size + rank + 1, (DOWN, Op.F), *backwards)
    row.add(hops, *backwards)
    # The last backwards; from the middle of them on, W is put off to where the rank would wait.
    pairs, is_odd = divmod(rank + 1, 2)
    row.add(pairs, (UP, Op.B), (DOWN, Op.B))
    row.add(is_odd, (UP, Op.B))
    split = row.take(is_odd, DOWN, Op.I)
    split.append(woven((0, row.take(pairs, UP, Op.I)), (0, row.take(pairs, DOWN, Op.I))))
    row.row.append(split)
    last = row.take(hops, DOWN, Op.I)
    split.append(last)
    row.row.append(woven((0, split.as_op(Op.W)), (0, last)))
    return row.row


def side_by_side(program: Program) -> Program:
    """Make pairs of each forward and the whole backward right behind it.

    But not the first ones where a pipeline turns, or two meet: its forward is awaited there.
    """
    table, placement, forwards = program.table, program.placement, list[Action]()
    for rank, (begin, end) in enumerate(itertools.pairwise(table.offset)):
        op = table.op[begin:end]
        own = [
            begin + at
            for at, pair in enumerate(itertools.pairwise(op))
            if pair == (CODES[Op.F], CODES[Op.B])
        ]
        first, second = placement.stages_of(rank)
        if placement.directions == 1:
            turns = second == first + 1
        else:
            middle = placement.depth // 2
            turns = {first, second - placement.depth} == {middle - 1, middle}
        forwards += table.those(own[1:] if turns else own)
    return with_pairs(program, forwards)
