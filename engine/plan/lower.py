"""Adds the transfers to a program, and proves that the result cannot hang.

A message travels on the channel of its directed stage edge, and a channel keeps order. SEND
follows its producer. RECV is posted `look_ahead` compute actions before its consumer: far enough
ahead for the transfer to hide behind compute, not so far that buffers pile up or that a receive
stands in front of a send that its peer is waiting for (pytorch issues 188833 and 175225).

    compute order  F0        F1        B0
    look_ahead 0   RECV0 F0  RECV1 F1  ...     each transfer is exposed
    look_ahead 1   RECV0 RECV1 F0  RECV2 F1    transfer 1 hides behind F0
"""

from __future__ import annotations

from typing import NamedTuple

from engine.plan.action import COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op
from engine.plan.program import Program
from engine.plan.rules import ProgramError, execution_order

DEFAULT_LOOK_AHEAD = 1


class Channel(NamedTuple):
    """A directed edge between stages of two ranks; its messages arrive in the order sent."""

    source: int
    target: int


def channel_of(transfer: Action) -> Channel:
    """The channel that a SEND or RECV action uses. A RECV names the receiving stage."""
    stage = transfer.stage
    match transfer.op:
        case Op.SEND_F:
            return Channel(stage, stage + 1)
        case Op.RECV_F:
            return Channel(stage - 1, stage)
        case Op.SEND_B:
            return Channel(stage, stage - 1)
        case Op.RECV_B:
            return Channel(stage + 1, stage)
        case _:
            raise ValueError(f"{transfer} is not a transfer")


def incoming(action: Action, program: Program) -> Action | None:
    """The RECV that a compute action waits for, or None when its input is on this rank."""
    stage, op, microbatch = action
    if op is Op.F and _crosses(program, stage - 1, stage):
        return Action(stage, Op.RECV_F, microbatch)
    if op in (Op.B, Op.I) and _crosses(program, stage, stage + 1):
        return Action(stage, Op.RECV_B, microbatch)
    return None


def outgoing(action: Action, program: Program) -> Action | None:
    """The SEND that follows a compute action, or None when nobody elsewhere needs its result."""
    stage, op, microbatch = action
    if op is Op.F and _crosses(program, stage, stage + 1):
        return Action(stage, Op.SEND_F, microbatch)
    if op in (Op.B, Op.I) and _crosses(program, stage - 1, stage):
        return Action(stage, Op.SEND_B, microbatch)
    return None


def _crosses(program: Program, stage: int, next_stage: int) -> bool:
    ranks = program.placement.ranks
    return stage >= 0 and next_stage < len(ranks) and ranks[stage] != ranks[next_stage]


def lower(program: Program, look_ahead: int = DEFAULT_LOOK_AHEAD) -> Program:
    """The program with SEND and RECV inserted; each rank's compute order is unchanged.

    Receives of one channel keep the order in which its sender produces them. Raises ProgramError
    if the result could hang.
    """
    sent = _messages_by_channel(program)
    rows = tuple(_lower_row(program, rank, sent, look_ahead) for rank in range(program.world_size))
    lowered = Program(program.schedule, program.placement, program.num_microbatches, rows)
    prove_no_deadlock(lowered)
    return lowered


def _messages_by_channel(program: Program) -> dict[Channel, list[int]]:
    """For each channel, the microbatches in the order in which its sender produces them."""
    sent: dict[Channel, list[int]] = {}
    for row in program.actions:
        for action in row:
            if (send := outgoing(action, program)) is not None:
                sent.setdefault(channel_of(send), []).append(send.microbatch)
    return sent


def _lower_row(
    program: Program, rank: int, sent: dict[Channel, list[int]], look_ahead: int
) -> tuple[Action, ...]:
    row = program.actions[rank]
    posted = _receive_positions(program, row, sent, look_ahead)
    lowered: list[Action] = []
    for position, action in enumerate(row):
        lowered += posted.get(position, ())
        lowered.append(action)
        if (send := outgoing(action, program)) is not None:
            lowered.append(send)
    return tuple(lowered)


