"""Walks a large plan once and prints, as JSON, what memory it took: for benchmarks.core.

    python -m benchmarks.core_memory generated|given NUM_ACTIONS

`generated`: a plan is generated, checked, lowered and simulated. `given`: a plan that is there as
arrays is simulated.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.plan.action import CODES, Op
from engine.plan.lower import lower
from engine.plan.program import Program, loop_placement
from engine.plan.rules import check
from engine.plan.schedules.registry import build_program
from engine.plan.simulate import Simulation, TransferModel, simulate, uniform
from engine.plan.table import Table

NUM_RANKS = 8
TRANSFERS = TransferModel(latency_ns=1000)


def generated(num_actions: int) -> dict[str, float]:
    """Return the peak of the process, from the generator to the times."""
    began = time.perf_counter()
    program = build_program("interleaved_zb", NUM_RANKS, num_actions // 384 * 8, 2)
    check(program)
    lower(program)
    _simulate(program)
    taken = time.perf_counter() - began
    return {"bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "s": taken}


def given(num_actions: int) -> dict[str, float]:
    """Return the bytes held in the end: the arrays of the plan, and two times of each action."""
    _simulate(_one_f_one_b(NUM_RANKS))  # loads what is needed
    before = _held_bytes()
    program = _one_f_one_b(num_actions // (2 * NUM_RANKS))
    began = time.perf_counter()
    kept = _simulate(program)
    taken = time.perf_counter() - began
    return {"bytes": _held_bytes() - before, "s": taken, "makespan": kept.makespan_ns}


def _simulate(program: Program) -> Simulation:
    return simulate(program, uniform(program.placement, 3000, 3000, 3000), TRANSFERS)


def _one_f_one_b(num_microbatches: int) -> Program:
    """1F1B made of arrays: generators make objects, which take ten times as much."""
    length = 2 * num_microbatches
    op = np.empty((NUM_RANKS, length), np.int8)
    microbatch = np.empty((NUM_RANKS, length), np.int32)
    for rank in range(NUM_RANKS):
        _fill_row(op[rank], microbatch[rank], NUM_RANKS - 1 - rank)
    stage = np.repeat(np.arange(NUM_RANKS, dtype=np.int32), length)
    offset = np.arange(NUM_RANKS + 1) * length
    columns = (offset, op.ravel(), stage, microbatch.ravel())
    table = Table.from_memory(*(column.data for column in columns))
    return Program("1f1b", loop_placement(NUM_RANKS), num_microbatches, table)


def _fill_row(op: NDArray[np.int8], microbatch: NDArray[np.int32], num_ahead: int) -> None:
    forward, backward = CODES[Op.F], CODES[Op.B]
    op[:num_ahead] = forward
    op[num_ahead : len(op) - num_ahead : 2] = forward
    op[num_ahead + 1 : len(op) - num_ahead : 2] = backward
    op[len(op) - num_ahead :] = backward
    for code in (forward, backward):
        microbatch[op == code] = np.arange(len(op) // 2)


def _held_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    print(json.dumps({"generated": generated, "given": given}[sys.argv[1]](int(sys.argv[2]))))
