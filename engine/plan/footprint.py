"""Predicts the peak memory of a program's row from the costs of single actions.

A rank's bytes are walked along its row of the lowered program:

                 .3.                         .6.
                 | |  2                      | |
                 | +-------+         +-------+ | 7
          1      |         | 5       |  1      +-----+               .9.
       +---------+         +---------+               | 8             | |
     0 |                                             +---------------+ +--
     --+                                                gradients stay
       RECV_F    F         SEND_F    RECV_B  B       SEND_B          OPT

0. Parameters, optimizer state, buffers and the step's batch are always there.
1. A receive has its buffer from its post on; where a transport copies a message out only when it
   is taken, from then on, and so has each that stands before it on the channel.
2. F leaves its activations and its output. 3. On its way it rises above that.
4. The F of any microbatch costs what the first of its stage did: shapes are the same.
5. The output counts until it is sent: on queued transports until its channel's next SEND.
6. B rises with its temporaries; the first one of a stage makes the gradients, which stay.
7. B lets go of activations and input, and leaves the gradient that it sends (until then: 5).
8. Right after it, the gradient that it was given goes. I and W share 6 to 8: what I does not let
   go of goes in W.
9. The optimizer rises with its temporaries.

The costs of an action (2, 3, 6, 7, 9) are cut out of a step that was measured, from few
microbatches: the first F of each stage, and the first two of each kind of its backward, for the
first makes gradients. All else follows from the order of the row: how many microbatches are held,
when, and which messages lie about. So the outcome is a prediction of the program, not the
measurement again. Where they differ, something is held that the row does not tell of: such as what
was sent to a rank that lags behind.

How much of 8 is let go is not measured but follows from conservation: of all that one microbatch
brings to a stage, nothing may be left but the gradients. So nothing can add up over microbatches
that does not in fact. A plain count of held microbatches, as `peak_activations`, would be simpler,
but knows neither gradients nor temporaries nor what a half of a backward keeps.
"""

from __future__ import annotations

import bisect
import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.plan.action import COMPUTE_OPS, NO_INDEX, RECV_OPS, SEND_OPS, Action, Op
from engine.plan.lower import Edge, edge_of, incoming, outgoing
from engine.plan.program import Program
from engine.plan.spans import Lane, Span

StageOp = tuple[int, Op]


class Level(NamedTuple):
    """From `time_ns` on, `num_bytes` are allocated."""

    time_ns: int
    num_bytes: int


class Block(NamedTuple):
    """Memory that was allocated during a step; `end_ns` None where it outlived the step."""

    start_ns: int
    end_ns: int | None
    num_bytes: int


class Cost(NamedTuple):
    """The effect of one action on the bytes allocated."""

    rise_bytes: int  # at its highest, above its start
    net_bytes: int  # at its end, above its start
    handed_bytes: int = 0  # of what it leaves, what goes once the message is sent


@dataclass(frozen=True)
class Costs:
    """Costs by stage and op. OPT is under `NO_INDEX`; what was not measured costs nothing.

    `first` is the first action of its kind, which may make gradients; `later` the second, missing
    where a program has one microbatch.
    """

    first: Mapping[StageOp, Cost]
    later: Mapping[StageOp, Cost]

    def of(self, stage_op: StageOp, *, is_first: bool) -> Cost:
        first = self.first.get(stage_op, Cost(0, 0))
        return first if is_first else self.later.get(stage_op, first)


@dataclass(frozen=True)
class Messages:
    """Bytes of one microbatch's messages, and how long a transport holds them.

    `forward_bytes[stage]` goes from a stage to the next, `backward_bytes[stage]` comes back for it.
    `is_posted`: a receive has its buffer from its post, not only when its message is taken, or one
    behind it on the channel.
    `is_queued`: what is sent is let go at the next SEND of its channel, not at its own.
    """

    forward_bytes: Sequence[int]
    backward_bytes: Sequence[int]
    is_posted: bool = True
    is_queued: bool = True

    def received_bytes(self, receive: Action) -> int:
        if receive.op is Op.RECV_F:
            return self.forward_bytes[receive.stage - 1]
        return self.backward_bytes[receive.stage]


