"""The loops of the solver, which can be compiled as `engine.plan.kernels` can.

All microbatches are alike, so that each stage may take them in order: a row is then a sequence of
kinds, and its nth F or I is of microbatch n. With S stages, kind o x S + s is op o of stage s, F, I
and W being 0, 1 and 2. Kind 3 x S + s is an I that makes a whole backward with a W of its stage
right behind it, then of the same microbatch, and is an I like others where none follows:

    0F 1F 1B 1W 0I 0W    with S = 2 and 1B of kind 7: the B of stage 1, then both halves of stage 0

`took` is by these kinds. Split, the input gradient of a backward is there sooner; whole, its rank
may be done sooner. The other W take the other microbatches, in order too.

`shape` is (rank of each stage, where a rank's stages begin, the stages by rank, where a rank's row
begins, and by kind the kind before it and after it on a microbatch's way through F and I, or NONE);
`memory` is (limit and least limit by rank, by kind what an action changes of what is held). The
input of F or I of stage s and microbatch m arrives at `arrival`, at its kind x M + m.

`turn` is (when each rank begins a step, and each channel is free for it; how long each goes on
after it, which is its optimizer; and three that hold something of each meanwhile). Channels are by
kind of what is sent, behind the ranks. Where ranks meet between steps, each begins a step with its
optimizer, counted from the meeting; else where steps bring it.

`play_rows` walks over such rows, and not `engine.plan.kernels.walk`: a search does so after each of
some hundred thousand changes, and the microbatches of a row of kinds need no new numbers for it.

Room is kept for the oldest microbatch that has not gone forward through all stages of a rank: else
younger ones could fill the rank, and none could ever turn back. With it kept on every rank, that
microbatch can always go on once all that turned back are done: no choice leads into a dead end.
"""

from __future__ import annotations

from engine.arrays import Arrays, Ints
from engine.plan.kernels import NONE

LATE = 2**62

MOST_STEPS, FEW_STEPS = 32, 4
"""Steps in a row in which the period is found, most often; and how many are gone through for it
after a change."""


def open_stages(
    shape: Arrays, memory: Arrays, count: Ints, held: int, rank: int, is_open: Ints
) -> None:
    """Mark the stages of which a rank can take one more F and still finish what it has begun.

    No more than its `places` are between F and I of a stage at any time.
    """
    first, stages = shape[1], shape[2]
    limit, least, takes, places = memory
    num_stages, last = len(places), stages[first[rank + 1] - 1]
    younger = least[rank]  # than the oldest microbatch that is still to come to the last stage
    for at in range(first[rank], first[rank + 1] - 1):
        here = stages[at]
        younger += max(0, count[here] - count[last] - 1) * takes[here]
    for at in range(first[rank], first[rank + 1]):
        here = stages[at]
        more = takes[here] if here != last and count[here] > count[last] else 0
        is_open[here] = (
            held + takes[here] <= limit[rank]
            and younger + more <= limit[rank]
            and count[here] < count[num_stages + here] + places[here]
        )


