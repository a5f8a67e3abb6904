"""The 1F1B family: forwards to warm up, pairs of a forward and a backward, the remaining backwards.

    schedule           warm-up forwards        backward           stages of a rank
    1f1b               p-1-r                   B                  1
    zb_h1              p-1-r                   I, W r later       1
    zb_h2              2(p-1-r)                I, W 2r later      1
    interleaved_1f1b   (v-1)k + 2(p-1-r)       B                  v, k microbatches in turn
    interleaved_zb     (v-1)k + (p-1-r)        I, W r later       v, k microbatches in turn
    seq1f1b            p-1-r + k-1             B                  1, k slices of a microbatch

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

Seq1F1B is Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism", arXiv 2406.03488.
A microbatch here is a slice of one of the batch's: of k slices, slice j of microbatch m has the
number mk + j. Forwards come in order; of the slices of a microbatch, the last has the first
backward. Slices take a kth of the time, and so does what a rank waits. p = 2, k = 2, two
microbatches, F and B of one time unit each:

    rank 0: F0 F1 F2 .  B1 F3 B0 .  B3 B2
    rank 1: .  F0 F1 B1 F2 B0 F3 B3 B2 .
"""

from __future__ import annotations

from array import array

from engine.plan.action import Op
from engine.plan.program import Placement
from engine.plan.table import Row, woven


def one_f_one_b(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank. Rank r never holds more than p - r microbatches' activations."""
    return _rows(placement, num_microbatches, num_microbatches, 1, is_split=False)


def seq1f1b(placement: Placement, num_microbatches: int, num_slices: int) -> list[Row]:
    """Rows of actions by rank. Rank r never holds more than p - r + k - 1 slices' activations."""
    slices, backward = array("q", range(num_microbatches)), array("q")
    last_rank = placement.world_size - 1
    for first in range(0, num_microbatches, num_slices):
        backward += slices[first : first + num_slices][::-1]
    return [
        woven(
            (rank - last_rank - (num_slices - 1), Row.alike(Op.F, rank, slices)),
            (0, Row.alike(Op.B, rank, backward)),
        )
        for rank in range(placement.world_size)
    ]


def zb_h1(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank. No rank holds more than p microbatches' activations."""
    return _rows(placement, num_microbatches, num_microbatches, 1, is_split=True)


def zb_h2(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank. No rank holds more than 2p - 1 microbatches' activations."""
    return _rows(placement, num_microbatches, num_microbatches, 2, is_split=True)


def interleaved_1f1b(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank; m must be a multiple of the number of rounds, max(1, m // p)."""
    in_turn = num_microbatches // num_rounds(placement.world_size, num_microbatches)
    return _rows(placement, num_microbatches, in_turn, 2, is_split=False)


def interleaved_zb(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank; m must be a multiple of the number of rounds, max(1, m // p)."""
    in_turn = num_microbatches // num_rounds(placement.world_size, num_microbatches)
    return _rows(placement, num_microbatches, in_turn, 1, is_split=True)


def num_rounds(world_size: int, num_microbatches: int) -> int:
    """In how many rounds an interleaved schedule takes the microbatches through a rank's stages."""
    return max(1, num_microbatches // world_size)


def _rows(
    placement: Placement,
    num_microbatches: int,
    in_turn: int,
    forwards_per_hop: int,
    *,
    is_split: bool,
) -> list[Row]:
    """The rows of the family, with `in_turn` microbatches after another at each stage of a rank.

    `forwards_per_hop`: how many more forwards a rank enters with than the next one, beside those
    that reach its last stage; with `is_split` it is also how many more W the next one puts off.
    """
    last_rank, stages_per_rank = placement.world_size - 1, len(placement.stages_of(0))
    microbatches = array("q")
    for first in range(0, num_microbatches, in_turn):
        microbatches += array("q", range(first, first + in_turn)) * stages_per_rank
    rows = []
    for rank in range(placement.world_size):
        down = array("q")
        for stage in placement.stages_of(rank):
            down += array("q", [stage]) * in_turn
        num_turns = num_microbatches // in_turn
        forwards = Row.alike(Op.F, down * num_turns, microbatches)
        backward = Op.I if is_split else Op.B
        backwards = Row.alike(backward, down[::-1] * num_turns, microbatches)
        num_warmup = (stages_per_rank - 1) * in_turn + forwards_per_hop * (last_rank - rank)
        parts = [(-num_warmup, forwards), (0, backwards)]
        if is_split:
            parts.append((forwards_per_hop * rank, backwards.as_op(Op.W)))
        rows.append(woven(*parts))
    return rows
