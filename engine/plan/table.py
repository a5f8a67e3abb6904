"""The actions of a program as arrays of integers.

    offset        0         3              the rows of rank 0, then those of rank 1
    op            F  F  B   F  B  F  ...   as a code, see `engine.plan.action.OPS`
    stage         0  0  0   1  1  1
    microbatch    0  1  0   0  0  1

Collectives lie beside the arrays, each with the position before which it stands: what loops over
the arrays, and who reads a table as rows, sees computations and transfers only.

Loops over arrays can be compiled (`engine.arrays`). Whoever wants actions reads a table as
a sequence of rows, each a tuple of them, made when they are asked for.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any, NamedTuple

from engine.arrays import Arrays, Maker, listed
from engine.plan.action import CODES, COLLECTIVE_OPS, OPS, Action


class Placed(NamedTuple):
    """A collective, and the position in its row of a table before which it stands."""

    position: int
    action: Action


class Table(Sequence[tuple[Action, ...]]):
    """The rows of all ranks; those of rank r are at `offset[r]` to `offset[r + 1]`."""

    def __init__(
        self, offset: array[int], op: array[int], stage: array[int], microbatch: array[int]
    ) -> None:
        self.offset, self.op, self.stage, self.microbatch = offset, op, stage, microbatch
        self.collectives: tuple[tuple[Placed, ...], ...] = ()  # by rank; nothing without any
        self.legal_in: object = None  # the placement and microbatches that its facts are proved for

    @classmethod
    def of(cls, rows: Iterable[Sequence[Action]]) -> Table:
        """The table of some rows of actions."""
        table = cls(array("q", [0]), array("q"), array("q"), array("q"))
        collectives = []
        for row in rows:
            kept, placed = row, list[Placed]()
            if not COLLECTIVE_OPS.isdisjoint(map(itemgetter(1), row)):
                kept = [action for action in row if action.op not in COLLECTIVE_OPS]
                for at, action in enumerate(row):
                    if action.op in COLLECTIVE_OPS:
                        placed.append(Placed(at - len(placed), action))
            collectives.append(tuple(placed))
            table.stage.extend(map(itemgetter(0), kept))
            table.op.extend(map(CODES.__getitem__, map(itemgetter(1), kept)))
            table.microbatch.extend(map(itemgetter(2), kept))
            table.offset.append(len(table.op))
        if any(collectives):
            table.collectives = tuple(collectives)
        return table

    @property
    def arrays(self) -> tuple[array[int], ...]:
        return self.offset, self.op, self.stage, self.microbatch

    @cached_property
    def _lists(self) -> tuple[list[int], ...]:
        return tuple(values.tolist() for values in self.arrays)

    def made_by(self, made: Maker) -> Arrays:
        """The arrays, or lists of the same."""
        return self._lists if made is listed else self.arrays

    @property
    def num_actions(self) -> int:
        return len(self.op)

    def part(self, rank: int, first: int = 0, last: int | None = None) -> tuple[Action, ...]:
        """The actions of a rank from one position to before another."""
        begin, end = self.offset[rank], self.offset[rank + 1]
        chosen = slice(min(begin + first, end), end if last is None else min(begin + last, end))
        ops = map(OPS.__getitem__, self.op[chosen])
        return tuple(map(Action, self.stage[chosen], ops, self.microbatch[chosen]))

    def at(self, index: int) -> Action:
        """The action at an index of the arrays."""
        return Action(self.stage[index], OPS[self.op[index]], self.microbatch[index])

    def place(self, index: int) -> tuple[int, int]:
        """Rank and position of the action at an index."""
        rank = bisect_right(self.offset, index) - 1
        return rank, index - self.offset[rank]

    @cached_property
    def _rows(self) -> tuple[tuple[Action, ...], ...]:
        return tuple(map(self.part, range(len(self))))

    @cached_property
    def whole_rows(self) -> tuple[tuple[Action, ...], ...]:
        """The rows with their collectives."""
        if not self.collectives:
            return self._rows
        merged = []
        for row, placed in zip(self._rows, self.collectives, strict=True):
            whole = list(row)
            for number, (position, action) in enumerate(placed):
                whole.insert(position + number, action)
            merged.append(tuple(whole))
        return tuple(merged)

    def without_collectives(self) -> Table:
        """The same arrays, and what was proved of them, alone."""
        table = Table(*self.arrays)
        table.legal_in = self.legal_in
        return table

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, rank: Any) -> Any:
        return self._rows[rank]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table):
            return self.arrays == other.arrays and self.collectives == other.collectives
        return self._rows == other

    def __hash__(self) -> int:
        return hash(self._rows)

    def __repr__(self) -> str:
        return repr(self._rows)
