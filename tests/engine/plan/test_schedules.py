"""Every registered schedule over a grid of shapes, against closed forms and torch's own tables."""

import re

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from engine.plan.action import COMPUTE_OPS, Op
from engine.plan.lower import lower
from engine.plan.rules import check
from engine.plan.schedules import afab, one_f_one_b
from engine.plan.schedules.registry import (
    ALIASES,
    SCHEDULES,
    UnknownScheduleError,
    build_program,
    find_schedule,
    theoretical_bubble_fraction,
)
from engine.plan.simulate import draw_timeline, peak_activations, simulate

GRID = [(p, m) for p in (1, 2, 3, 4, 8, 16) for m in (1, 2, 3, 4, 5, 8, 13, 32)]


def uniform(forward_ns, backward_ns):
    return lambda action: forward_ns if action.op is Op.F else backward_ns


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), GRID)
def test_a_schedule_obeys_the_rules_and_cannot_hang(name, p, m):
    program = build_program(name, p, m)
    check(program)
    for look_ahead in (0, 1, 2, 10_000):
        lower(program, look_ahead)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), GRID)
def test_its_simulated_bubble_is_the_closed_form(name, p, m):
    forward, backward = 7, 13
    spans = simulate(build_program(name, p, m), uniform(forward, backward))
    makespan = max(span.end_ns for span in spans)
    compute = sum(span.end_ns - span.start_ns for span in spans if span.op in COMPUTE_OPS)
    theory = theoretical_bubble_fraction(name, p, m, forward, backward)
    assert 1 - compute / (p * makespan) == pytest.approx(theory, abs=1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), GRID)
def test_it_holds_as_many_activations_as_it_states(name, p, m):
    stated = [SCHEDULES[name].peak_activations(p, m, rank) for rank in range(p)]
    assert peak_activations(build_program(name, p, m)) == stated


def torchs(name, p, m):
    """torch's own table as text; reducing sharded gradients is no action of ours."""
    rows = get_schedule_ops(name, p, m, 1)
    return [[str(a) for a in row if a is not None and "REDUCE" not in str(a)] for row in rows]


def ours(name, p, m):
    return [[str(action) for action in row] for row in build_program(name, p, m).actions]


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in GRID if m >= p])
def test_afab_is_torchs_gpipe(p, m):
    assert ours("afab", p, m) == torchs("GPipe", p, m)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in GRID if m >= p])
def test_1f1b_is_torchs_but_for_the_last_rank(p, m):
    """torch's table for the last rank starts at F1 and ends past the last microbatch."""
    assert ours("1f1b", p, m)[:-1] == torchs("1F1B", p, m)[:-1]


def test_1f1b_at_4_ranks_and_8_microbatches_has_the_published_figures():
    program = build_program("1f1b", 4, 8)
    assert max(span.end_ns for span in simulate(program, uniform(1, 1))) == 22
    assert theoretical_bubble_fraction("1f1b", 4, 8, 1, 1) == 3 / 11
    assert peak_activations(program) == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("module", "name", "p", "m"), [(afab, "afab", 3, 3), (one_f_one_b, "1f1b", 3, 4)]
)
def test_the_drawing_in_the_docstring_is_what_the_simulator_draws(module, name, p, m):
    drawn = re.findall(r"^ +(rank .*)$", module.__doc__, flags=re.MULTILINE)
    simulated = draw_timeline(simulate(build_program(name, p, m), uniform(1, 1)))
    assert drawn == simulated.splitlines()


def test_gpipe_is_an_alias_of_afab():
    assert ALIASES == {"gpipe": "afab"}
    assert build_program("gpipe", 2, 2) == build_program("afab", 2, 2)


def test_an_unknown_schedule_names_the_known_ones():
    with pytest.raises(UnknownScheduleError, match='unknown schedule "1f1v"; known: afab, 1f1b'):
        find_schedule("1f1v")


@pytest.mark.parametrize(("p", "m"), [(0, 1), (1, 0), (-1, 4)])
def test_a_program_without_ranks_or_microbatches_is_refused(p, m):
    with pytest.raises(ValueError, match="at least 1 rank"):
        build_program("afab", p, m)
