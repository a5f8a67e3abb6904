"""Layers on stages for any placement, so that the heaviest rank has as little to do as can be.

`engine.model.partition.balance` does this for stages that are each on a rank of their own. Here a
rank may own several, from anywhere in the model, and holds what they hold:

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
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from engine.plan.model_costs import LayerCosts, ModelCosts
from engine.plan.program import Placement

MOST_CUTS = 20_000
"""Cuts that the search tries after each success: about a tenth of a second."""

Counts = tuple[int, ...]
"""The number of layers of each stage."""
Partition = tuple[range, ...]
"""The layers of each stage."""


class NoPartitionError(ValueError):
    """No partition was found within the limits; `needed` is what the closest one takes, by rank."""

    def __init__(self, limits: Sequence[int], needed: Sequence[int]) -> None:
        self.needed = tuple(needed)
        both = enumerate(zip(limits, needed, strict=True))
        over = [f"rank {rank}: {need}, not {limit}" for rank, (limit, need) in both if need > limit]
        super().__init__(f"no partition found takes so few bytes; closest is {', '.join(over)}")


def solve_partition(
    costs: ModelCosts | Sequence[ModelCosts],
    placement: Placement,
    *,
    limits: Sequence[int] | None = None,
    num_held: Sequence[int] | None = None,
    least: Sequence[int] | None = None,
    most_cuts: int = MOST_CUTS,
) -> Partition:
    """The layers of each stage, in order; at least as many as `least` says (none if not given).

    `costs` are one for all stages, or by stage where they differ, as with recompute. A load is the
    time of F and B of one microbatch, or of F, I and W where these are quicker. A rank takes, of
    at most `limits` bytes, the static bytes of its stages, the bytes held by `num_held`
    microbatches (by stage; 0 if not given) and the largest transient of any layer. With
    `most_cuts` of 0 there is no search through cuts: stages are then more even, ranks less.

    Raises ValueError where there are not as many as stages or ranks, or too few layers,
    NoPartitionError where no partition within the limits is found.
    """
    loads = Loads(costs, placement, limits, num_held, least)
    counts = min((loads.settled(start) for start in loads.starts()), key=loads.excess_of)
    counts = loads.settled(loads.searched(counts, most_cuts))
    if loads.excess_of(counts)[0] > 0:
        raise NoPartitionError(loads.given_limits, loads.needed_bytes(counts))
    return partition_of(counts)


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


class _Weights(NamedTuple):
    """The weights of a model's layers, as sums up to each, and what each rank bears anyway."""

    upto: list[list[int]]  # by stage and number of layers
    fixed: list[int]  # by rank

    def of(self, stage: int, begin: int, end: int) -> int:
        return self.upto[stage][end] - self.upto[stage][begin]


