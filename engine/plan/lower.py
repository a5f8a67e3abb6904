"""Adds the transfers to a program, and proves that the result cannot hang.

A message travels on a channel, and a channel keeps order. SEND follows its producer. A policy
decides where RECV is posted:

    compute order     F0        F1        B0
    just_in_time      RECV0 F0  RECV1 F1  ...     each transfer is exposed
    early, 1 ahead    RECV0 RECV1 F0  RECV2 F1    transfer 1 hides behind F0

`early` posts a receive a bounded number of compute actions ahead of its consumer: far enough for
the transfer to hide, not so far that buffers pile up or that a receive is posted before a send
that its peer is waiting for (pytorch issues 188833 and 175225).

What has to keep order with what depends on how channels are shared. The engine gives each directed
stage edge its own; with fewer, legal programs can hang, which `prove_no_deadlock` detects.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple

from engine.arrays import filled, run
from engine.plan import kernels
from engine.plan.action import CODES, COMPUTE_OPS, OPS, RECV_OPS, SEND_OPS, Action, Op
from engine.plan.program import Program
from engine.plan.rules import ProgramError, check_facts, columns_of, kinds_of, num_links
from engine.plan.table import Table

DEFAULT_LOOK_AHEAD = 1


class Policy(StrEnum):
    """Where receives are posted."""

    EARLY = "early"
    JUST_IN_TIME = "just_in_time"


class Edge(NamedTuple):
    """A directed edge between stages of two ranks; its messages arrive in the order sent."""

    source: int
    target: int


_COUNTERPART = {  # of each transfer, the op and the hop to the stage of its other end
    Op.SEND_F: (Op.RECV_F, 1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, 1),
}
_RECEIVED = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}
_SENT = {Op.F: Op.SEND_F, Op.B: Op.SEND_B, Op.I: Op.SEND_B}


def counterpart(transfer: Action) -> Action:
    """The other end of a message: the RECV of a SEND, the SEND of a RECV."""
    op, hop = _COUNTERPART[transfer.op]
    return Action(transfer.stage + hop, op, transfer.microbatch)


def edge_of(transfer: Action) -> Edge:
    """The stage edge that a SEND or RECV action uses. A RECV names the receiving stage."""
    if transfer.op not in _COUNTERPART:
        raise ValueError(f"{transfer} is not a transfer")
    here, there = transfer.stage, transfer.stage + _COUNTERPART[transfer.op][1]
    return Edge(here, there) if transfer.op in SEND_OPS else Edge(there, here)


def incoming(action: Action, program: Program) -> Action | None:
    """The RECV that a compute action waits for, or None when its input is on this rank."""
    return _crossing(program, action.stage, _RECEIVED.get(action.op), action.microbatch)


def outgoing(action: Action, program: Program) -> Action | None:
    """The SEND that follows a compute action, or None when nobody elsewhere needs its result."""
    return _crossing(program, action.stage, _SENT.get(action.op), action.microbatch)


def _crossing(program: Program, stage: int, op: Op | None, microbatch: int) -> Action | None:
    """The transfer of a stage, or None where its two ends would be on one rank."""
    ranks = program.placement.ranks
    other = -1 if op is None else stage + _COUNTERPART[op][1]
    if op is None or not 0 <= other < len(ranks) or ranks[stage] == ranks[other]:
        return None
    return Action(stage, op, microbatch)


def lower(
    program: Program, policy: Policy = Policy.EARLY, look_ahead: int = DEFAULT_LOOK_AHEAD
) -> Program:
    """The program with SEND and RECV inserted; each rank's compute order is unchanged.

    `look_ahead` is how many compute actions ahead of its consumer `early` posts a receive. Receives
    of one channel keep the order in which its sender produces them. A program that has transfers of
    its own keeps them, but no collectives. Raises ProgramError if the result could hang.
    """
    lowered = program = program.without_collectives()
    if not program.has_transfers:
        check_facts(program)
        ahead = min(look_ahead, program.table.num_actions) if policy is Policy.EARLY else 0
        table, width, links = program.table, program.num_microbatches, num_links(program)
        kinds = kinds_of(program.placement, width)
        sent = filled(0, links * width), filled(0, links * width)  # in which order
        num_sent = filled(0, links)
        run(table.num_actions, kernels.order_messages, table.arrays, kinds, width, num_sent, *sent)
        crossings = zip(program.num_of_kind, kinds.edge, strict=True)
        num_messages = sum(num for num, edge in crossings if edge != kernels.NONE)
        size = table.num_actions + 2 * num_messages
        out = Table(filled(0, len(table) + 1), *(filled(0, size) for _ in range(3)))
        arguments = table.arrays, kinds, width, ahead, sent, filled(0, links), out.arrays
        run(table.num_actions, kernels.insert_transfers, *arguments)
        lowered = replace(program, actions=out)
    prove_no_deadlock(lowered)
    return lowered


class Sharing(StrEnum):
    """Which transfers share one in-order channel, and so have to be posted in one order."""

    STAGE_EDGE = "stage_edge"  # each directed edge between two stages has its own: the engine
    RANK_EDGE = "rank_edge"  # each direction between two ranks
    RANK_PAIR = "rank_pair"  # two ranks, both directions: an NCCL communicator of two
    RANK = "rank"  # everything that a rank sends and receives


_Line = tuple[int, ...]
"""Names a channel's line at one rank: the transfers that must complete in the order posted."""


