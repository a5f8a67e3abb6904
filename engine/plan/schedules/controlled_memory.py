"""V-Half and V-Min: two stages per rank in a V, repeated so tightly that activations are few.

Source: Qi et al., "Pipeline Parallelism with Controllable Memory", arXiv 2405.15362. A schedule is
one microbatch's way through the ranks, its building block, repeated every 6 units of time (a unit
is an F, I or W of one stage; a rank has 6 to do for a microbatch). The longer a microbatch stays on
a rank, the more microbatches stay at once: the block's life span sets the memory.

On rank r of p the block's passes start at

                 forward down     forward up        I up       I down
    V-Min        r                a1 + (p-1-r)      a2 + r     a3 + (p-1-r)
    V-Half       r                a1 + 2(p-1-r)     a2 + r     a3 + 2(p-1-r)

with a1, a2, a3 as small as leaves the four at different units of the 6 on every rank and the peak
lowest; each W takes the unit left over that comes next. Only the order is kept: a rank starts each
action as soon as it can. p = 3, m = 2, V-Half and then V-Min:

    rank 0: 0F0 0F1 .   .   .   5F0 5I0 5W0 .   5F1 5I1 5W1 0I0 0W0 .   .   .   0I1 0W1
    rank 1: .   1F0 .   .   4F0 1F1 .   4I0 4F1 4W0 .   1I0 4I1 1W0 4W1 .   1I1 1W1 .
    rank 2: .   .   2F0 3F0 .   .   2F1 3F1 3I0 3W0 2I0 2W0 .   3I1 3W1 2I1 2W1 .   .

    rank 0: 0F0 .   .   .   .   5F0 0F1 5I0 5W0 .   .   5F1 .   0I0 5I1 5W1 0W0 .   .   0I1 0W1
    rank 1: .   1F0 .   .   4F0 .   .   1F1 4I0 .   4F1 4W0 1I0 1W0 .   4I1 4W1 .   1I1 1W1 .
    rank 2: .   .   2F0 3F0 .   .   .   .   2F1 3F1 3I0 2I0 3W0 2W0 .   .   3I1 2I1 3W1 2W1 .

V-Min hands on without delay and so holds least, about a third of 1F1B; V-Half holds about half
and idles less.
"""

from __future__ import annotations

import itertools
from array import array

from engine.plan.action import Op
from engine.plan.program import Placement
from engine.plan.table import Row, woven

PERIOD = 6


def v_min(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank. No rank holds more than (p + 4) // 3 microbatches' activations."""
    p = placement.world_size
    turn = 2 * p + (2 if p % 3 == 0 else 0)
    passes = [(r, p + (p - 1 - r), turn + r, turn + p + (p - 1 - r)) for r in range(p)]
    return _repeated(placement, passes, num_microbatches)


def v_half(placement: Placement, num_microbatches: int) -> list[Row]:
    """Rows of actions by rank. No rank holds more than (p + 2) // 2 microbatches' activations."""
    p = placement.world_size
    turn = 3 * p - 1 + (3 if p % 2 == 0 else 0)
    passes = [(r, p + 2 * (p - 1 - r), turn + r, turn + p + 1 + 2 * (p - 1 - r)) for r in range(p)]
    return _repeated(placement, passes, num_microbatches)


def _repeated(
    placement: Placement, passes: list[tuple[int, int, int, int]], num_microbatches: int
) -> list[Row]:
    """The block of each rank for every microbatch, in order of time."""
    microbatches = array("q", range(num_microbatches))
    rows = []
    for rank, starts in enumerate(passes):
        block = sorted(_block(placement.stages_of(rank), *starts), key=lambda one: one[0] % PERIOD)
        rows.append(
            woven(*((at // PERIOD, Row.alike(op, stage, microbatches)) for at, stage, op in block))
        )
    return rows


def _block(
    stages: tuple[int, ...], down: int, up: int, up_input: int, down_input: int
) -> list[tuple[int, int, Op]]:
    """The starts of one microbatch's actions on a rank, W where it waits least."""
    first, second = stages
    left = set(range(PERIOD)) - {start % PERIOD for start in (down, up, up_input, down_input)}
    second_weight, first_weight = min(
        (
            (_next(up_input, one), _next(down_input, other))
            for one, other in itertools.permutations(left)
        ),
        key=sum,
    )
    return [
        *((down, first, Op.F), (down_input, first, Op.I), (first_weight, first, Op.W)),
        *((up, second, Op.F), (up_input, second, Op.I), (second_weight, second, Op.W)),
    ]


def _next(start: int, unit: int) -> int:
    """The first time after `start` that is at a unit of the period."""
    return start + 1 + (unit - start - 1) % PERIOD
