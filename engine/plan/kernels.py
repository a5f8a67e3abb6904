"""Every walk over a program, as a loop over its arrays that can be compiled.

A kernel takes arrays and numbers and fills arrays that its caller has made; it makes none, raises
nothing and knows no names. Where a rule is broken it returns the index of the action, and whoever
called it finds the words. Each is called through `engine.arrays`. Nothing here may be given
a stage or column that is out of range, except where it is looked for.

`table` is (offset, op, stage, column): the arrays of `engine.plan.table`, with the microbatch as a
column from 0 to before `width`. `kinds` are the arrays of `engine.plan.rules.Kinds`, by op and
stage. Ranks are walked in turns: each as far as it can, and again when what it is blocked on is
there, so that each action is visited once.
"""

from __future__ import annotations

from engine.arrays import Arrays, Ints

F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, OPT = range(9)
"""As `engine.plan.action.CODES`, written out: machine code is compiled anew when this file changes,
not when another one does."""
NONE = -1


# what a program consists of


def find_illegal(table: Arrays, ranks: Ints, width: int, done: Ints) -> int:
    """The first action of a stage that is not its rank's, or of a column that there is not.

    Else the first computation of which a fact was made before; `done` marks facts, (3, S, width),
    and is empty where they do not matter.
    """
    offset, op, stage, column = table
    size, num_stages, again = len(done) // 3, len(ranks), NONE
    for rank in range(len(offset) - 1):
        for at in range(offset[rank], offset[rank + 1]):
            here, microbatch = stage[at], column[at]
            if not (0 <= here < num_stages and ranks[here] == rank and 0 <= microbatch < width):
                return at
            if size > 0:
                code, place = op[at], here * width + microbatch  # of F; then come I and W
                if code != F:
                    place += size if code != W else 2 * size
                if done[place] != 0 or (code == B and done[place + size] != 0):
                    again = at if again == NONE else again
                done[place] = 1
                if code == B:
                    done[place + size] = 1
    return again


def count_kinds(op: Ints, stage: Ints, num_stages: int, count: Ints) -> None:
    """How many actions there are of each kind."""
    for at in range(len(op)):
        if 0 <= stage[at] < num_stages:
            count[op[at] * num_stages + stage[at]] += 1


def find_peaks(offset: Ints, op: Ints, peak: Ints) -> None:
    """The most activations that each rank holds: F adds one, B and W take one away."""
    for rank in range(len(offset) - 1):
        held = most = 0
        for at in range(offset[rank], offset[rank + 1]):
            if op[at] == F:
                held += 1
                most = max(most, held)
            elif op[at] in (B, W):  # a tuple to look in is slow
                held -= 1
        peak[rank] = most


# time


def play(
    table: Arrays,
    kinds: Arrays,
    took: Ints,
    transfer_ns: int,
    overlaps: bool,
    walk: Arrays,
    ready: Ints,
    start: Ints,
    end: Ints,
) -> None:
    """When each computation starts and ends, each as soon as it can; `took` is by kind.

    `ready`: when each link is there, NONE before. `position` ends short of what never starts.
    """
    offset, op, stage, column = table
    needed, made, _, edge, user = kinds
    position, now, blocked, stack, channel_free = walk
    num_stages, top = len(needed) // (OPT + 1), len(stack)
    while top > 0:
        top -= 1
        rank = stack[top]
        at, free, stop = position[rank], now[rank], offset[rank + 1]
        while at < stop:
            code, microbatch = op[at], column[at]
            kind = code * num_stages + stage[at]
            link = needed[kind] + microbatch
            there = ready[link]
            if there < 0:
                blocked[rank] = link
                break
            if there > free and code != W:  # W needs what its rank has, before it is sent
                free = there
            start[at] = free
            free += took[kind]
            end[at] = arrival = free
            channel = edge[kind]
            if channel >= 0:
                channel_free[channel] = arrival = max(channel_free[channel], free) + transfer_ns
                if not overlaps:
                    free = arrival
            if code != W:
                link, waiting = made[kind] + microbatch, user[kind]
                ready[link] = arrival
                if blocked[waiting] == link:
                    blocked[waiting] = NONE
                    stack[top] = waiting
                    top += 1
            at += 1
        position[rank], now[rank] = at, free


def move_messages(
    table: Arrays, edge: Ints, duration_ns: int, end: Ints, channel: Arrays, message: Arrays
) -> None:
    """When the message of each computation begins to move, and which is before it; or NONE."""
    _, op, stage, _ = table
    last, free = channel
    moved, before = message
    num_stages = len(edge) // (OPT + 1)
    for at in range(len(op)):
        here = edge[op[at] * num_stages + stage[at]]
        if here >= 0:
            moved[at] = max(end[at], free[here])
            free[here] = moved[at] + duration_ns
            before[at], last[here] = last[here], at


