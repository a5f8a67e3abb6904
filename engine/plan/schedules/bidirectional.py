"""Two pipelines in opposite directions over the same ranks: Chimera and DualPipe.

Each rank has a stage of both: rank r has stage r of the pipeline down the ranks, and stage 2p-1-r,
which is stage p-1-r of the pipeline up them. So every part of the model is on two ranks, whose
gradients are summed once in a step. Where one pipeline fills, the other one is at its loss.

Chimera is Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with
Bidirectional Pipelines", arXiv 2107.06925, with one pair of pipelines. Its unit of p microbatches,
half of them each way, is repeated. p = 4, m = 4, F and B of one time unit each (`.` is idle):

    rank 0: 0F0 0F1 .   7F2 7B2 7F3 7B3 0B0 .   0B1
    rank 1: .   1F0 6F2 1F1 6F3 6B2 1B0 6B3 1B1 .
    rank 2: .   5F2 2F0 5F3 2F1 2B0 5B2 2B1 5B3 .
    rank 3: 4F2 4F3 .   3F0 3B0 3F1 3B1 4B2 .   4B3

A rank idles for (p-2)B in a step, and for (p-2)(B-F) more with each further unit, where B is not
the shorter.

DualPipe is DeepSeek's, arXiv 2412.19437 (github.com/deepseek-ai/DualPipe). In its main part a
forward of one pipeline and a full backward of the other stand side by side, where they may overlap
and take F&B together; a rank idles for (p/2-1)(F&B + B - 3W). p = 2, m = 4, F, I and W of one unit
each, the forwards beside backwards run in order:

    rank 0: 0F0 3F2 0F1 3B2 3B2 3F3 0B0 0B0 3B3 3B3 0I1 0W1
    rank 1: 2F2 1F0 2F3 1B0 1B0 1F1 2B2 2B2 1B1 1B1 2I3 2W3
"""

from __future__ import annotations

from array import array

from engine.plan.action import Op
from engine.plan.program import Placement
from engine.plan.schedules.v_shaped import dualpipev_row
from engine.plan.table import Row, woven


def chimera(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank; p must be even, and m a multiple of it.

    No rank holds more than p microbatches' activations.
    """
    p, half = placement.world_size, placement.world_size // 2
    rows = []
    for rank in range(p):
        # Forwards of a pipeline and backwards of the other one take turns, half a unit of each.
        ways = [(rank, Row.of(())), (p - 1 - rank, Row.of(()))]
        for first in range(0, num_microbatches // 2, half):
            down = rank, array("q", range(first, first + half))
            begin = first + num_microbatches // 2
            up = 2 * p - 1 - rank, array("q", range(begin, begin + half))
            for (_, row), ahead, back in zip(ways, (down, up), (up, down), strict=True):
                row.append(Row.alike(Op.F, *ahead))
                row.append(Row.alike(Op.B, *back))
        # One way has the even units of time, the other one the odd ones.
        turns = sorted(ways, key=lambda way: way[0] % 2)
        rows.append(woven(*((begin // 2, row) for begin, row in turns)))
    return rows


def dualpipe(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank; p must be even, m even and at least 2p.

    They are DualPipeV's of half the ranks and microbatches: a rank's stage nearer to the beginning
    of its pipeline is as the one down, the other as the one up. No rank holds more than p + 1
    microbatches' activations.
    """
    p, half = placement.world_size, num_microbatches // 2
    rows = []
    for rank in range(p):
        stages, firsts, hops = (rank, 2 * p - 1 - rank), (0, half), min(rank, p - 1 - rank)
        order = 1 if rank < p // 2 else -1
        rows.append(dualpipev_row(hops, stages[::order], p // 2, half, firsts[::order]))
    return rows
