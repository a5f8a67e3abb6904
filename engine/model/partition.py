"""Layers to stages: which contiguous slice of the decoder layers each stage owns.

Embeddings always belong to the first stage, the final norm and the output head to the last; only
layers are distributed. A stage may be empty.
"""

from __future__ import annotations


class PartitionError(ValueError):
    """The requested partition does not fit the model or the number of stages."""


def partition_layers(
    partition: str | tuple[int, ...], num_layers: int, num_stages: int
) -> list[range]:
    """The layers of each stage, in order.

    `partition` is `"uniform"` or the number of layers of each stage, such as `(6, 10, 10, 6)`.
    Raises PartitionError when a list has the wrong length or sum.
    """
    if partition == "uniform":
        return _ranges(_uniform_counts(num_layers, num_stages))
    if isinstance(partition, str):
        raise PartitionError(f'unknown partition "{partition}"; expected "uniform" or a list')
    counts = list(partition)
    if len(counts) != num_stages:
        raise PartitionError(f"{counts} names {len(counts)} stages; there are {num_stages}")
    if min(counts) < 0 or sum(counts) != num_layers:
        raise PartitionError(f"{counts} sums to {sum(counts)} layers; the model has {num_layers}")
    return _ranges(counts)


def _uniform_counts(num_layers: int, num_stages: int) -> list[int]:
    """Equal counts; what is left over goes to the middle stages.

    The first stage also embeds and the last also computes the head and the loss, so they are the
    last to be given an extra layer.
    """
    counts = [num_layers // num_stages] * num_stages
    middle = (num_stages - 1) / 2
    by_distance = sorted(range(num_stages), key=lambda stage: abs(stage - middle))
    for stage in by_distance[: num_layers % num_stages]:
        counts[stage] += 1
    return counts


def _ranges(counts: list[int]) -> list[range]:
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]