def find_makers(table: Arrays, made: Ints, maker: Ints) -> None:
    """The index of the computation that makes each link."""
    _, op, stage, column = table
    num_stages = len(made) // (OPT + 1)
    for at in range(len(op)):
        if op[at] != W:
            maker[made[op[at] * num_stages + stage[at]] + column[at]] = at


def walk_back(
    table: Arrays,
    ranks: Ints,
    needed: Ints,
    maker: Ints,
    message: Arrays,
    duration_ns: int,
    overlaps: bool,
    start: Ints,
    end: Ints,
    path: Ints,
) -> int:
    """Go from the last computation, `path[0]`, to what ended for it to start, until the first.

    `path` gets twice the index of each computation; of the maker of a message that, and 1. Returns
    how many there are.
    """
    offset, op, stage, column = table
    moved, before = message
    num_stages, length, at, is_message = len(needed) // (OPT + 1), 0, path[0], False
    while True:
        path[length] = 2 * at + is_message
        length += 1
        if is_message:
            is_message = end[at] != moved[at] and before[at] >= 0
            at = before[at] if is_message else at
            continue
        if start[at] == 0:
            return length
        if at > offset[ranks[stage[at]]]:
            is_sending = not overlaps and moved[at - 1] >= 0
            if (moved[at - 1] + duration_ns if is_sending else end[at - 1]) == start[at]:
                at, is_message = at - 1, is_sending
                continue
        at = maker[needed[op[at] * num_stages + stage[at]] + column[at]]
        is_message = moved[at] >= 0


# transfers


def order_messages(
    table: Arrays, kinds: Arrays, width: int, num_sent: Ints, order: Ints, turn: Ints
) -> None:
    """The columns of each edge in the order sent, from edge x width on, and the turn of each."""
    _, op, stage, column = table
    edge = kinds[3]
    num_stages = len(edge) // (OPT + 1)
    for at in range(len(op)):
        here = edge[op[at] * num_stages + stage[at]]
        if here >= 0:
            order[here * width + num_sent[here]] = column[at]
            turn[here * width + column[at]] = num_sent[here]
            num_sent[here] += 1


def insert_transfers(
    table: Arrays, kinds: Arrays, width: int, ahead: int, sent: Arrays, posted: Ints, out: Arrays
) -> None:
    """Put each SEND behind its maker, and each RECV `ahead` computations before what needs it.

    With a RECV stand, before it, those of its edge that were sent before. `posted`: how many of an
    edge have been posted.
    """
    offset, op, stage, column = table
    needed, _, receives, edge, _ = kinds
    order, turn = sent
    out_offset, out_op, out_stage, out_column = out
    num_stages, to = len(edge) // (OPT + 1), 0
    for rank in range(len(offset) - 1):
        need = offset[rank]  # the computation that is looked ahead at
        for at in range(offset[rank], offset[rank + 1]):
            while need < offset[rank + 1] and need <= at + ahead:
                kind = op[need] * num_stages + stage[need]
                if receives[kind]:
                    first = needed[kind]
                    here = first // width
                    while posted[here] <= turn[first + column[need]]:
                        out_op[to], out_stage[to] = RECV_F if op[need] == F else RECV_B, stage[need]
                        out_column[to] = order[first + posted[here]]
                        posted[here] += 1
                        to += 1
                need += 1
            out_op[to], out_stage[to], out_column[to] = op[at], stage[at], column[at]
            to += 1
            if edge[op[at] * num_stages + stage[at]] >= 0:
                out_op[to], out_stage[to] = SEND_F if op[at] == F else SEND_B, stage[at]
                out_column[to] = column[at]
                to += 1
        out_offset[rank + 1] = to


AWAY, AGAIN, UNPOSTED, UNNEEDED, UNMADE, UNSENT = range(1, 7)


def misplaced_transfer(
    table: Arrays, kinds: Arrays, ranks: Ints, width: int, marks: Arrays
) -> tuple[int, int]:
    """The first action that stands wrong beside transfers, after what is wrong: 0 if nothing is.

    Of UNSENT it is the rank. `marks`: what has been, (ops, S, width), and of which links the maker
    and the RECV have been.
    """
    offset, op, stage, column = table
    needed, made, receives, edge, _ = kinds
    is_seen, is_made, is_posted = marks
    for rank in range(len(offset) - 1):
        num_due = 0  # SENDs whose maker is done
        for at in range(offset[rank], offset[rank + 1]):
            code = op[at]
            if not 0 <= stage[at] < len(ranks) or ranks[stage[at]] != rank:
                return AWAY, at
            kind = code * len(ranks) + stage[at]
            if is_seen[kind * width + column[at]]:
                return AGAIN, at
            is_seen[kind * width + column[at]] = 1
            link = made[kind] + column[at]
            if code <= W:
                if receives[kind] and not is_posted[needed[kind] + column[at]]:
                    return UNPOSTED, at
                if edge[kind] >= 0 and not is_made[link]:
                    is_made[link] = 1
                    num_due += 1
            elif code in (RECV_F, RECV_B):
                if edge[kind] < 0:
                    return UNNEEDED, at
                is_posted[link] = 1
            else:
                if edge[kind] < 0 or not is_made[link]:
                    return UNMADE, at
                num_due -= 1
        if num_due > 0:
            return UNSENT, rank
    return 0, 0


