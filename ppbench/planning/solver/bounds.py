"""A lower bound on the step of every program for a problem, and why it is one.

Three facts about any program P make it easier to bound. None lengthens the makespan:

- A backward B can be cut into an I and a W at the same times: the input gradient is only earlier.
  (Where transfers block their sender, W moves behind the message, which the B had behind it.) Both
  must then fit into the B, and where a B takes less than its halves they do not. So let an I take
  i' = min(I, B) and a W take w' = min(W, B - i'). Every I, W and B of P has room for these: i' is
  at most I, w' at most W, and i' + w' at most B. What has become shorter ends sooner, its rank
  being idle for the rest, so that nothing comes later or is held longer than in P.
- All microbatches being alike, the nth F, I and W of a stage can now be given to microbatch n: the
  nth to start has its input by then, since n inputs have been made, and memory is a count of each.
  Of two directions each has its own microbatches, so that this is true of each.
- The rank of a stage is busy with its nth action of a kind before the (n + 1)th.

So the starts of P, renumbered, obey these differences, and the longest path to an action is a head
(a time before which it cannot start), the longest path from it a tail:

    chain       F(s, n) -> F(s+1, n) -> ... -> I(S-1, n) -> ... -> I(0, n), and I(s, n) -> W(s, n),
                a transfer more between ranks
    order       F(s, n) -> F(s, n+1), and so for I and W, with the transfer more where the message
                blocks its sender
    memory      I(y, n) -> F(x, n+k), of any two stages that a rank has of one direction, whose
                stages up to s take H(s):
                  y <= x   at F(x, n+k), k that have begun y and are not back there hold H(y) each:
                           k H(y) + H(x) is above the limit
                  y > x    n must yet begin y, with H(y) then, while k others that have begun x hold
                           H(x) each; or it has, and k - 1 others and n+k itself do:
                           k H(x) + H(y) is above the limit
                W(y, n) -> F(x, n+k): k that have not been through W of y hold what I leaves of y;
                if y > x, that or H(x): k times the least of these, and H(x), is above the limit

The bound is the largest of three, over the ranks:

Where ranks do not meet, the step is the period of steps in a row. A rank begins its next step when
it is done with this one, so that no period is shorter than a rank's step from its first action to
its last. The same three then bound each rank by itself: heads are the longest paths from any of the
rank's own actions, none of which is before 0, tails those to any of them. And a channel has the
messages of all microbatches of its direction in each step.

1. The time of one machine that may interrupt its jobs, each with head and tail: for every set of
   actions, least head + their time + least tail. The largest over all sets is found by Carlier's
   schedule: of what has its head behind it, always go on with the longest tail.
2. What a rank has done before its first I can start is limited by memory. All else comes after it.
   Its work from the last F of its lowest stage until that microbatch is back is limited by what is
   held beside it; that is counted with one direction only.
3. Memory over time: held x time, summed over the microbatches, is at most the limit x time, less
   what can not yet be taken at the beginning and what must be free already at the end.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from operator import sub
from typing import NamedTuple

from ppbench.planning.solver.problem import Problem


class Job(NamedTuple):
    """An action on its rank: it cannot start before `head`, nor the program end before `tail`."""

    head: int
    busy: int
    tail: int


def lower_bound(problem: Problem) -> int:
    """A time in nanoseconds below which no program within the limits can end.

    Raises NoProgramError where there is none.
    """
    problem.check_limits()
    chain, optimizers = Chain(problem), problem.optimizers
    ranks = range(problem.placement.world_size)
    if problem.meets:
        heads, tails = chain.heads(), chain.tails()
        firsts = problem.placement.copies_of(0)
        bounds = [max(optimizers), *(heads[first][0] + tails[first][0] for first in firsts)]
        bounds += [each for rank in ranks for each in _of_rank(chain, rank, heads, tails)]
        return max(bounds)
    bounds = [problem.num_each * chain.channel_ns]
    for rank in ranks:
        heads, tails = chain.heads(rank), chain.tails(rank)
        bounds += [each + optimizers[rank] for each in _of_rank(chain, rank, heads, tails)]
    return max(bounds)


def _of_rank(
    chain: Chain, rank: int, heads: list[list[int]], tails: list[list[int]]
) -> Iterator[int]:
    """Bounds by all that a rank has to do."""
    kinds = chain.kinds_of(rank)
    if not kinds:
        return
    jobs = [
        Job(head, chain.busy[kind], tail - chain.busy[kind])
        for kind in kinds
        for head, tail in zip(heads[kind], tails[kind], strict=True)
    ]
    # The least time of a machine that may interrupt its jobs (Carlier 1982).
    waiting, ready, now, at = sorted(jobs), list[list[int]](), 0, 0
    while at < len(waiting) or ready:
        if not ready:
            now = max(now, waiting[at].head)
        while at < len(waiting) and waiting[at].head <= now:
            heapq.heappush(ready, [-waiting[at].tail, waiting[at].busy])
            at += 1
        first = ready[0]
        until = waiting[at].head if at < len(waiting) else math.inf
        if now + first[1] <= until:
            now += first[1]
            yield now - first[0]
            heapq.heappop(ready)
        else:
            first[1] -= int(until) - now
            now = int(until)
    yield _from_first_input(chain, rank, heads)
    yield _held_over_time(chain, rank, heads)


NEVER = -(2**62)
"""The head or tail of an action that is on no path: whatever is added, it stays below all."""


class Chain:
    """The actions of a microbatch, by kind: F of all stages, then I, then W.

    `busy`: how long the rank is, with the message where that blocks it; `delay`: from then until
    the next stage can start.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.num_stages = problem, problem.placement.num_stages
        durations, m, depth = problem.durations, problem.num_each, problem.placement.depth
        whole = durations.whole_ns
        inputs = list(map(min, durations.input_ns, whole))  # i' and w'
        weights = map(min, durations.weight_ns, map(sub, whole, inputs))
        self.busy: list[int] = [*durations.forward_ns, *inputs, *weights]
        self.delay = [0] * len(self.busy)
        ranks, transfers = problem.placement.ranks, problem.transfers
        self.channel_ns = 0
        for stage, (here, there) in enumerate(itertools.pairwise(ranks)):
            crosses = here != there and not problem.placement.is_last(stage)
            for kind in (stage, self.num_stages + stage + 1) if crosses else ():
                self.channel_ns = transfers.duration_ns
                if transfers.overlaps:
                    self.delay[kind] = transfers.duration_ns
                else:
                    self.busy[kind] += transfers.duration_ns
        # By direction, the way of a microbatch.
        firsts = problem.placement.copies_of(0)
        self.orders = [
            [*stages, *(self.num_stages + stage for stage in reversed(stages))]
            for stages in map(range, firsts, [first + depth for first in firsts])
        ]
        # By stage, the I and W of the rank that F waits for, and how many microbatches before.
        self.places: list[list[tuple[int, int]]] = [[] for _ in range(self.num_stages)]
        self.frees: list[list[tuple[int, int]]] = [[] for _ in self.busy]
        for stage, places in enumerate(self.places):
            own = problem.placement.stages_of(ranks[stage])
            stages = [other for other in own if other // depth == stage // depth]
            sums = itertools.accumulate(problem.held_after_forward[other] for other in stages)
            upto = dict(zip(stages, sums, strict=True))
            limit, here = problem.limits[ranks[stage]], upto[stage]
            for other, both in upto.items():
                left = problem.held_after_input[other]
                left = left if other <= stage else min(left, here)
                most = limit - max(here, both), limit - here
                each = min(here, both), left
                for op, (room, held) in enumerate(zip(most, each, strict=True), 1):
                    num = 1 + room // held if held else m
                    if num < m:
                        kind = op * self.num_stages + other
                        places.append((kind, num))
                        self.frees[kind].append((stage, num))

    def kinds_of(self, rank: int) -> list[int]:
        stages = self.problem.placement.stages_of(rank)
        return [op * self.num_stages + stage for op in range(3) for stage in stages]

    def trips(self) -> list[int]:
        """By stage, from the start of F to the end of I of a microbatch that is alone."""
        starts, now = [0] * len(self.busy), 0
        for order in self.orders:
            for kind in order:
                starts[kind] = now
                now += self.busy[kind] + self.delay[kind]
        inputs = range(self.num_stages, 2 * self.num_stages)
        return [starts[kind] + self.busy[kind] - starts[kind - self.num_stages] for kind in inputs]

    def heads(self, rank: int | None = None) -> list[list[int]]:
        """By kind and microbatch, a time before which the action cannot start.

        From the first start of all, or of a rank: then NEVER for what need not wait for that.
        """
        m, num_stages, busy = self.problem.num_each, self.num_stages, self.busy
        least = self._at_least(rank)
        if rank is None:  # an optimizer is first
            least = [self.problem.optimizers[of] for of in self.problem.placement.ranks] * 3
        heads = [[0] * m for _ in busy]
        for n, order in itertools.product(range(m), self.orders):
            there = NEVER
            for kind in order:
                begin = max(there, least[kind], heads[kind][n - 1] + busy[kind] if n else NEVER)
                if kind < num_stages:
                    for before, num in self.places[kind]:
                        if n >= num:
                            begin = max(begin, heads[before][n - num] + busy[before])
                else:
                    weight = kind + num_stages
                    before_it = heads[weight][n - 1] + busy[weight] if n else NEVER
                    heads[weight][n] = max(begin + busy[kind], least[weight], before_it)
                heads[kind][n] = begin
                there = begin + busy[kind] + self.delay[kind]
        return heads

    def tails(self, rank: int | None = None) -> list[list[int]]:
        """By kind and microbatch, how long before the end the action must start.

        Before the end of all, or of a rank: then NEVER for what that need not wait for.
        """
        m, num_stages, busy = self.problem.num_each, self.num_stages, self.busy
        least = self._at_least(rank)
        tails = [[0] * m for _ in busy]
        for n, order in itertools.product(reversed(range(m)), self.orders):
            left = NEVER
            for kind in reversed(order):
                later = tails[kind][n + 1] if n + 1 < m else NEVER
                longest = max(least[kind], self.delay[kind] + left, later)
                if kind >= num_stages:
                    weight = kind + num_stages
                    later = tails[weight][n + 1] if n + 1 < m else NEVER
                    freed = self._freed(tails, weight, n)
                    tails[weight][n] = busy[weight] + max(least[weight], later, freed)
                    longest = max(longest, tails[weight][n], self._freed(tails, kind, n))
                tails[kind][n] = left = busy[kind] + longest
        return tails

    def _at_least(self, rank: int | None) -> list[int]:
        """By kind, the least head or tail: 0, but NEVER for what is not of the rank."""
        ranks = self.problem.placement.ranks
        return [0 if rank in (None, of) else NEVER for of in ranks] * 3

    def _freed(self, tails: list[list[int]], kind: int, n: int) -> int:
        """The longest tail of an F that waits for the memory of an I or W."""
        m = self.problem.num_each
        waiting = (tails[stage][n + num] for stage, num in self.frees[kind] if n + num < m)
        return max(waiting, default=NEVER)


def _from_first_input(chain: Chain, rank: int, heads: list[list[int]]) -> int:
    """The start of a rank's first I, and all work that it cannot have done before."""
    problem, num_stages, busy = chain.problem, chain.num_stages, chain.busy
    m, stages = problem.num_each, problem.placement.stages_of(rank)
    limit, lowest = problem.limits[rank], stages[0]
    turn = num_stages + lowest
    forward, after_input = problem.held_after_forward, problem.held_after_input
    work = m * sum(busy[kind] for kind in chain.kinds_of(rank))
    early = _most([(busy[s], forward[s]) for s in stages], limit, m)
    until = min(heads[num_stages + s][0] for s in stages) + work - early
    if m * forward[lowest] <= limit or len(chain.orders) > 1:
        return until
    # Something must be free before the last F of the lowest stage, which is then behind the first
    # I. Until that microbatch is back, there is left to do what is held besides: of microbatches
    # that are on their way forward, or back, and W.
    held = list(itertools.accumulate(forward[s] for s in stages))
    back = [busy[num_stages + s] + busy[2 * num_stages + s] for s in stages]
    ahead = [sum(busy[s] for s in stages[at + 1 :]) for at in range(len(stages))]
    begun = [(more + sum(back), most) for more, most in zip(ahead, held, strict=True)]
    turned = [(sum(back[: at + 1]), most) for at, most in enumerate(held[:-1])]
    weights = [(busy[2 * num_stages + s], after_input[s]) for s in stages]
    left = _most([*begun, *turned, *weights], limit - forward[lowest], m - 1)
    own = ahead[0] + sum(back[1:])
    return until + max(0, chain.trips()[lowest] - busy[lowest] - busy[turn] - own - left)


def _most(items: list[tuple[int, int]], limit: int, most_each: int) -> int:
    """At least the most work that can be held at once, of up to so many (work, memory) each."""
    grain = math.gcd(*(memory for _, memory in items))
    left = limit - limit % grain if grain else limit
    total = 0
    for work, memory in sorted(
        items, key=lambda item: item[0] / item[1] if item[1] else math.inf, reverse=True
    ):
        if memory == 0 or left >= memory * most_each:
            total += work * most_each
            left -= memory * most_each
        else:
            return total - -work * left // memory
    return total


def _held_over_time(chain: Chain, rank: int, heads: list[list[int]]) -> int:
    """The first time by which memory over time is enough for all microbatches."""
    problem, num_stages, busy = chain.problem, chain.num_stages, chain.busy
    limit, stages = problem.limits[rank], problem.placement.stages_of(rank)
    forward, left = problem.held_after_forward, problem.held_after_input
    trips, needed = chain.trips(), 0
    taken, freed = list[tuple[int, int]](), list[tuple[int, int]]()
    for s in stages:
        turn, weight = num_stages + s, 2 * num_stages + s
        needed += problem.num_each * (forward[s] * trips[s] + left[s] * busy[weight])
        taken.append((forward[s], busy[s]))
        freed += [(left[s], busy[weight]), (forward[s], busy[turn] + busy[weight])]
    most = max(forward[s] for s in stages)
    rise, fall = _steepest(taken), _steepest(freed)
    low, high = 0, 1
    while _area(high, limit, most, rise, fall) < needed:
        high *= 2
    while low < high:
        middle = (low + high) // 2
        if _area(middle, limit, most, rise, fall) < needed * (1 - 1e-9):
            low = middle + 1
        else:
            high = middle
    return min(heads[s][0] for s in stages) + low


def _steepest(changes: list[tuple[int, int]]) -> float:
    return max(held / time if time else math.inf if held else 0.0 for held, time in changes)


def _area(length: int, limit: int, most: int, rise: float, fall: float) -> float:
    """Memory x time under a limit, a rise from the beginning and a fall to the end.

    Each begins at `most`: one action is under way.
    """

    def level(at: float) -> float:
        risen = most + rise * at if at else most if rise < math.inf else limit
        left = length - at
        fallen = most + fall * left if left else most if fall < math.inf else limit
        return min(limit, risen, fallen)

    points = {0.0, float(length)}
    if 0 < rise < math.inf:
        points.add((limit - most) / rise)
    if 0 < fall < math.inf:
        points.add(length - (limit - most) / fall)
    if max(rise, fall) < math.inf and rise + fall > 0:
        points.add(fall * length / (rise + fall))
    inside = sorted(point for point in points if 0 <= point <= length)
    return sum((level(a) + level(b)) * (b - a) / 2 for a, b in itertools.pairwise(inside))
