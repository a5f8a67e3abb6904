"""The solver's programs over their lower bounds, and over the best registered schedule.

    python -m benchmarks.planning [solver] [memory_limits]

`solver` draws problems at random: up to 16 ranks with up to 4 stages each, up to 64 microbatches,
costs and transfers that differ, memory for p/3 to 2p microbatches. Every program is proved legal,
within memory, and as long as the solver says. `memory_limits` solves nine published settings of
one stage per rank, in microseconds: F takes 2f, the input half of the backward 2b, the weight half
2w, a message c. A microbatch holds 34h + 5 x 1024 a from its F on, 32h of which to the end of its
weight half. Ranks do not meet between steps. The bubble is 1 - computing time / period.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import NamedTuple

from benchmarks.claims import Goal
from benchmarks.loop import within
from benchmarks.rows import Row, parser, run
from engine.plan.check import check
from engine.plan.period import period_ns
from engine.plan.predict import Durations
from engine.plan.program import Program, loop_placement, v_placement
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program
from engine.plan.walk import TransferModel
from ppbench.judge.evidence import Rounds
from ppbench.planning.solver.problem import Problem, counted
from ppbench.planning.solver.solver import solve


def drawn_problem(
    seed: int, most_ranks: int = 16, most_stages: int = 4, most_microbatches: int = 64
) -> Problem:
    """A problem with one stage up to twice as heavy, its memory counted in activations."""
    random_ = random.Random(seed)
    p, v = random_.randint(1, most_ranks), random_.randint(1, most_stages)
    placement = random_.choice([loop_placement, v_placement])(p, v)
    base, scatter = 100_000, random_.choice([0, 0.05, 0.2, 0.4])
    forward = [base * (1 + random_.uniform(0, scatter)) for _ in placement.ranks]
    forward[random_.randrange(len(forward))] *= random_.uniform(1, 2)
    shares = 1, random_.uniform(0.5, 1.5), random_.uniform(0.3, 1.2)
    durations = Durations(*(tuple(round(f * share) for f in forward) for share in shares))
    limit = max(v, round(random_.uniform(p / 3, 2 * p) * v))
    transfers = TransferModel(round(random_.uniform(0, base / 2)), overlaps=seed % 5 > 0)
    m = random_.randint(1, most_microbatches)
    problem = counted(placement, m, durations, limit, transfers)
    return replace(problem, meets=seed // 5 % 2 == 0)


def steps_of_schedules(problem: Problem) -> Iterator[int]:
    """Steps in nanoseconds of the schedules with this placement that keep within the memory."""
    p, stages = problem.placement.world_size, problem.placement.num_stages
    for name, schedule in SCHEDULES.items():
        if schedule.place(p, stages // p) == problem.placement:
            try:
                program = build_program(name, p, problem.num_microbatches, stages // p)
            except ShapeError:
                continue
            if max(peak_activations(program)) <= problem.limits[0]:
                yield step_of(problem, program)


def step_of(problem: Problem, program: Program) -> int:
    """The period of a program in nanoseconds, rounded up."""
    times = problem.durations, problem.transfers, problem.optimizers
    return math.ceil(period_ns(program, *times, meets=problem.meets))


def solver(asked: argparse.Namespace) -> Iterator[Row]:
    """Solve drawn problems; each is a launch of one round, bound and schedule its bases."""
    over_bound, over_best = dict[str, list[Rounds]](), list[Rounds]()
    num_proved = 0
    for seed in within(asked.seconds, count(), fewest=10):
        problem = drawn_problem(seed)
        solution = solve(problem, asked.effort)
        check(solution.program, max_held=problem.limits[0])
        step_ns = step_of(problem, solution.program)
        assert step_ns == solution.step_ns >= solution.bound_ns
        memory = "below" if problem.limits[0] < problem.placement.num_stages else "above"
        own = over_bound.setdefault(f"memory {memory} p", [])
        own.append(Rounds((solution.bound_ns,), (step_ns,)))
        num_proved += step_ns == solution.bound_ns
        best_ns = min(steps_of_schedules(problem), default=None)
        if best_ns is not None:
            over_best.append(Rounds((best_ns,), (step_ns,)))
    every = [one for own in over_bound.values() for one in own]
    yield Row.ratio("step over the bound", every, note=f"{len(every)} problems")
    for name, own in over_bound.items():
        yield Row.ratio(f"step over the bound, {name}", own)
    yield Row.share("proved to be as short as can be", num_proved, len(every))
    worst = max(one.head[0] / one.base[0] for one in over_best)
    yield Row.exact("step over the best schedule's, at most", worst, Goal(at_most=1))
    yield Row.ratio("step over the best schedule's", over_best)


class Setting(NamedTuple):
    """A pipeline, and costs of a microbatch on a rank, in microseconds and units of memory."""

    ranks: int
    num_microbatches: int
    us: tuple[int, int, int, int]  # f, b, w, c
    units: tuple[int, int]  # h, a

    def problem(self, limit: float) -> Problem:
        """The problem with memory for `limit` times as many microbatches as ranks."""
        (*thirds, c), (h, a), p = self.us, self.units, self.ranks
        held, kept = 34 * h + 5 * 1024 * a, 32 * h
        durations = Durations(*((2000 * us,) * p for us in thirds))
        limits, holds = (round(limit * p * held),) * p, ((held,) * p, (kept,) * p)
        pipeline = loop_placement(p), self.num_microbatches, durations
        return Problem(*pipeline, limits, *holds, TransferModel(1000 * c), meets=False)

    @property
    def zb_h1_bubble(self) -> float:
        """The bubble of ZB-H1 over its period, by its closed form."""
        f, b, w, c = self.us
        idle_us = (self.ranks - 1) * 2 * (f + b - w + c)
        return idle_us / (idle_us + self.num_microbatches * 2 * (f + b + w))


SETTINGS = (
    Setting(16, 48, (14407, 14380, 9676, 1610), (4096, 32)),
    Setting(24, 72, (6763, 6969, 5251, 755), (5120, 40)),
    Setting(32, 96, (9458, 9748, 7288, 879), (6144, 48)),
    Setting(16, 64, (14412, 14393, 9688, 1621), (4096, 32)),
    Setting(24, 96, (6783, 6984, 5259, 758), (5120, 40)),
    Setting(32, 128, (9469, 9744, 7306, 892), (6144, 48)),
    Setting(16, 128, (14316, 14306, 9639, 1619), (4096, 32)),
    Setting(24, 192, (6785, 6990, 5260, 770), (5120, 40)),
    Setting(32, 256, (9447, 9644, 7193, 887), (6144, 48)),
)
LIMITS = (2.25, 1.75, 1.0, 3.0, 1.375)


def memory_limits(asked: argparse.Namespace) -> Iterator[Row]:
    """Solve each setting under each limit, the limits with a goal first."""
    bubbles, over_bound = dict[float, list[float]](), list[float]()
    over_zb_h1: list[float] = []
    points = [(setting, limit) for limit in LIMITS for setting in SETTINGS]
    for setting, limit in within(asked.seconds, points):
        problem = setting.problem(limit)
        solution = solve(problem, asked.effort)
        check(solution.program)
        period = period_ns(solution.program, problem.durations, problem.transfers)
        assert solution.bound_ns <= period <= solution.step_ns
        durations = problem.durations
        each_ns = durations.forward_ns[0] + durations.whole_ns[0]
        busy_ns = setting.num_microbatches * each_ns
        bubbles.setdefault(limit, []).append(float(1 - busy_ns / period))
        over_bound.append(float(period / solution.bound_ns))
        if limit == 1:
            over_zb_h1.append(bubbles[limit][-1] / setting.zb_h1_bubble)
    for limit, own in bubbles.items():
        goal = Goal(at_most=0.04) if limit == 1.75 else None
        note = f"of {len(own)} settings"
        yield Row.exact(f"bubble with memory for {limit} p, at most", max(own), goal, note=note)
    yield Row.exact("period over the bound, at most", max(over_bound))
    if over_zb_h1:
        yield Row.exact("bubble with memory for p over ZB-H1's, at most", max(over_zb_h1))


PARTS = {"solver": solver, "memory_limits": memory_limits}

if __name__ == "__main__":
    options = parser(__doc__, PARTS)
    options.add_argument("--effort", type=float, default=0.05, help="how long the solver searches")
    run("planning", __doc__, PARTS, options)
