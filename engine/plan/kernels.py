"""Loops over the arrays of a program, the walk among them, that can be compiled.

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

F, B, I, W, SEND_F, RECV_F, SEND_B, RECV_B, OPT, UNSHARD, RESHARD, REDUCE_GRAD, NORM = range(13)
"""As `engine.plan.action.CODES`, written out: machine code is compiled anew when this file changes,
not when another one does."""
NUM_OPS = NORM + 1
NONE = -1
MADE = -2
"""When a message is there that is made and has not moved yet."""


# what a program consists of


def find_illegal(table: Arrays, ranks: Ints, width: int, left: Ints) -> int:
    """The first action of a stage that is not its rank's, or of a column that there is not.

    Else the first computation of which a fact was made before; `left` has 1 for each fact, (3, S,
    width), until it is made, and is empty where they do not matter.
    """
    offset, op, stage, column = table
    size, num_stages, again = len(left) // 3, len(ranks), NONE
    for rank in range(len(offset) - 1):
        for at in range(offset[rank], offset[rank + 1]):
            here, microbatch = stage[at], column[at]
            if op[at] > RECV_B:  # of no microbatch; `engine.plan.collective_rules` knows its place
                continue
            if not (0 <= here < num_stages and ranks[here] == rank and 0 <= microbatch < width):
                return at
            if size > 0:
                code, place = op[at], here * width + microbatch  # of F; then come I and W
                if code != F:
                    place += size if code != W else 2 * size
                if left[place] == 0 or (code == B and left[place + size] == 0):
                    again = at if again == NONE else again
                left[place] = 0
                if code == B:
                    left[place + size] = 0
    return again


def count_kinds(op: Ints, stage: Ints, num_stages: int, count: Ints) -> None:
    """How many actions there are of each kind."""
    for at in range(len(op)):
        if 0 <= stage[at] < num_stages:
            count[op[at] * num_stages + stage[at]] += 1


def find_mates(
    offset: Ints,
    op: Ints,
    stage: Ints,
    microbatch: Ints,
    paired: Ints,
    num_microbatches: int,
    mates: Ints,
) -> None:
    """The computation behind each forward that `paired` has, on the same rank."""
    for rank in range(len(offset) - 1):
        forward = NONE
        for at in range(offset[rank], offset[rank + 1]):
            if op[at] > W:
                continue
            if forward != NONE:
                mates[forward], forward = at, NONE
            place = stage[at] * num_microbatches + microbatch[at]
            if op[at] == F and 0 <= place < len(paired) and paired[place] == 1:
                forward = at


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


# transfers


def order_messages(
    table: Arrays, kinds: Arrays, width: int, num_sent: Ints, order: Ints, turn: Ints
) -> None:
    """The columns of each edge in the order sent, from edge x width on, and the turn of each."""
    _, op, stage, column = table
    edge = kinds[3]
    num_stages = len(edge) // NUM_OPS
    for at in range(len(op)):
        here = edge[op[at] * num_stages + stage[at]]
        if here >= 0:
            order[here * width + num_sent[here]] = column[at]
            turn[here * width + column[at]] = num_sent[here]
            num_sent[here] += 1


def insert_transfers(
    table: Arrays,
    kinds: Arrays,
    width: int,
    ahead: int,
    sent: Arrays,
    posted: Ints,
    mates: Ints,
    out: Arrays,
) -> None:
    """Put each SEND behind its maker, and each RECV `ahead` computations before what needs it.

    With a RECV stand, before it, those of its edge that were sent before. `posted`: how many of an
    edge have been posted. No transfer stands within a pair.
    """
    offset, op, stage, column = table
    needed, _, receives, edge, _ = kinds
    order, turn = sent
    out_offset, out_op, out_stage, out_column = out
    num_stages, to = len(edge) // NUM_OPS, 0
    for rank in range(len(offset) - 1):
        need = offset[rank]  # the computation that is looked ahead at
        for at in range(offset[rank], offset[rank + 1]):
            is_pair = len(mates) > 0 and mates[at] != NONE
            while need < offset[rank + 1] and need <= at + ahead + is_pair:
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
            is_second = len(mates) > 0 and at > offset[rank] and mates[at - 1] == at
            for maker in range(at - is_second, at if is_pair else at + 1):
                if edge[op[maker] * num_stages + stage[maker]] >= 0:
                    out_op[to] = SEND_F if op[maker] == F else SEND_B
                    out_stage[to], out_column[to] = stage[maker], column[maker]
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
            if code > RECV_B:
                continue
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


# time


def walk(
    table: Arrays,
    kinds: Arrays,
    lines: Arrays,
    took: Ints,
    shape: tuple[int, int, int, int, int],
    transfer_ns: int,
    overlaps: bool,
    walkers: Arrays,
    links: Arrays,
    queue: Arrays,
    channel: Arrays,
    times: Arrays,
    why: Arrays,
) -> int:
    """Let every rank go as far as it can, and again when what it is blocked on is there.

    `shape` is (steps K, replicas D, microbatches, stages, links). A walker is a rank of a replica,
    d x p + r; what is by step and replica lies one behind the other, (d x K + k) times its length.
    `table`: offset, op, stage, column, `awaits`, the collective of the row that an action waits
    for, `mates`, the backward that a forward is one with, and `copies`, the other REDUCE_GRAD of
    one replica whose stages are on two ranks. `took` is by replica, step and
    action; a message's at its SEND. `walkers`: where each stands in its row, in which step, since
    when it is free, what it did last, what it is blocked on, and the stack of those to go on.
    `links`: when each is there, NONE before or MADE, and what brought it.
    `queue`: the first and last transfer of each line, what is behind each, and lines to look at.
    `channel`: when each channel and lane is free, and who has come to a meeting.
    `times`: when each action starts and ends, and when what it lets move begins to move; NONE
    before. `why`: by action what ended for it to start, by message what ended for it to move; both
    may be empty. Returns a RECV that would get another microbatch's message, or NONE.
    """
    offset, op, stage, column, awaits, mates, copies = table
    needed, made, _, edge, user = kinds
    num_steps, replicas, width, num_stages, num_links = shape
    position, step, now, latest, blocked, stack, ends = walkers
    there_ns, brought = links
    free_ns, last_moved, lane_ns, num_come, come_ns = channel
    start, end, moves = times
    cause, moved_by = why
    num_ranks, size = len(offset) - 1, len(op)
    top, has_why, is_explicit = len(stack), len(cause) > 0, len(lines[0]) > 0
    is_joined, has_pairs = len(awaits) > 0, len(mates) > 0
    has_copies = len(copies) > 0 and replicas == 1
    first, last, behind, todo, is_todo = queue
    num_lines = len(is_todo)
    while top > 0:
        top -= 1
        walker = stack[top]
        replica, rank = walker // num_ranks, walker % num_ranks
        at, k, free, before = position[walker], step[walker], now[walker], latest[walker]
        begin, stop = offset[rank], offset[rank + 1]
        base = (replica * num_steps + k) * size
        link_base = (replica * num_steps + k) * num_links * width
        while True:
            if at == stop:
                ends[walker * num_steps + k] = free
                if k + 1 == num_steps:
                    break
                k, at = k + 1, begin
                base, link_base = base + size, link_base + num_links * width
                continue
            own, code, began, reason = base + at, op[at], free, before
            if is_joined and awaits[at] >= 0:
                over = end[base + awaits[at]]
                if over < 0:
                    blocked[walker] = NONE - 1 - (base + awaits[at])
                    break
                if over > began:
                    began, reason = over, base + awaits[at]
            if code <= W:
                kind = code * num_stages + stage[at]
                link = link_base + column[at] + needed[kind]
                arrived = there_ns[link]
                if arrived < 0 and (code != W or arrived == NONE):
                    blocked[walker] = link
                    break
                if arrived > began and code != W:
                    began = arrived
                    if has_why:
                        reason = brought[link]
                mate = mates[at] if has_pairs else NONE
                if mate != NONE:
                    link = link_base + column[mate] + needed[op[mate] * num_stages + stage[mate]]
                    if there_ns[link] < 0:
                        blocked[walker] = link
                        break
                    if there_ns[link] > began:
                        began = there_ns[link]
                        if has_why:
                            reason = brought[link]
                start[own] = began
                end[own] = free = began + took[own]
                before = own
                if has_why:
                    cause[own] = reason
                if code != W:
                    link, here = link_base + column[at] + made[kind], edge[kind]
                    if here < 0:
                        there_ns[link] = free
                        if has_why:
                            brought[link] = own
                    elif is_explicit:
                        if there_ns[link] == NONE:
                            there_ns[link] = MADE
                    else:
                        here += replica * num_links
                        ready, maker = free, own
                        if mate != NONE and overlaps:  # the pair is over then
                            ready, maker = free + took[base + mate], base + mate
                        moved = max(ready, free_ns[here])
                        if has_why:
                            late = moved > ready and last_moved[here] >= 0
                            moved_by[own] = NONE - 1 - last_moved[here] if late else maker
                            last_moved[here], brought[link] = own, NONE - 1 - own
                        moves[own] = moved
                        there_ns[link] = free_ns[here] = moved + transfer_ns
                        if not overlaps:
                            free, before = moved + transfer_ns, NONE - 1 - own
                        waiting = replica * num_ranks + user[kind]
                        if blocked[waiting] == link:
                            blocked[waiting], stack[top] = NONE, waiting
                            top += 1
            elif code <= RECV_B:
                kind = code * num_stages + stage[at]
                start[own] = free
                here = replica * num_lines + lines[0][kind]
                if first[here] < 0:
                    first[here] = own
                else:
                    behind[last[here]] = own
                last[here] = own
                is_other_there = first[replica * num_lines + lines[1][kind]] >= 0
                todo[0], num_todo = here, int(is_other_there)
                while num_todo > 0:
                    num_todo -= 1
                    line = todo[num_todo]
                    is_todo[line % num_lines] = 0
                    one = first[line]
                    if one < 0:
                        continue
                    there, both = one % size, one // size
                    kind = op[there] * num_stages + stage[there]
                    other_line = replica * num_lines + lines[1][kind]
                    other = first[other_line]
                    if other < 0:
                        continue
                    other_at = other % size
                    other_kind = op[other_at] * num_stages + stage[other_at]
                    if needed[other_kind] != needed[kind]:
                        continue
                    is_receive = op[there] == RECV_F or op[there] == RECV_B
                    send, receive = (other, one) if is_receive else (one, other)
                    if column[there] != column[other_at] or one - there != other - other_at:
                        return receive
                    first[line], first[other_line] = behind[one], behind[other]
                    here = replica * num_links + edge[kind]
                    moved = max(start[send], start[receive], free_ns[here])
                    over = moved + took[send]
                    link = both * num_links * width + needed[kind] + column[there]
                    start[send] = start[receive] = moves[send] = moves[receive] = moved
                    end[send] = end[receive] = free_ns[here] = there_ns[link] = over
                    if has_why:
                        brought[link] = send
                    for each in (lines[0][kind], lines[1][kind]):
                        if first[replica * num_lines + each] >= 0 and not is_todo[each]:
                            is_todo[each], todo[num_todo] = 1, replica * num_lines + each
                            num_todo += 1
                    waiting = replica * num_ranks + user[kind]
                    if blocked[waiting] == link:
                        blocked[waiting], stack[top] = NONE, waiting
                        top += 1
            elif code == RESHARD:
                start[own] = end[own] = free
            elif code == OPT:
                if has_why:
                    cause[own] = reason
                start[own] = began
                end[own] = free = began + took[own]
                before = own
            elif code == NORM:
                if end[own] < 0 and start[own] < 0:
                    start[own] = began
                    if has_why:
                        cause[own] = reason
                    come_ns[k] = max(come_ns[k], began)
                    num_come[size * num_steps + k] += 1
                    if num_come[size * num_steps + k] == num_ranks * replicas:
                        for each in range(num_ranks * replicas):
                            # Every rank stands at its NORM.
                            theirs = each // num_ranks * num_steps + k
                            place = at if each == walker else position[each]
                            end[theirs * size + place] = come_ns[k] + took[own]
                            if blocked[each] == NONE - 1 - (theirs * size + place):
                                blocked[each], stack[top] = NONE, each
                                top += 1
                if end[own] < 0:
                    blocked[walker] = NONE - 1 - own
                    break
                free, before = end[own], own
            else:
                start[own] = free
                other = copies[at] if has_copies else NONE
                come = k * size + (min(at, other) if other != NONE else at)
                num_ends = replicas if other == NONE else 2
                num_come[come] += 1
                if num_come[come] == num_ends:
                    # The same place on all replicas, or two places of one on two ranks.
                    away = rank
                    if other != NONE:
                        away = 0
                        while offset[away + 1] <= other:
                            away += 1
                    ready = 0
                    for each in range(num_ends):
                        theirs, lane = (each * num_steps + k) * size + at, each * num_ranks + rank
                        if other != NONE and each == 1:
                            theirs, lane = k * size + other, away
                        start[theirs] = max(start[theirs], lane_ns[lane])
                        ready = max(ready, start[theirs])
                    for each in range(num_ends):
                        theirs, lane = (each * num_steps + k) * size + at, each * num_ranks + rank
                        if other != NONE and each == 1:
                            theirs, lane = k * size + other, away
                        moves[theirs] = ready
                        end[theirs] = lane_ns[lane] = ready + took[theirs]
                        waiting = lane
                        if blocked[waiting] == NONE - 1 - theirs:
                            blocked[waiting], stack[top] = NONE, waiting
                            top += 1
            at += 1
        position[walker], step[walker], now[walker], latest[walker] = at, k, free, before
    return NONE


def later_by(start: Ints, moves: Ints, size: int, step: int, before: int) -> int:
    """How much later all times of a step are than those of one before; NONE if they differ."""
    later = start[step * size] - start[before * size] if size > 0 else 0
    for at in range(size):
        here, there = step * size + at, before * size + at
        if start[here] - start[there] != later:
            return NONE
        if moves[here] != NONE and moves[here] - moves[there] != later:
            return NONE
    return later


def spread(op: Ints, stage: Ints, num_stages: int, by_kind: Ints, took: Ints) -> None:
    """Give each action what its kind takes."""
    for at in range(len(op)):
        took[at] = by_kind[op[at] * num_stages + max(stage[at], 0)]


def find_awaited(offset: Ints, op: Ints, stage: Ints, latest: Ints, awaits: Ints) -> None:
    """The collective that each action waits for, or NONE; `latest` is by stage, NONE before."""
    for rank in range(len(offset) - 1):
        last = NONE
        for at in range(offset[rank], offset[rank + 1]):
            if op[at] == UNSHARD:
                latest[stage[at]] = last = at
            elif op[at] == REDUCE_GRAD:
                last = at
            elif op[at] <= W:
                awaits[at] = latest[stage[at]]
            elif op[at] == OPT or op[at] == NORM:
                awaits[at] = last


def walk_back(why: Arrays, start: Ints, at: int, path: Ints) -> int:
    """Go from an action to what ended for it to start, until the beginning.

    `path` gets twice the index of each; of the maker of a message that, and 1. Returns how many.
    """
    cause, moved_by = why
    length, is_message = 0, False
    while True:
        path[length] = 2 * at + is_message
        length += 1
        reason = moved_by[at] if is_message else cause[at]
        if reason == NONE or (start[at] == 0 and not is_message):
            return length
        is_message = reason < NONE
        at = NONE - 1 - reason if is_message else reason
