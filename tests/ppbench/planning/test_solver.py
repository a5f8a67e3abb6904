"""Programs that the solver finds: legal, within memory, no worse than families or the optimum."""

import math
import random
from dataclasses import replace

import pytest
from exact import least_step

from benchmarks.planning import drawn_problem, steps_of_schedules
from engine import arrays
from engine.plan.action import Op
from engine.plan.check import check
from engine.plan.lower import lower
from engine.plan.period import period_ns
from engine.plan.predict import Durations
from engine.plan.program import (
    Placement,
    from_csv,
    loop_placement,
    to_csv,
    two_way_placement,
    v_placement,
)
from engine.plan.walk import FREE_TRANSFERS, TransferModel
from ppbench.planning.solver.bounds import lower_bound
from ppbench.planning.solver.problem import NoProgramError, Problem, counted
from ppbench.planning.solver.solver import solve


def drawn(seed, most_microbatches):
    """A problem of the benchmark; of one in four, whole backwards are quicker than their halves."""
    problem, random_ = drawn_problem(seed, most_microbatches=most_microbatches), random.Random(seed)
    if seed % 4 == 3:
        whole = tuple(round(random_.uniform(0.75, 1) * ns) for ns in problem.durations.whole_ns)
        problem = replace(problem, durations=replace(problem.durations, backward_ns=whole))
    return problem


def drawn_in_bytes(seed):
    """A small problem whose stages differ in all: times, and memory of both kinds.

    Of every other one a whole backward takes not as long as its halves, on some stages longer.
    """
    random_ = random.Random(seed)
    p, v, m = random_.randint(1, 4), random_.choice([1, 1, 2]), random_.randint(1, 6)
    m = min(m, 14 // (p * v))
    placement = random_.choice([loop_placement, v_placement])(p, v)
    times = [tuple(random_.randint(20, 150) for _ in placement.ranks) for _ in range(3)]
    taken = tuple(random_.randint(3, 9) for _ in placement.ranks)
    left = tuple(random_.randint(0, held) for held in taken)
    transfers = TransferModel(random_.choice([0, 10, 50]))
    problem = Problem(placement, m, Durations(*times), (99,) * p, taken, left, transfers)
    part = random_.uniform(1, m + 1)
    if seed % 2:
        whole = tuple(round(ns * random_.uniform(0.6, 1.1)) for ns in problem.durations.whole_ns)
        problem = replace(problem, durations=replace(problem.durations, backward_ns=whole))
    return replace(problem, limits=tuple(int(least * part) for least in problem.least_limits))


def most_held(problem, program):
    """By rank, in the problem's unit."""
    peaks = []
    for row in program.actions:
        held, peak = 0, 0
        for stage, op, _ in row:
            taken, left = problem.held_after_forward[stage], problem.held_after_input[stage]
            held += {Op.F: taken, Op.I: left - taken, Op.W: -left, Op.B: -taken}[op]
            peak = max(peak, held)
        peaks.append(peak)
    return peaks


def repeated(problem, seed):
    """The problem with optimizers, whose ranks meet or do not."""
    random_ = random.Random(seed)
    longest = max(problem.durations.forward_ns)
    optimizers = [random_.randint(0, longest) for _ in problem.limits]
    return replace(problem, optimizer_ns=tuple(optimizers), meets=seed // 2 % 2 == 0)


def assert_sound(problem, solution):
    check(solution.program)
    lower(solution.program)
    assert from_csv(to_csv(solution.program), "solved") == solution.program
    program, times = solution.program, (problem.durations, problem.transfers)
    period = period_ns(program, *times, problem.optimizers, meets=problem.meets)
    assert math.ceil(period) == solution.step_ns >= solution.bound_ns
    for held, limit in zip(most_held(problem, solution.program), problem.limits, strict=True):
        assert held <= limit


def test_programs_are_sound_and_never_worse_than_a_family_that_fits(is_thorough):
    for seed in range(500) if is_thorough else (1, 2, 7, 8):  # with and without each option
        problem = repeated(drawn(seed, 64 if is_thorough else 16), seed)
        solution = solve(problem, 1 if is_thorough else 0)
        assert_sound(problem, solution)
        assert solution.step_ns <= min(steps_of_schedules(problem), default=solution.step_ns)


def test_there_is_a_program_wherever_one_microbatch_fits(is_thorough):
    for seed in range(400 if is_thorough else 25):
        problem = drawn_in_bytes(seed)
        least = replace(problem, limits=problem.least_limits)
        for one in (problem, least):
            assert_sound(one, solve(one, 0))
        for rank in range(problem.placement.world_size):
            limits = [*problem.least_limits]
            limits[rank] -= 1
            with pytest.raises(NoProgramError, match=f"rank {rank}: {limits[rank] + 1}, not") as no:
                solve(replace(problem, limits=tuple(limits)))
            assert no.value.least == problem.least_limits


def test_small_problems_are_solved_as_well_as_can_be_and_the_bound_is_never_above(is_thorough):
    num_proved = num_equal = 0
    for seed in range(330 if is_thorough else 12):
        problem = repeated(drawn_in_bytes(seed), seed)
        solution = solve(problem, 0.01)
        assert_sound(problem, solution)
        least = least_step(problem, solution.step_ns, 20 if is_thorough else 3)
        if least is not None:
            num_proved += 1
            num_equal += solution.step_ns == least
            assert solution.bound_ns <= least
            assert solution.step_ns <= 1.01 * least
    assert num_proved >= (300 if is_thorough else 6)
    assert num_equal >= 0.9 * num_proved


def test_the_bound_of_two_directions_is_never_above_the_least_step(is_thorough):
    num_proved = num_equal = 0
    soon = 2, 5, 6, 7, 10, 13  # seeds of which the least step is found in a fraction of a second
    for seed in range(200) if is_thorough else soon:
        random_ = random.Random(seed)
        p, m = random_.choice([(2, 2), (2, 4), (4, 2), (4, 4)])
        placement = two_way_placement(p)
        times = [tuple(random_.randint(20, 150) for _ in placement.ranks) for _ in range(3)]
        taken = tuple(random_.randint(3, 9) for _ in placement.ranks)
        left = tuple(random_.randint(0, held) for held in taken)
        transfers = TransferModel(random_.choice([0, 10, 20]))
        problem = Problem(placement, m, Durations(*times), (99,) * p, taken, left, transfers)
        part = random_.uniform(1, 3)
        limits = tuple(int(least * part) for least in problem.least_limits)
        problem = repeated(replace(problem, limits=limits), seed)
        within = m * sum(map(sum, times)) + sum(problem.optimizers) + 8 * m * p * 20
        least = least_step(problem, within, 20)
        if least is not None:
            bound = lower_bound(problem)
            num_proved += 1
            num_equal += bound == least
            assert 0.5 * least < bound <= least
    assert num_proved >= (150 if is_thorough else len(soon))
    assert num_equal >= 0.1 * num_proved


@pytest.mark.parametrize("limit", [32, 48, 64])
@pytest.mark.thorough
def test_256_microbatches_on_32_ranks_come_within_2_percent_of_the_bound(limit):
    random_ = random.Random(limit)
    times = [
        tuple(round(share * random_.uniform(950_000, 1_050_000)) for _ in range(32))
        for share in (1, 1, 0.8)
    ]
    problem = counted(loop_placement(32), 256, Durations(*times), limit, TransferModel(20_000))
    solution = solve(problem)
    assert_sound(problem, solution)
    assert solution.step_ns <= 1.02 * solution.bound_ns


def test_a_backward_is_whole_where_that_is_quicker_and_split_where_it_is_waited_for():
    problem = counted(loop_placement(2), 4, Durations((9, 9), (9, 9), (9, 9), (14, 14)), 4)
    solution = solve(problem, 0.001)
    assert_sound(problem, solution)
    assert solution.step_ns == least_step(problem, solution.step_ns, 20)
    assert {Op.B, Op.I} <= {action.op for row in solution.program.actions for action in row}


def test_pinned_bounds():
    quick = Durations((5, 5), (4, 4), (3, 3), (6, 3))  # stage 1: i' = 3 and w' = 0
    assert lower_bound(counted(loop_placement(2), 1, quick, 1)) == 5 + 5 + 3 + 6
    times = Durations((1, 1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1))
    assert lower_bound(counted(loop_placement(4), 1, times, 1)) == 9  # 4 F, 4 I and the last W
    assert lower_bound(counted(loop_placement(4), 8, times, 8)) == 8 * 3 + 3  # 3 F before rank 3
    assert lower_bound(counted(loop_placement(4), 8, times, 1)) == 8 * 9  # one after another


def test_the_same_each_time_and_compiled_or_not(monkeypatch):
    times = Durations((9, 4, 5, 7, 6, 5), (8, 5, 6, 5, 4, 8), (3, 6, 5, 4, 7, 5))
    problem = counted(v_placement(3), 5, times, 3)
    assert solve(problem, 0.0005).step_ns < solve(problem, 0).step_ns  # it is searched
    machine_code = solve(problem, 0.0005)
    assert solve(problem, 0.0005) == machine_code
    monkeypatch.setattr(arrays, "PAYS_FROM", 10**12)
    assert solve(problem, 0.0005) == machine_code


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"limits": (1,)}, "2 limits"),
        ({"held_after_forward": (1,)}, "2 stages"),
        ({"num_microbatches": 0}, "one microbatch"),
        ({"held_after_input": (2, 1)}, "more than its forward"),
        ({"held_after_input": (-1, 1)}, "negative"),
    ],
)
def test_a_problem_that_is_none(changes, match):
    problem = counted(loop_placement(2), 2, Durations((1, 1), (1, 1), (1, 1)), 2)
    with pytest.raises(ValueError, match=match):
        replace(problem, **changes)


