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
    took: Ints,
    moving: Ints,
    walk: Arrays,
    message: Arrays,
    meeting: Arrays,
    sums: Arrays,
    start: Ints,
    end: Ints,
) -> None:
    """When each action of each replica starts and ends, as `kernels.replay` says it of one.

    `lanes`: the first collective of each rank; before which action each collective stands; the
    collective that each action waits for, or NONE. `moving` is how long each collective of each
    replica moves bytes. `meeting`: how many replicas have come to a collective; then, by replica,
    when it begins, is ready and ends. `sums`: of each walker the time in computation
    and when it first computes.
    """
    offset, op, stage, column = table
    needed, _, receives, edge, user = kinds
    first, before, awaits = lanes
    position, now, blocked, turn, stack, channel_free = walk
    num_stages, num_ranks, top = len(needed) // (OPT + 1), len(offset) - 1, len(stack)
    num_replicas = len(position) // num_ranks
    num_links, num_edges = len(message[0]) // num_replicas, len(channel_free) // num_replicas
    while top > 0:
        top -= 1
        walker = stack[top]
        replica, rank = walker // num_ranks, walker % num_ranks
        at, free, own = position[walker], now[walker], replica * len(op)
        while True:
            while turn[walker] < first[rank + 1] and before[turn[walker]] <= at:
                top = _begin(turn[walker], walker, free, lanes, moving, walk, meeting, top)
                turn[walker] += 1
            if at == offset[rank + 1]:
                break
            kind = op[at] * num_stages + stage[at]
            link = replica * num_links + needed[kind] + column[at]
            if op[at] <= W:
                if awaits[at] >= 0 and meeting[0][awaits[at]] < num_replicas:
                    blocked[walker] = NONE - 1 - awaits[at]
                    break
                if receives[kind] and message[1][link] < 0:
                    blocked[walker] = link
                    break
                if awaits[at] >= 0:
                    free = max(free, meeting[3][replica * len(before) + awaits[at]])
                if receives[kind]:
                    free = max(free, message[1][link])
                if sums[1][walker] < 0:
                    sums[1][walker] = free
                start[own + at] = free
                free += took[own + at]
                sums[0][walker] += took[own + at]
                end[own + at] = free
            else:
                is_send, channel = op[at] in (SEND_F, SEND_B), replica * num_edges + edge[kind]
                ends = own + at, is_send, free
                if _post(ends, link, channel, took, message, channel_free, start, end):
                    top = _wake(replica * num_ranks + user[kind], link, blocked, stack, top)
            at += 1
        position[walker], now[walker] = at, free


def _begin(
    here: int,
    walker: int,
    free: int,
    lanes: Arrays,
    moving: Ints,
    walk: Arrays,
    meeting: Arrays,
    top: int,
) -> int:
    """Note that a replica has come to a collective; the last to come lets it be done."""
    first, before, _ = lanes
    num_come, begin, ready, over = meeting
    size, num_ranks = len(before), len(first) - 1
    rank, num_replicas = walker % num_ranks, len(begin) // size
    begin[walker // num_ranks * size + here] = free
    num_come[here] += 1
    if num_come[here] < num_replicas:
        return top
    latest = 0
    for at in range(here, num_replicas * size, size):
        if here > first[rank]:
            begin[at] = max(begin[at], over[at - 1])
        latest = max(latest, begin[at])
    for replica in range(num_replicas):
        at = replica * size + here
        ready[at], over[at] = latest, latest + moving[at]
        top = _wake(replica * num_ranks + rank, NONE - 1 - here, walk[2], walk[4], top)
    return top


def _wake(walker: int, awaited: int, blocked: Ints, stack: Ints, top: int) -> int:
    """Put a walker on the stack if it is blocked on just this; returns how many are on it."""
    if blocked[walker] != awaited:
        return top
    blocked[walker], stack[top] = NONE, walker
    return top + 1


def _post(
    end_of_message: tuple[int, bool, int],
    link: int,
    channel: int,
    took: Ints,
    message: Arrays,
    channel_free: Ints,
    start: Ints,
    end: Ints,
) -> bool:
    """Post a SEND or RECV; the second of the two lets the message move, and is told so."""
    at, is_send, free = end_of_message
    posted, arrived = message
    other = posted[link]
    if other < 0:
        posted[link], start[at] = at, free
        return False
    moved = max(start[other], free, channel_free[channel])
    there = moved + took[at if is_send else other]
    start[at] = start[other] = moved
    end[at] = end[other] = channel_free[channel] = arrived[link] = there
    return True
