"""Emulated worlds: a model whose true costs are known, and what a measurement of them gave."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from engine.plan.model_costs import LinkCosts, ModelCosts, StageCosts
from ppbench.planning.cost_set import CostSet, Setting
from ppbench.planning.plan import PlanRequest

MIB = 2**20
TIMES = ("forward_ns", "backward_ns", "input_ns", "weight_ns", "optimizer_ns")
FAMILIES = ("afab", "1f1b", "interleaved_1f1b", "zb_h1", "zb_h2", "zbv", "v_half", "v_min")

LAYER = StageCosts(
    *(1e6, 2e6, 1.1e6, 1e6, 0.01),
    held_after_forward=10 * MIB,
    held_after_input=4 * MIB,
    transient_bytes=MIB,
    static_bytes=20 * MIB,
    message_bytes=MIB,
    optimizer_ns=1e5,
)
HEAD = replace(LAYER, forward_ns=2e6, backward_ns=4e6, input_ns=2e6, weight_ns=2e6)


def costs_of(by_setting: Mapping[tuple[int, bool], ModelCosts], link: LinkCosts) -> CostSet:
    """Costs of a model by microbatch size and recomputation, and of a link."""
    named = {Setting(*setting): model for setting, model in by_setting.items()}
    return CostSet("drawn", "float32", 128, "adamw", "cpu", "drawn", named, link)


@dataclass(frozen=True)
class World:
    """What is asked, what it truly costs, and what was measured of that."""

    request: PlanRequest
    truth: CostSet
    measured: CostSet


def world(seed: int, schedules: tuple[str, ...] = FAMILIES, most_layers: int = 8) -> World:
    """A world of 2 to 4 ranks, one microbatch size or two, and any memory that may be short."""
    drawn = random.Random(seed)
    ranks = drawn.choice([2, 2, 3, 4])
    num_layers = drawn.randint(max(4, ranks + 1), most_layers)
    sizes = drawn.choice([(1,), (2,), (1, 2)])
    batch = drawn.choice([8, 12, 16]) * (1 if 1 in sizes else 2)
    truth = _truth(drawn, num_layers, sizes)
    measured = measurement(truth, seed + 1, drawn.choice([0.005, 0.01, 0.02]))
    plain = truth.by_setting[sizes[-1], False]
    static = sum(layer.static_bytes for layer in (plain.before, *plain.layers, plain.after))
    held = sum(layer.held_after_forward for layer in (plain.before, *plain.layers, plain.after))
    memory = round(1.5 * static / ranks + drawn.uniform(0.3, 1.5) * held) + 20 * MIB
    limit = drawn.choice([None, memory, memory, memory])
    given = (ranks,), limit, batch, 128, schedules, (1, 2), sizes
    request = PlanRequest(*given, meets=drawn.random() < 0.5)
    return World(request, truth, measured)


def _truth(drawn: random.Random, num_layers: int, sizes: tuple[int, ...]) -> CostSet:
    forward, ratios = drawn.uniform(0.5e6, 2e6), (drawn.uniform(0.6, 1.5), drawn.uniform(0.4, 1.2))
    heavy = drawn.choice([0, 0, 1, 2])  # layers of another type, such as experts
    factor = drawn.uniform(1.2, 2)
    latency = drawn.choice([0, drawn.uniform(0, forward / 2)])
    whole = drawn.uniform(0.85, 1.0)
    head, embedding = drawn.uniform(0.3, 3), drawn.uniform(0.05, 0.4)
    by_setting = {}
    for size in sizes:
        scale = size * drawn.uniform(0.85, 1.0) if size > 1 else 1
        for recompute in (False, True):
            one = _layer(forward * scale, ratios, whole, size, recompute=recompute)
            layers = [one] * num_layers
            for at in range(heavy):
                layers[at * 2 + 1] = _scaled(one, factor)
            by_setting[size, recompute] = ModelCosts(
                _scaled(one, embedding), tuple(layers), _scaled(one, head), drawn.uniform(0, 2e4)
            )
    return costs_of(by_setting, LinkCosts(latency, drawn.choice([float("inf"), 5e9]), 0.02))


def _layer(
    forward: float, ratios: tuple[float, float], whole: float, size: int, *, recompute: bool
) -> StageCosts:
    """A layer whose input half and weight half take `ratios` of its forward."""
    again = forward if recompute else 0.0
    given, weight = forward * ratios[0], forward * ratios[1]
    held, left = ((1.5 if recompute else 12) * MIB * size, 5 * MIB * size)
    return StageCosts(
        forward,
        (given + weight) * whole + again,
        given + again,
        weight,
        held_after_forward=round(held),
        held_after_input=left,
        transient_bytes=2 * MIB * size,
        static_bytes=24 * MIB,
        message_bytes=MIB * size,
        optimizer_ns=forward / 10,
    )


def _scaled(layer: StageCosts, factor: float) -> StageCosts:
    times = {name: getattr(layer, name) * factor for name in TIMES}
    return replace(layer, **times, static_bytes=round(layer.static_bytes * factor))


def measurement(truth: CostSet, seed: int, error: float) -> CostSet:
    """What is measured of true costs: each time of each type of layer off by its own error."""
    drawn = random.Random(seed)
    kinds: dict[StageCosts, StageCosts] = {}

    def of(layer: StageCosts) -> StageCosts:
        if layer not in kinds:
            off = {name: getattr(layer, name) / _factor(drawn, error) for name in TIMES}
            kinds[layer] = replace(layer, **off, error=error)
        return kinds[layer]

    by_setting = {
        setting: replace(
            model,
            before=of(model.before),
            layers=tuple(map(of, model.layers)),
            after=of(model.after),
        )
        for setting, model in truth.by_setting.items()
    }
    by = _factor(drawn, truth.link.error)
    link = replace(
        truth.link,
        latency_ns=truth.link.latency_ns / by,
        bytes_per_s=truth.link.bytes_per_s * by,
    )
    return costs_of(by_setting, link)


def _factor(drawn: random.Random, error: float) -> float:
    return max(0.5, 1 + error * drawn.gauss(0, 1))
