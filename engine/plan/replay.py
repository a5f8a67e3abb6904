"""Runs a lowered program in time with a duration for every single action and message.

`engine.plan.simulate` answers what a program would do if every stage had one cost; this answers
what it did, or would have done with some of its times changed: the question behind "where did the
idle time go". It keeps to what the executor does. A rank does one computation at a time in the
order of its row; SEND and RECV only stand in line. A message moves once both ends are ready and the
message before it has left their channel:

    rank 0   F0 |SEND0  F1
    rank 1      |RECV0  ...............  F0
                        ^ moving: from the later of the two, for as long as it is given

With free transfers and one cost per stage and op the times are those of `simulate`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from engine.plan.action import COMPUTE_OPS, RECV_OPS, Action
from engine.plan.lower import Edge, counterpart, edge_of, incoming
from engine.plan.program import Program
from engine.plan.spans import Span, lane_of

Times = dict[Action, tuple[int, int]]
"""By action, its start and end in nanoseconds."""


@dataclass(frozen=True)
class Replay:
    """One step that starts at 0 ns."""

    program: Program  # lowered
    compute: Times
    messages: Times  # by SEND: from when the bytes move until they are there

    @property
    def makespan_ns(self) -> int:
        """The time from the first start to the last end of a computation."""
        first = min((start for start, _ in self.compute.values()), default=0)
        return max((end for _, end in self.compute.values()), default=0) - first

    def compute_ns(self) -> list[int]:
        """Time in computation, by rank."""
        sums = [0] * self.program.world_size
        ranks = self.program.placement.ranks
        for action, (start, end) in self.compute.items():
            sums[ranks[action.stage]] += end - start
        return sums

    def idle_ns(self) -> list[int]:
        """Return the part of the makespan without computation, by rank."""
        makespan_ns = self.makespan_ns
        return [makespan_ns - compute_ns for compute_ns in self.compute_ns()]

    def spans(self) -> Iterator[Span]:
        """Computations and both ends of each message, all of step 0."""
        for action, (start, end) in self.compute.items():
            yield self._span(action, start, end)
        for send, (start, end) in self.messages.items():
            yield self._span(send, start, end)
            yield self._span(counterpart(send), start, end)

    def _span(self, action: Action, start_ns: int, end_ns: int) -> Span:
        stage, op, microbatch = action
        rank = self.program.placement.ranks[stage]
        return Span(0, rank, lane_of(op), stage, op, microbatch, start_ns, end_ns, 0)


def replay(
    lowered: Program, compute_ns: Mapping[Action, int], moving_ns: Mapping[Action, int]
) -> Replay:
    """Run a program that has its transfers, and that `lower` has proved.

    `compute_ns` holds every F, B, I and W of it; `moving_ns`, by SEND, how long a message's bytes
    move, nothing where it is not given.
    """
    walk = _Walk(lowered, compute_ns, moving_ns)
    ready = list(range(lowered.world_size))
    while ready:
        ready += walk.advance(ready.pop())
    walk.check_all_is_over()
    return Replay(lowered, walk.compute, walk.messages)


class _Walk:
    """The progress of each rank, and the ends of messages that are ready."""

    def __init__(
        self, lowered: Program, compute_ns: Mapping[Action, int], moving_ns: Mapping[Action, int]
    ) -> None:
        self._program, self._compute_ns, self._moving_ns = lowered, compute_ns, moving_ns
        self._position = [0] * lowered.world_size
        self._now = [0] * lowered.world_size
        self._posted: dict[Action, int] = {}  # by SEND: when its first end was ready
        self._channel_free: dict[Edge, int] = {}
        self.compute: Times = {}
        self.messages: Times = {}

    def advance(self, rank: int) -> list[int]:
        """Go on with a rank until it waits; returns the ranks that may go on because of it."""
        row, freed = self._program.actions[rank], []
        while self._position[rank] < len(row):
            action = row[self._position[rank]]
            if action.op not in COMPUTE_OPS:
                freed += self._post(action, self._now[rank])
            elif not self._compute(rank, action):
                break
            self._position[rank] += 1
        return freed

    def _compute(self, rank: int, action: Action) -> bool:
        """Do an action if its input is there."""
        start, receive = self._now[rank], incoming(action, self._program)
        if receive is not None:
            arrival = self.messages.get(counterpart(receive))
            if arrival is None:
                return False
            start = max(start, arrival[1])
        self._now[rank] = start + self._compute_ns[action]
        self.compute[action] = (start, self._now[rank])
        return True

    def _post(self, transfer: Action, now: int) -> list[int]:
        """One end is ready; with the second the message moves, and its receiver may go on."""
        send = counterpart(transfer) if transfer.op in RECV_OPS else transfer
        first = self._posted.get(send)
        if first is None:
            self._posted[send] = now
            return []
        channel = edge_of(send)
        start = max(first, now, self._channel_free.get(channel, 0))
        end = start + self._moving_ns.get(send, 0)
        self._channel_free[channel] = end
        self.messages[send] = (start, end)
        return [self._program.placement.ranks[channel.target]]

    def check_all_is_over(self) -> None:
        lengths = [len(row) for row in self._program.actions]
        assert self._position == lengths, "a program that hangs passed the proof"
