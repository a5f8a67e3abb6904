"""A program: for each rank, the ordered actions of one step. Text in and out.

The program is the single description of a schedule. Rules check it, lowering adds its transfers,
the simulator predicts it and the executor runs it; none of them knows the schedule's name.
"""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass

from engine.plan.action import Action, parse_action


@dataclass(frozen=True)
class Placement:
    """Which rank owns each stage: `ranks[stage]`."""

    ranks: tuple[int, ...]
    world_size: int

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return tuple(stage for stage, owner in enumerate(self.ranks) if owner == rank)


def loop_placement(world_size: int, stages_per_rank: int = 1) -> Placement:
    """Stage s on rank s mod p: the stages go round the ranks `stages_per_rank` times."""
    num_stages = world_size * stages_per_rank
    return Placement(tuple(stage % world_size for stage in range(num_stages)), world_size)


@dataclass(frozen=True)
class Program:
    """The actions of one step, by rank, in the order in which each rank issues them."""

    schedule: str
    placement: Placement
    num_microbatches: int
    actions: tuple[tuple[Action, ...], ...]

    @property
    def world_size(self) -> int:
        return self.placement.world_size

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages


def to_csv(program: Program) -> str:
    """torch's form: a row per rank, a cell per action."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(
        [str(action) for action in row] for row in program.actions
    )
    return text.getvalue()


def actions_from_csv(text: str) -> tuple[tuple[Action, ...], ...]:
    """Read torch's CSV form; empty cells are idle slots and carry no meaning here.

    Raises ValueError naming row and column of a cell that is not an action.
    """
    rows = []
    for rank, cells in enumerate(csv.reader(io.StringIO(text))):
        rows.append(tuple(_cell(rank, i, cell) for i, cell in enumerate(cells) if cell.strip()))
    return tuple(rows)


def _cell(rank: int, column: int, text: str) -> Action:
    try:
        return parse_action(text)
    except ValueError as error:
        raise ValueError(f"rank {rank}, column {column}: {error}") from None


def to_json(program: Program) -> str:
    """Everything needed to rebuild the program, as one JSON object."""
    return json.dumps(
        {
            "schedule": program.schedule,
            "num_microbatches": program.num_microbatches,
            "placement": list(program.placement.ranks),
            "actions": [[str(action) for action in row] for row in program.actions],
        }
    )


def from_json(text: str) -> Program:
    """The inverse of `to_json`; raises ValueError or KeyError on other text."""
    data = json.loads(text)
    rows = tuple(tuple(parse_action(cell) for cell in row) for row in data["actions"])
    placement = Placement(tuple(data["placement"]), len(rows))
    return Program(data["schedule"], placement, data["num_microbatches"], rows)


def draw(program: Program, mark: tuple[int, int] | None = None, context: int = 8) -> str:
    """The program as a grid, a row per rank; `mark` is a (rank, position) shown in brackets.

    With a mark, only `context` columns on either side of it are drawn.
    """
    first, last = 0, max((len(row) for row in program.actions), default=0)
    if mark is not None:
        first, last = max(0, mark[1] - context), mark[1] + context + 1
    rows = [
        [_drawn(action, (rank, first + i) == mark) for i, action in enumerate(row[first:last])]
        for rank, row in enumerate(program.actions)
    ]
    width = max((len(cell) for row in rows for cell in row), default=0)
    return "\n".join(
        f"rank {rank}: " + " ".join(cell.ljust(width) for cell in row).rstrip()
        for rank, row in enumerate(rows)
    )


def _drawn(action: Action, is_marked: bool) -> str:
    return f"[{action}]" if is_marked else str(action)
