"""Layers on stages for any placement, so that the heaviest rank has as little to do as can be.

`engine.model.partition.balance` does this for stages that are each on a rank of their own. Here a
rank may own several, from anywhere in the model:

    rank 0   stages 0 and 3   [before, layers 0-2] and [layers 8, 9]     load: the sum of both
    rank 1   stages 1 and 2   [layers 3, 4] and [layers 5-7]

1. The layers go to ranks as if all were alike, each to the rank with the least to do, and evenly to
   its stages. Where all are alike, no heaviest rank can have less to do.
2. One layer at a time moves from a stage to another, those between shifted by one, for as long as
   that helps.
3. A search through all cuts looks for a heaviest rank with less to do, until there is none or it
   has taken too long. Of the last stage of a rank it need only try the most layers that fit: with
   fewer, others have more, unless they must have some. So it is exact, and takes next to no time,
   with one stage on each rank.
4. What is left is evened out as in 2.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from engine.plan.model_costs import LayerCosts, ModelCosts
from engine.plan.program import Placement

MOST_CUTS = 20_000
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
    counts = loads.settled(loads.start())
    return partition_of(loads.settled(loads.searched(counts, most_cuts)))


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


class Loads:
    """A model's loads, in picoseconds, for a placement; and the search for counts."""

    def __init__(
        self, costs: ModelCosts, placement: Placement, least: Sequence[int] | None = None
    ) -> None:
        """Take what `solve_partition` takes, and raise its ValueError."""
        num_stages = placement.num_stages
        self.least = [0] * num_stages if least is None else list(least)
        if len(self.least) != num_stages:
            raise ValueError(f"expected {num_stages} least layers, got {len(self.least)}")
        self.ranks, self.num_layers = placement.ranks, len(costs.layers)
        if sum(self.least) > self.num_layers:
            raise ValueError(f"{self.num_layers} layers are too few for {sum(self.least)}")
        self.stages = [placement.stages_of(rank) for rank in range(placement.world_size)]

        def load(layer: LayerCosts) -> int:
            backward = min(layer.backward_ns, layer.input_ns + layer.weight_ns)
            return round(1000 * (layer.forward_ns + backward))

        self.upto = [0, *itertools.accumulate(map(load, costs.layers))]  # by number of layers
        self.fixed = [0] * placement.world_size  # what a rank bears anyway
        for rank in self.ranks:
            self.fixed[rank] += round(2000 * costs.action_ns)
        self.fixed[self.ranks[0]] += load(costs.before)
        self.fixed[self.ranks[-1]] += load(costs.after)

    # what a partition is worth

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

    # 1. where to start

    def start(self) -> Counts:
        """Layers dealt out as if all were alike."""
        counts, middle = [*self.least], (len(self.stages) - 1) / 2
        begin = self.totals(self.least)
        queue = [(begin[r], abs(r - middle), r) for r, stages in enumerate(self.stages) if stages]
        heapq.heapify(queue)
        for _ in range(self.num_layers - sum(self.least)):
            load, distance, rank = queue[0]
            stage = min(self.stages[rank], key=lambda stage: (counts[stage], -stage))
            counts[stage] += 1
            mean = self.upto[-1] // self.num_layers
            heapq.heapreplace(queue, (load + max(1, mean), distance, rank))
        return tuple(counts)

    # 2. one layer at a time

    def settled(self, counts: Counts) -> Counts:
        """The counts after all moves of a layer that help, the best first."""
        worth = self.excess_of(counts)
        while True:
            better = min(self._moved(counts), key=self.excess_of, default=counts)
            if self.excess_of(better) >= worth:
                return counts
            counts, worth = better, self.excess_of(better)

    def _moved(self, counts: Counts) -> Iterator[Counts]:
        """A layer less on a stage, and one more on the next one or the one before.

        Or on any other, from the stages of the heaviest rank.
        """
        loads = self.totals(counts)
        heaviest = loads.index(max(loads))
        for stage, rank in enumerate(self.ranks):
            yield from moves(counts, stage, self.least, is_far=rank == heaviest)

    # 3. all cuts

    def searched(self, counts: Counts, most_cuts: int) -> Counts:
        """Counts with the least load of the heaviest rank, if it can be proved.

        Else the best found.
        """
        while (heaviest := self.excess_of(counts)[0]) > self.least_load():
            better = _Cuts(self, heaviest, most_cuts).found()
            if better is None:
                break
            counts = better
        return counts

    def least_load(self) -> int:
        """No heaviest rank can have less: by the mean, and if all layers were as the lightest."""
        owners = [rank for rank, stages in enumerate(self.stages) if stages]
        each = (after - before for before, after in itertools.pairwise(self.upto))
        lightest, total = min(each, default=0), sum(self.fixed) + self.upto[-1]
        loads = [self.fixed[rank] for rank in owners]
        heapq.heapify(loads)
        for _ in range(self.num_layers):
            heapq.heapreplace(loads, loads[0] + lightest)
        return max(-(-total // len(owners)), *loads)


class _Cuts:
    """A search, stage by stage, for counts whose heaviest rank has less to do than a load."""

    def __init__(self, of: Loads, below: int, most_cuts: int) -> None:
        self.of, self.below, self.num_left = of, below, most_cuts
        self.loads = [*of.fixed]
        self.left = [len(stages) for stages in of.stages]
        self.counts: list[int] = []
        self.failed: set[tuple[int, ...]] = set()
        # By stage, the least layers from it on.
        self.needed = [*itertools.accumulate(reversed(of.least), initial=0)][::-1]

    def found(self) -> Counts | None:
        """The first such counts; None if there are none, or none is found in time."""
        if max(self.loads) >= self.below:
            return None
        return tuple(self.counts) if self._fill(0, 0) else None

    def _fill(self, stage: int, begin: int) -> bool:
        """Give layers from `begin` on to stages from `stage` on; whether that succeeds."""
        of, upto = self.of, self.of.upto
        if stage == len(of.ranks):
            return begin == of.num_layers
        rank = of.ranks[stage]
        owners = [rank for rank, left in enumerate(self.left) if left]
        room = sum(self.below - 1 - self.loads[rank] for rank in owners)
        if upto[-1] - upto[begin] > room or self.num_left <= 0:
            return False
        state = stage, begin, *(self.loads[r] for r in owners)
        if state in self.failed:
            return False
        # Where the stage may end, what promises most first.
        ends = []
        for end in range(begin + of.least[stage], of.num_layers - self.needed[stage + 1] + 1):
            if self.loads[rank] + upto[end] - upto[begin] >= self.below:
                break
            ends.append(end)
        if self.left[rank] == 1:
            ends = ends[::-1] if self.needed[stage + 1] else ends[-1:]
        else:
            part = len(ends) // self.left[rank]  # each of the rank's stages gets its part
            ends = sorted(ends, key=lambda end: abs(end - ends[0] - part))
        self.left[rank] -= 1
        for end in ends:
            self.num_left -= 1
            load = upto[end] - upto[begin]
            self.loads[rank] += load
            self.counts.append(end - begin)
            if self._fill(stage + 1, end):
                return True
            self.counts.pop()
            self.loads[rank] -= load
        self.left[rank] += 1
        self.failed.add(state)
        return False
