"""Adds the transfers to a program, and proves that the result cannot hang.

A message travels on a channel, and a channel keeps order. SEND follows its producer. Where RECV
stands is a policy:

    compute order     F0        F1        B0
    just_in_time      RECV0 F0  RECV1 F1  ...     each transfer is exposed
    early, 1 ahead    RECV0 RECV1 F0  RECV2 F1    transfer 1 hides behind F0

`early` posts a receive a bounded number of compute actions ahead of its consumer: far enough for
the transfer to hide, not so far that buffers pile up or that a receive stands in front of a send
that its peer is waiting for (pytorch issues 188833 and 175225).

What has to keep order with what depends on how channels are shared. The engine gives each directed
stage edge its own; with fewer, legal programs can hang, which `prove_no_deadlock` tells.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from engine.plan.action import COMPUTE_OPS, RECV_OPS, Action, Op
from engine.plan.program import Program
from engine.plan.rules import ProgramError

DEFAULT_LOOK_AHEAD = 1


class Policy(StrEnum):
    """Where receives are posted."""

    EARLY = "early"
    JUST_IN_TIME = "just_in_time"


class Edge(NamedTuple):
    """A directed edge between stages of two ranks; its messages arrive in the order sent."""

    source: int
    target: int


def edge_of(transfer: Action) -> Edge:
    """The stage edge that a SEND or RECV action uses. A RECV names the receiving stage."""
    stage = transfer.stage
    match transfer.op:
        case Op.SEND_F:
            return Edge(stage, stage + 1)
        case Op.RECV_F:
            return Edge(stage - 1, stage)
        case Op.SEND_B:
            return Edge(stage, stage - 1)
        case Op.RECV_B:
            return Edge(stage + 1, stage)
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


def lower(
    program: Program, policy: Policy = Policy.EARLY, look_ahead: int = DEFAULT_LOOK_AHEAD
) -> Program:
    """The program with SEND and RECV inserted; each rank's compute order is unchanged.

    `look_ahead` is how many compute actions ahead of its consumer `early` posts a receive. Receives
    of one channel keep the order in which its sender produces them. A program that has transfers of
    its own keeps them. Raises ProgramError if the result could hang.
    """
    lowered = program
    if not program.has_transfers:
        ahead = look_ahead if policy is Policy.EARLY else 0
        sent = _messages_by_edge(program)
        rows = tuple(_lower_row(program, row, sent, ahead) for row in program.actions)
        lowered = Program(program.schedule, program.placement, program.num_microbatches, rows)
    prove_no_deadlock(lowered)
    return lowered


def _messages_by_edge(program: Program) -> dict[Edge, list[int]]:
    """Return, for each edge, the microbatches in the order in which its sender produces them."""
    sent: dict[Edge, list[int]] = {}
    for row in program.actions:
        for action in row:
            if (send := outgoing(action, program)) is not None:
                sent.setdefault(edge_of(send), []).append(send.microbatch)
    return sent


def _lower_row(
    program: Program, row: tuple[Action, ...], sent: dict[Edge, list[int]], look_ahead: int
) -> tuple[Action, ...]:
    posted = _receive_positions(program, row, sent, look_ahead)
    lowered: list[Action] = []
    for position, action in enumerate(row):
        lowered += posted.get(position, ())
        lowered.append(action)
        if (send := outgoing(action, program)) is not None:
            lowered.append(send)
    return tuple(lowered)


def _receive_positions(
    program: Program, row: tuple[Action, ...], sent: dict[Edge, list[int]], look_ahead: int
) -> dict[int, list[Action]]:
    """Compute position -> the receives posted in front of it, those needed first standing first."""
    consumers: dict[Edge, dict[int, tuple[int, Action]]] = {}
    for position, action in enumerate(row):
        if (receive := incoming(action, program)) is not None:
            by_microbatch = consumers.setdefault(edge_of(receive), {})
            by_microbatch[receive.microbatch] = (position, receive)
    posted: dict[int, list[tuple[int, Action]]] = {}
    for channel, by_microbatch in consumers.items():
        needed = len(row)  # where this receive, or one behind it on its channel, is needed first
        for microbatch in reversed(sent[channel]):
            position, receive = by_microbatch[microbatch]
            needed = min(needed, position)
            posted.setdefault(max(0, needed - look_ahead), []).append((needed, receive))
    for receives in posted.values():
        receives.reverse()
        receives.sort(key=lambda one: one[0])  # stable: those of a channel keep its order
    return {at: [receive for _, receive in receives] for at, receives in posted.items()}


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
    _check_transfers_stand_right(lowered)
    _Rendezvous(lowered, sharing).run()


class _Rendezvous:
    def __init__(self, lowered: Program, sharing: Sharing) -> None:
        self._program, self._sharing = lowered, sharing
        self._position = [0] * lowered.world_size
        self._lines: dict[_Line, list[Action]] = {}
        self._heads: dict[_Line, int] = {}  # how many of a line are complete
        self._received: set[Action] = set()

    def run(self) -> None:
        """Run to the end, or to where nothing moves."""
        ready = list(range(self._program.world_size))
        while ready:
            rank = ready.pop()
            row = self._program.actions[rank]
            while self._position[rank] < len(row):
                action = row[self._position[rank]]
                if action.op not in COMPUTE_OPS:
                    ready += self._post(rank, action)
                elif not self._can_start(action):
                    break
                self._position[rank] += 1
        self._check_all_is_over()

    def _can_start(self, action: Action) -> bool:
        receive = incoming(action, self._program)
        return receive is None or receive in self._received

    def _post(self, rank: int, transfer: Action) -> list[int]:
        """Stand in line; complete all that can be; the ranks that may go on."""
        line = self._line(rank, transfer)
        self._lines.setdefault(line, []).append(transfer)
        freed: list[int] = []
        pending = [line]
        while pending:
            here = pending.pop()
            head = self._head(here)
            if head is None:
                continue
            there = self._line(self._peer(head), counterpart(head))
            opposite = self._head(there)
            if opposite is None:
                continue
            if opposite != counterpart(head):
                self._check_same_message(head, opposite)
                continue
            for end in (head, opposite):
                if end.op in RECV_OPS:
                    self._received.add(end)
                    freed.append(self._program.placement.ranks[end.stage])
            for one in (here, there):
                self._heads[one] = self._heads.get(one, 0) + 1
                pending.append(one)
        return freed

    def _check_same_message(self, head: Action, opposite: Action) -> None:
        """One edge's next SEND and RECV must be of one microbatch, or a wrong one is delivered."""
        if edge_of(head) != edge_of(opposite):
            return
        send, receive = sorted((head, opposite), key=lambda action: action.op in RECV_OPS)
        channel = edge_of(send)
        reason = (
            f"channel {channel.source}->{channel.target} would deliver microbatch "
            f"{send.microbatch} to it"
        )
        rank = self._program.placement.ranks[receive.stage]
        position = self._program.actions[rank].index(receive)
        raise ProgramError(self._program, rank, position, reason)

    def _head(self, line: _Line) -> Action | None:
        posted, num_complete = self._lines.get(line, []), self._heads.get(line, 0)
        return posted[num_complete] if num_complete < len(posted) else None

    def _peer(self, transfer: Action) -> int:
        return self._program.placement.ranks[counterpart(transfer).stage]

    def _line(self, rank: int, transfer: Action) -> _Line:
        channel = edge_of(transfer)
        source, target = (self._program.placement.ranks[stage] for stage in channel)
        match self._sharing:
            case Sharing.STAGE_EDGE:
                return (rank, *channel)
            case Sharing.RANK_EDGE:
                return (rank, source, target)
            case Sharing.RANK_PAIR:
                return (rank, min(source, target), max(source, target))
            case Sharing.RANK:
                return (rank,)

    def _check_all_is_over(self) -> None:
        for rank, row in enumerate(self._program.actions):
            if self._position[rank] < len(row):
                raise self._circle(rank, row[self._position[rank]])
        for line in self._lines:
            if (head := self._head(line)) is not None:
                raise self._circle(line[0], head)

    def _circle(self, rank: int, action: Action) -> ProgramError:
        """Follow the waits from an action until one comes up again: that is the circle."""
        waits: dict[tuple[int, Action], str] = {}
        place = (rank, action)
        while place not in waits:
            following, why = self._wait_of(*place)
            waits[place] = f"{place[1]} on rank {place[0]} {why}"
            if following is None:
                return self._error(*place, waits[place])
            place = following
        places = list(waits)
        circle = [waits[one] for one in places[places.index(place) :]]
        return self._error(*place, "hangs: " + "; ".join(circle))

    def _error(self, rank: int, action: Action, reason: str) -> ProgramError:
        return ProgramError(self._program, rank, self._program.actions[rank].index(action), reason)

    def _wait_of(self, rank: int, action: Action) -> tuple[tuple[int, Action] | None, str]:
        """Return what a blocked action waits for, also in words; None if it waits for nothing."""
        if action.op in COMPUTE_OPS:
            receive = incoming(action, self._program)
            assert receive is not None  # else it would not be blocked
            return (rank, receive), f"waits for {receive}"
        head = self._head(self._line(rank, action))
        if head is not None and head != action:
            return (rank, head), f"stands in line behind {head}"
        peer, other = self._peer(action), counterpart(action)
        row, position = self._program.actions[peer], self._position[peer]
        if other not in row:
            return None, f"waits for {other} on rank {peer}, which is not there"
        if other in row[position:]:
            blocked = row[position]
            return (peer, blocked), f"waits for {other} behind {blocked} on rank {peer}"
        return (peer, other), f"waits for {other} on rank {peer}"


