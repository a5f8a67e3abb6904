"""The one memory model: the bytes of a rank after each action of its row, and their peak.

The trainer predicts a step with it from the bytes of the actions that it has measured, a plan and
the solver's limits from the costs of stages (`engine.plan.model_costs`).

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

Where there is no backward, F itself lets go of its input (7): nothing of a microbatch stays.

All else follows from the order of the row: how many microbatches are held, when, and which messages
lie about. Where a measurement differs, something is held that the row does not tell of: such as
what was sent to a rank that lags behind.

The bytes of single actions (2, 3, 6, 7, 9) are either cut out of a measured step, from few
microbatches: the first F of each stage, and the first two of each kind of its backward. How much of
8 is let go then follows from conservation: of all that one microbatch brings to a stage, nothing
may be left but the gradients. So nothing can add up over microbatches that does not in fact.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from engine.plan.action import CODES, COLLECTIVE_OPS, NO_INDEX, Op
from engine.plan.model_costs import COMPUTING, StageBytes
from engine.plan.program import Program
from engine.plan.sharded_bytes import (
    NO_BYTES,
    NOTHING_SHARED,
    ActionBytes,
    SharedBytes,
    changes_along,
)

StageOp = tuple[int, Op]


@dataclass(frozen=True)
class MeasuredBytes:
    """Bytes of actions by stage and op. OPT is under `NO_INDEX`; what was not measured has none.

    `first` is the first action of its kind, which may make gradients; `later` the second, missing
    where a program has one microbatch.
    """

    first: Mapping[StageOp, ActionBytes]
    later: Mapping[StageOp, ActionBytes]


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


class MemoryRow:
    """A rank's row of a lowered program, as arrays from which its bytes follow for any costs."""

    def __init__(
        self, lowered: Program, rank: int, *, is_posted: bool = True, is_queued: bool = True
    ) -> None:
        """Take what is known of the transport as `Messages` says it."""
        table, ranks = lowered.table, lowered.placement.ranks
        self.owned = lowered.placement.stages_of(rank)
        self._last_ops = (Op.B, Op.I) if lowered.has_backward else (Op.F,)
        self._crosses = [here != there for here, there in itertools.pairwise(ranks)]
        row = slice(*table.offset[rank : rank + 2])
        op, stage, microbatch = (np.frombuffer(one, np.int64)[row] for one in table.arrays[1:])
        width, nothing = int(microbatch.max(initial=0)) + 1, 2 * len(COMPUTING) * len(self.owned)
        places = np.zeros(len(ranks), np.int64)
        places[list(self.owned)] = np.arange(len(self.owned))
        place = places[stage]
        fact = place * width + microbatch
        computes = np.flatnonzero(op < len(COMPUTING))
        self._first = int(computes[0]) if len(computes) else len(op)
        # By position: the kind of a computation, as `StageBytes` has it; the kind of that whose
        # message is let go; and what messages there is room for from there on, and how many.
        self._kind, self._sent = np.full((2, len(op)), nothing)
        of_op = place * len(COMPUTING) + op
        # The first of B and W makes the gradients of its stage.
        firsts = _first_of_each(computes, np.where(op == CODES[Op.W], of_op - 2, of_op))
        self._kind[computes] = 2 * of_op[computes] + 1
        self._kind[firsts] -= 1
        self._message, self._num_arriving = np.zeros((2, len(op)), np.int64)
        for way, (computing, send, receive) in enumerate(
            [((Op.F,), Op.SEND_F, Op.RECV_F), ((Op.B, Op.I), Op.SEND_B, Op.RECV_B)]
        ):
            users = np.isin(op, [CODES[one] for one in computing])
            made_by = np.full(len(self.owned) * width, nothing)
            made_by[fact[users]] = self._kind[users]
            for own in range(len(self.owned)):
                sends, receives, takes = (
                    np.flatnonzero(which & (place == own))
                    for which in (op == CODES[send], op == CODES[receive], users)
                )
                sent = made_by[fact[sends]]
                self._sent[sends] = [nothing, *sent[:-1]][: len(sent)] if is_queued else sent
                count = np.ones(len(receives), np.int64)
                if not is_posted:
                    turn = np.zeros(width, np.int64)
                    turn[microbatch[receives]] = np.arange(1, len(receives) + 1)
                    count = np.diff(np.maximum.accumulate(turn[microbatch[takes]]), prepend=0)
                arrives = receives if is_posted else takes
                self._message[arrives] = 2 * own + way
                self._num_arriving[arrives] = count
        # Where what is in common with replicas may change: at collectives, and where a stage may
        # make gradients, which is once between two of them.
        is_shared = np.isin(op, [CODES[one] for one in COLLECTIVE_OPS])
        makes = np.flatnonzero((op == CODES[Op.B]) | (op == CODES[Op.W]))
        between = np.cumsum(is_shared) * len(ranks) + stage
        makes = _first_of_each(makes, between)
        self._changing = np.union1d(np.flatnonzero(is_shared), makes)
        self._actions = table.those((self._changing + row.start).tolist())
        # Which of these were measured: of each op the first action, and the second.
        firsts = _first_of_each(computes, of_op)
        seconds = _first_of_each(np.setdiff1d(computes, firsts), of_op)
        measured = {at: 2 * of_op[at] for at in firsts} | {at: 2 * of_op[at] + 1 for at in seconds}
        self._measured = [measured.get(at, nothing) for at in self._changing]

    def peak(
        self,
        static_bytes: int,
        stages: Sequence[StageBytes],
        optimizer: ActionBytes = NO_BYTES,
        shared: SharedBytes = NOTHING_SHARED,
    ) -> int:
        """The most bytes that the rank has allocated in a step, its optimizer included.

        `static_bytes` is there all the time; `stages` are those of the rank, in order; `shared` is
        what it has in common with its replicas, where there are any: gradients are then its.
        """
        highest, after, rest = self._levels(stages, shared)
        level = int(after[-1]) if len(after) else 0
        peak = max(0, int(highest.max(initial=0)), level + rest.rise_bytes)
        level += rest.net_bytes
        return static_bytes + max(peak, level + max(optimizer.rise_bytes, optimizer.net_bytes))

    def before_computing(
        self, stages: Sequence[StageBytes], shared: SharedBytes = NOTHING_SHARED
    ) -> int:
        """Bytes that the row has brought when its first computation begins.

        They are of messages that there is room for, and of stages that are gathered.
        """
        _, after, _ = self._levels(stages, shared)
        before = int(after[self._first - 1]) if self._first else 0
        if self._first < len(after):
            before += int(self._arriving(stages)[self._first])
        return before

    def _arriving(self, stages: Sequence[StageBytes]) -> npt.NDArray[np.int64]:
        """By position, the bytes of messages that there is room for from there on."""
        received = [n for one in stages for n in (one.input_bytes, one.given_bytes)]
        return np.array(received, np.int64)[self._message] * self._num_arriving

    def _levels(
        self, stages: Sequence[StageBytes], shared: SharedBytes
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], ActionBytes]:
        """The bytes during and after each action, above those at the start, and what follows."""
        rise, net, sent = (
            np.array([*itertools.chain.from_iterable(column), 0], np.int64)
            for column in zip(*((one.rise, one.net, one.sent) for one in stages), strict=True)
        )
        arriving = self._arriving(stages)
        change, highest = net[self._kind] - sent[self._sent], rise[self._kind]
        rest = NO_BYTES
        if shared.buckets:
            *changes, rest = changes_along(self._actions, shared)
            for at, one in zip(self._changing, changes, strict=True):
                highest[at] += one.rise_bytes
                change[at] += one.net_bytes
        change += arriving
        after = np.cumsum(change)
        return after - change + arriving + highest, after, rest

    def of_measured(
        self, measured: MeasuredBytes, messages: Messages, shared: SharedBytes = NOTHING_SHARED
    ) -> list[StageBytes]:
        """The bytes of the rank's stages from those of actions that were measured.

        These have made gradients in common with replicas, which count along the row.
        """
        made: dict[int, int] = {}
        if shared.buckets:
            *changes, _ = changes_along(self._actions, shared)
            made = {k: one.net_bytes for k, one in zip(self._measured, changes, strict=True)}
        last, stages = len(self._crosses), []
        for place, stage in enumerate(self.owned):
            actions: list[ActionBytes] = []
            for op, is_later in itertools.product(COMPUTING, (False, True)):
                is_known = is_later and (stage, op) in measured.later
                of_nth = measured.later if is_known else measured.first
                one = of_nth.get((stage, op), NO_BYTES)
                num_bytes = made.get(2 * (place * len(COMPUTING) + CODES[op]) + is_known, 0)
                net_bytes = one.net_bytes - num_bytes
                handed_bytes = max(0, one.handed_bytes - num_bytes)  # gradients go between spans
                rise_bytes = max(one.rise_bytes - num_bytes, net_bytes)
                actions.append(ActionBytes(rise_bytes, net_bytes, handed_bytes))
            later_of = dict(zip(COMPUTING, actions[1::2], strict=True))
            taken = messages.forward_bytes[stage - 1] if stage else 0
            given = messages.backward_bytes[stage] if stage < last else 0
            for at, op in enumerate(COMPUTING):
                if op not in self._last_ops:
                    continue
                # What it frees when it ends (8), which would otherwise stay.
                left, sending = 0, [(Op.F, stage, messages.forward_bytes)]
                if op is not Op.F:
                    left, sending = given, [*sending, (op, stage - 1, messages.backward_bytes)]
                if (stage, op) in measured.later:  # else gradients and what is left are one number
                    whole = {Op.I: (Op.F, Op.I, Op.W), Op.B: (Op.F, Op.B), Op.F: (Op.F,)}[op]
                    left += taken + sum(later_of[one].net_bytes for one in whole)
                    # What goes with the message: as measured at a SEND, all of it to a stage here.
                    for maker, edge, message_bytes in sending:
                        if 0 <= edge < last:
                            handed = later_of[maker].handed_bytes
                            left -= handed if self._crosses[edge] else message_bytes[edge]
                for n in (2 * at, 2 * at + 1):
                    actions[n] = actions[n]._replace(net_bytes=actions[n].net_bytes - left)
            rises, nets, sent = zip(*actions, strict=True)
            stages.append(StageBytes(rises, nets, sent, taken, given))
        return stages


def _first_of_each(
    positions: npt.NDArray[np.int64], group: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The first of some positions for each group that they are of."""
    first: npt.NDArray[np.int64] = positions[np.unique(group[positions], return_index=True)[1]]
    return first


def predict_peak(
    lowered: Program,
    rank: int,
    start_bytes: int,
    measured: MeasuredBytes,
    messages: Messages,
    shared: SharedBytes = NOTHING_SHARED,
) -> int:
    """The peak of a rank from a measured step's actions.

    `start_bytes` were allocated when its first computation began.
    """
    how = {"is_posted": messages.is_posted, "is_queued": messages.is_queued}
    row = MemoryRow(lowered, rank, **how)
    stages = row.of_measured(measured, messages, shared)
    static_bytes = start_bytes - row.before_computing(stages, shared)
    optimizer = measured.first.get((NO_INDEX, Op.OPT), NO_BYTES)
    return row.peak(static_bytes, stages, optimizer, shared)
