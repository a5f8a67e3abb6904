"""Replays all steps and replicas of a job at once: one action after another, each for all of them.

`engine.plan.joined` replays one step of some replicas. An analysis asks for tens of thousands, all
of one program; and since its rows fix what waits for what, all can go through it in one order, each
time being an array over steps and replicas. That is quicker than compiled loops over single steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from graphlib import TopologicalSorter

import numpy as np
import numpy.typing as npt

from engine.plan.action import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op
from engine.plan.lower import Edge, counterpart, edge_of, incoming
from engine.plan.program import Program

Ns = npt.NDArray[np.int64]
Chosen = npt.NDArray[np.bool_]
"""By column, whether it is meant."""
JOINED = (Op.UNSHARD, Op.REDUCE_GRAD)
_NONE = -1


@dataclass(frozen=True, eq=False)
class Columns:
    """What each column is of; a message is of the rank that sends it."""

    program: Program

    @cached_property
    def actions(self) -> list[Action]:
        row_actions = [action for row in self.program.actions for action in row]
        return row_actions + [action for _, action in self._collectives]

    @cached_property
    def _collectives(self) -> list[tuple[int, Action]]:
        placed = enumerate(self.program.table.collectives)
        return [(rank, at.action) for rank, row in placed for at in row if at.action.op in JOINED]

    @property
    def num_actions(self) -> int:
        """How many columns are of the table's actions; collectives follow."""
        return self.program.table.num_actions

    @cached_property
    def rank(self) -> npt.NDArray[np.int64]:
        lengths = np.diff(self.program.table.offset)
        of_actions = np.repeat(np.arange(len(lengths)), lengths)
        return np.concatenate([of_actions, [rank for rank, _ in self._collectives]]).astype(int)

    @cached_property
    def stage(self) -> npt.NDArray[np.int64]:
        return np.array([action.stage for action in self.actions])

    @cached_property
    def microbatch(self) -> npt.NDArray[np.int64]:
        return np.array([action.microbatch for action in self.actions])

    @cached_property
    def link(self) -> npt.NDArray[np.int64]:
        """The first stage of a SEND's link; nothing takes the place of other columns."""
        ends = (min(edge_of(a)) if a.op in SEND_OPS else _NONE for a in self.actions)
        return np.fromiter(ends, np.int64)

    @cached_property
    def is_compute(self) -> Chosen:
        return self.of_ops(COMPUTE_OPS)

    def of_ops(self, ops: Iterable[Op]) -> Chosen:
        wanted = frozenset(ops)
        return np.array([action.op in wanted for action in self.actions])

    @cached_property
    def kinds(self) -> list[tuple[Op, int, npt.NDArray[np.int64]]]:
        """Each op and stage that takes time, with its columns."""
        of_kind: dict[tuple[Op, int], list[int]] = {}
        for at, action in enumerate(self.actions):
            if action.op not in RECV_OPS:
                of_kind.setdefault((action.op, action.stage), []).append(at)
        return [(op, stage, np.array(at)) for (op, stage), at in of_kind.items()]

    @cached_property
    def _waits(self) -> dict[int, list[int]]:
        """By column, the columns at whose ends it can begin: all that is before it anywhere."""
        places, waits = {action: at for at, action in enumerate(self.actions)}, _Waits()
        collectives = iter(range(self.num_actions, len(self.actions)))
        for row in self.program.rows:
            waits.begin_row()
            for action in row:
                if action.op in JOINED:
                    waits.add_collective(next(collectives), action)
                elif action.op in COMPUTE_OPS:
                    receive = incoming(action, self.program)
                    sent = [] if receive is None else [places[counterpart(receive)]]
                    waits.add_computation(places[action], action, sent)
                elif action.op is not Op.RESHARD:
                    waits.post(action)
        waits.add_messages(places)
        return waits.of_columns

    @cached_property
    def _order(self) -> list[int]:
        return list(TopologicalSorter(self._waits).static_order())

    def steps_ns(self, ns: Ns) -> Ns:
        """From each step's first computation or gather to its end; `ns[step, replica, column]`."""
        took = np.ascontiguousarray(np.moveaxis(ns, 2, 0))
        ends = np.zeros_like(took)
        for column in self._order:
            end = ends[column]
            for before in self._waits[column]:
                np.maximum(end, ends[before], out=end)
            if column >= self.num_actions:
                end[:] = end.max(axis=1, keepdims=True)  # ready on all replicas
            end += took[column]
        computed = np.flatnonzero(self.is_compute)
        _, first = np.unique(self.rank[computed], return_index=True)
        beginning = np.concatenate([computed[first], np.flatnonzero(self.of_ops([Op.UNSHARD]))])
        begun = (ends - took)[beginning].min(axis=(0, 2))
        return np.asarray(ends.max(axis=(0, 2)) - begun)


class _Waits:
    """What each column waits for, found on a way through the rows."""

    def __init__(self) -> None:
        self.of_columns: dict[int, list[int]] = {}
        self._posted: dict[Action, list[int]] = {}
        self.begin_row()

    def begin_row(self) -> None:
        self._computed: list[int] = []  # the computation before
        self._lane: list[int] = []  # the collective before
        self._unsharded: dict[int, list[int]] = {}

    def add_collective(self, column: int, action: Action) -> None:
        self.of_columns[column] = self._computed + self._lane
        self._lane = [column]
        if action.op is Op.UNSHARD:
            self._unsharded[action.stage] = self._lane

    def add_computation(self, column: int, action: Action, sent: list[int]) -> None:
        self.of_columns[column] = self._computed + self._unsharded.get(action.stage, []) + sent
        self._computed = [column]

    def post(self, transfer: Action) -> None:
        self._posted[transfer] = self._computed

    def add_messages(self, places: Mapping[Action, int]) -> None:
        """Each waits for both of its ends, and for the message before it in its channel."""
        channels: dict[Edge, list[int]] = {}
        for action, posted in self._posted.items():
            if action.op in SEND_OPS:
                edge = edge_of(action)
                ends = posted + self._posted[counterpart(action)]
                self.of_columns[places[action]] = ends + channels.get(edge, [])
                channels[edge] = [places[action]]
