"""Proves that D replicas of a pipeline cannot hang in their collectives.

Rank r of each replica has one lane, on which UNSHARDs and REDUCE_GRADs are done in the order in
which it issues them; one is done when it is at the head of the lane of rank r in all replicas.
None blocks its rank. A computation waits until its stage's UNSHARD is done, and for its message;
a step is over when all lanes are empty. RESHARD sends nothing.

Lanes of different orders never empty. Lanes of one order can hang too, through messages, and
although no replica would alone. Here 0F0 of replica 0 waits for 0UNSHARD of replica 1, which is
behind 0B0; that waits for 1F0, this for 1UNSHARD of replica 0, and that is behind 1F0, which waits
for the 0F0 that all began with:

                 rank 0                  rank 1
    replica 0    0UNSHARD 0F0 0B0        1F0 1UNSHARD 1B0
    replica 1    0F0 0B0 0UNSHARD        1UNSHARD 1F0 1B0
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple

from engine.plan.action import COMPUTE_OPS, Action, Op
from engine.plan.lower import Sharing, counterpart, incoming, prove_no_deadlock
from engine.plan.program import Program
from engine.plan.rules import ProgramError

_JOINED = (Op.UNSHARD, Op.REDUCE_GRAD)


class _Place(NamedTuple):
    """An action's place: the replica, the rank, and the position in the rank's row."""

    replica: int
    rank: int
    position: int


def prove_replicas_join(replicas: Sequence[Program]) -> None:
    """Raise ProgramError if replicas of a pipeline, each with its transfers, can hang.

    Each must have transfers that cannot hang by themselves; its stage edges have channels of their
    own (`Sharing.STAGE_EDGE`), on which a message moves once both ends are posted. The error is of
    the replica whose action it names. Raises ValueError where the replicas differ in shape. Each
    action is visited a bounded number of times.
    """
    for replica in replicas:
        if replica.placement != replicas[0].placement:
            raise ValueError("replicas of one pipeline have one placement")
        prove_no_deadlock(replica, Sharing.STAGE_EDGE)
    lanes = [[_lane(replica, rank) for rank in range(replica.world_size)] for replica in replicas]
    for number, replica in enumerate(replicas):
        for rank in range(replica.world_size):
            _check_lane(replicas, lanes, number, rank)
    _Walk(replicas, lanes).check()


def _lane(program: Program, rank: int) -> list[int]:
    """The positions of what a rank puts on its lane."""
    return [at for at, action in enumerate(program.rows[rank]) if action.op in _JOINED]


def _check_lane(
    replicas: Sequence[Program], lanes: list[list[list[int]]], number: int, rank: int
) -> None:
    """Raise ProgramError at the first place where a lane is not that of replica 0."""
    first, other = replicas[0].rows[rank], replicas[number].rows[rank]
    for here, there in zip_longest(lanes[0][rank], lanes[number][rank]):
        expected = first[here] if here is not None else None
        if there is None or other[there] != expected:
            position = len(other) if there is None else there
            what = f"has {expected} at this place of the lane" if expected else "has no more"
            reason = f"is of replica {number}; replica 0 {what}, so neither is ever done"
            raise ProgramError(replicas[number], rank, position, reason)


class _Walk:
    """All ranks of all replicas, each taken as far as it can go."""

    def __init__(self, replicas: Sequence[Program], lanes: list[list[list[int]]]) -> None:
        self._replicas, self._lanes = replicas, lanes
        self._sent = [
            {action: at for row in replica.rows for at, action in enumerate(row)}
            for replica in replicas
        ]
        pairs = [(d, rank) for d, one in enumerate(replicas) for rank in range(one.world_size)]
        self._position = dict.fromkeys(pairs, 0)
        self._num_on_lane = dict.fromkeys(pairs, 0)
        self._unshard: dict[tuple[int, int], dict[int, int]] = {pair: {} for pair in pairs}

    def check(self) -> None:
        """Walk to the end; raise ProgramError with the circle of waits where there is none."""
        todo = list(self._position)
        waiting: dict[tuple[int, int], list[tuple[int, int]]] = {}
        while todo:
            pair = todo.pop()
            begun_at = self._position[pair]
            while self._position[pair] < len(self._row(pair)):
                if (place := self._wait_of(pair)) is not None:
                    waiting.setdefault(place[:2], []).append(pair)
                    break
                self._pass(pair)
            if self._position[pair] > begun_at:
                todo += waiting.pop(pair, [])
        for pair, position in self._position.items():
            if position < len(self._row(pair)):
                raise self._circle(pair)

    def _row(self, pair: tuple[int, int]) -> tuple[Action, ...]:
        return self._replicas[pair[0]].rows[pair[1]]

    def _pass(self, pair: tuple[int, int]) -> None:
        action = self._row(pair)[self._position[pair]]
        if action.op is Op.UNSHARD:
            self._unshard[pair][action.stage] = self._num_on_lane[pair]
        self._num_on_lane[pair] += action.op in _JOINED
        self._position[pair] += 1

    def _wait_of(self, pair: tuple[int, int]) -> _Place | None:
        """Return an action not issued yet without which the next one of a rank cannot start."""
        replica, rank = pair
        action = self._row(pair)[self._position[pair]]
        if action.op not in COMPUTE_OPS:
            return None
        program, places = self._replicas[replica], []
        if (receive := incoming(action, program)) is not None:
            send = counterpart(receive)
            owner = program.placement.ranks[send.stage]
            places.append(_Place(replica, owner, self._sent[replica][send]))
        if (turn := self._unshard[pair].get(action.stage)) is not None:
            places += [_Place(d, rank, lane[rank][turn]) for d, lane in enumerate(self._lanes)]
        return next((p for p in places if self._position[p[:2]] <= p.position), None)

    def _circle(self, pair: tuple[int, int]) -> ProgramError:
        """Follow the waits from a rank until one comes up again: that is the circle."""
        waits: dict[tuple[int, int], str] = {}
        while pair not in waits:
            place = self._wait_of(pair)
            assert place is not None  # else it would go on
            action = self._row(pair)[self._position[pair]]
            awaited = self._row(place[:2])[place.position]
            waits[pair] = f"{action} of replica {pair[0]} waits for {awaited} of replica {place[0]}"
            pair = place[:2]
        pairs = list(waits)
        circle = "; ".join(waits[one] for one in pairs[pairs.index(pair) :])
        error_at = pair[1], self._position[pair]
        return ProgramError(self._replicas[pair[0]], *error_at, f"hangs: {circle}")
