"""The costs of a pipeline that is one of several replicas: what they share, and when they sum.

Gradients are there whole until they are summed, so that of all that may be shared only optimizer
states shorten a peak without more collectives in the step (ZeRO-1). What replicas do together comes
after a stage's last backward, and is counted as if nothing of it were hidden: exact for one stage
per rank, at most a little too long for several.
"""

from __future__ import annotations

from dataclasses import replace

from engine.plan.collectives import CollectivePolicy, Zero1
from engine.plan.joined_simulation import ring_ns
from engine.plan.model_costs import LayerCosts, ModelCosts
from engine.plan.sharded_bytes import TrainingBytes, kept_bytes
from ppbench.planning.cost_set import CostSet

PLANNED = ("none", "ddp", "zero1")
"""The policies that a plan knows."""
BUCKET_BYTES = 25 * 2**20
"""At most so much of the gradients is there twice, as they are put end to end."""


def of_replica(costs: CostSet, replicas: int, policy: CollectivePolicy, num_states: int) -> CostSet:
    """The costs of one of the replicas, each with the link's bandwidth to the next.

    `num_states` are the optimizer's tensors for a parameter.
    """
    if replicas == 1:
        return costs

    def shared(layer: LayerCosts) -> LayerCosts:
        return _shared(layer, replicas, policy, num_states, costs.link.bytes_per_s)

    def of_model(model: ModelCosts) -> ModelCosts:
        layers = tuple(map(shared, model.layers))
        return replace(model, before=shared(model.before), layers=layers, after=shared(model.after))

    by_setting = {setting: of_model(model) for setting, model in costs.by_setting.items()}
    return replace(costs, by_setting=by_setting)


def _shared(
    layer: LayerCosts, replicas: int, policy: CollectivePolicy, num_states: int, bytes_per_s: float
) -> LayerCosts:
    one = layer.static_bytes // (2 + num_states)
    whole = TrainingBytes(one, one, layer.static_bytes - 2 * one)
    given = one, replicas, bytes_per_s
    moving_ns, optimizer_ns = ring_ns(*given, is_summed_whole=True), layer.optimizer_ns
    if isinstance(policy, Zero1):  # each updates its part, which all gather then
        moving_ns += ring_ns(*given, is_summed_whole=False)
        optimizer_ns /= replicas
    return replace(
        layer,
        static_bytes=sum(kept_bytes(whole, policy, replicas)),
        transient_bytes=layer.transient_bytes + min(one, BUCKET_BYTES),
        optimizer_ns=optimizer_ns + moving_ns,
    )