_COUNTERPART = {
    Op.SEND_F: (Op.RECV_F, 1),
    Op.RECV_F: (Op.SEND_F, -1),
    Op.SEND_B: (Op.RECV_B, -1),
    Op.RECV_B: (Op.SEND_B, 1),
}


def counterpart(transfer: Action) -> Action:
    """The other end of a message: the RECV of a SEND, the SEND of a RECV."""
    op, hop = _COUNTERPART[transfer.op]
    return Action(transfer.stage + hop, op, transfer.microbatch)


def check_delivery_between_ranks(lowered: Program) -> None:
    """Raise ProgramError unless each rank posts receives in the order in which its peer sends.

    This is what a runtime needs that gives all messages from one rank to another one line, as
    torch.distributed.pipelining does: there the next receive takes the next message, whatever it is
    meant for. Only transfers count; nothing else of the program is checked.
    """
    ranks = lowered.placement.ranks
    sent: dict[tuple[int, int], list[Action]] = {}
    posted: dict[tuple[int, int], list[tuple[int, int]]] = {}  # where each receive stands
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


def _check_transfers_stand_right(lowered: Program) -> None:
    """Each is there once, a SEND after its producer, a RECV before its consumer, none too many."""
    for rank, row in enumerate(lowered.actions):
        due: set[Action] = set()  # SENDs whose producer is done
        seen: set[Action] = set()
        for position, action in enumerate(row):
            if action in seen:
                raise ProgramError(lowered, rank, position, "has been done before")
            seen.add(action)
            owner = lowered.placement.ranks[action.stage : action.stage + 1]
            reason = _why_misplaced(action, lowered, due, seen)
            if owner != (rank,):
                reason = f"stage {action.stage} is not placed on this rank"
            if reason is not None:
                raise ProgramError(lowered, rank, position, reason)
        if unsent := due - seen:
            reason = f"{min(unsent)} is missing"
            raise ProgramError(lowered, rank, len(row), reason)


def _why_misplaced(
    action: Action, lowered: Program, due: set[Action], seen: set[Action]
) -> str | None:
    if action.op in COMPUTE_OPS:
        if (send := outgoing(action, lowered)) is not None:
            due.add(send)
        receive = incoming(action, lowered)
        if receive is not None and receive not in seen:
            return f"{receive} is not posted before it"
        return None
    if action.op in RECV_OPS:
        consumers = (Op.F,) if action.op is Op.RECV_F else (Op.B, Op.I)
        if any(incoming(action._replace(op=op), lowered) == action for op in consumers):
            return None
        return "nothing on this rank needs it from another rank"
    return None if action in due else "stands before the action it sends for"
