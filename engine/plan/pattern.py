"""Patterns: the way of one microbatch through the pipeline, which all take, whole periods apart.

    rank 0   F0 F1 F2 .. I0 .. I1 W0 I2 W1 .. W2 F3 F4 F5     F, I and W of a stage start at
    rank 1      F0 F1 F2 I0 F.. I1 W0 I2 ..                   start + slot x period

Where memory is short, filling rows in order of time lets early stages in too soon or too late, and
what is lost is lost with every microbatch. A pattern is searched as a whole instead: no two actions
of a rank may overlap modulo the period (modulo scheduling, Rau 1994; building blocks of pipelines,
Qi and others 2024, arXiv 2405.15362). So microbatches never collide whatever slots they take, and
each takes the first in which all ranks can hold it: in waves, if a period is short for the memory.

A microbatch's way is laid from the middle outwards: from the last stage on its F back, each as late
as its rank is free, its I onwards, each as soon. So a wait far inside, during which all stages
outside are held, is taken last. `push` keeps actions further away than they need be; it is changed
at random as long as no more is held then.

The loops are written as those of `engine.plan.search`; `shape` is the same.
"""

from __future__ import annotations

from engine.arrays import Arrays, Ints
from engine.plan.search import LATE, draw


def free_from(
    shape: Arrays, busy: Ints, period: int, start: Ints, rank: int, length: int, at: int
) -> int:
    """The first time from `at` on when a rank is free for so long, modulo the period, or LATE."""
    first, stages = shape[1], shape[2]
    num_stages, size = len(stages), 3 * (first[rank + 1] - first[rank])
    last, num_clear, turn = at + period, 0, 0
    while num_clear < size:
        kind = (turn % 3) * num_stages + stages[first[rank] + turn // 3]
        turn, num_clear = (turn + 1) % size, num_clear + 1
        if start[kind] == LATE or busy[kind] == 0:
            continue
        since = (at - start[kind]) % period
        if since < busy[kind]:
            at, num_clear = at + busy[kind] - since, 0
        elif since + length > period:
            at, num_clear = at + period - since + busy[kind], 0
        if at > last:
            return LATE
    return at


def free_until(
    shape: Arrays, busy: Ints, period: int, start: Ints, rank: int, length: int, at: int
) -> int:
    """The last time up to `at` from which on a rank is free for so long, as above, or LATE."""
    first, stages = shape[1], shape[2]
    num_stages, size = len(stages), 3 * (first[rank + 1] - first[rank])
    least, num_clear, turn = at - period, 0, 0
    while num_clear < size:
        kind = (turn % 3) * num_stages + stages[first[rank] + turn // 3]
        turn, num_clear = (turn + 1) % size, num_clear + 1
        if start[kind] == LATE or busy[kind] == 0:
            continue
        since = (at - start[kind]) % period
        if since < busy[kind]:
            at, num_clear = at - since - length, 0
        elif since + length > period:
            at, num_clear = at - since - length + period, 0
        if at < least:
            return LATE
    return at


def lay(shape: Arrays, times: Arrays, period: int, push: Ints, start: Ints) -> bool:
    """Lay a microbatch's actions out, from the middle outwards; whether there is room for each.

    `times` are (how long its rank is busy with an action, how long after that the next stage can
    start), by kind. A stage whose W has a negative `push` lays it at once, others when all else is.
    """
    ranks, (busy, delay) = shape[0], times
    num_stages = len(ranks)
    for kind in range(len(start)):
        start[kind] = LATE
    begin = end = 0
    for stage in range(num_stages - 1, -1, -1):
        rank, back, weight = ranks[stage], num_stages + stage, 2 * num_stages + stage
        at = begin - delay[stage] - busy[stage] - push[stage]
        begin = free_until(shape, busy, period, start, rank, busy[stage], at)
        start[stage] = begin
        end = end if stage < num_stages - 1 else begin + busy[stage]
        if begin == LATE:
            return False
        end = free_from(shape, busy, period, start, rank, busy[back], end + push[back])
        start[back] = end
        if end == LATE:
            return False
        end += busy[back]
        if push[weight] < 0:
            start[weight] = free_from(shape, busy, period, start, rank, busy[weight], end)
        end += delay[back]
    for stage in range(num_stages):
        back, weight = num_stages + stage, 2 * num_stages + stage
        if push[weight] >= 0:
            at = start[back] + busy[back] + push[weight]
            start[weight] = free_from(shape, busy, period, start, ranks[stage], busy[weight], at)
        if start[weight] == LATE:
            return False
    return True


def area_of(busy: Ints, memory: Arrays, start: Ints) -> int:
    """Memory x time of a microbatch, summed over the stages."""
    _, taken, left = memory
    num_stages, area = len(taken), 0
    for stage in range(num_stages):
        back, weight = num_stages + stage, 2 * num_stages + stage
        until_input = start[back] + busy[back]
        area += taken[stage] * (until_input - start[stage])
        area += left[stage] * (start[weight] + busy[weight] - until_input)
    return area


def find_pattern(
    shape: Arrays,
    times: Arrays,
    memory: Arrays,
    period: int,
    num_tries: int,
    push: Ints,
    start: Ints,
    seed: Ints,
) -> bool:
    """Change `push` at random as long as no more is held for longer; whether there is a pattern.

    `start` gets when the actions of a microbatch start, by kind. `memory` is (limit by rank, held
    after F and held after I by stage).
    """
    busy, num_kinds, least = times[0], len(push), LATE
    longest = max(busy)
    for turn in range(num_tries):
        first, second = draw(seed, num_kinds), draw(seed, num_kinds)
        before, before_second = push[first], push[second]
        if turn > 0:
            push[first] = longest * draw(seed, 1024) // 1024 if draw(seed, 2) else 0
            if 3 * first >= 2 * num_kinds and draw(seed, 2):
                push[first] = -1
            if draw(seed, 2):
                push[second] = 0
        area = LATE
        if lay(shape, times, period, push, start):
            area = area_of(busy, memory, start)
        if area <= least:
            least = area
        else:
            push[first] = before
            push[second] = before_second if second != first else before
    return least < LATE and lay(shape, times, period, push, start)


def is_held(
    shape: Arrays,
    busy: Ints,
    memory: Arrays,
    period: int,
    start: Ints,
    upto: Ints,
    first_slot: int,
    last_slot: int,
) -> bool:
    """Whether all ranks can hold what they do at each F of the microbatches of some slots.

    `upto` is how many microbatches have a slot before each, up to that after the last.
    """
    first, stages = shape[1], shape[2]
    limit, taken, left = memory
    num_stages = len(stages)
    for slot in range(first_slot, last_slot + 1):
        if upto[slot + 1] == upto[slot]:
            continue
        for rank in range(len(limit)):
            for index in range(first[rank], first[rank + 1]):
                at, held = start[stages[index]] + slot * period, 0
                for other in range(first[rank], first[rank + 1]):
                    stage = stages[other]
                    back, weight = num_stages + stage, 2 * num_stages + stage
                    begun = (at - start[stage]) // period
                    turned = (at - start[back] - busy[back]) // period
                    over = (at - start[weight] - busy[weight]) // period
                    num_turned = upto[min(max(turned, -1), last_slot) + 1]
                    held += taken[stage] * (upto[min(max(begun, -1), last_slot) + 1] - num_turned)
                    held += left[stage] * (num_turned - upto[min(max(over, -1), last_slot) + 1])
                if held > limit[rank]:
                    return False
    return True


def let_in(
    shape: Arrays, busy: Ints, memory: Arrays, period: int, start: Ints, upto: Ints, slots: Ints
) -> None:
    """Give each microbatch the first slot in which all ranks can hold it.

    `upto` has room for as many slots as there can be, of all microbatches one after another. Limits
    must be at least the least.
    """
    end = 0
    for kind in range(len(start)):
        end = max(end, start[kind] + busy[kind])
    reach, slot = (end - min(start)) // period + 1, -1
    for number in range(len(slots)):
        slot += 1
        upto[slot + 1] = number + 1
        while not is_held(shape, busy, memory, period, start, upto, max(0, slot - reach), slot):
            upto[slot + 1] = number
            slot += 1
            upto[slot + 1] = number + 1
        slots[number] = slot
