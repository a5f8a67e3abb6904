"""Whether plans of a million actions stay a matter of seconds, and cost grows in proportion.

    python -m benchmarks.simulate [--ranks 64] [--stages-per-rank 8] [--microbatches 256 512 1024]

Builds, checks and simulates interleaved_zb at each number of microbatches, on one thread. Printed
per row: the number of compute actions, the seconds of each phase, and the microseconds per action
of all together, which is to stay the same from row to row. 1024 microbatches are 1.57 million
actions; on a slow machine of two cores they take about 6 s, 4 microseconds per action.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from typing import TypeVar

from engine.plan.rules import check
from engine.plan.schedules.registry import build_program
from engine.plan.simulate import simulate, uniform

SCHEDULE = "interleaved_zb"
FORWARD_NS, INPUT_NS, WEIGHT_NS = 8_000, 8_000, 8_000

Result = TypeVar("Result")


def main() -> None:
    settings = _arguments()
    print(f"{SCHEDULE}, {settings.ranks} ranks, {settings.stages_per_rank} stages per rank")
    print("microbatches    actions  build s  check s  simulate s  us per action")
    for num_microbatches in settings.microbatches:
        print(_row(settings.ranks, settings.stages_per_rank, num_microbatches), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--stages-per-rank", type=int, default=8)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[256, 512, 1024])
    return parser.parse_args()


def _row(num_ranks: int, stages_per_rank: int, num_microbatches: int) -> str:
    program, build_s = _timed(
        lambda: build_program(SCHEDULE, num_ranks, num_microbatches, stages_per_rank)
    )
    _, check_s = _timed(lambda: check(program))
    durations = uniform(program.placement, FORWARD_NS, INPUT_NS, WEIGHT_NS)
    _, simulate_s = _timed(lambda: simulate(program, durations))
    num_actions = sum(map(len, program.actions))
    each_us = (build_s + check_s + simulate_s) / num_actions * 1e6
    return (
        f"{num_microbatches:12} {num_actions:10} {build_s:8.2f} {check_s:8.2f} "
        f"{simulate_s:11.2f} {each_us:14.2f}"
    )


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What it returns, and the seconds it takes from a clean heap."""
    gc.collect()
    start = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start


if __name__ == "__main__":
    main()
