"""Whether a program is legal and can be finished, and the reason when it cannot.

Two things make a program legal. Its facts are unique: each action is placed, and each fact of
`engine.plan.rules` is made once. And the walk over it ends (`engine.plan.walk`). Where it does not,
the actions that are left wait for each other in a circle.
"""

from __future__ import annotations

import itertools
from array import array
from operator import sub

from engine.arrays import filled, run
from engine.plan import kernels
from engine.plan.action import RECV_OPS, SEND_OPS, Action, Op
from engine.plan.kernels import NONE
from engine.plan.messages import counterpart, edge_of, incoming, outgoing
from engine.plan.program import Program
from engine.plan.rules import (
    ProgramError,
    check_facts,
    columns_of,
    fact_needed,
    kinds_of,
    num_links,
    peak_activations,
)
from engine.plan.walk import Sharing, Walk, line_of, walk


def check(program: Program, max_held: int | None = None) -> None:
    """Raise ProgramError unless each action is placed, happens once, and can run in this order.

    With `max_held`, also unless no rank ever holds more activations than that, counted in
    microbatches, or slices of them, over all its stages. The cost grows with the length of the
    program.
    """
    compute = program.compute_only()
    check_facts(compute)
    explain(walk(compute, [filled(0, compute.table.num_actions)]))
    if max_held is not None:
        for rank, peak in enumerate(peak_activations(compute)):
            if peak > max_held:
                row = compute.table.part(rank)
                held = itertools.accumulate((a.op is Op.F) - (a.op in (Op.B, Op.W)) for a in row)
                position, num_held = next((at, n) for at, n in enumerate(held) if n > max_held)
                what = "slices" if compute.slices else "microbatches"
                reason = (
                    f"holds the activations of {num_held} {what}; at most {max_held} are allowed"
                )
                raise ProgramError(compute, rank, position, reason)


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
            kernels.AGAIN: "has been done before",
            kernels.UNPOSTED: f"{incoming(action, lowered)} is not posted before it",
            kernels.UNNEEDED: "nothing on this rank needs it from another rank",
            kernels.UNMADE: "comes before the action whose result it sends",
        }
        raise ProgramError(lowered, *lowered.table.place(index), reasons[wrong])
    explain(walk(lowered, [filled(0, num_actions)], sharing=sharing), sharing)


def explain(walked: Walk, sharing: Sharing = Sharing.STAGE_EDGE) -> None:
    """Raise ProgramError with the circle of waits unless a walk of one step ended."""
    if walked.is_over and all(head == NONE for head in walked.heads):
        return
    program, table = walked.program, walked.program.table
    ranks, positions = program.placement.ranks, list(map(sub, walked.positions, table.offset))
    heads = {
        line_of(program.placement, sharing, head): head
        for at in walked.heads
        if at != NONE
        for head in [table.at(at)]
    }
    if walked.misdelivered != NONE:
        receive = table.at(walked.misdelivered)
        send = counterpart(receive)
        head = heads[line_of(program.placement, sharing, send)]
        channel = edge_of(send)
        reason = (
            f"channel {channel.source}->{channel.target} would deliver microbatch "
            f"{head.microbatch} to it"
        )
        raise ProgramError(program, *table.place(walked.misdelivered), reason)
    rows = program.actions
    stuck = [
        (rank, row[at])
        for rank, row in enumerate(rows)
        for at in positions[rank : rank + 1]
        if at < len(row)
    ]
    stuck += [(ranks[head.stage], head) for head in heads.values()]
    waits: dict[tuple[int, Action], str] = {}
    place, why = stuck[0], ""
    pairs = zip(range(len(program.mates)), program.mates, strict=True)
    mates = {table.at(at): table.at(mate) for at, mate in pairs if mate != NONE}
    while place not in waits:
        rank, action = place
        if (mate := mates.get(action)) is not None and _has_input(action, walked):
            waits[place] = f"{action} on rank {rank} is one with {mate}"
            place = rank, mate
            rank, action = place
        if action.op in SEND_OPS | RECV_OPS:
            head = heads.get(line_of(program.placement, sharing, action), action)
            if head != action:
                following, reason = (rank, head), f"is queued behind {head}"
            else:
                other = counterpart(action)
                peer = ranks[other.stage]
                left = rows[peer][positions[peer] :]
                following, reason = (peer, other), f"waits for {other} on rank {peer}"
                if other in left:
                    following = peer, left[0]
                    reason = f"waits for {other} behind {left[0]} on rank {peer}"
                elif other not in rows[peer]:
                    why = f"{action} on rank {rank} {reason}, which is not there"
        elif program.has_transfers and (its := incoming(action, program)):
            following, reason = (rank, its), f"waits for {its}"
        else:
            needed = fact_needed(action, program.placement)
            assert needed is not None  # else it would not be blocked
            owner = ranks[needed.stage]
            left = rows[owner][positions[owner] :]
            full = needed._replace(op=Op.B) if needed.op is Op.I else needed
            if needed not in left and full not in left:
                raise ProgramError(
                    program, rank, positions[rank], f"needs {needed}, which is never done"
                )
            following = owner, left[0]
            comes = (
                "comes only later" if owner == rank else f"stands behind {left[0]} on rank {owner}"
            )
            reason = f"needs {needed if needed in left else full}, which {comes}"
        waits[place] = f"{action} on rank {rank} {reason}"
        if why:
            break
        place = following
    if not why:
        places = list(waits)
        why = "hangs: " if program.has_transfers else "can never start: "
        why += "; ".join(waits[one] for one in places[places.index(place) :])
    rank, action = place
    raise ProgramError(program, rank, rows[rank].index(action), why)


def _has_input(action: Action, walked: Walk) -> bool:
    """Whether what a forward needs was done where a walk stopped."""
    program = walked.program
    needed = fact_needed(action, program.placement)
    if needed is None:
        return True
    owner = program.placement.ranks[needed.stage]
    done = walked.positions[owner] - program.table.offset[owner]
    if (receive := incoming(action, program)) is not None and program.has_transfers:
        head = {program.table.at(at) for at in walked.heads if at != NONE}
        return not head & {receive, counterpart(receive)} and (
            counterpart(receive) in program.table.part(owner, 0, done)
        )
    return needed in program.table.part(owner, 0, done)


def check_delivery_between_ranks(lowered: Program) -> None:
    """Raise ProgramError unless each rank posts receives in the order in which its peer sends.

    This is what a runtime needs that gives all messages from one rank to another one line, as
    torch.distributed.pipelining does: there the next receive takes the next message, whatever it is
    meant for. Only transfers count; nothing else of the program is checked.
    """
    ranks = lowered.placement.ranks
    # By sending and receiving rank: rank, position and action of every transfer, in order.
    sent: dict[tuple[int, int], list[tuple[int, int, Action]]] = {}
    posted: dict[tuple[int, int], list[tuple[int, int, Action]]] = {}
    for rank, row in enumerate(lowered.actions):
        for position, action in enumerate(row):
            if action.op in SEND_OPS | RECV_OPS:
                source, target = (ranks[stage] for stage in edge_of(action))
                ends = sent if action.op in SEND_OPS else posted
                ends.setdefault((source, target), []).append((rank, position, action))
    for pair, receives in posted.items():
        for (_, _, send), (rank, position, receive) in zip(
            sent.get(pair, ()), receives, strict=False
        ):
            if receive != counterpart(send):
                reason = f"receives what rank {pair[0]} sends as {send}"
                raise ProgramError(lowered, rank, position, reason)
