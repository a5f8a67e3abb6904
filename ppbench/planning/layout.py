"""Layers on stages for any placement, so that the heaviest rank has as little to do as can be.

`engine.model.partition.balance` does this for stages that are each on a rank of their own. Here a
rank may own several, from anywhere in the model:

    rank 0   stages 0 and 3   [before, layers 0-2] and [layers 8, 9]     load: the sum of both
    rank 1   stages 1 and 2   [layers 3, 4] and [layers 5-7]

With two directions, ranks that own the same parts share their microbatches, and bear as one.

1. Layers are dealt out as if all were alike. Then one at a time moves from a stage to another,
   those between shifted by one, for as long as that helps.
2. A search through all cuts looks for a heaviest rank with less to do, until there is none or it
   has taken too long. It is exact, and takes next to no time, with one stage on each rank.
3. What is left is evened out as in 1.

A solver of integer programs (HiGHS, by `scipy.optimize.milp`) is no substitute: after a second it
has no partition at all of 69 layers on 64 stages, and one with 66 % too much of 45 on 16.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from engine.plan.model_costs import ModelCosts, StageCosts
from engine.plan.program import Placement

MOST_CUTS = 10_000
"""Cuts that the search tries after each success: about a tenth of a second."""

Counts = tuple[int, ...]
"""The number of layers of each stage."""
Partition = tuple[range, ...]
"""The layers of each stage."""


def solve_partition(
    costs: ModelCosts,
    placement: Placement,
    *,
    least: Sequence[int] | None = None,
    most_cuts: int = MOST_CUTS,
) -> Partition:
    """The layers of each stage, in order; at least as many as `least` says (none if not given).

    A load is the time of F and B of one microbatch, or of F, I and W where these are quicker. With
    `most_cuts` of 0 there is no search through cuts: stages are then more even, ranks less.

    Raises ValueError where there are not as many numbers as stages, or too few layers.
    """
    loads = Loads(costs, placement, least)
    counts = loads.settled(loads.dealt())
    while better := loads.lighter(max(loads.totals(counts)), most_cuts):
        counts = better
    return partition_of(loads.settled(counts))


def partition_of(counts: Sequence[int]) -> Partition:
    """The layers of each stage from their numbers."""
    ends = list(itertools.accumulate(counts))
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))


def moves(
    counts: Sequence[int], stage: int, least: Sequence[int], *, is_far: bool
) -> Iterator[Counts]:
    """A layer less on a stage, and one more on the next one or the one before, or on any."""
    if counts[stage] <= least[stage]:
        return
    stages = range(len(counts))
    for other in stages if is_far else stages[max(0, stage - 1) : stage + 2]:
        if other != stage:
            changed = list(counts)
            changed[stage] -= 1
            changed[other] += 1
            yield tuple(changed)


def _bearers(placement: Placement) -> tuple[int, ...]:
    """The rank that bears each part; of ranks that own the same parts, a number for all."""
    if placement.directions == 1:
        return placement.ranks
    every = range(placement.world_size)
    owned = [{stage % placement.depth for stage in placement.stages_of(rank)} for rank in every]
    return tuple(owned.index(owned[rank]) for rank in placement.ranks[: placement.depth])


class Loads:
    """A model's loads, in picoseconds, for a placement; and the search for counts."""

    def __init__(
        self, costs: ModelCosts, placement: Placement, least: Sequence[int] | None = None
    ) -> None:
        """Take what `solve_partition` takes, and raise its ValueError."""
        depth = placement.depth
        self.least = [0] * depth if least is None else list(least)
        if len(self.least) != depth:
            raise ValueError(f"expected {depth} least layers, got {len(self.least)}")
        self.ranks, self.num_layers = _bearers(placement), len(costs.layers)
        if sum(self.least) > self.num_layers:
            raise ValueError(f"{self.num_layers} layers are too few for {sum(self.least)}")

        def load(layer: StageCosts) -> int:
            return round(1000 * layer.quickest_ns)

        self.upto = [0, *itertools.accumulate(map(load, costs.layers))]  # by number of layers
        self.lightest = min(map(load, costs.layers), default=0)
        self.fixed = [0] * placement.world_size  # what a rank bears anyway
        for rank in self.ranks:
            self.fixed[rank] += round(2000 * costs.action_ns)
        self.fixed[self.ranks[0]] += load(costs.before)
        self.fixed[self.ranks[-1]] += load(costs.after)

    def totals(self, counts: Sequence[int]) -> list[int]:
        """The loads by rank."""
        totals, begin = [*self.fixed], 0
        for rank, count in zip(self.ranks, counts, strict=True):
            totals[rank] += self.upto[begin + count] - self.upto[begin]
            begin += count
        return totals

    def excess_of(self, counts: Counts) -> tuple[int, ...]:
        """The smaller, the better: the heaviest rank, then how uneven all are."""
        loads = self.totals(counts)
        uneven = sum(load * load for load in loads)
        return max(loads), uneven, sum(count * count for count in counts)

    def dealt(self) -> Counts:
        """Layers dealt out as if all were alike, each to the rank with the least to do."""
        counts, mean = [*self.least], self.upto[-1] // max(1, self.num_layers)
        loads, stages = self.totals(counts), range(len(counts))
        for _ in range(self.num_layers - sum(counts)):
            stage = min(stages, key=lambda at: (loads[self.ranks[at]], counts[at], -at))
            counts[stage] += 1
            loads[self.ranks[stage]] += max(1, mean)
        return tuple(counts)

    def settled(self, counts: Counts) -> Counts:
        """The counts after all moves of a layer that help, the best first.

        A move is to the next stage or the one before; to any from the stages of the heaviest rank.
        """
        worth = self.excess_of(counts)
        while True:
            loads = self.totals(counts)
            heaviest = loads.index(max(loads))
            moved = [
                changed
                for stage, rank in enumerate(self.ranks)
                for changed in moves(counts, stage, self.least, is_far=rank == heaviest)
            ]
            better = min(moved, key=self.excess_of, default=counts)
            if self.excess_of(better) >= worth:
                return counts
            counts, worth = better, self.excess_of(better)

    def lighter(self, than: int, most_cuts: int) -> Counts | None:
        """Counts whose heaviest rank has less to do; None if there are none, or none is found.

        Stage by stage, each may end where its rank still has less; where it has its part of what
        fits is tried first. A rank's last stage has all the rest as its part.
        """
        ranks, upto, loads = self.ranks, self.upto, [*self.fixed]
        left = [ranks.count(rank) for rank in range(len(loads))]  # stages to come
        needed = [*itertools.accumulate(reversed(self.least), initial=0)][::-1]
        counts, failed = list[int](), set[tuple[int, ...]]()

        def fill(stage: int, begin: int) -> bool:
            """Give layers from `begin` on to stages from `stage` on; whether that succeeds."""
            nonlocal most_cuts
            if stage == len(ranks):
                return begin == self.num_layers
            rank = ranks[stage]
            rooms = [than - 1 - load for load, more in zip(loads, left, strict=True) if more]
            num = sum(room // max(1, self.lightest) for room in rooms)
            state = stage, begin, *rooms
            is_full = upto[-1] - upto[begin] > sum(rooms) or self.num_layers - begin > num
            if is_full or most_cuts <= 0 or state in failed:
                return False
            first, last = begin + self.least[stage], self.num_layers - needed[stage + 1]
            room = than - 1 - loads[rank] + upto[begin]
            ends = [end for end in range(first, last + 1) if upto[end] <= room]
            if left[rank] == 1 and not needed[stage + 1]:
                ends = ends[-1:]  # with fewer, others would have more
            part = first + len(ends) // left[rank]
            left[rank] -= 1
            for end in sorted(ends, key=lambda end: abs(end - part)):
                most_cuts -= 1
                loads[rank] += upto[end] - upto[begin]
                counts.append(end - begin)
                if fill(stage + 1, end):
                    return True
                counts.pop()
                loads[rank] -= upto[end] - upto[begin]
            left[rank] += 1
            failed.add(state)
            return False

        return tuple(counts) if max(loads) < than and fill(0, 0) else None
