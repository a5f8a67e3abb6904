"""Layers to stages: which contiguous slice of the layers each stage owns.

What comes before the layers (embeddings) always belongs to the first stage, what comes after them
(final norm, output head) to the last; only layers are distributed. A stage may be empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

from engine.plan.model_costs import ModelCosts

BY_COST = ("parameters", "measured")
KNOWN = ("uniform", *BY_COST)
Joined = Callable[[float, float], float]


class PartitionError(ValueError):
    """The requested partition does not fit the model or the number of stages."""


def totals_of(parts: Sequence[float], partition: Sequence[range]) -> list[float]:
    """Each stage's total of what stands before the layers, of each layer, and what follows them."""
    totals = [sum(parts[layers.start + 1 : layers.stop + 1]) for layers in partition]
    totals[0] += parts[0]
    totals[-1] += parts[-1]
    return totals


def times_to_balance(measured: ModelCosts) -> list[float]:
    """Nanoseconds of a forward and a whole backward of each part of a model."""
    return [part.forward_ns + part.backward_ns for part in measured.parts]


def partition_layers(
    partition: str | tuple[int, ...], num_layers: int, num_stages: int
) -> list[range]:
    """The layers of each stage, in order, for a partition that needs no costs.

    `partition` is `"uniform"` or the number of layers of each stage, such as `(6, 10, 10, 6)`.
    Raises PartitionError when a list has the wrong length or sum.
    """
    if partition == "uniform":
        # What is left over goes to the middle stages: the first also embeds and the last also
        # computes the head and the loss.
        counts = [num_layers // num_stages] * num_stages
        middle = (num_stages - 1) / 2
        by_distance = sorted(range(num_stages), key=lambda stage: abs(stage - middle))
        for stage in by_distance[: num_layers % num_stages]:
            counts[stage] += 1
        return _ranges(counts)
    if isinstance(partition, str):
        raise PartitionError(
            f'unknown partition "{partition}"; expected one of {", ".join(KNOWN)}, or a list'
        )
    counts = list(partition)
    if len(counts) != num_stages:
        raise PartitionError(f"{counts} names {len(counts)} stages; there are {num_stages}")
    if min(counts) < 0 or sum(counts) != num_layers:
        raise PartitionError(f"{counts} sums to {sum(counts)} layers; the model has {num_layers}")
    return _ranges(counts)


def balance(parts: Sequence[float], num_stages: int) -> list[range]:
    """The partition whose most costly stage costs least; exact, by dynamic programming.

    `parts` are the costs of what stands before the layers, of each layer, and of what follows them.
    Of several such partitions, the one with the smallest sum of squares: the other stages are
    evened out as well. Takes num_stages x layers² steps, twice: first for how little the most
    costly stage can cost, then for the squares of stages that cost no more.
    """
    largest, _ = _best_cuts(parts, num_stages, max, math.inf)
    _, cuts = _best_cuts(parts, num_stages, lambda squares, cost: squares + cost * cost, largest)
    return [range(start, end) for start, end in zip((0, *cuts), cuts, strict=False)]


def _best_cuts(
    parts: Sequence[float], num_stages: int, joined: Joined, limit: float
) -> tuple[float, tuple[int, ...]]:
    """The least that the costs of the stages join to, none above the limit, and where each ends."""
    before_layers, *layers, after_layers = parts
    num_layers = len(layers)
    upto = [0.0, *accumulate(layers)]
    # best[end]: what the stages so far join to, which own the layers < end, and their cuts
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ()), *[(math.inf, ())] * num_layers]
    for stage in range(num_stages):
        own = before_layers if stage == 0 else 0.0
        own += after_layers if stage == num_stages - 1 else 0.0
        longer: list[tuple[float, tuple[int, ...]]] = []
        for end in range(num_layers + 1):
            options = []
            for cut, (before, cuts) in enumerate(best[: end + 1]):
                cost = upto[end] - upto[cut] + own
                options.append((joined(before, cost) if cost <= limit else math.inf, (*cuts, end)))
            longer.append(min(options))
        best = longer
    return best[num_layers]


def _ranges(counts: list[int]) -> list[range]:
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
