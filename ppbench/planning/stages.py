"""The costs of stages of one model, and the steps that programs take with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from engine.plan.model_costs import LinkCosts, ModelCosts, StageCosts
from engine.plan.period import Step, periods
from engine.plan.predict import Durations
from engine.plan.program import Placement, Program
from engine.plan.walk import TransferModel, of_kinds

TIMES = ("forward_ns", "backward_ns", "input_ns", "weight_ns", "optimizer_ns")
"""The times of a layer, and of a stage."""


class StageTable:
    """The costs of every stage that may be asked for, each joined from its layers once."""

    def __init__(self, models: Mapping[bool, ModelCosts]) -> None:
        """Take the costs of a model by whether its layers recompute."""
        self.models = models
        self._known: dict[tuple[int, int, bool, bool, bool], StageCosts] = {}

    def of(self, partition: Sequence[range], stage: int, recompute: bool) -> StageCosts:
        """The costs of one stage, which may be a copy of a part in a second direction."""
        part, last = stage % len(partition), len(partition) - 1
        layers, is_first, is_last = partition[part], part == 0, part == last
        key = layers.start, layers.stop, recompute, is_first, is_last
        if key not in self._known:
            model = self.models[recompute]
            self._known[key] = model.of_stage(layers, is_first=is_first, is_last=is_last)
        return self._known[key]

    def of_all(
        self, partition: Sequence[range], recompute: Sequence[bool]
    ) -> tuple[StageCosts, ...]:
        """The costs of all stages, in order; `recompute` is by stage, each copy counted."""
        return tuple(self.of(partition, stage, is_on) for stage, is_on in enumerate(recompute))


PARTIAL = 6
"""Messages' worth of bytes that a layer of a sliced microbatch keeps beyond its activations.

Keys and values are no larger than a message each. Their buffers are whole from the first slice on
and until the last backward, so those of two microbatches may be there in part, and the gradients
that wait for earlier slices of one."""


def in_slices(model: ModelCosts, num_slices: int) -> ModelCosts:
    """The costs of a slice of a microbatch, the mean over all; its gradients are whole."""
    if num_slices == 1:
        return model

    def cut(layer: StageCosts) -> StageCosts:
        whole = {name: getattr(layer, name) for name in _OF_TOKENS}
        times = {name: ns / num_slices for name, ns in whole.items() if name in TIMES}
        sizes = {name: -(-n // num_slices) for name, n in whole.items() if name not in TIMES}
        kept = layer.static_bytes + PARTIAL * layer.message_bytes
        return replace(layer, **times, **sizes, static_bytes=kept)

    return model.with_each(cut)


_OF_TOKENS = (
    *(name for name in TIMES if name != "optimizer_ns"),
    *("held_after_forward", "held_after_input", "transient_bytes", "message_bytes", "input_bytes"),
)
"""A slice has a part of each of these."""


def never_quicker(models: Mapping[bool, ModelCosts]) -> dict[bool, ModelCosts]:
    """The costs of a model, of which recomputing is never quicker: where it is, that is noise."""
    if len(models) < 2:
        return dict(models)
    plain, again = models[False], models[True]
    before, *layers, after = map(_slower, again.parts, plain.parts)
    action_ns = max(again.action_ns, plain.action_ns)
    return {False: plain, True: ModelCosts(before, tuple(layers), after, action_ns)}


def _slower(again: StageCosts, plain: StageCosts) -> StageCosts:
    slower = {name: max(getattr(again, name), getattr(plain, name)) for name in TIMES}
    return replace(again, **slower)


def durations_of(stages: Sequence[StageCosts]) -> Durations:
    """The durations of a simulation, by stage."""
    return Durations(
        tuple(round(stage.forward_ns) for stage in stages),
        tuple(round(stage.input_ns) for stage in stages),
        tuple(round(stage.weight_ns) for stage in stages),
        tuple(round(stage.backward_ns) for stage in stages),
    )


def transfers_of(link: LinkCosts, stages: Sequence[StageCosts]) -> TransferModel:
    """Transfers beside the computation, each of the largest message between two stages."""
    num_bytes = max((stage.message_bytes for stage in stages[:-1]), default=0)
    return TransferModel(round(link.latency_ns), link.bytes_per_s, num_bytes)


def optimizers_of(stages: Sequence[StageCosts], placement: Placement) -> tuple[int, ...]:
    """By rank, the time of its optimizer in nanoseconds."""
    by_rank = [0] * placement.world_size
    for rank, stage in zip(placement.ranks, stages, strict=True):
        by_rank[rank] += round(stage.optimizer_ns)
    return tuple(by_rank)


def steps_ns(
    cases: Iterable[tuple[Program, Sequence[StageCosts]]], transfers: TransferModel, *, meets: bool
) -> list[int]:
    """The time of a step of programs with their stages, which have the same transfers."""
    steps = []
    for program, stages in cases:
        took = of_kinds(program, durations_of(stages).by_kind(len(stages)))
        steps.append(Step(program, [took], optimizers_of(stages, program.placement), meets))
    return list(map(math.ceil, periods(steps, transfers)))