def choose(shape: Arrays, took: Ints, key: Ints, patience: int, state: Arrays, rank: int) -> int:
    """Which kind a rank starts next, or NONE; `next_time` gets when.

    The one that can start first, of several that of the lowest key; but one of a lower key, if it
    can start before `patience` percent of the first one's time are over.
    """
    first, stages = shape[1], shape[2]
    count, arrival, now, next_time, is_open = state[:5]
    num_stages = len(is_open)
    width = len(arrival) // (2 * num_stages)
    begin, until, lowest, best = LATE, LATE, LATE, NONE
    for turn in range(2):
        for at in range(3 * first[rank], 3 * first[rank + 1]):
            stage, op = stages[at // 3], at % 3
            kind = op * num_stages + stage
            done = count[kind]
            if done == width or (op == 2 and done == count[kind - num_stages]):
                continue
            there = now[rank]
            if op < 2:
                if arrival[kind * width + done] < 0:
                    continue
                there = max(there, arrival[kind * width + done])
            if there > (begin if turn == 0 else until):
                continue
            urgency = key[kind * width + done]
            is_better = urgency < lowest or (turn == 0 and there < begin)
            if is_better and (op > 0 or is_open[stage]):
                best, lowest, next_time[rank] = kind, urgency, there
                begin = there if turn == 0 else begin
        if patience == 0 or best == NONE:
            break
        until = begin + max(took[best] * patience // 100 - 1, 0)
    return best


def list_schedule(
    shape: Arrays,
    took: Ints,
    memory: Arrays,
    link: tuple[int, bool],
    key: Ints,
    whole: Ints,
    patience: int,
    state: Arrays,
    row: Ints,
) -> None:
    """Fill the rows in order of time, each rank taking what its keys say.

    The first backwards of a stage are whole, as many as `whole` says; the others are split.
    `state` is zeros but for `arrival`, NONE but for the inputs of stage 0, and `position`, where
    the rows begin. Limits must be at least the least: then no rank is ever at a dead end.
    """
    ranks, follower, (transfer_ns, overlaps), change = shape[0], shape[5], link, memory[2]
    count, arrival, now, next_time, is_open, next_kind, held, channel_free, position = state
    num_stages = len(ranks)
    width = len(arrival) // (2 * num_stages)
    for rank in range(len(now)):
        open_stages(shape, memory, count, held[rank], rank, is_open)
        next_kind[rank] = choose(shape, took, key, patience, state, rank)
    for _ in range(len(row)):
        rank = NONE  # whose next action starts first
        for other in range(len(next_kind)):
            if next_kind[other] >= 0 and (rank < 0 or next_time[other] < next_time[rank]):
                rank = other
        if rank < 0:
            break
        kind, at = next_kind[rank], position[rank]
        row[at], lasts = kind, took[kind]
        held[rank] += change[kind]
        position[rank] += 1
        if kind // num_stages == 1 and count[kind] < whole[kind - num_stages]:
            weight = kind + num_stages
            row[at], row[at + 1], lasts = weight + num_stages, weight, took[weight + num_stages]
            held[rank] += change[weight]
            position[rank] += 1
            count[weight] += 1
        end = now[rank] = next_time[rank] + lasts
        after = follower[kind]
        user = ranks[after % num_stages] if after >= 0 else rank
        if user != rank:
            end = channel_free[kind] = max(channel_free[kind], end) + transfer_ns
            now[rank] = now[rank] if overlaps else end
        if after >= 0:
            arrival[after * width + count[kind]] = end
        count[kind] += 1
        open_stages(shape, memory, count, held[rank], rank, is_open)
        next_kind[rank] = choose(shape, took, key, patience, state, rank)
        if user != rank:
            next_kind[user] = choose(shape, took, key, patience, state, user)


def alternate(shape: Arrays, memory: Arrays, most_late: Ints, row: Ints) -> bool:
    """Fill the rows of ranks with a stage each in turns of I and F; whether that can be done.

    A rank begins with as many F as its `places` and limit allow. Its W come when more than
    `most_late` wait, when the next F needs their memory, or one behind each I where no F is left.
    """
    ranks, _, _, offset = shape[:4]
    limit, _, change, places = memory
    num_stages = len(ranks)
    for here in range(num_stages):
        rank = ranks[here]
        at, held, late, begun = offset[rank], 0, 0, 0
        width, takes = (offset[rank + 1] - at) // 3, change[here]
        while begun < min(width, places[here]) and held + takes <= limit[rank]:
            row[at] = here
            at, begun, held = at + 1, begun + 1, held + takes
        for back in range(width):
            if begun <= back:
                return False
            row[at] = num_stages + here
            at, late, held = at + 1, late + 1, held + change[num_stages + here]
            while late > 0 and (
                begun == width or late > most_late[here] or held + takes > limit[rank]
            ):
                row[at] = 2 * num_stages + here
                at, late, held = at + 1, late - 1, held + change[2 * num_stages + here]
                if begun == width:
                    break
            if begun < width and held + takes <= limit[rank]:
                row[at] = here
                at, begun, held = at + 1, begun + 1, held + takes
        for _ in range(late):
            row[at] = 2 * num_stages + here
            at += 1
    return True


def rewind(shape: Arrays, state: Arrays, turn: Arrays) -> None:
    """Bring the state of `play_rows` back to before the first action, at the times of `turn`."""
    offset = shape[3]
    count, position, free, blocked, stack = state[:5]
    begin, _, origin = turn[:3]
    for kind in range(len(count)):
        count[kind] = 0
    for one in range(len(free)):
        free[one], origin[one] = begin[one], one
    for rank in range(len(position)):
        position[rank], blocked[rank], stack[rank] = offset[rank], NONE, rank


def play_rows(
    shape: Arrays, took: Ints, link: tuple[int, bool], row: Ints, state: Arrays, origin: Ints
) -> bool:
    """Go through some rows, from where `rewind` has brought the state; whether all was done.

    `cause` gets, of each action, the place of that which ended for it to start; `origin`, of each
    rank and channel, that where the longest path to its end begins. Of the state, `arrival`,
    `maker` and `source` may hold anything but for stage 0's F.
    """
    ranks, _, _, offset, leader, follower = shape
    count, position, free, blocked, stack, arrival, maker, cause, _, source = state
    num_stages, top, num_left = len(ranks), len(position), len(row)
    width, (transfer_ns, overlaps) = len(arrival) // (2 * num_stages), link
    channels = len(position)
    while top > 0:
        top -= 1
        rank = stack[top]
        at, now, first = position[rank], free[rank], origin[rank]
        while at < offset[rank + 1]:
            kind = row[at]
            is_whole = kind >= 3 * num_stages
            if is_whole:
                kind -= 2 * num_stages
                is_whole = at + 1 < offset[rank + 1] and row[at + 1] == kind + num_stages
            done, before, after = count[kind], leader[kind], follower[kind]
            if before >= 0 and count[before] <= done:
                blocked[rank] = before
                break
            cause[at] = at - 1 if at > offset[rank] else NONE
            place = kind * width + done
            if kind < 2 * num_stages and arrival[place] > now:
                now, cause[at], first = arrival[place], maker[place], source[place]
            now += took[kind + 2 * num_stages] if is_whole else took[kind]
            count[kind] += 1
            num_left -= 1
            if after >= 0:
                user, end, since = ranks[after % num_stages], now, first
                if user != rank:
                    channel = channels + kind
                    if free[channel] > end:
                        end, since = free[channel], origin[channel]
                    end += transfer_ns
                    free[channel], origin[channel] = end, since
                    if not overlaps:
                        now, first = end, since
                    if blocked[user] == kind:
                        blocked[user], stack[top] = NONE, user
                        top += 1
                place = after * width + done
                arrival[place], maker[place], source[place] = end, at, since
            if is_whole:
                at += 1
                cause[at] = at - 1
                count[kind + num_stages] += 1
                num_left -= 1
            at += 1
        position[rank], free[rank], origin[rank] = at, now, first
    return num_left == 0


# steps in a row


def longest_step(shape: Arrays, state: Arrays, turn: Arrays) -> int:
    """The longest time from where a rank or channel begins a step to where it begins the next.

    `last[0]` gets the place of the last action of the rank that takes it. The period of steps in a
    row is at most that (Collatz and Wielandt, for longest paths). Where ranks meet it is the time
    from meeting to meeting: what a rank's optimizer took before, it takes after.
    """
    offset, position, free, last = shape[3], state[1], state[2], state[8]
    begin, after = turn[:2]
    longest, last[0] = NONE, NONE
    for one in range(len(free)):
        lasts = free[one] + after[one] - begin[one]
        if lasts > longest:
            longest = lasts
            if one < len(position):
                last[0] = offset[one + 1] - 1
    return longest


def longest_circle(state: Arrays, turn: Arrays) -> int:
    """The longest mean of the longest paths that go in a circle: no period is shorter.

    A rank is done when the longest path to its end is, which begins with some rank's first action,
    its `origin`; that rank began when the longest path to its own end was done, a step before. So
    going back from rank to rank ends in a circle. `last[0]` gets a rank or channel of the longest.
    """
    free, last = state[2], state[8]
    begin, after, origin, seen = turn[:4]
    longest, last[0] = NONE, NONE
    for one in range(len(free)):
        seen[one] = NONE
    for first in range(len(free)):
        one = first
        while seen[one] < 0:
            seen[one], one = first, origin[one]
        if seen[one] != first:
            continue  # it leads to a circle that was met before
        length, total, other = 0, 0, one
        while length == 0 or other != one:
            total += free[other] + after[other] - begin[origin[other]]
            length, other = length + 1, origin[other]
        if -(-total // length) > longest:
            longest, last[0] = -(-total // length), one
    return longest


def begin_next(state: Arrays, turn: Arrays, period: int) -> None:
    """Let all begin where they would if each step were a period behind the one before.

    Ranks whose longest paths come from the circle of `longest_circle` begin as its steps say
    (Howard's policy iteration), others where this step leaves them.
    """
    num_ranks, free, root = len(state[1]), state[2], state[8][0]
    begin, after, origin, seen, later = turn
    for one in range(len(free)):
        seen[one] = NONE
    seen[root], later[root] = root, begin[root]
    for first in range(len(free)):
        length, one = 0, first
        while seen[one] < 0 and length < len(free):
            length, one = length + 1, origin[one]
        if seen[one] < 0:
            later[first] = free[first] + after[first] - period
        while seen[one] >= 0 and seen[first] < 0:  # the nearest to the circle first
            one = first
            while seen[origin[one]] < 0:
                one = origin[one]
            before = origin[one]
            seen[one], later[one] = root, later[before] + free[one] + after[one] - begin[before]
            later[one] -= period
    earliest = later[0]
    for rank in range(num_ranks):
        earliest = min(earliest, later[rank])
    for one in range(len(free)):
        begin[one] = max(0, later[one] - earliest)


def step_of(
    shape: Arrays,
    took: Ints,
    link: tuple[int, bool],
    row: Ints,
    state: Arrays,
    turn: Arrays,
    how: tuple[bool, int, int],
) -> int:
    """The time of a step of some rows, NONE where they cannot be finished.

    `how`: whether ranks meet; at most so many steps in a row are gone through; one that is longer
    than so much need not be known better. `turn` is left as of the last of these steps, and
    `last[0]` as what its longest path or circle ends with.
    """
    meets, most_steps, most_ns = how
    longest = NONE
    for _ in range(most_steps):
        rewind(shape, state, turn)
        if not play_rows(shape, took, link, row, state, turn[2]):
            return NONE
        longest = longest_step(shape, state, turn)
        if meets:
            break
        least = longest_circle(state, turn)
        if least >= longest or least > most_ns:
            break
        begin_next(state, turn, least)
    return longest


def refill(
    shape: Arrays, memory: Arrays, row: Ints, level: Ints, rank: int, first: int, last: int
) -> bool:
    """Count what a rank holds after each of its actions from one to another; whether it may."""
    limit, _, change = memory
    held = level[first - 1] if first > shape[3][rank] else 0
    for at in range(first, last + 1):
        held += change[row[at]]
        level[at] = held
        if held > limit[rank]:
            return False
    return True


def trace(cause: Ints, last: int, path: Ints, length: int) -> int:
    """Add the places of the actions on the path to a place, the last first; returns the length."""
    at = last
    while at >= 0 and length < len(path):
        path[length] = at
        length += 1
        at = cause[at]
    return length


def trace_all(shape: Arrays, state: Arrays, origin: Ints, meets: bool, path: Ints) -> int:
    """The actions of the longest path; where ranks do not meet, of the longest circle of paths."""
    offset, num_ranks, cause, last = shape[3], len(state[1]), state[7], state[8]
    if meets:
        return trace(cause, last[0], path, 0)
    length, one, is_first = 0, last[0], True
    while is_first or one != last[0]:
        if one < num_ranks:
            length = trace(cause, offset[one + 1] - 1, path, length)
        one, is_first = origin[one], False
    return length


def draw(seed: Ints, below: int) -> int:
    """The next of a sequence of pseudo-random numbers, from 0 to before `below`."""
    seed[0] = (seed[0] * 1103515245 + 12345) % 2147483648
    return (seed[0] >> 8) % below


def rotate(row: Ints, kept: Ints, low: int, high: int, size: int) -> None:
    """Take the last `size` actions of the places from `low` to `high` before the others.

    Of a negative size, the first behind the others. `kept` gets what stood there.
    """
    length = high + 1 - low
    for at in range(length):
        kept[at] = row[low + at]
    for at in range(length):
        row[low + at] = kept[(at - size) % length]


def propose(
    shape: Arrays, took: Ints, row: Ints, at: int, rank: int, reach: int, seed: Ints
) -> tuple[int, int, int, int]:
    """A change around an action: places from and to which to `rotate`, by how many, a new kind.

    The kind is NONE if it stays; the first place is if there is nothing to change. An action moves
    by up to `reach` places, forwards or with what is behind it, a whole backward with both its
    halves and never into another; or a backward is made whole, or cut.
    """
    num_stages, begin, end = len(shape[0]), shape[3][rank], shape[3][rank + 1]
    first_whole, kind = 3 * num_stages, row[at]
    half = kind - 2 * num_stages if kind >= first_whole else kind
    weight, whole = half + num_stages, half + 2 * num_stages
    is_input = num_stages <= half < 2 * num_stages
    if is_input and took[whole] < took[half] + took[weight] and draw(seed, 4) == 0:
        if kind == whole:
            return at, at, 0, half
        for other in range(at + 1, end):
            if row[other] == weight and row[other - 1] != whole:
                return at + 1, other, 1, whole
        return NONE, NONE, 0, NONE
    hop, is_later = 1 + draw(seed, 1 + draw(seed, reach)), draw(seed, 4) == 0
    first = last = at - 1 if is_later else at
    if first < begin:
        return NONE, NONE, 0, NONE
    if row[first] >= first_whole and first + 1 < end and row[first + 1] == row[first] - num_stages:
        last += 1
    elif first > begin and row[first - 1] == row[first] + num_stages >= first_whole:
        first -= 1
    low, high = (first, last + hop) if is_later else (first - hop, last)
    if is_later and high + 1 < end and row[high] >= first_whole:
        high += row[high + 1] == row[high] - num_stages
    if not is_later and low > begin and row[low - 1] >= first_whole:
        low -= row[low - 1] == row[low] + num_stages
    if low < begin or high >= end:
        return NONE, NONE, 0, NONE
    size = last + 1 - first
    return low, high, -size if is_later else size, NONE


def anneal(
    shape: Arrays,
    took: Ints,
    memory: Arrays,
    link: tuple[int, bool],
    row: Ints,
    best: Ints,
    state: Arrays,
    turn: Arrays,
    work: Arrays,
    settings: tuple[int, int, int, int, bool],
    seed: Ints,
) -> int:
    """Change the rows around actions of the longest path, worse by ever less; the least step.

    From `row` on; `best` gets the best rows. Threshold accepting: a change may cost up to a random
    part of what is left of `warmth_ns`. It ends with `enough`.
    """
    num_moves, warmth_ns, reach, enough, meets = settings
    path, level, owner, kept, kept_begin = work
    offset, begin = shape[3], turn[0]
    now = step_of(shape, took, link, row, state, turn, (meets, MOST_STEPS, LATE))
    least, length = now, trace_all(shape, state, turn[2], meets, path)
    best[:] = row
    for rank in range(len(offset) - 1):
        refill(shape, memory, row, level, rank, offset[rank], offset[rank + 1] - 1)
    for move in range(num_moves if least > enough else 0):
        at = path[draw(seed, length)]
        rank, kind, step = owner[at], row[at], NONE
        low, high, size, becomes = propose(shape, took, row, at, rank, reach, seed)
        if low < 0:
            continue
        rotate(row, kept, low, high, size)
        row[at] = becomes if becomes >= 0 else row[at]
        allowed = warmth_ns * (num_moves - move) // num_moves * draw(seed, 1024) // 1024
        kept_begin[:] = begin
        if refill(shape, memory, row, level, rank, low, high):
            how = meets, FEW_STEPS, now + allowed
            step = step_of(shape, took, link, row, state, turn, how)
        if step < 0 or step > now + allowed:
            row[low : high + 1] = kept[: high + 1 - low]
            row[at] = kind
            refill(shape, memory, row, level, rank, low, high)
            begin[:] = kept_begin
            continue
        now, length = step, trace_all(shape, state, turn[2], meets, path)
        if now < least:
            least, best[:] = now, row
            if least <= enough:
                break
    return least
