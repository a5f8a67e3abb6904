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
from typing import Any, NamedTuple

from engine.arrays import Arrays, Maker, filled, listed
from engine.plan.action import CODES, OPS, Action, Op


class Row(NamedTuple):
    """Actions in order, as arrays; schedules are made of them, thousands of actions at a time."""

    op: array[int]
    stage: array[int]
    microbatch: array[int]

    @classmethod
    def of(cls, actions: Sequence[Action]) -> Row:
        """The row of some actions."""
        op = map(CODES.__getitem__, map(itemgetter(1), actions))
        columns = map(itemgetter(0), actions), map(itemgetter(2), actions)
        return cls(array("q", op), *(array("q", column) for column in columns))

    @classmethod
    def alike(cls, op: Op, stage: array[int] | int, microbatch: array[int]) -> Row:
        """A row of one op, for microbatches in this order; of one stage, or each of its own."""
        length = len(microbatch)
        stages = filled(stage, length) if isinstance(stage, int) else stage
        return cls(filled(CODES[op], length), stages, microbatch)

    def as_op(self, op: Op) -> Row:
        """The same stages and microbatches with another op."""
        return Row.alike(op, self.stage, self.microbatch)

    def append(self, further: Row) -> None:
        """Put further actions at the end."""
        for own, more in zip(self, further, strict=True):
            own.extend(more)


def woven(*rows: tuple[int, Row]) -> Row:
    """One row of several, which take turns: each gives an action a turn, from a turn of its own on.

    F from turn -2, I from 0, W from 1:   F0 F1 | F2 I0 | F3 I1 W0 | I2 W1 | I3 W2 | W3
    """
    ends = [first + len(row.op) for first, row in rows]
    turns = sorted({*ends, *(first for first, _ in rows)})
    whole = Row(*(array("q") for _ in range(3)))
    for begin, end in itertools.pairwise(turns):  # the same rows take part in each of these turns
        parts = [
            (row, slice(begin - first, end - first))
            for (first, row), last in zip(rows, ends, strict=True)
            if first <= begin and end <= last
        ]
        for column, of_whole in enumerate(whole):
            mixed = filled(0, len(parts) * (end - begin))
            for at, (row, part) in enumerate(parts):
                mixed[at :: len(parts)] = row[column][part]
            of_whole.extend(mixed)
    return whole


class Table(Sequence[tuple[Action, ...]]):
    """The rows of all ranks; those of rank r are at `offset[r]` to `offset[r + 1]`."""

    def __init__(
        self, offset: array[int], op: array[int], stage: array[int], microbatch: array[int]
    ) -> None:
        self.offset, self.op, self.stage, self.microbatch = offset, op, stage, microbatch
        self.legal_in: object = None  # placement, microbatches and slices that it is proved for

    @classmethod
    def of(cls, rows: Iterable[Sequence[Action] | Row]) -> Table:
        """The table of some rows of actions, one for each rank."""
        offset, whole = array("q", [0]), Row.of(())
        for row in rows:
            whole.append(row if isinstance(row, Row) else Row.of(row))
            offset.append(len(whole.op))
        return cls(offset, *whole)

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

    def those(self, indices: Sequence[int]) -> list[Action]:
        """The actions at some indices of the arrays."""
        ops = map(OPS.__getitem__, map(self.op.__getitem__, indices))
        stages, microbatches = self.stage.__getitem__, self.microbatch.__getitem__
        return list(map(Action, map(stages, indices), ops, map(microbatches, indices)))

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
        arrays = (array("q", itertools.compress(column, kept)) for column in self.arrays[1:])
        return Table(array("q", itertools.accumulate(ends, initial=0)), *arrays)

    def with_tails(self, tails: Sequence[Sequence[Action]]) -> Table:
        """The same rows with further actions at the end of each."""
        rows = []
        for (begin, end), tail in zip(itertools.pairwise(self.offset), tails, strict=True):
            rows.append(Row(*(column[begin:end] for column in self.arrays[1:])))
            rows[-1].append(Row.of(tail))
        return Table.of(rows)

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
