"""Makes a large plan, checks, lowers and simulates it, and prints as JSON what memory that took.

Run as `python -m benchmarks.core_memory NUM_ACTIONS`.
"""

from __future__ import annotations

import json
import resource
import sys
import time

from engine.plan.check import check
from engine.plan.lower import lower
from engine.plan.predict import predict, uniform
from engine.plan.schedules.registry import build_program
from engine.plan.walk import TransferModel

NUM_RANKS = 8


def main(num_actions: int) -> None:
    began = time.perf_counter()
    program = build_program("interleaved_zb", NUM_RANKS, num_actions // 384 * 8, 2)
    check(program)
    lower(program)
    predict(program, uniform(program.placement, 3000, 3000, 3000), TransferModel(latency_ns=1000))
    taken = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"bytes": peak, "s": taken}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
