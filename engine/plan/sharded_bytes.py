"""The bytes that a replica keeps of its stages, by policy: arithmetic beside what is measured.

Of a stage with P bytes of parameters, G of gradients and O of optimizer states, D replicas keep

                     parameters                     gradients                 optimizer states
    none, ddp        P                              G                         O
    ZeRO-1           P                              G                         O / D
    ZeRO-2           P                              G, once summed G / D      O / D
    ZeRO-3, torch    P / D, and P while unsharded   G, once summed G / D      O / D

each, as in ZeRO (arXiv 1910.02054, section 5). Gradients are there from a stage's first backward of
the step on. What is padded for equal shards is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from engine.plan.action import Action, Op
from engine.plan.collectives import CollectivePolicy, Zero1, Zero2, most_unsharded


class TrainingBytes(NamedTuple):
    """Bytes of parameters, gradients and optimizer states: of a stage, or what is kept of it."""

    parameters: int
    gradients: int
    optimizer: int


def kept_bytes(whole: TrainingBytes, policy: CollectivePolicy, replicas: int) -> TrainingBytes:
    """What one of the replicas keeps of a stage after its gradients are summed and it is sharded.

    Equal shards: a byte that cannot be divided is one more for each.
    """
    shard = TrainingBytes(*(-(-num_bytes // replicas) for num_bytes in whole))
    if most_unsharded(policy) is not None:
        return shard
    match policy:
        case Zero2():
            return shard._replace(parameters=whole.parameters)
        case Zero1():
            return whole._replace(optimizer=shard.optimizer)
        case _:
            return whole


class Level(NamedTuple):
    """The bytes that a rank keeps of its stages after an action, and the most during it."""

    kept_bytes: int
    most_bytes: int


def kept_along(
    row: Sequence[Action],
    stages: Mapping[int, TrainingBytes],
    policy: CollectivePolicy,
    replicas: int,
) -> list[Level]:
    """What a rank keeps of its stages before a step, and along its row with its collectives.

    A collective takes its effect at once. Into the shard of the first sum, and beside one that was
    summed before, whole gradients are summed: they go when that is done.
    """
    kept = {stage: kept_bytes(whole, policy, replicas) for stage, whole in stages.items()}
    has_shards = isinstance(policy, Zero2) or most_unsharded(policy) is not None
    level = sum(one.parameters + one.optimizer for one in kept.values())
    levels, unsummed, summed = [Level(level, level)], set[int](), set[int]()
    for stage, op, _ in row:
        most = level
        if op in (Op.B, Op.W) and stage not in unsummed:
            unsummed.add(stage)
            level += stages[stage].gradients
        elif op in (Op.UNSHARD, Op.RESHARD):
            level += stages[stage].parameters * (1 if op is Op.UNSHARD else -1)
        elif op is Op.REDUCE_GRAD and has_shards:
            level += 0 if stage in summed else kept[stage].gradients
            most = level
            level -= stages[stage].gradients
            unsummed.discard(stage)
            summed.add(stage)
        levels.append(Level(level, max(most, level)))
    return levels