def meet(
    table: Arrays, kinds: Arrays, lines: Arrays, walk: Arrays, line: Arrays, is_there: Ints
) -> int:
    """Let the ends of messages meet: a SEND and its RECV, each the first that is left in its line.

    `lines` are, by kind, the line of a transfer and that of its other end. Returns the index of a
    RECV that would get another microbatch's message, or NONE. Then what hangs is left over: of a
    rank what `position` is short of, of a line its `first`.
    """
    offset, op, stage, column = table
    needed, _, receives, _, user = kinds
    position, blocked, stack = walk
    first, last, behind, todo, is_todo = line
    num_stages, top = len(needed) // (OPT + 1), len(stack)
    while top > 0:
        top -= 1
        rank = stack[top]
        at = position[rank]
        while at < offset[rank + 1]:
            kind = op[at] * num_stages + stage[at]
            if op[at] <= W:
                if receives[kind] and not is_there[needed[kind] + column[at]]:
                    blocked[rank] = needed[kind] + column[at]
                    break
                at += 1
                continue
            todo[0], num_todo = lines[0][kind], 1
            if first[todo[0]] < 0:
                first[todo[0]] = at
            else:
                behind[last[todo[0]]] = at
            last[todo[0]] = at
            at += 1
            while num_todo > 0:
                num_todo -= 1
                is_todo[todo[num_todo]] = 0
                receive = _complete(table, needed, lines, line, is_there, todo[num_todo])
                if receive < NONE:
                    return NONE - 1 - receive
                if receive >= 0:
                    kind = op[receive] * num_stages + stage[receive]
                    num_todo = _put(todo, is_todo, num_todo, lines[0][kind])
                    num_todo = _put(todo, is_todo, num_todo, lines[1][kind])
                    if blocked[user[kind]] == needed[kind] + column[receive]:
                        blocked[user[kind]] = NONE
                        stack[top] = user[kind]
                        top += 1
        position[rank] = at
    return NONE


def _put(todo: Ints, is_todo: Ints, num_todo: int, line: int) -> int:
    """Put a line on a stack where it is not yet; returns how many are."""
    if is_todo[line]:
        return num_todo
    is_todo[line], todo[num_todo] = 1, line
    return num_todo + 1


def _complete(
    table: Arrays, needed: Ints, lines: Arrays, line: Arrays, is_there: Ints, here: int
) -> int:
    """Let the first of a line meet its other end, if that is the first of its own.

    Returns the RECV of the two; NONE if it cannot be; NONE - 1 - RECV if they are not a pair.
    """
    _, op, stage, column = table
    others, first, behind = lines[1], line[0], line[2]
    num_stages, one = len(needed) // (OPT + 1), first[here]
    if one < 0:
        return NONE
    kind = op[one] * num_stages + stage[one]
    other = first[others[kind]]
    if other < 0 or needed[op[other] * num_stages + stage[other]] != needed[kind]:
        return NONE
    receive = one if op[one] in (RECV_F, RECV_B) else other
    if column[one] != column[other]:
        return NONE - 1 - receive
    first[here], first[others[kind]] = behind[one], behind[other]
    is_there[needed[kind] + column[one]] = 1
    return receive


