"""The drawings in the documentation are what the simulator draws."""

import importlib
import pkgutil
import re

import pytest

from engine.plan import schedules
from engine.plan.drawing import draw_timeline, grid_of, label_of, unit_of
from engine.plan.predict import Durations, predict, uniform
from engine.plan.program import Program, loop_placement
from engine.plan.schedules.registry import build_program

# In the order in which they stand; every op takes one unit, a full backward of afab and 1f1b too.
STAGES_OF_ONE = (2, 2, 2)  # F, I and W of a rank with two stages
DRAWN = {
    "breadth_first": [("afab", 3, 3, (2, 1, 1)), ("looped_bfs", 2, 2, STAGES_OF_ONE)],
    "v_shaped": [("zbv", 2, 3, STAGES_OF_ONE)],
    "controlled_memory": [("v_half", 3, 2, STAGES_OF_ONE), ("v_min", 3, 2, STAGES_OF_ONE)],
    "one_f_one_b": [
        ("1f1b", 3, 4, (2, 1, 1)),
        ("zb_h1", 3, 4, (1, 1, 1)),
        ("zb_h2", 3, 5, (1, 1, 1)),
        ("interleaved_1f1b", 2, 2, STAGES_OF_ONE),
    ],
}
MODULES = [module.name for module in pkgutil.iter_modules(schedules.__path__)]


def drawings_in(module_name):
    """Each run of lines that begin with a rank."""
    text = importlib.import_module(f"engine.plan.schedules.{module_name}").__doc__ or ""
    drawings = re.findall(r"(?:^ +rank \d+: .*\n?)+", text, flags=re.MULTILINE)
    return ["\n".join(line.strip() for line in one.splitlines()) for one in drawings]


def timeline(simulation):
    return draw_timeline(simulation.program, simulation.start_ns, simulation.end_ns)


def drawn(name, p, m, costs, v=None):
    program = build_program(name, p, m, v)
    return timeline(predict(program, uniform(program.placement, *costs)))


@pytest.mark.parametrize("module", MODULES)
def test_a_drawing_in_a_docstring_is_what_the_simulator_draws(module):
    assert drawings_in(module) == [drawn(*case) for case in DRAWN.get(module, [])]


def test_a_column_is_the_longest_time_of_which_all_are_multiples():
    program = build_program("1f1b", 2, 1)
    simulation = predict(program, Durations((20, 20), (10, 10), (30, 30)))
    assert timeline(simulation).splitlines() == [
        "rank 0: F0 .  .  .  B0 B0",
        "rank 1: .  F0 B0 B0 .  .",
    ]
    assert unit_of(simulation.start_ns, simulation.end_ns) == 20


def test_nothing_to_draw_is_drawn_as_nothing():
    simulation = predict(
        Program("test", loop_placement(2), 0, ((), ())), uniform(loop_placement(2), 1, 1, 1)
    )
    assert timeline(simulation) == "rank 0: \nrank 1: "
    assert grid_of(simulation.program, simulation.start_ns, simulation.end_ns, 1) == [[], []]
    assert label_of(None, has_stages=True) == "."
