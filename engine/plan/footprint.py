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

import itertools
from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.arrays import filled, run
from engine.plan import kernels
from engine.plan.action import COLLECTIVE_OPS, COMPUTE_OPS, NO_INDEX, OPS, RECV_OPS, Action, Op
from engine.plan.messages import edge_of, incoming, outgoing
from engine.plan.program import Program
from engine.plan.rules import columns_of, kinds_of, num_links
from engine.plan.sharded_bytes import NOTHING_SHARED, Change, Shared, changes_along

StageOp = tuple[int, Op]


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
    lowered: Program,
    rank: int,
    static_bytes: int,
    costs: Costs,
    messages: Messages,
    shared: Shared = NOTHING_SHARED,
) -> int:
    """The most bytes that a rank has allocated in a step, its optimizer included.

    `static_bytes` is there all the time: parameters, optimizer state, buffers, the batch. `shared`
    is what the rank has in common with its replicas, where there are any.
    """
    whole_row, lowered = lowered.actions[rank], lowered.without_collectives()
    arrays, width = columns_of(lowered)
    begin, end = lowered.table.offset[rank : rank + 2]

    # By position among computations and transfers, the rise and net of the collectives before it
    # and the bytes of gradients that it makes; `sums` is what follows the row.
    rise, net, made = along = tuple(filled(0, end - begin) for _ in range(3))
    sums = Change(0, 0)
    if shared.buckets:
        *changes, last = changes_along(whole_row, shared)
        position = 0
        for action, change in zip(whole_row, changes, strict=True):
            if action.op in COLLECTIVE_OPS:
                sums = sums.then(change)
                continue
            rise[position], net[position] = sums
            made[position] = change.net_bytes
            position, sums = position + 1, Change(0, 0)
        sums = sums.then(last)

    # The measured actions have made gradients, which are counted along the row.
    made_by: dict[StageOp, list[int]] = defaultdict(list)
    for action, num_bytes in zip(lowered.actions[rank], made, strict=True):
        made_by[action.stage, action.op].append(num_bytes)
    costs = Costs(
        *(
            {
                kind: Cost(
                    cost.rise_bytes - num_bytes,
                    cost.net_bytes - num_bytes,
                    max(0, cost.handed_bytes - num_bytes),  # gradients go between spans too
                )
                for kind, cost in measured.items()
                for num_bytes in [[*made_by[kind], 0, 0][nth]]
            }
            for nth, measured in enumerate((costs.first, costs.later))
        )
    )

    # By kind: rise, net and what is handed on, of its first action and of later ones, what is let
    # go after each, and the bytes of the message that a RECV is for, or that a computation needs.
    computing = {Op.RECV_F: Op.F, Op.RECV_B: Op.B}
    rows = []
    for op in OPS:
        for stage in range(lowered.num_stages):
            both = (costs.of((stage, op), is_first=is_first) for is_first in (True, False))
            receive = incoming(Action(stage, computing.get(op, op), 0), lowered)
            let_go = _let_go_after(lowered, stage, op, costs, messages)
            received = messages.received_bytes(receive) if receive else 0
            rows.append((*itertools.chain(*both), let_go, received))
    *by_kind, received_by_kind = (array("q", column) for column in zip(*rows, strict=True))

    columns = (column[begin:end] for column in arrays[1:])
    kinds = kinds_of(lowered.placement, width)
    links = num_links(lowered)
    sizes = len(kinds.edge), links, links, links * width, links * width, links
    peak, level = run(
        end - begin,
        kernels.follow_bytes,
        (array("q", [0, end - begin]), *columns, *along),
        kinds,
        width,
        tuple(by_kind),
        received_by_kind,
        messages.is_posted,
        messages.is_queued,
        tuple(filled(0, size) for size in sizes),
        static_bytes,
    )
    optimizer = costs.of((NO_INDEX, Op.OPT), is_first=True)
    peak, level = max(peak, level + sums.rise_bytes), level + sums.net_bytes
    return max(peak, level + max(optimizer.rise_bytes, optimizer.net_bytes))


def _let_go_after(lowered: Program, stage: int, op: Op, costs: Costs, messages: Messages) -> int:
    """Return the bytes that a B or I frees when it ends (8), which would otherwise stay."""
    if op not in (Op.B, Op.I):
        return 0
    last = lowered.num_stages - 1
    forward, backward = messages.forward_bytes, messages.backward_bytes
    given_bytes = backward[stage] if stage < last else 0
    if (stage, op) not in costs.later:  # gradients and what is left are one number
        return given_bytes
    left_bytes = given_bytes + (forward[stage - 1] if stage > 0 else 0)
    halves = (Op.I, Op.W) if op is Op.I else (Op.B,)
    left_bytes += sum(costs.of((stage, one), is_first=False).net_bytes for one in (Op.F, *halves))
    sent = {Op.F: forward[stage] if stage < last else 0, op: backward[stage - 1] if stage else 0}
    for made_by, message_bytes in sent.items():
        # What goes with the message: as measured at a SEND, all of it to a stage of this rank.
        is_sent = outgoing(Action(stage, made_by, 0), lowered) is not None
        handed_bytes = costs.of((stage, made_by), is_first=False).handed_bytes
        left_bytes -= handed_bytes if is_sent else message_bytes
    return left_bytes


def there_before_computing(
    lowered: Program, rank: int, messages: Messages, shared: Shared = NOTHING_SHARED
) -> int:
    """Bytes that a row has brought when its first compute action begins.

    They are of messages that there is room for, and of stages that are gathered.
    """
    whole_row, lowered = lowered.actions[rank], lowered.without_collectives()
    first = next((at for at, a in enumerate(whole_row) if a.op in COMPUTE_OPS), len(whole_row))
    *changes, _ = changes_along(whole_row[:first], shared)
    gathered_bytes = sum(change.net_bytes for change in changes)
    row = lowered.actions[rank]
    position = next((at for at, a in enumerate(row) if a.op in COMPUTE_OPS), len(row))
    receives = [action for action in row[:position] if action.op in RECV_OPS]
    if not messages.is_posted:  # what the first takes, and what stands before it on its channel
        taken = incoming(row[position], lowered) if position < len(row) else None
        last = receives.index(taken) + 1 if taken else 0
        receives = [r for r in receives[:last] if taken and edge_of(r) == edge_of(taken)]
    return gathered_bytes + sum(map(messages.received_bytes, receives))