def replay(
    table: Arrays,
    kinds: Arrays,
    lanes: Arrays,
    times: Arrays,
    walk: Arrays,
    message: Arrays,
    meeting: Arrays,
) -> None:
    """When each action of D replicas starts and ends; a transfer, when its message moves.

    What each replica has of its own lies behind that of the replica before. A rank of a replica is
    one of D x p walkers. The collectives of a rank are numbered from `first[rank]` on, in the order
    of its row: its lane. As replicas have the same row, the last of them to come to a collective
    finds the ones before it on the lane done.

    `lanes`: the first of each rank, where each stands, and what each action waits for. `times`: how
    long actions take and collectives move bytes; starts and ends. `message`: by link, the end that
    was ready first, and when it has arrived. `meeting`: how many replicas have come; by replica,
    when each collective begins, is ready and ends. All are NONE before.
    """
    offset, op, stage, column = table
    needed, _, receives, edge, user = kinds
    first, before, awaits = lanes
    took, moving, start, end = times
    position, now, blocked, turn, stack, channel_free = walk
    posted, arrived = message
    over, num_ranks, top = meeting[3], len(offset) - 1, len(stack)
    num_stages, size = len(needed) // (OPT + 1), len(position) // num_ranks  # D
    num_links, num_edges = len(arrived) // size, len(channel_free) // size
    while top > 0:
        top, walker = top - 1, stack[top - 1]
        replica, rank = walker // num_ranks, walker % num_ranks
        at, free, own = position[walker], now[walker], replica * len(op)
        while True:
            if turn[walker] < first[rank + 1] and before[turn[walker]] <= at:
                top = _begin(at, walker, free, lanes, moving, walk, meeting, top)
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
                start[own + at] = free
                end[own + at] = free = free + took[own + at]
            elif posted[link] < 0:
                posted[link], start[own + at] = own + at, free
            else:
                other, channel = posted[link], replica * num_edges + edge[kind]
                moved = max(start[other], free, channel_free[channel])
                there = moved + took[own + at if op[at] in (SEND_F, SEND_B) else other]
                start[own + at] = start[other] = moved
                end[own + at] = end[other] = channel_free[channel] = arrived[link] = there
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
    """Note that a replica has come to the collectives before an action; the last lets them be."""
    (first, before, _), (num_come, begin, ready, over) = lanes, meeting
    blocked, turn, stack = walk[2], walk[3], walk[4]
    size, num_ranks = len(before), len(first) - 1
    replica, rank = walker // num_ranks, walker % num_ranks
    while turn[walker] < first[rank + 1] and before[turn[walker]] <= at:
        here = turn[walker]
        begin[replica * size + here] = free
        num_come[here] += 1
        turn[walker] += 1
        if num_come[here] * size < len(begin):
            continue
        latest = 0
        for each in range(here, len(begin), size):
            if here > first[rank]:
                begin[each] = max(begin[each], over[each - 1])
            latest = max(latest, begin[each])
        for each in range(here, len(begin), size):
            ready[each], over[each] = latest, latest + moving[each]
            top = _wake(each // size * num_ranks + rank, NONE - 1 - here, blocked, stack, top)
    return top


def _wake(walker: int, awaited: int, blocked: Ints, stack: Ints, top: int) -> int:
    """Put a walker on the stack if it is blocked on just this; returns how many are on it."""
    if blocked[walker] != awaited:
        return top
    blocked[walker], stack[top] = NONE, walker
    return top + 1


# memory


def follow_bytes(
    row: Arrays,
    kinds: Arrays,
    width: int,
    costs: Arrays,
    message_bytes: Ints,
    is_posted: bool,
    is_queued: bool,
    memory: Arrays,
    level: int,
) -> tuple[int, int]:
    """The most bytes along the row of one rank, from `level` on, and those at its end.

    `engine.plan.footprint` makes the arguments and says what they are.
    """
    _, op, stage, column, joined_rise, joined_net, gradients = row
    needed, made, receives, edge, _ = kinds
    first_rise, first_net, first_handed, rise, net, handed, let_go = costs
    is_done, num_posted, num_taken, turn, to_send, queued = memory
    num_stages, peak = len(needed) // (OPT + 1), level
    for at in range(len(op)):
        kind = op[at] * num_stages + stage[at]
        here = edge[kind]
        peak = max(peak, level + joined_rise[at])
        level += joined_net[at]
        if op[at] in (RECV_F, RECV_B):
            num_posted[here] += 1
            turn[needed[kind] + column[at]] = num_posted[here]
            level += message_bytes[kind] if is_posted else 0
        elif op[at] in (SEND_F, SEND_B):
            sent = to_send[needed[kind] + column[at]]
            if is_queued:
                sent, queued[here] = queued[here], sent
            level -= sent
        else:
            if receives[kind] and not is_posted:
                source, last = needed[kind] // width, turn[needed[kind] + column[at]]
                if last > num_taken[source]:
                    level += (last - num_taken[source]) * message_bytes[kind]
                    num_taken[source] = last
            is_first = is_done[kind] == 0
            is_done[kind] = 1
            peak = max(peak, level + gradients[at] + (first_rise if is_first else rise)[kind])
            level += gradients[at] + (first_net[kind] if is_first else net[kind])
            if here >= 0:
                to_send[made[kind] + column[at]] = first_handed[kind] if is_first else handed[kind]
            peak = max(peak, level)
            level -= let_go[kind]
        peak = max(peak, level)
    return peak, level