@pytest.mark.parametrize("p", [2, 4, 6])
def test_as_many_microbatches_as_ranks_have_the_bubble_of_zb_h1_and_no_less(p):
    f, i, w, c, m = 30, 28, 20, 2, 3 * p  # a weight half keeps 43 % of a microbatch
    times = Durations((f,) * p, (i,) * p, (w,) * p)
    held = (100,) * p, (43,) * p
    limits, link = (100 * p,) * p, TransferModel(c)
    problem = Problem(loop_placement(p), m, times, limits, *held, link, meets=False)
    solution = solve(problem, 0)
    assert_sound(problem, solution)
    # Messages are waited for on the way there and back, before the first I and behind the last F.
    least = m * (f + i + w) + (p - 1) * (f + i - w + 4 * c)
    assert solution.step_ns == solution.bound_ns == least


def test_a_rank_without_stages_has_no_step_of_its_own():
    times = Durations((1,), (1,), (1,))
    placement = Placement((0,), 2)
    for meets, step_ns in ((False, 3), (True, 100)):
        one = counted(placement, 1, times, 9)
        problem = replace(one, optimizer_ns=(0, 100), meets=meets)
        solution = solve(problem, 0)
        period = period_ns(solution.program, times, FREE_TRANSFERS, (0, 100), meets=meets)
        assert solution.step_ns == step_ns == period >= solution.bound_ns
