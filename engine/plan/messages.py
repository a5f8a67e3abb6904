"""Messages between stages: which computation receives and sends one, and over which edge."""

from __future__ import annotations

from typing import NamedTuple

from engine.plan.action import SEND_OPS, Action, Op
from engine.plan.program import Placement, Program


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
    return crossing(program.placement, action.stage, _RECEIVED.get(action.op), action.microbatch)


def outgoing(action: Action, program: Program) -> Action | None:
    """The SEND that follows a compute action, or None when nobody elsewhere needs its result."""
    return crossing(program.placement, action.stage, _SENT.get(action.op), action.microbatch)


def crossing(placement: Placement, stage: int, op: Op | None, microbatch: int) -> Action | None:
    """The transfer of a stage, or None where its two ends would be on one rank."""
    ranks, depth = placement.ranks, placement.depth
    other = -1 if op is None else stage + _COUNTERPART[op][1]
    if op is None or other // depth != stage // depth or ranks[stage] == ranks[other]:
        return None
    return Action(stage, op, microbatch)
