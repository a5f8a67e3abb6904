"""Bubbles of the solver's programs by period, under limits of memory, beside their lower bounds.

    python -m benchmarks.memory_limits [--effort 1] [--settings 0 1 ... 8]
        [--limits 1.0 1.125 ... 3.0]

Ranks do not meet between steps, and no optimizer takes time. The costs are nine published settings
of one stage per rank (16, 24 and 32 ranks, 3 to 8 microbatches for each), in microseconds: F takes
2f, the input half of the backward 2b, the weight half 2w, a message c. A microbatch holds
34h + 5 x 1024 a from its F on, 32h of which to the end of its weight half. A rank may hold so many
times its number of ranks as a limit says. The bubble is 1 - computing time / period.

At a limit of 1 the best that is known is ZB-H1, by its closed form (p - 1)(F + B - W + 2c).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from engine.plan.check import check
from engine.plan.period import period_ns
from engine.plan.predict import Durations
from engine.plan.program import loop_placement
from engine.plan.walk import TransferModel
from ppbench.planning.solver.problem import Problem
from ppbench.planning.solver.solver import solve


class Setting(NamedTuple):
    """Costs of a microbatch on a rank, in microseconds and units of memory."""

    ranks: int
    num_microbatches: int
    f: int
    b: int
    w: int
    c: int
    h: int
    a: int

    def problem(self, limit: float) -> Problem:
        """The problem with memory for `limit` times as many microbatches as ranks."""
        p, held, kept = self.ranks, 34 * self.h + 5 * 1024 * self.a, 32 * self.h
        times = ((2000 * us,) * p for us in (self.f, self.b, self.w))
        limits, holds = (round(limit * p * held),) * p, ((held,) * p, (kept,) * p)
        transfers = TransferModel(1000 * self.c)
        placement, m = loop_placement(p), self.num_microbatches
        return Problem(placement, m, Durations(*times), limits, *holds, transfers, meets=False)

    @property
    def zb_h1_bubble(self) -> float:
        """The bubble of ZB-H1 over its period."""
        idle_us = (self.ranks - 1) * 2 * (self.f + self.b - self.w + self.c)
        return idle_us / (idle_us + self.num_microbatches * 2 * (self.f + self.b + self.w))


SETTINGS = (
    Setting(16, 48, 14407, 14380, 9676, 1610, 4096, 32),
    Setting(16, 64, 14412, 14393, 9688, 1621, 4096, 32),
    Setting(16, 128, 14316, 14306, 9639, 1619, 4096, 32),
    Setting(24, 72, 6763, 6969, 5251, 755, 5120, 40),
    Setting(24, 96, 6783, 6984, 5259, 758, 5120, 40),
    Setting(24, 192, 6785, 6990, 5260, 770, 5120, 40),
    Setting(32, 96, 9458, 9748, 7288, 879, 6144, 48),
    Setting(32, 128, 9469, 9744, 7306, 892, 6144, 48),
    Setting(32, 256, 9447, 9644, 7193, 887, 6144, 48),
)
LIMITS = tuple(1 + eighths / 8 for eighths in range(17))


class Point(NamedTuple):
    """A solution: its bubble, that of its bound, and how long the solver took."""

    limit: float
    bubble: float
    bound: float
    seconds: float


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--effort", type=float, default=1.0)
    options.add_argument("--settings", type=int, nargs="+", default=list(range(len(SETTINGS))))
    options.add_argument("--limits", type=float, nargs="+", default=list(LIMITS))
    asked, surroundings = options.parse_args(), read_surroundings()
    solved = {}
    for number in asked.settings:
        setting = SETTINGS[number]
        solved[setting] = [_point(setting, limit, asked.effort) for limit in asked.limits]
    write("memory_limits", asked, surroundings, list(_ratios(solved)), list(_figures(solved)))


def _point(setting: Setting, limit: float, effort: float) -> Point:
    """Solve, and prove the program legal, within memory and its period what the solver says."""
    problem = setting.problem(limit)
    began = time.perf_counter()
    solution = solve(problem, effort)
    seconds = time.perf_counter() - began
    check(solution.program)
    period = period_ns(solution.program, problem.durations, problem.transfers)
    assert solution.bound_ns <= period <= solution.step_ns
    busy = setting.num_microbatches * sum(
        of[0] for of in (problem.durations.forward_ns, problem.durations.whole_ns)
    )
    point = Point(limit, float(1 - busy / period), 1 - busy / solution.bound_ns, seconds)
    shape = f"{setting.ranks} ranks, {setting.num_microbatches} microbatches, limit {limit:.3f}"
    print(
        f"  {shape}: bubble {point.bubble:.4f}, bound {point.bound:.4f}, {seconds:.1f} s",
        flush=True,
    )
    return point


def _ratios(solved: dict[Setting, list[Point]]) -> Iterator[Ratio]:
    every = [point for points in solved.values() for point in points]
    for least, most in ((1.75, 0.04), (2.25, 0.01)):
        bubbles = [point.bubble for point in every if point.limit >= least]
        if bubbles:
            name = f"bubble from a limit of {least} on: the largest"
            yield Ratio(name, (max(bubbles),), goal=Goal(at_most=most, is_exact=True))
    tight = [(setting, point) for setting, points in solved.items() for point in points[:1]]
    over = [point.bubble / setting.zb_h1_bubble for setting, point in tight if point.limit == 1]
    if over:
        name = "bubble at a limit of 1 over ZB-H1's closed form: the largest"
        yield Ratio(name, (max(over),), goal=Goal(at_most=1, is_exact=True))
    longest = max(point.seconds for point in every)
    yield Ratio("the longest over 60 s", (longest / 60,), goal=Goal(at_most=1))


def _figures(solved: dict[Setting, list[Point]]) -> Iterator[Figure]:
    for setting, points in solved.items():
        name = f"bubble by limit: {setting.ranks} ranks, {setting.num_microbatches} microbatches"
        yield Figure(name, tuple(point.bubble for point in points))
        yield Figure(f"its bound: {name}", tuple(point.bound for point in points))


if __name__ == "__main__":
    main()
