"""The actions of a program as arrays of integers.

    offset        0         3              the rows of rank 0, then those of rank 1
    op            F  F  B   F  B  F  ...   as a code, see `engine.plan.action.OPS`
    stage         0  0  0   1  1  1
    microbatch    0  1  0   0  0  1

Loops over arrays can be compiled (`engine.arrays`). Whoever wants actions reads a table as
a sequence of rows, each a tuple of them, made when they are asked for.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from operator import itemgetter
from typing import Any

from engine.arrays import Arrays, Maker, listed
from engine.plan.action import CODES, OPS, Action, Op


class Table(Sequence[tuple[Action, ...]]):
    """The rows of all ranks; those of rank r are at `offset[r]` to `offset[r + 1]`."""

    def __init__(
        self, offset: array[int], op: array[int], stage: array[int], microbatch: array[int]
    ) -> None:
        self.offset, self.op, self.stage, self.microbatch = offset, op, stage, microbatch
        self.legal_in: object = None  # the placement and microbatches that its facts are proved for

    @classmethod
    def of(cls, rows: Iterable[Sequence[Action]]) -> Table:
        """The table of some rows of actions."""
        table = cls(array("q", [0]), array("q"), array("q"), array("q"))
        for row in rows:
            table.stage.extend(map(itemgetter(0), row))
            table.op.extend(map(CODES.__getitem__, map(itemgetter(1), row)))
            table.microbatch.extend(map(itemgetter(2), row))
            table.offset.append(len(table.op))
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

    def of_ops(self, ops: Collection[Op]) -> Table:
        """The same rows with actions of these ops alone; this table where it has no others."""
        wanted = bytes(op in ops for op in OPS)
        kept = bytes(map(wanted.__getitem__, self.op))
        if 0 not in kept:
            return self
        ends = (kept[begin:end].count(1) for begin, end in itertools.pairwise(self.offset))
        columns = (self.op, self.stage, self.microbatch)
        arrays = (array("q", itertools.compress(column, kept)) for column in columns)
        return Table(array("q", itertools.accumulate(ends, initial=0)), *arrays)

    def with_tails(self, tails: Sequence[Sequence[Action]]) -> Table:
        """The same rows with further actions at the end of each."""
        table = Table(array("q", [0]), array("q"), array("q"), array("q"))
        for (begin, end), tail in zip(itertools.pairwise(self.offset), tails, strict=True):
            further = Table.of([tail])
            for own, ours, theirs in zip(
                table.arrays[1:], self.arrays[1:], further.arrays[1:], strict=True
            ):
                own.extend(ours[begin:end])
                own.extend(theirs)
            table.offset.append(len(table.op))
        return table

    def __len__(self) -> int:
        return len(self.offset) - 1

    def __getitem__(self, rank: Any) -> Any:
        return self._rows[rank]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Table):
            return self.arrays == other.arrays
        return self._rows == other

    def __hash__(self) -> int:
        return hash(self._rows)

    def __repr__(self) -> str:
        return repr(self._rows)