def predict_peak(
    lowered: Program, rank: int, static_bytes: int, costs: Costs, messages: Messages
) -> int:
    """The most bytes that a rank has allocated in a step, its optimizer included.

    `static_bytes` is there all the time: parameters, optimizer state, buffers, the batch.
    """
    walk = _Walk(lowered, static_bytes, costs, messages)
    for action in lowered.actions[rank]:
        walk.do(action)
    walk.do(Action(NO_INDEX, Op.OPT, NO_INDEX))
    return walk.peak_bytes


def received_before_computing(lowered: Program, rank: int, messages: Messages) -> int:
    """Bytes of the messages that a rank has room for when its first compute action begins."""
    row = lowered.actions[rank]
    position = next((at for at, a in enumerate(row) if a.op in COMPUTE_OPS), len(row))
    receives = [action for action in row[:position] if action.op in RECV_OPS]
    if not messages.is_posted:
        inbox = _Inbox()
        for receive in receives:
            inbox.post(receive)
        taken = (incoming(action, lowered) for action in row[position : position + 1])
        receives = [r for receive in taken if receive is not None for r in inbox.take(receive)]
    return sum(map(messages.received_bytes, receives))


class _Inbox:
    """Posted receives whose messages are still outside the rank's own memory, by channel."""

    def __init__(self) -> None:
        self._posted: dict[Edge, deque[Action]] = {}
        self._copied: set[Action] = set()  # out of their turn

    def post(self, receive: Action) -> None:
        self._posted.setdefault(edge_of(receive), deque()).append(receive)

    def take(self, receive: Action) -> list[Action]:
        """Return the receives whose messages are copied out when this one's is taken.

        They are it and those before it on its channel; none if that has been done.
        """
        if receive in self._copied:
            self._copied.remove(receive)
            return []
        posted, copied = self._posted[edge_of(receive)], []
        while (first := posted.popleft()) != receive:
            copied.append(first)
        self._copied.update(copied)
        return [*copied, receive]


class _Walk:
    """Follows a program and counts the bytes that are allocated after each action."""

    def __init__(
        self, lowered: Program, static_bytes: int, costs: Costs, messages: Messages
    ) -> None:
        self._lowered, self._costs, self._messages = lowered, costs, messages
        self._level = self.peak_bytes = static_bytes
        self._done: set[StageOp] = set()
        self._to_send: dict[Action, int] = {}
        self._queued: dict[Edge, int] = {}  # what the channel's next SEND lets go of
        self._inbox = _Inbox()

    def do(self, action: Action) -> None:
        if action.op in RECV_OPS:
            if self._messages.is_posted:
                self._add(self._messages.received_bytes(action))
            else:
                self._inbox.post(action)
        elif action.op in SEND_OPS:
            self._send(action)
        else:
            self._compute(action)

    def _compute(self, action: Action) -> None:
        receive = incoming(action, self._lowered)
        if receive is not None and not self._messages.is_posted:
            self._add(sum(map(self._messages.received_bytes, self._inbox.take(receive))))
        key = action.stage, action.op
        cost = self._costs.of(key, is_first=key not in self._done)
        self._done.add(key)
        self.peak_bytes = max(self.peak_bytes, self._level + cost.rise_bytes)
        self._add(cost.net_bytes)
        if (send := outgoing(action, self._lowered)) is not None:
            self._to_send[send] = cost.handed_bytes
        if action.op in (Op.B, Op.I):
            self._add(-self._let_go_after(*key))

    def _send(self, send: Action) -> None:
        sent_bytes = self._to_send.pop(send, 0)
        if self._messages.is_queued:
            channel = edge_of(send)
            sent_bytes, self._queued[channel] = self._queued.get(channel, 0), sent_bytes
        self._add(-sent_bytes)

    def _let_go_after(self, stage: int, op: Op) -> int:
        """What goes right after a B or I (8): all that would be left of a microbatch otherwise."""
        last = self._lowered.num_stages - 1
        forward, backward = self._messages.forward_bytes, self._messages.backward_bytes
        given_bytes = backward[stage] if stage < last else 0
        if (stage, op) not in self._costs.later:  # gradients cannot be told from what is left
            return given_bytes
        received_bytes = given_bytes + (forward[stage - 1] if stage > 0 else 0)
        halves = (Op.I, Op.W) if op is Op.I else (Op.B,)
        costs = [self._costs.of((stage, one), is_first=False) for one in (Op.F, *halves)]
        sent_bytes = self._handed(stage, Op.F, forward[stage] if stage < last else 0)
        sent_bytes += self._handed(stage, op, backward[stage - 1] if stage > 0 else 0)
        return received_bytes + sum(cost.net_bytes for cost in costs) - sent_bytes

    def _handed(self, stage: int, op: Op, message_bytes: int) -> int:
        """What a stage hands on: to its SEND as measured, to a neighbour on this rank all of it."""
        if outgoing(Action(stage, op, 0), self._lowered) is None:
            return message_bytes
        return self._costs.of((stage, op), is_first=False).handed_bytes

    def _add(self, num_bytes: int) -> None:
        self._level += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._level)