class Loads:
    """A model's loads, in picoseconds, and bytes, for a placement; and the search for counts."""

    def __init__(
        self,
        costs: ModelCosts | Sequence[ModelCosts],
        placement: Placement,
        limits: Sequence[int] | None = None,
        num_held: Sequence[int] | None = None,
        least: Sequence[int] | None = None,
    ) -> None:
        """Take what `solve_partition` takes, and raise its ValueError."""
        num_stages, num_ranks = placement.num_stages, placement.world_size
        models = [costs] * num_stages if isinstance(costs, ModelCosts) else list(costs)
        held = [0] * num_stages if num_held is None else list(num_held)
        self.least = [0] * num_stages if least is None else list(least)
        if len({len(model.layers) for model in models}) > 1:
            raise ValueError("the costs of all stages must be of the same layers")
        given = [len(models), len(held), len(self.least)]
        if given != [num_stages] * 3:
            raise ValueError(
                f"expected costs, held microbatches and least layers of {num_stages} stages, "
                f"got {given}"
            )
        if limits is not None and len(limits) != num_ranks:
            raise ValueError(f"expected the limits of {num_ranks} ranks, got {len(limits)}")
        self.ranks, self.num_layers = placement.ranks, len(models[0].layers)
        if sum(self.least) > self.num_layers:
            raise ValueError(f"{self.num_layers} layers are too few for {sum(self.least)}")
        self.stages = [placement.stages_of(rank) for rank in range(num_ranks)]

        def load(layer: LayerCosts, _: int) -> int:
            backward = min(layer.backward_ns, layer.input_ns + layer.weight_ns)
            return round(1000 * (layer.forward_ns + backward))

        def num_bytes(layer: LayerCosts, stage: int) -> int:
            return layer.static_bytes + held[stage] * layer.held_after_forward

        self.load = self._weights(models, load)
        for stage, model in enumerate(models):
            self.load.fixed[self.ranks[stage]] += round(2000 * model.action_ns)
        self.bytes = self._weights(models, num_bytes)
        self.transient: list[int] = []
        for rank, stages in enumerate(self.stages):
            layers = [layer for stage in stages for layer in models[stage].layers]
            layers += [models[0].before] * (self.ranks[0] == rank)
            layers += [models[-1].after] * (self.ranks[-1] == rank)
            most = max((layer.transient_bytes for layer in layers), default=0)
            self.transient.append(most)
        self.given_limits = list(limits or [])
        self.limits = list(map(int.__sub__, self.given_limits, self.transient)) or None

    def _weights(
        self, models: Sequence[ModelCosts], weight: Callable[[LayerCosts, int], int]
    ) -> _Weights:
        upto = [
            [0, *itertools.accumulate(weight(layer, stage) for layer in model.layers)]
            for stage, model in enumerate(models)
        ]
        fixed, last = [0] * len(self.stages), len(models) - 1
        fixed[self.ranks[0]] += weight(models[0].before, 0)
        fixed[self.ranks[last]] += weight(models[last].after, last)
        return _Weights(upto, fixed)

    # what a partition is worth

    def totals(self, weights: _Weights, counts: Sequence[int]) -> list[int]:
        """By rank."""
        totals, begin = [*weights.fixed], 0
        for stage, count in enumerate(counts):
            totals[self.ranks[stage]] += weights.of(stage, begin, begin + count)
            begin += count
        return totals

    def needed_bytes(self, counts: Counts) -> list[int]:
        return list(map(int.__add__, self.totals(self.bytes, counts), self.transient))

    def excess_of(self, counts: Counts) -> tuple[int, ...]:
        """The smaller, the better: bytes too many, the heaviest rank, then how uneven all are."""
        over, loads = 0, self.totals(self.load, counts)
        if self.limits is not None:
            taken = zip(self.totals(self.bytes, counts), self.limits, strict=True)
            over = sum(max(0, num_bytes - limit) for num_bytes, limit in taken)
        uneven = sum(load * load for load in loads)
        return over, max(loads), uneven, sum(count * count for count in counts)

    # 1. where to start

    def starts(self) -> Iterator[Counts]:
        """Layers dealt out as if all were alike: by load, and by bytes if there are limits."""
        yield self._dealt(self.load)
        if self.limits is not None:
            yield self._dealt(self.bytes)

    def _dealt(self, weights: _Weights) -> Counts:
        counts, middle = [*self.least], (len(self.stages) - 1) / 2
        begin = self.totals(weights, self.least)
        if weights is self.bytes and self.limits is not None:
            begin = list(map(int.__sub__, begin, self.limits))
        queue = [(begin[r], abs(r - middle), r) for r, stages in enumerate(self.stages) if stages]
        heapq.heapify(queue)
        for _ in range(self.num_layers - sum(self.least)):
            load, distance, rank = queue[0]
            stage = min(self.stages[rank], key=lambda stage: (counts[stage], -stage))
            counts[stage] += 1
            mean = weights.upto[stage][-1] // self.num_layers
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

        Or on any other, from the stages of the heaviest rank and of the one with the least room.
        """
        loads = self.totals(self.load, counts)
        worst = {loads.index(max(loads))}
        if self.limits is not None:
            room = list(map(int.__sub__, self.limits, self.totals(self.bytes, counts)))
            worst.add(room.index(min(room)))
        for stage, rank in enumerate(self.ranks):
            yield from moves(counts, stage, self.least, is_far=rank in worst)

    # 3. all cuts

    def searched(self, counts: Counts, most_cuts: int) -> Counts:
        """Counts with the least load of the heaviest rank within the limits, if it can be proved.

        Else the best found.
        """
        worth = self.excess_of(counts)
        while worth[0] > 0 or worth[1] > self.least_load():
            below = worth[1] if worth[0] == 0 else sum(self.totals(self.load, counts)) + 1
            better = _Cuts(self, below, most_cuts).found()
            if better is None:
                break
            counts, worth = better, self.excess_of(better)
        return counts

    def least_load(self) -> int:
        """No heaviest rank can have less: by the mean, and if all layers were as the lightest."""
        owners = [rank for rank, stages in enumerate(self.stages) if stages]
        least = _least_each(self.load.upto)
        lightest, total = min(least, default=0), sum(self.load.fixed) + sum(least)
        loads = [self.load.fixed[rank] for rank in owners]
        heapq.heapify(loads)
        for _ in range(self.num_layers):
            heapq.heapreplace(loads, loads[0] + lightest)
        return max(-(-total // len(owners)), *loads)


class _Cuts:
    """A search, stage by stage, for counts whose heaviest rank has less to do than a load."""

    def __init__(self, of: Loads, below: int, most_cuts: int) -> None:
        self.of, self.below, self.num_left = of, below, most_cuts
        self.loads, self.bytes = [*of.load.fixed], [*of.bytes.fixed]
        self.left = [len(stages) for stages in of.stages]
        self.counts: list[int] = []
        self.failed: set[tuple[int, ...]] = set()
        self.least_left, self.needed = (  # by place, the sum from it on
            [*itertools.accumulate(reversed(numbers), initial=0)][::-1]
            for numbers in (_least_each(of.load.upto), of.least)
        )

    def found(self) -> Counts | None:
        """The first such counts; None if there are none, or none is found in time."""
        limits = self.of.limits
        if limits is not None and any(map(int.__gt__, self.bytes, limits)):
            return None
        if max(self.loads) >= self.below:
            return None
        return tuple(self.counts) if self._fill(0, 0) else None

    def _fill(self, stage: int, begin: int) -> bool:
        """Give layers from `begin` on to stages from `stage` on; whether that succeeds."""
        of = self.of
        if stage == len(of.ranks):
            return begin == of.num_layers
        rank = of.ranks[stage]
        owners = [rank for rank, left in enumerate(self.left) if left]
        room = sum(self.below - 1 - self.loads[rank] for rank in owners)
        if self.least_left[begin] > room or self.num_left <= 0:
            return False
        state = stage, begin, *(weight[r] for weight in (self.loads, self.bytes) for r in owners)
        if state in self.failed:
            return False
        # Where the stage may end, what promises most first.
        ends = []
        for end in range(begin + of.least[stage], of.num_layers - self.needed[stage + 1] + 1):
            if self.loads[rank] + of.load.of(stage, begin, end) >= self.below:
                break
            taken = self.bytes[rank] + of.bytes.of(stage, begin, end)
            if of.limits is not None and taken > of.limits[rank]:
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
            load, num_bytes = of.load.of(stage, begin, end), of.bytes.of(stage, begin, end)
            self.loads[rank] += load
            self.bytes[rank] += num_bytes
            self.counts.append(end - begin)
            if self._fill(stage + 1, end):
                return True
            self.counts.pop()
            self.loads[rank] -= load
            self.bytes[rank] -= num_bytes
        self.left[rank] += 1
        self.failed.add(state)
        return False


def _least_each(upto: Sequence[Sequence[int]]) -> list[int]:
    """Return the least weight of each layer, on whichever stage."""
    every = itertools.pairwise(zip(*upto, strict=True))
    return [min(map(int.__sub__, after, before)) for before, after in every]
