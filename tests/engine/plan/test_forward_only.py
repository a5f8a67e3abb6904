"""Programs of forwards alone: they are legal, cannot hang, and no order of theirs is shorter."""

from __future__ import annotations

import itertools

import pytest
from drawn_programs import stages_per_rank

from engine.plan.check import check
from engine.plan.lower import Policy, lower
from engine.plan.period import period_of
from engine.plan.predict import InFlight, predict, uniform
from engine.plan.program import EVALUATE, from_json, to_csv, to_json, two_way_placement, v_placement
from engine.plan.rules import ProgramError, peak_activations
from engine.plan.schedules.registry import SCHEDULES, ShapeError, build_program

SHAPES = [(name, v) for name in SCHEDULES for v in stages_per_rank(name)]


def programs(name, v, ranks, most):
    """The schedule's program for evaluations, in every shape that it has."""
    for p, m in itertools.product(ranks, range(1, most)):
        try:
            yield build_program(name, p, m, v, mode=EVALUATE)
        except ShapeError:
            continue


def step_of(program):
    """Each stage takes 1 ns."""
    v = program.placement.depth // program.world_size
    return predict(program, uniform(program.placement, v, v, v))


@pytest.mark.parametrize(("name", "v"), SHAPES)
def test_no_step_could_be_shorter(name, v):
    """The last rank begins after p - 1 forwards, has v of each microbatch, and never waits.

    In a V the last rank is half-way, and p - 1 forwards follow its last one. Each of two ways takes
    half of the microbatches.
    """
    for program in programs(name, v, (1, 2, 3, 4, 8, 16), 35):
        step, p, m = step_of(program), program.world_size, program.num_microbatches
        length = max(v * m + p - 1, v * p + m - 1)  # or few microbatches pass all
        if SCHEDULES[name].place is v_placement:
            length = 2 * m + 2 * (p - 1)
        elif SCHEDULES[name].place is two_way_placement:  # a rank in the middle is filled last
            length = m + max(0, p - 2)
        assert step.makespan_ns == length
        if v == 1:
            assert step.bubble_fraction == pytest.approx((p - 1) / (m + p - 1))
            assert period_of(step) == m


@pytest.mark.parametrize(("name", "v"), SHAPES)
def test_every_forward_is_done_once_and_none_can_hang(name, v):
    for program in programs(name, v, (1, 2, 3, 4), 9):
        check(program)
        for policy in Policy:
            lower(program, policy)
        assert peak_activations(program) == [1] * program.world_size
        assert from_json(to_json(program)) == program
    step = step_of(build_program("1f1b", 2, 2, mode=EVALUATE))
    assert step.in_flight(1) == [InFlight(*one) for one in ((1, 1), (2, 0), (2, 1), (3, 0))]


@pytest.mark.parametrize(("name", "v"), SHAPES)
def test_only_two_ways_need_even_numbers(name, v):
    shapes = set(itertools.product((1, 2, 3, 4), range(1, 9)))
    found = {(one.world_size, one.num_microbatches) for one in programs(name, v, (1, 2, 3, 4), 9)}
    is_two_way = SCHEDULES[name].place is two_way_placement
    assert shapes - found == {one for one in shapes if is_two_way and any(n % 2 for n in one)}


def test_a_file_without_a_backward_is_run_as_it_is_written_and_trains_nothing(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text(to_csv(build_program("zbv", 2, 3)))
    derived = build_program("zbv", 2, 3, mode=EVALUATE)
    assert build_program(f"csv:{file}", 2, 3, mode=EVALUATE).actions == derived.actions
    file.write_text("0F1,0F0\n1F1\n")
    program = build_program(f"csv:{file}", 2, 2, mode=EVALUATE)
    assert to_csv(program) == file.read_text()
    with pytest.raises(ProgramError, match="1F0 is never done"):
        check(program)
    with pytest.raises(ShapeError, match=r'has no backward.*; expected mode "evaluate"') as caught:
        build_program(f"csv:{file}", 2, 2)
    assert caught.value.key == "mode"
