"""Programs and timelines as text grids: a row per rank, a column per action or per unit of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from engine.plan.action import Action
from engine.plan.program import Program

Times = Sequence[Sequence[int]]
"""For each rank, one time in nanoseconds per action."""
Grid = list[list[Action | None]]


def draw(program: Program, mark: tuple[int, int] | None = None, context: int = 8) -> str:
    """Draw the order of each rank's actions; `mark` is a (rank, position) shown in brackets.

    With a mark, only `context` columns on either side of it are drawn.
    """
    first, last = (0, None) if mark is None else (max(0, mark[1] - context), mark[1] + context + 1)
    return _text(
        [
            f"[{action}]" if (rank, first + i) == mark else str(action)
            for i, action in enumerate(program.table.part(rank, first, last))
        ]
        for rank in range(len(program.table))
    )


def draw_timeline(program: Program, start_ns: Times, end_ns: Times) -> str:
    """Draw what each rank computes in each unit of time, which is `unit_of`."""
    has_stages = program.num_stages > program.world_size
    grid = grid_of(program, start_ns, end_ns, unit_of(start_ns, end_ns))
    return _text([label_of(cell, has_stages=has_stages) for cell in row] for row in grid)


def grid_of(program: Program, start_ns: Times, end_ns: Times, unit_ns: int) -> Grid:
    """Return what each rank computes in each unit of time; None where it idles."""
    makespan_ns = max((end for row in end_ns for end in row), default=0)
    grid: Grid = [[None] * -(-makespan_ns // unit_ns) for _ in program.actions]
    for rank, row in enumerate(program.actions):
        for action, start, end in zip(row, start_ns[rank], end_ns[rank], strict=True):
            for column in range(start // unit_ns, -(-end // unit_ns)):
                grid[rank][column] = action
    return grid


def unit_of(start_ns: Times, end_ns: Times) -> int:
    """The longest unit of time, in nanoseconds, of which all times are multiples."""
    return math.gcd(*(time for times in (start_ns, end_ns) for row in times for time in row)) or 1


def label_of(action: Action | None, *, has_stages: bool) -> str:
    """`F0`, or `2F0` where a rank has several stages; `.` is idle."""
    if action is None:
        return "."
    return str(action) if has_stages else f"{action.op.value}{action.microbatch}"


def _text(rows: Iterable[Sequence[str]]) -> str:
    cells = list(rows)
    width = max((len(cell) for row in cells for cell in row), default=0)
    return "\n".join(
        f"rank {rank}: " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for rank, row in enumerate(cells)
    )
