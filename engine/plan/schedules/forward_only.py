"""Forwards alone, for an evaluation: nothing is held for a backward, so the placement decides.

The microbatches come in rounds of at least p, so that few of them are between two stages. A rank
takes what has arrived: of the earliest round, for the earliest stage. If all stages take as long,
no order is shorter, on a loop, a V or two ways: the rank that is filled last works without a pause.

    rank 0   0F0 0F1 0F2 2F0 2F1 2F2 .
    rank 1   .   1F0 1F1 1F2 3F0 3F1 3F2
"""

from __future__ import annotations

from array import array
from heapq import heappop, heappush

from engine.plan.action import Op
from engine.plan.program import Placement
from engine.plan.schedules.one_f_one_b import num_rounds
from engine.plan.table import Row


def forwards(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank."""
    ranks, depth = placement.ranks, placement.depth
    if len(ranks) == placement.world_size:
        order = array("q", range(num_microbatches))
        return [Row.alike(Op.F, ranks.index(rank), order) for rank in range(len(ranks))]
    rounds = num_rounds(placement.world_size, num_microbatches)
    # By rank: the round, the part of the model, the microbatch, and its stage.
    arrived: list[list[tuple[int, int, int, int]]] = [[] for _ in range(placement.world_size)]
    for microbatch in range(num_microbatches):
        first = depth * placement.direction_of(microbatch, num_microbatches)
        turn = microbatch * placement.directions % num_microbatches * rounds // num_microbatches
        arrived[ranks[first]].append((turn, 0, microbatch, first))
    stages, microbatches = ([array("q") for _ in arrived] for _ in range(2))
    while any(arrived):  # each rank that has something takes one, all as long
        taken = [(rank, heappop(heap)) for rank, heap in enumerate(arrived) if heap]
        for rank, (turn, part, microbatch, stage) in taken:
            stages[rank].append(stage)
            microbatches[rank].append(microbatch)
            if not placement.is_last(stage):
                heappush(arrived[ranks[stage + 1]], (turn, part + 1, microbatch, stage + 1))
    return [Row.alike(Op.F, *row) for row in zip(stages, microbatches, strict=True)]
