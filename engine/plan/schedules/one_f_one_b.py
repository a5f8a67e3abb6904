"""The 1F1B family: forwards to warm up, pairs of a forward and a backward, the remaining backwards.

    schedule           warm-up forwards        backward           stages of a rank
    1f1b               p-1-r                   B                  1
    zb_h1              p-1-r                   I, W r later       1
    zb_h2              2(p-1-r)                I, W 2r later      1
    interleaved_1f1b   (v-1)k + 2(p-1-r)       B                  v, k microbatches in turn
    interleaved_zb     (v-1)k + (p-1-r)        I, W r later       v, k microbatches in turn

"W r later" means that r backwards are done before the first W, and each further backward is
followed by one W: the W that rank r puts off fill the end of its row, where it would wait.

Sources: 1F1B is Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training"
(PipeDream-Flush), arXiv 2006.09503. p = 3, m = 4, F and B of one time unit each (`.` is idle):

    rank 0: F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
    rank 1: .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
    rank 2: .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

ZB-H1 and ZB-H2 are Qi et al., "Zero Bubble Pipeline Parallelism", arXiv 2401.10241. ZB-H1, p = 3,
m = 4, F, I and W of one time unit each:

    rank 0: F0 F1 F2 .  .  I0 W0 F3 I1 W1 I2 W2 I3 W3
    rank 1: .  F0 F1 .  I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    rank 2: .  .  F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

ZB-H2 enters with twice the forwards, so that no rank waits once it has begun; p = 3, m = 5:

    rank 0: F0 F1 F2 F3 F4 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 .  .
    rank 1: .  F0 F1 F2 I0 F3 I1 F4 I2 W0 I3 W1 I4 W2 W3 W4 .
    rank 2: .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 W0 W1 W2 W3 W4

Interleaving is Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters",
arXiv 2104.04473: a rank takes k microbatches through its first stage, then the same k through its
second, and so on. k = m / max(1, m // p), which is p where p divides m. p = 2, m = 2, v = 2:

    rank 0: 0F0 0F1 2F0 2F1 .   .   2B0 2B0 .   2B1 2B1 0B0 0B0 0B1 0B1
    rank 1: .   1F0 1F1 3F0 3B0 3B0 3F1 3B1 3B1 1B0 1B0 1B1 1B1 .   .
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan.action import Action, Op
from engine.plan.program import Placement


def one_f_one_b(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Rows of actions by rank. Rank r never holds more than p - r microbatches' activations."""
    rows = []
    for rank in range(placement.world_size):
        forwards = _in_order(rank, Op.F, num_microbatches)
        backwards = _in_order(rank, Op.B, num_microbatches)
        rows.append(_paired(forwards, backwards, placement.world_size - 1 - rank))
    return rows


def zb_h1(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Rows of actions by rank. No rank holds more than p microbatches' activations."""
    return _zero_bubble(placement, num_microbatches, 1)


def zb_h2(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Rows of actions by rank. No rank holds more than 2p - 1 microbatches' activations."""
    return _zero_bubble(placement, num_microbatches, 2)


def _zero_bubble(
    placement: Placement, num_microbatches: int, forwards_per_hop: int
) -> list[list[Action]]:
    """`forwards_per_hop`: how many more forwards a rank enters with than the next one."""
    rows = []
    for rank in range(placement.world_size):
        num_warmup = forwards_per_hop * (placement.world_size - 1 - rank)
        forwards = _in_order(rank, Op.F, num_microbatches)
        backwards = _in_order(rank, Op.I, num_microbatches)
        rows.append(_put_off_w(_paired(forwards, backwards, num_warmup), forwards_per_hop * rank))
    return rows


def interleaved_1f1b(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Rows of actions by rank; m must be a multiple of the number of rounds, max(1, m // p)."""
    return _interleaved(placement, num_microbatches, Op.B, 2)


def interleaved_zb(placement: Placement, num_microbatches: int) -> list[list[Action]]:
    """Rows of actions by rank; m must be a multiple of the number of rounds, max(1, m // p)."""
    rows = _interleaved(placement, num_microbatches, Op.I, 1)
    return [_put_off_w(row, rank) for rank, row in enumerate(rows)]


def num_rounds(world_size: int, num_microbatches: int) -> int:
    """In how many rounds an interleaved schedule takes the microbatches through a rank's stages."""
    return max(1, num_microbatches // world_size)


def _in_order(stage: int, op: Op, num_microbatches: int) -> list[Action]:
    return [Action(stage, op, m) for m in range(num_microbatches)]


def _interleaved(
    placement: Placement, num_microbatches: int, backward: Op, forwards_per_hop: int
) -> list[list[Action]]:
    """`forwards_per_hop`: as for `_zero_bubble`, beside those that reach a rank's last stage."""
    last_rank = placement.world_size - 1
    rows = []
    for rank in range(placement.world_size):
        stages = placement.stages_of(rank)
        forwards, backwards, in_turn = _in_turns(stages, num_microbatches, last_rank + 1, backward)
        num_warmup = (len(stages) - 1) * in_turn + forwards_per_hop * (last_rank - rank)
        rows.append(_paired(forwards, backwards, num_warmup))
    return rows


def _in_turns(
    stages: Sequence[int], num_microbatches: int, world_size: int, backward: Op
) -> tuple[list[Action], list[Action], int]:
    """A rank's forwards and backwards in order, and how many microbatches take turns at a stage."""
    in_turn = num_microbatches // num_rounds(world_size, num_microbatches)
    forwards, backwards = [], []
    for first in range(0, num_microbatches, in_turn):
        turn = range(first, first + in_turn)
        forwards += [Action(stage, Op.F, m) for stage in stages for m in turn]
        backwards += [Action(stage, backward, m) for stage in reversed(stages) for m in turn]
    return forwards, backwards, in_turn


def _paired(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int
) -> list[Action]:
    """`num_warmup` forwards, or all; then a forward and a backward in turn; then backwards."""
    num_warmup = min(num_warmup, len(forwards))
    num_pairs = len(forwards) - num_warmup
    row = list(forwards[:num_warmup])
    for forward, backward in zip(forwards[num_warmup:], backwards[:num_pairs], strict=True):
        row += (forward, backward)
    row += backwards[num_pairs:]
    return row


def _put_off_w(row: Sequence[Action], num_put_off: int) -> list[Action]:
    """After each I but the first `num_put_off`, the oldest W that is due; the others at the end."""
    inputs = [action for action in row if action.op is Op.I]
    weights = (action._replace(op=Op.W) for action in inputs)
    split: list[Action] = []
    num_inputs = 0
    for action in row:
        split.append(action)
        if action.op is Op.I:
            num_inputs += 1
            if num_inputs > num_put_off:
                split.append(next(weights))
    return [*split, *weights]
