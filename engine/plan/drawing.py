"""Programs as text grids: a row per rank, a column per action."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.plan.action import Action
from engine.plan.program import Program


def draw(program: Program, mark: tuple[int, int] | None = None, context: int = 8) -> str:
    """Draw the order of each rank's actions; `mark` is a (rank, position) shown in brackets.

    With a mark, only `context` columns on either side of it are drawn.
    """
    first, last = (0, None) if mark is None else (max(0, mark[1] - context), mark[1] + context + 1)
    return aligned(
        [
            f"[{action}]" if (rank, first + i) == mark else str(action)
            for i, action in enumerate(program.table.part(rank, first, last))
        ]
        for rank in range(len(program.table))
    )


def aligned(rows: Iterable[Sequence[str]]) -> str:
    """Cells below each other, a line for each rank."""
    cells = list(rows)
    width = max((len(cell) for row in cells for cell in row), default=0)
    return "\n".join(
        f"rank {rank}: " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for rank, row in enumerate(cells)
    )


def label_of(action: Action | None, *, has_stages: bool) -> str:
    """`F0`, or `2F0` where a rank has several stages; `.` is idle."""
    if action is None:
        return "."
    return str(action) if has_stages else f"{action.op.value}{action.microbatch}"
