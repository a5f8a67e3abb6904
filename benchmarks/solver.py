"""Steps of the solver over its lower bound, and over the best schedule of the registry.

    python -m benchmarks.solver [--instances 500] [--effort 0.1] [--large-effort 1]

The instances are drawn at random: up to 16 ranks with up to 4 stages each, in a loop or a V, up to
64 microbatches, F : I : W from 1 : 0.5 : 0.3 to 1 : 1.5 : 1.2, stages that differ by up to 40 % and
one of them up to twice as heavy, transfers of up to half a forward that overlap compute in four of
five, and memory for p/3 to 2p microbatches on a rank. The best schedule is that of those with the
same placement and number of stages that keep within the memory, of which there may be none. In half
of the instances ranks meet after a step, which then is the makespan; that of the others is the
period. The effort is how long the solver searches.

The solver's program is one of them or better: a ratio above 1 would be a fault. How often it is
strictly better is counted where the best schedule lies more than 2 % above the bound. A pipeline of
32 ranks and 256 microbatches whose stages differ by 5 % has more to search; its seconds are those
of one solution.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from engine.plan.check import check
from engine.plan.period import period_ns
from engine.plan.predict import Durations
from engine.plan.program import Program, loop_placement, v_placement
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program
from engine.plan.walk import TransferModel
from ppbench.planning.solver.problem import Problem, counted
from ppbench.planning.solver.solver import solve

LARGE_LIMITS = (32, 48, 64)
FEW = 25
"""Instances between two lines of progress."""


class Solved(NamedTuple):
    """Steps of an instance in nanoseconds: the one found, its bound, and a schedule's."""

    step_ns: int
    bound_ns: int
    best_ns: int | None  # None where no schedule fits
    limit: float  # microbatches of a rank's whole share, over the ranks
    spread: float  # the heaviest stage over the lightest


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--instances", type=int, default=500)
    options.add_argument("--effort", type=float, default=0.1)
    options.add_argument("--large-effort", type=float, default=1.0)
    settings, surroundings = options.parse_args(), read_surroundings()
    solved = []
    for seed in range(settings.instances):
        solved.append(_solved(drawn_problem(seed), settings.effort))
        if (seed + 1) % FEW == 0:
            print(f"  {seed + 1} of {settings.instances} instances", flush=True)
    large, took = _large(settings.large_effort)
    ratios = [*_over_bound(solved), *_over_schedules(solved), large, took]
    write("solver", settings, surroundings, ratios, _figures(solved))


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


def _solved(problem: Problem, effort: float) -> Solved:
    """Solve a problem, and prove its program legal, within memory and as long as it says."""
    solution = solve(problem, effort)
    check(solution.program, max_held=problem.limits[0])
    step_ns = step_of(problem, solution.program)
    assert step_ns == solution.step_ns >= solution.bound_ns
    best = min(steps_of_schedules(problem), default=None)
    forward = problem.durations.forward_ns
    limit = problem.limits[0] / problem.placement.num_stages
    return Solved(step_ns, solution.bound_ns, best, limit, max(forward) / min(forward))


def _over_bound(solved: list[Solved]) -> Iterator[Ratio]:
    parts = {
        "all": solved,
        "memory below p": [one for one in solved if one.limit < 1],
        "memory of p or more": [one for one in solved if one.limit >= 1],
    }
    for name, some in parts.items():
        values = tuple(one.step_ns / one.bound_ns for one in some)
        yield Ratio(f"step over the bound: {name}", values, goal=Goal(at_most=1.05))


def _over_schedules(solved: list[Solved]) -> Iterator[Ratio]:
    pairs = [(one, one.best_ns) for one in solved if one.best_ns is not None]
    over = [one.step_ns / best for one, best in pairs]
    yield Ratio(
        "step over the best schedule's: the largest",
        (max(over),),
        goal=Goal(at_most=1, is_exact=True),
    )
    far = [one.step_ns < best for one, best in pairs if best > 1.02 * one.bound_ns]
    share = (sum(far) / len(far),)
    name = "strictly better, of where the best schedule is 2 % above the bound"
    yield Ratio(name, share, goal=Goal(at_least=0.6, is_exact=True))
    uneven = [(one, best) for one, best in pairs if one.spread >= 1.2 and one.limit >= 1.5]
    where = "over the best schedule's: stages 20 % apart, memory of 1.5 p or more"
    found = tuple(one.step_ns / best for one, best in uneven)
    yield Ratio(f"step {where}", found, goal=Goal(at_most=0.97))
    yield Ratio(f"bound {where}", tuple(one.bound_ns / best for one, best in uneven))


def _large(effort: float) -> tuple[Ratio, Ratio]:
    """32 ranks and 256 microbatches: steps over their bounds, and seconds over a minute."""
    over, seconds = [], []
    for limit in LARGE_LIMITS:
        random_ = random.Random(limit)
        times = [
            tuple(round(share * random_.uniform(950_000, 1_050_000)) for _ in range(32))
            for share in (1, 1, 0.8)
        ]
        transfers = TransferModel(20_000)
        problem = counted(loop_placement(32), 256, Durations(*times), limit, transfers)
        began = time.perf_counter()
        solution = solve(problem, effort)
        seconds.append(time.perf_counter() - began)
        over.append(solution.step_ns / solution.bound_ns)
    name = "32 ranks, 256 microbatches, memory of p or more"
    return (
        Ratio(
            f"step over the bound: {name}: the largest",
            (max(over),),
            goal=Goal(at_most=1.02, is_exact=True),
        ),
        Ratio(f"{name}: the longest over 60 s", (max(seconds) / 60,), goal=Goal(at_most=1)),
    )


def _figures(solved: list[Solved]) -> Iterator[Figure]:
    short = sorted(one.step_ns / one.bound_ns for one in solved if one.limit < 0.6)
    if short:
        yield Figure("step over the bound: memory below 0.6 p", tuple(short))
    proved = statistics.fmean(one.step_ns == one.bound_ns for one in solved)
    yield Figure("share of instances proved to be as short as can be", (proved,))


if __name__ == "__main__":
    main()
