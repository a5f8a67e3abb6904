"""The drawings in the documentation are what the simulator draws."""

import importlib
import math
import pkgutil
import re

import pytest

from engine.plan import schedules
from engine.plan.drawing import aligned, label_of
from engine.plan.predict import predict, uniform
from engine.plan.schedules.registry import build_program

# In the order in which they stand; every op takes one unit, a full backward of afab and 1f1b too.
STAGES_OF_ONE = (2, 2, 2)  # F, I and W of a rank with two stages
DRAWN = {
    "breadth_first": [("afab", 3, 3, (2, 1, 1)), ("looped_bfs", 2, 2, STAGES_OF_ONE)],
    "bidirectional": [("chimera", 4, 4, (1, 1, 0)), ("dualpipe", 2, 4, (1, 1, 1))],
    "v_shaped": [("zbv", 2, 3, STAGES_OF_ONE)],
    "controlled_memory": [("v_half", 3, 2, STAGES_OF_ONE), ("v_min", 3, 2, STAGES_OF_ONE)],
    "one_f_one_b": [
        ("1f1b", 3, 4, (2, 1, 1)),
        ("zb_h1", 3, 4, (1, 1, 1)),
        ("zb_h2", 3, 5, (1, 1, 1)),
        ("interleaved_1f1b", 2, 2, STAGES_OF_ONE),
        ("seq1f1b", 2, 2, (2, 1, 1), None, (0.5, 0.5)),
    ],
}
MODULES = [module.name for module in pkgutil.iter_modules(schedules.__path__)]


def drawings_in(module_name):
    """Each run of lines that begin with a rank."""
    text = importlib.import_module(f"engine.plan.schedules.{module_name}").__doc__ or ""
    drawings = re.findall(r"(?:^ +rank \d+: .*\n?)+", text, flags=re.MULTILINE)
    return ["\n".join(line.strip() for line in one.splitlines()) for one in drawings]


def timeline(simulation):
    """Draw what each rank computes in each unit of time, the longest of which all are multiples."""
    times = (simulation.start_ns, simulation.end_ns)
    unit = math.gcd(*(time for ends in times for row in ends for time in row)) or 1
    grid = [["."] * (simulation.makespan_ns // unit) for _ in simulation.program.actions]
    has_stages = simulation.program.num_stages > simulation.program.world_size
    for rank, row in enumerate(simulation.program.actions):
        for action, start, end in zip(row, *(ends[rank] for ends in times), strict=True):
            for column in range(start // unit, end // unit):
                grid[rank][column] = label_of(action, has_stages=has_stages)
    return aligned(grid)


def drawn(name, p, m, costs, v=None, slices=()):
    program = build_program(name, p, m, v, slices=slices)
    return timeline(predict(program, uniform(program.placement, *costs)))


@pytest.mark.parametrize("module", MODULES)
def test_a_drawing_in_a_docstring_is_what_the_simulator_draws(module):
    assert drawings_in(module) == [drawn(*case) for case in DRAWN.get(module, [])]
