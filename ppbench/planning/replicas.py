"""The costs of what several ranks train together: replicas, and the copies of two directions.

What is gathered and summed comes and goes along a row (`engine.plan.memory`); here is what is kept
all the time. What replicas do together is counted as if nothing of it were hidden: exact for one
stage per rank, at most a little too long for several.

    none, DDP       an all-reduce: two passes over the ring
    ZeRO-1          an all-reduce, and a gather of what the optimizer has updated
    ZeRO-2          a reduce-scatter, once for a stage, and that gather
    ZeRO-3, torch   a reduce-scatter, and a gather before the first forward; all stages of a rank
                    stay unsharded until its last backward

Both copies of a stage are trained, and their gradients are summed by an all-reduce of two ranks.
"""

from __future__ import annotations

from dataclasses import replace

from engine.plan.collectives import (
    CollectivePolicy,
    Zero1,
    Zero2,
    leaves_whole_sums,
    most_unsharded,
    reduces_every_backward,
    ring_ns,
)
from engine.plan.model_costs import ModelCosts, StageCosts
from engine.plan.sharded_bytes import TrainingBytes, kept_bytes
from ppbench.planning.cost_set import CostSet


def of_replica(costs: CostSet, replicas: int, policy: CollectivePolicy, num_states: int) -> CostSet:
    """The costs of one of the replicas, each with the link's bandwidth to the next.

    `num_states` are the optimizer's tensors for a parameter.
    """
    if replicas == 1:
        return costs

    def shared(layer: StageCosts) -> StageCosts:
        one = layer.gradient_bytes
        whole = TrainingBytes(one, one, num_states * one)
        given = (one, replicas, costs.link.bytes_per_s)
        moving_ns = ring_ns(*given, is_summed_whole=leaves_whole_sums(policy))
        optimizer_ns = layer.optimizer_ns
        if updates_part(policy):  # which all gather
            moving_ns += ring_ns(*given, is_summed_whole=False)
            optimizer_ns /= replicas
        kept = kept_bytes(whole, policy, replicas)
        gone_bytes = whole.parameters - kept.parameters + whole.optimizer - kept.optimizer
        return replace(
            layer,
            static_bytes=max(0, layer.static_bytes - gone_bytes),
            optimizer_ns=optimizer_ns + moving_ns,
        )

    by_setting = {setting: model.with_each(shared) for setting, model in costs.by_setting.items()}
    return replace(costs, by_setting=by_setting, replicas=replicas, policy=policy)


def updates_part(policy: CollectivePolicy) -> bool:
    """Whether the optimizer of each replica updates a part of the parameters."""
    return most_unsharded(policy) is not None or isinstance(policy, Zero1 | Zero2)


def with_copies(costs: CostSet, model: ModelCosts, directions: int) -> ModelCosts:
    """The costs of a replica's layers where each is on `directions` ranks, which sum gradients.

    They do after all of their backwards, so that nothing hides it. Each replica sums what it
    updates.
    """
    if directions == 1:
        return model
    parts = costs.replicas if updates_part(costs.policy) else 1

    def summed(layer: StageCosts) -> StageCosts:
        given = layer.gradient_bytes // parts, directions, costs.link.bytes_per_s
        moving_ns = ring_ns(*given, is_summed_whole=True)
        return replace(layer, optimizer_ns=layer.optimizer_ns + moving_ns)

    return model.with_each(summed)


def unplanned(policy: CollectivePolicy, most_stages: int) -> tuple[str, str] | None:
    """The setting of a policy that no plan knows, and why; None where it can be planned.

    `most_stages`: the largest number of stages per rank that a plan may choose.
    """
    if reduces_every_backward(policy):
        return (
            "sharding.every_backward",
            'plans know "zero2" with one sum for a stage; expected false, got true',
        )
    most = most_unsharded(policy)
    if most is None or most >= most_stages:
        return None
    why = "plans know sharded parameters where all stages of a rank stay unsharded"
    return "plan.stages_per_rank", f"{why}, at most {most} by sharding; got {most_stages}"