def prove_no_deadlock(lowered: Program, sharing: Sharing = Sharing.STAGE_EDGE) -> None:
    """Raise ProgramError if the lowered program can hang or would deliver a wrong message.

    A strict rendezvous: a SEND and its RECV complete together, once both are posted and nothing
    posted before them on their channels is left. Neither blocks its rank; a compute action blocks
    it until its RECV is complete. This is how NCCL behaves. No buffering is assumed, so what ends
    here ends on every transport. A hang is reported as the circle of waits. Visits each action
    once.
    """
    lowered = lowered.without_collectives()
    arrays, width = columns_of(lowered)
    num_actions, links = lowered.table.num_actions, num_links(lowered)
    # Each transfer occurs once, a SEND after its producer, a RECV before its consumer.
    kinds, ranks = kinds_of(lowered.placement, width), array("q", lowered.placement.ranks)
    marks = tuple(filled(0, size * width) for size in (len(kinds.edge), links, links))
    wrong, index = run(num_actions, kernels.misplaced_transfer, arrays, kinds, ranks, width, marks)
    if wrong == kernels.UNSENT:
        row = lowered.table.part(index)
        due = {send for a in row if (send := outgoing(a, lowered)) is not None} - set(row)
        raise ProgramError(lowered, index, len(row), f"{min(due)} is missing")
    if wrong:
        action = lowered.table.at(index)
        reasons = {
            kernels.AWAY: f"stage {action.stage} is not placed on this rank",
            kernels.AGAIN: "has been done before",
            kernels.UNPOSTED: f"{incoming(action, lowered)} is not posted before it",
            kernels.UNNEEDED: "nothing on this rank needs it from another rank",
            kernels.UNMADE: "comes before the action whose result it sends",
        }
        raise ProgramError(lowered, *lowered.table.place(index), reasons[wrong])
    # Lines by kind: that of a transfer and that of its other end; 0 without one.
    names: dict[_Line, int] = {}
    lines = filled(0, lowered.num_stages * len(OPS)), filled(0, lowered.num_stages * len(OPS))
    for op in SEND_OPS | RECV_OPS:
        for stage in range(lowered.num_stages):
            if transfer := _crossing(lowered, stage, op, 0):
                kind = CODES[op] * lowered.num_stages + stage
                for ends, end in zip(lines, (transfer, counterpart(transfer)), strict=True):
                    name = line_of(lowered, sharing, end)
                    ends[kind] = names.setdefault(name, len(names))
    num_lines = max(lines[0], default=0) + 1
    position = lowered.table.offset[:-1]
    every = range(lowered.world_size)
    walk = position, filled(kernels.NONE, len(every)), array("q", every)
    first, last, todo = (filled(kernels.NONE, num_lines) for _ in range(3))
    line = first, last, filled(kernels.NONE, num_actions), todo, filled(0, num_lines)
    arguments = arrays, kinds, lines, walk, line, filled(0, links * width)
    index = run(num_actions, kernels.meet, *arguments)
    if index != kernels.NONE:
        receive = lowered.table.at(index)
        send = counterpart(receive)
        channel = edge_of(send)
        head = lowered.table.at(first[lines[0][CODES[send.op] * lowered.num_stages + send.stage]])
        reason = (
            f"channel {channel.source}->{channel.target} would deliver microbatch "
            f"{head.microbatch} to it"
        )
        raise ProgramError(lowered, *lowered.table.place(index), reason)
    positions = [at - begin for at, begin in zip(position, lowered.table.offset, strict=False)]
    blocked = [
        (rank, action)
        for rank, at in enumerate(positions)
        for action in lowered.table.part(rank, at, at + 1)
    ]
    heads = [lowered.table.at(at) for at in first if at != kernels.NONE]
    blocked += [(ranks[head.stage], head) for head in heads]
    if blocked:
        of_lines = {line_of(lowered, sharing, head): head for head in heads}
        raise _circle_of_waits(lowered, sharing, positions, of_lines, blocked[0])


