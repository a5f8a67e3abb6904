"""The peak memory of each rank, along its row of a program, from the costs of its stages.

    bytes held by a rank   static   F ########   I #####   W .
                                    while an action runs, its transient bytes are there as well

A microbatch of a stage holds `held_after_forward` bytes from its F on; its I leaves
`held_after_input`, which is more where layers recompute, and its B or W nothing. Besides, there are
messages: of each link between two ranks one that came ahead of its computation and one that is not
yet taken, in both directions. A transport may hold a message longer, and a receive be posted
sooner: one more of each is in the upper end of the peak, and only what is below the limit by then
is said to fit.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from engine.plan.action import CODES, Op
from engine.plan.model_costs import StageCosts
from engine.plan.program import Placement, Program

_F, _B, _I, _W = (CODES[op] for op in (Op.F, Op.B, Op.I, Op.W))


class Rows:
    """The rows of a program of computations, as arrays for counting memory."""

    def __init__(self, program: Program) -> None:
        """Read the table of a program without transfers."""
        table, placement = program.table, program.placement
        place = [
            placement.stages_of(rank).index(stage) for stage, rank in enumerate(placement.ranks)
        ]
        op = np.frombuffer(table.op, np.int64)
        stage = np.array(place, np.int64)[np.frombuffer(table.stage, np.int64)]
        self._kind = [
            op[begin:end] * len(placement.stages_of(rank)) + stage[begin:end]
            for rank, (begin, end) in enumerate(itertools.pairwise(table.offset))
        ]

    def most_held(self, rank: int, own: Sequence[StageCosts]) -> int:
        """The most bytes of a rank's microbatches at once, with what its actions take meanwhile.

        `own` are the stages of the rank, in order.
        """
        after_forward = np.array([stage.held_after_forward for stage in own], np.int64)
        after_input = np.array([stage.held_after_input for stage in own], np.int64)
        transient = np.array([stage.transient_bytes for stage in own], np.int64)
        by_op = {
            _F: after_forward,
            _B: -after_forward,
            _I: after_input - after_forward,
            _W: -after_input,
        }
        change = np.concatenate([by_op[code] for code in sorted(by_op)])
        again = np.maximum(after_input - after_forward, 0)  # a backward makes it, whole or its half
        rise = np.concatenate([after_forward, again, again, np.zeros_like(again)])
        rise += np.tile(transient, len(by_op))
        kind = self._kind[rank]
        after = np.cumsum(change[kind])
        during = after - change[kind] + rise[kind]
        return int(during.max(initial=0))


def static_bytes(own: Sequence[StageCosts]) -> int:
    """The bytes of parameters, gradients and optimizer of a rank's stages."""
    return sum(stage.static_bytes for stage in own)


def message_bytes(placement: Placement, stages: Sequence[StageCosts]) -> list[tuple[int, int]]:
    """By rank, the bytes of messages that it has at once: as expected, and at most."""
    by_rank = [(0, 0)] * placement.world_size
    for stage, (here, there) in enumerate(itertools.pairwise(placement.ranks)):
        for rank in {here, there} if here != there else ():
            expected, most = by_rank[rank]
            num_bytes = stages[stage].message_bytes
            by_rank[rank] = expected + 2 * num_bytes, most + 3 * num_bytes
    return by_rank
