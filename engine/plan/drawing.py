"""A simulated step as a text grid: a row per rank, a column per unit of time."""

from __future__ import annotations

import math

from engine.plan.action import Action
from engine.plan.simulate import Simulation

Grid = list[list[Action | None]]


def grid_of(simulation: Simulation, unit_ns: int) -> Grid:
    """For each rank what it computes in each unit of time; None where it idles."""
    num_columns = -(-simulation.makespan_ns // unit_ns)
    grid: Grid = [[None] * num_columns for _ in simulation.program.actions]
    for rank, row in enumerate(simulation.program.actions):
        times = zip(row, simulation.start_ns[rank], simulation.end_ns[rank], strict=True)
        for action, start, end in times:
            for column in range(start // unit_ns, -(-end // unit_ns)):
                grid[rank][column] = action
    return grid


def unit_of(simulation: Simulation) -> int:
    """The longest unit of time, in nanoseconds, of which all times are multiples."""
    times = (time for row in simulation.start_ns + simulation.end_ns for time in row)
    return math.gcd(*times) or 1


def label_of(action: Action | None, *, has_stages: bool) -> str:
    """`F0`, or `2F0` where a rank has several stages; `.` is idle."""
    if action is None:
        return "."
    return str(action) if has_stages else f"{action.op.value}{action.microbatch}"


def draw_timeline(simulation: Simulation, unit_ns: int | None = None) -> str:
    """The grid as text, all columns of one width."""
    program = simulation.program
    has_stages = program.num_stages > program.world_size
    grid = grid_of(simulation, unit_ns or unit_of(simulation))
    rows = [[label_of(cell, has_stages=has_stages) for cell in row] for row in grid]
    width = max((len(cell) for row in rows for cell in row), default=0)
    return "\n".join(
        f"rank {rank}: " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for rank, row in enumerate(rows)
    )