def line_of(lowered: Program, sharing: Sharing, transfer: Action) -> _Line:
    """The name of the line that a transfer stands in at its rank."""
    rank, channel = lowered.placement.ranks[transfer.stage], edge_of(transfer)
    source, target = (lowered.placement.ranks[stage] for stage in channel)
    match sharing:
        case Sharing.STAGE_EDGE:
            return (rank, *channel)
        case Sharing.RANK_EDGE:
            return (rank, source, target)
        case Sharing.RANK_PAIR:
            return (rank, min(source, target), max(source, target))
        case Sharing.RANK:
            return (rank,)


def _circle_of_waits(
    lowered: Program,
    sharing: Sharing,
    positions: Sequence[int],
    heads: Mapping[_Line, Action],
    blocked: tuple[int, Action],
) -> ProgramError:
    """Follow the waits from a blocked action until one comes up again: that is the circle.

    `positions` are where each rank stands, `heads` the first transfer of each line.
    """
    waits: dict[tuple[int, Action], str] = {}
    place, reason = blocked, ""
    while not reason and place not in waits:
        rank, action = place
        if action.op in COMPUTE_OPS:
            receive = incoming(action, lowered)
            assert receive is not None  # else it would not be blocked
            following, why = (rank, receive), f"waits for {receive}"
        elif (head := heads.get(line_of(lowered, sharing, action), action)) != action:
            following, why = (rank, head), f"is queued behind {head}"
        else:
            other = counterpart(action)
            peer = lowered.placement.ranks[other.stage]
            row, left = lowered.actions[peer], lowered.actions[peer][positions[peer] :]
            following, why = (peer, other), f"waits for {other} on rank {peer}"
            if other in left:
                following = peer, left[0]
                why = f"waits for {other} behind {left[0]} on rank {peer}"
            elif other not in row:
                following, reason = place, f"{action} on rank {rank} {why}, which is not there"
        waits[place] = f"{action} on rank {rank} {why}"
        place = following
    if not reason:
        places = list(waits)
        circle = (waits[one] for one in places[places.index(place) :])
        reason = "hangs: " + "; ".join(circle)
    rank, action = place
    return ProgramError(lowered, rank, lowered.actions[rank].index(action), reason)


def check_delivery_between_ranks(lowered: Program) -> None:
    """Raise ProgramError unless each rank posts receives in the order in which its peer sends.

    This is what a runtime needs that gives all messages from one rank to another one line, as
    torch.distributed.pipelining does: there the next receive takes the next message, whatever it is
    meant for. Only transfers count; nothing else of the program is checked.
    """
    lowered = lowered.without_collectives()
    ranks = lowered.placement.ranks
    sent: dict[tuple[int, int], list[Action]] = {}
    posted: dict[tuple[int, int], list[tuple[int, int]]] = {}  # rank and position of each
    for rank, row in enumerate(lowered.actions):
        for position, action in enumerate(row):
            if action.op in COMPUTE_OPS:
                continue
            source, target = (ranks[stage] for stage in edge_of(action))
            if action.op in RECV_OPS:
                posted.setdefault((source, target), []).append((rank, position))
            else:
                sent.setdefault((source, target), []).append(action)
    for (source, target), receives in posted.items():
        sends = sent.get((source, target), ())
        for (rank, position), send in zip(receives, sends, strict=False):
            if lowered.actions[rank][position] != counterpart(send):
                reason = f"receives what rank {source} sends as {send}"
                raise ProgramError(lowered, rank, position, reason)
