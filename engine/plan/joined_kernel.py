"""The walk over D replicas of a lowered program, joined at their collectives, as a kernel.

As those of `engine.plan.kernels`, whose arrays these are; what each replica has of its own lies
behind that of the replica before. A rank of a replica is one of D x p walkers. The collectives of a
rank are numbered from `first[rank]` on, in the order of its row: its lane. As replicas have the
same row, the last of them to come to a collective finds the ones before it on the lane done.
"""

from __future__ import annotations

from engine.arrays import Arrays, Ints

W, SEND_F, SEND_B, OPT = 3, 4, 6, 8
"""As in `engine.plan.kernels`."""
NONE = -1


def replay_joined(
    table: Arrays,
    kinds: Arrays,
    lanes: Arrays,
    times: Arrays,
    walk: Arrays,
    message: Arrays,
    meeting: Arrays,
) -> None:
    """When each action of each replica starts and ends, as `kernels.replay` says it of one.

    `lanes`: the first of each rank, where each stands, and what each action waits for. `times`: how
    long actions take and collectives move bytes; starts and ends. `meeting`: how many replicas have
    come; by replica, when each collective begins, is ready and ends: NONE before.
    """
    offset, op, stage, column = table
    needed, _, receives, edge, user = kinds
    first, before, awaits = lanes
    position, now, blocked, turn, stack, channel_free = walk
    arrived, over, num_ranks, top = message[1], meeting[3], len(offset) - 1, len(stack)
    num_stages, size = len(needed) // (OPT + 1), len(position) // num_ranks  # D
    num_links, num_edges = len(arrived) // size, len(channel_free) // size
    while top > 0:
        top, walker = top - 1, stack[top - 1]
        replica, rank = walker // num_ranks, walker % num_ranks
        at, free, own = position[walker], now[walker], replica * len(op)
        while True:
            if turn[walker] < first[rank + 1] and before[turn[walker]] <= at:
                top = _begin(at, walker, free, lanes, times[1], walk, meeting, top)
            if at == offset[rank + 1]:
                break
            kind = op[at] * num_stages + stage[at]
            link = replica * num_links + needed[kind] + column[at]
            if op[at] <= W:
                here = replica * len(before) + awaits[at]
                is_sharded = awaits[at] >= 0 and over[here] < 0
                if is_sharded or (receives[kind] and arrived[link] < 0):
                    blocked[walker] = NONE - 1 - awaits[at] if is_sharded else link
                    break
                free = max(free, over[here]) if awaits[at] >= 0 else free
                free = max(free, arrived[link]) if receives[kind] else free
                times[2][own + at] = free
                times[3][own + at] = free = free + times[0][own + at]
            else:
                is_send, here = op[at] in (SEND_F, SEND_B), replica * num_edges + edge[kind]
                posting = own + at, is_send, free, link, here
                if _post(posting, times, message, channel_free):
                    top = _wake(replica * num_ranks + user[kind], link, blocked, stack, top)
            at += 1
        position[walker], now[walker] = at, free


def _begin(
    at: int,
    walker: int,
    free: int,
    lanes: Arrays,
    moving: Ints,
    walk: Arrays,
    meeting: Arrays,
    top: int,
) -> int:
    """Note that a replica has come to the collectives before an action."""
    (first, before, _), (num_come, begin, _, _), turn = lanes, meeting, walk[3]
    replica, rank = walker // (len(first) - 1), walker % (len(first) - 1)
    while turn[walker] < first[rank + 1] and before[turn[walker]] <= at:
        here = turn[walker]
        begin[replica * len(before) + here] = free
        num_come[here] += 1
        turn[walker] += 1
        if num_come[here] * len(before) == len(begin):
            top = _join(here, rank, lanes, moving, walk, meeting, top)
    return top


def _join(
    here: int, rank: int, lanes: Arrays, moving: Ints, walk: Arrays, meeting: Arrays, top: int
) -> int:
    """Let a collective be done, to which all replicas have come."""
    (first, before, _), (_, begin, ready, over) = lanes, meeting
    latest, size, num_ranks = 0, len(before), len(first) - 1
    for at in range(here, len(begin), size):
        if here > first[rank]:
            begin[at] = max(begin[at], over[at - 1])
        latest = max(latest, begin[at])
    for at in range(here, len(begin), size):
        ready[at], over[at] = latest, latest + moving[at]
        top = _wake(at // size * num_ranks + rank, NONE - 1 - here, walk[2], walk[4], top)
    return top


def _wake(walker: int, awaited: int, blocked: Ints, stack: Ints, top: int) -> int:
    """Put a walker on the stack if it is blocked on just this; returns how many are on it."""
    if blocked[walker] != awaited:
        return top
    blocked[walker], stack[top] = NONE, walker
    return top + 1


def _post(
    posting: tuple[int, bool, int, int, int], times: Arrays, message: Arrays, channel_free: Ints
) -> bool:
    """Post a SEND or RECV; the second of the two lets the message move, and is told so."""
    (at, is_send, free, link, channel), (posted, arrived) = posting, message
    took, _, start, end = times
    other = posted[link]
    if other < 0:
        posted[link], start[at] = at, free
        return False
    moved = max(start[other], free, channel_free[channel])
    there = moved + took[at if is_send else other]
    start[at] = start[other] = moved
    end[at] = end[other] = channel_free[channel] = arrived[link] = there
    return True