def costs_of(
    timeline: Sequence[Level], blocks: Iterable[Block], spans: Iterable[Span]
) -> tuple[int, Costs]:
    """The costs that a rank's measured step shows, and what it had when it first computed.

    `timeline` and `spans` are of one clock; `blocks` tell which memory outlives the spans.
    """
    compute = sorted((s for s in spans if s.lane is Lane.COMPUTE), key=lambda span: span.start_ns)
    chosen = _first_two(compute)
    handed = _handed_bytes(blocks, compute)
    first, later = (
        {
            key: _cost(timeline, compute[i[n]], handed[i[n]])
            for key, i in chosen.items()
            if n < len(i)
        }
        for n in (0, 1)
    )
    later |= {key: cost for key, cost in first.items() if key[1] is Op.F}
    return _level_at(timeline, compute[0].start_ns), Costs(first, later)


def _first_two(compute: Sequence[Span]) -> dict[StageOp, list[int]]:
    """Positions of the first two spans of each kind; of F, all of which are alike, the first."""
    chosen: dict[StageOp, list[int]] = {}
    for position, span in enumerate(compute):
        positions = chosen.setdefault((span.stage, span.op), [])
        if len(positions) < (1 if span.op is Op.F else 2):
            positions.append(position)
    return chosen


def _handed_bytes(blocks: Iterable[Block], compute: Sequence[Span]) -> list[int]:
    """Return the bytes that each span allocated and that were freed between spans, once sent."""
    starts = [span.start_ns for span in compute]

    def position(time_ns: int) -> int | None:
        at = bisect.bisect_right(starts, time_ns) - 1
        return at if at >= 0 and time_ns <= compute[at].end_ns else None

    handed = [0] * len(compute)
    for block in blocks:
        at = position(block.start_ns)
        if at is not None and block.end_ns is not None and position(block.end_ns) is None:
            handed[at] += block.num_bytes
    return handed


def _cost(timeline: Sequence[Level], span: Span, handed_bytes: int) -> Cost:
    start_bytes = _level_at(timeline, span.start_ns)
    first, stop = (_position(timeline, time_ns) for time_ns in (span.start_ns, span.end_ns))
    within = [level.num_bytes for level in itertools.islice(timeline, first, stop)]
    end_bytes = within[-1] if within else start_bytes
    return Cost(max([start_bytes, *within]) - start_bytes, end_bytes - start_bytes, handed_bytes)


def _level_at(timeline: Sequence[Level], time_ns: int) -> int:
    """The bytes allocated at a time; before the timeline begins, as when it does."""
    return timeline[max(0, _position(timeline, time_ns) - 1)].num_bytes


def _position(timeline: Sequence[Level], time_ns: int) -> int:
    """Return how many levels begin up to a time."""
    return bisect.bisect_right(timeline, time_ns, key=lambda level: level.time_ns)
