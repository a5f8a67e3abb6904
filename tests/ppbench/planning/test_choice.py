"""The program of `schedule = "auto"`: which placement, and backwards that are left whole."""

import pytest

from engine.plan.check import check
from engine.plan.program import loop_placement, v_placement
from engine.plan.rules import peak_activations
from engine.plan.schedules.registry import build_program
from engine.plan.simulate import Durations, simulate
from ppbench.planning.solver.choice import best_program, placements_of, with_whole_backwards
from ppbench.planning.solver.problem import NoProgramError, counted


def problems(p, v, m, durations, limit):
    return [counted(place, m, durations, limit) for place in placements_of(p, v)]


def test_one_stage_per_rank_is_a_loop_and_several_are_tried_as_a_v_too():
    assert placements_of(4, 1) == [loop_placement(4)]
    assert placements_of(4, 2) == [loop_placement(4, 2), v_placement(4)]
    assert placements_of(1, 3) == [loop_placement(1, 3)]


@pytest.mark.parametrize(("p", "v", "limit"), [(4, 1, 4), (2, 2, 4)])
def test_the_program_is_no_slower_than_any_schedule_within_the_limit(p, v, limit):
    m = 6
    durations = Durations(*(tuple(10 + (3 * s + k) % 5 for s in range(p * v)) for k in range(3)))
    found = best_program(problems(p, v, m, durations, limit))
    assert found.schedule == "auto"
    check(found)
    assert max(peak_activations(found)) <= limit
    makespan = simulate(found, durations).makespan_ns
    names = {1: ("1f1b", "zb_h1", "afab", "zb_h2"), 2: ("zbv", "interleaved_1f1b", "v_min")}[v]
    rivals = [program for name in names if (program := build_program(name, p, m, v))]
    fitting = [rival for rival in rivals if max(peak_activations(rival)) <= limit]
    assert fitting
    assert all(makespan <= simulate(rival, durations).makespan_ns for rival in fitting)


def test_a_limit_below_one_microbatch_has_no_program():
    with pytest.raises(NoProgramError):
        best_program(problems(2, 2, 3, Durations((1,) * 4, (1,) * 4, (1,) * 4), 1))


def test_backwards_are_whole_on_the_stages_that_ask_for_it():
    program = build_program("zb_h1", 2, 3)
    assert with_whole_backwards(program, set()) is program
    whole = with_whole_backwards(program, {1})
    check(whole)
    rows = [[str(action) for action in row] for row in whole.actions]
    assert rows[0] == [str(action) for action in program.actions[0]]
    assert rows[1] == ["1F0", "1B0", "1F1", "1B1", "1F2", "1B2"]
    check(with_whole_backwards(program, {0, 1}))