def _receive_positions(
    program: Program, row: tuple[Action, ...], sent: dict[Channel, list[int]], look_ahead: int
) -> dict[int, list[Action]]:
    """Compute position -> the receives posted in front of it."""
    consumers: dict[Channel, dict[int, tuple[int, Action]]] = {}
    for position, action in enumerate(row):
        if (receive := incoming(action, program)) is not None:
            by_microbatch = consumers.setdefault(channel_of(receive), {})
            by_microbatch[receive.microbatch] = (position, receive)
    posted: dict[int, list[Action]] = {}
    for channel, by_microbatch in consumers.items():
        latest = len(row)
        in_reverse = []
        for microbatch in reversed(sent[channel]):
            position, receive = by_microbatch[microbatch]
            latest = min(latest, max(0, position - look_ahead))
            in_reverse.append((latest, receive))
        for position, receive in reversed(in_reverse):
            posted.setdefault(position, []).append(receive)
    return posted


def prove_no_deadlock(lowered: Program) -> None:
    """Raise ProgramError if the lowered program can hang or would deliver a wrong message.

    The k-th SEND of a channel meets its k-th RECV, and neither blocks its rank; a compute action
    blocks until its RECV has met its SEND. If both sides agree on each channel's order, and each
    RECV stands before its consumer and each SEND after its producer, the only waits left are the
    dependencies between compute actions, and `execution_order` finds any cycle among those.
    """
    _check_channels_agree(lowered)
    for rank in range(lowered.world_size):
        _check_transfers_stand_right(lowered, rank)
    compute_rows = tuple(
        tuple(action for action in row if action.op in COMPUTE_OPS) for row in lowered.actions
    )
    compute = Program(lowered.schedule, lowered.placement, lowered.num_microbatches, compute_rows)
    for _ in execution_order(compute):
        pass


def _check_channels_agree(lowered: Program) -> None:
    sends, receives = (_on_channels(lowered, ops) for ops in (SEND_OPS, RECV_OPS))
    for channel in sends.keys() | receives.keys():
        sent, received = sends.get(channel, []), receives.get(channel, [])
        for k in range(max(len(sent), len(received))):
            ours = received[k][2] if k < len(received) else None
            theirs = sent[k][2] if k < len(sent) else None
            if ours != theirs:
                rank, position, _ = received[k] if k < len(received) else sent[k]
                reason = (
                    f"message {k} of channel {channel.source}->{channel.target} is sent for "
                    f"microbatch {theirs} and received for microbatch {ours}"
                )
                raise ProgramError(lowered, rank, position, reason)


def _on_channels(lowered: Program, ops: frozenset[Op]) -> dict[Channel, list[tuple[int, int, int]]]:
    """Channel -> (rank, position, microbatch) of each of its transfers, in program order."""
    found: dict[Channel, list[tuple[int, int, int]]] = {}
    for rank, row in enumerate(lowered.actions):
        for position, action in enumerate(row):
            if action.op in ops:
                found.setdefault(channel_of(action), []).append((rank, position, action.microbatch))
    return found


def _check_transfers_stand_right(lowered: Program, rank: int) -> None:
    seen: set[Action] = set()
    for position, action in enumerate(lowered.actions[rank]):
        if action.op in COMPUTE_OPS:
            receive = incoming(action, lowered)
            if receive is not None and receive not in seen:
                raise ProgramError(lowered, rank, position, f"{receive} is not posted before it")
        elif action.op in SEND_OPS and not _producers(action) & seen:
            raise ProgramError(lowered, rank, position, "stands before the action it sends for")
        seen.add(action)


def _producers(send: Action) -> set[Action]:
    ops = (Op.F,) if send.op is Op.SEND_F else (Op.B, Op.I)
    return {Action(send.stage, op, send.microbatch) for op in ops}
