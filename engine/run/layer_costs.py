"""Measures the costs of each layer here: what a partition balances, and what a planner plans with.

Each layer is built alone, run a few times and dropped, so that measuring needs little more memory
than a layer; small layers are kept together and run in turns. The loss is part of what the last
stage bears.

A stage of several layers takes less than its layers alone: calling a stage takes its time, whatever
is in it. So a few layers are also run as one stage, from which follows what each action adds:

    alone      a + f    a + f    a + f          together    a + f + f + f
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from engine.model.stage_module import Model
from engine.plan.model_costs import ModelCosts, StageCosts
from engine.run.clock import clock_for
from engine.run.layer_times import (
    PartTimes,
    are_told_apart,
    median_error,
    median_times,
    relative_error,
    sample,
)
from engine.run.lone_stage import Conditions, Parts, measure_bytes
from engine.run.optimizer import OptimizerSpec

BUDGET_S = 2.0
"""Seconds for the samples of all parts, beyond the fewest that are needed."""
MOST_TOGETHER = 4
"""Layers that are run as one stage, too."""
KEPT_BYTES = 2**30
"""About how many bytes the parts that are kept at a time may have, unless one alone has more."""
_BYTES_PER_PARAMETER = 16  # in float32: weight, gradient and two numbers of an optimizer

OnProgress = Callable[[int, int], None]
"""Called with how many parts of a model have been measured, and of how many."""


def measure_model_costs(
    model: Model,
    shape: tuple[int, int],
    device: torch.device,
    autocast: AbstractContextManager[object] | None = None,
    optimizer: OptimizerSpec | None = None,
    *,
    recompute: bool = False,
    budget_s: float = BUDGET_S,
    on_progress: OnProgress | None = None,
) -> ModelCosts:
    """Times and bytes of each layer for one microbatch, and of what comes before and after them.

    `shape` is that of a microbatch's token ids; `optimizer` None is a trainer's own default.
    Samples are taken until the medians are within 2 %, or for about `budget_s` seconds. Equal
    layers have equal times unless their samples differ by more than chance. What the forward before
    a split backward takes longer counts as the latter's. With recomputation a split backward leaves
    more than its forward took: `held_after_input` is then above `held_after_forward`.

    Raises ModelError, and RuntimeError where bytes cannot be measured.
    """
    spec = OptimizerSpec() if optimizer is None else optimizer
    conditions = Conditions(shape, device, autocast or nullcontext(), spec, recompute)
    clock, alone = clock_for(device), _each_alone(model)
    parts = Parts(model, alone, conditions)
    num_together = num_together_of(model.part_sizes)
    by_part: dict[int, _Measured] = {}
    together: list[PartTimes] = []
    for group in groups_of(model.part_sizes, num_together):
        built = [parts.build(index) for index in group]
        run = list(built)
        if is_first := not by_part and num_together > 0:  # the first group also runs as one stage
            partition = [alone[0], range(num_together), *alone[num_together + 1 :]]
            run.append(Parts(model, partition, conditions).build(1))
        samples = sample(run, clock, budget_s * len(group) / len(alone))
        if is_first:
            together = samples.pop()
        sizes = measure_bytes(built, device)
        for index, part, times, size in zip(group, built, samples, sizes, strict=True):
            by_part[index] = _Measured(times, size, part.kind)
        if on_progress is not None:
            on_progress(len(by_part), len(alone))
        del built, run, part  # a group is dropped before the next is built
    measured = [part for _, part in sorted(by_part.items())]
    added = added_ns_of(measured, num_together, together)
    of_ends = PartTimes(*(max(0.0, ns) for ns in added))
    before, *layers, after = zip(measured, pooled_samples(measured), strict=True)
    return ModelCosts(
        _layer_costs(*before, of_ends),
        tuple(_layer_costs(*layer, added) for layer in layers),
        _layer_costs(*after, of_ends),
        max(0.0, (added.forward + added.backward) / 2),
    )


def _each_alone(model: Model) -> list[range]:
    """A partition with a stage for each layer, and for what comes before and after them."""
    num_layers = model.num_layers
    return [range(0), *(range(i, i + 1) for i in range(num_layers)), range(num_layers, num_layers)]


@dataclass(frozen=True)
class _Measured:
    """One part: its samples, round by round, and its bytes."""

    samples: list[PartTimes]
    costs: StageCosts  # its bytes alone
    kind: object


def num_together_of(part_sizes: Sequence[float]) -> int:
    """How many layers are run together, so that they fit; 0 where only one would."""
    num, kept = 0, 0.0
    for count in part_sizes[1:-1][:MOST_TOGETHER]:
        kept += 2 * count * _BYTES_PER_PARAMETER  # they are run alone, too
        num += kept <= KEPT_BYTES
    return num if num > 1 else 0


def groups_of(part_sizes: Sequence[float], num_together: int) -> list[list[int]]:
    """The parts that are kept at a time: those first that are run together."""
    first = list(range(1, num_together + 1))
    groups = [first] if first else []
    kept = 2 * sum(part_sizes[index] for index in first)
    for index in range(len(part_sizes)):
        if index in first:
            continue
        if not groups or (kept + part_sizes[index]) * _BYTES_PER_PARAMETER > KEPT_BYTES:
            groups.append([])
            kept = 0
        groups[-1].append(index)
        kept += part_sizes[index]
    return [sorted(group) for group in groups]


def added_ns_of(
    measured: Sequence[_Measured], num_together: int, together: Sequence[PartTimes]
) -> PartTimes:
    """Return what a stage's call adds to each action; below 0 where layers slow each other down.

    `together` are samples of the first layers as one stage. The median over rounds, each of which
    has all layers alone and together; as far as it exceeds its own error, and at most what the
    smallest part takes, which is called as well.
    """
    if not together:
        return PartTimes(*[0.0] * len(PartTimes._fields))
    rounds = zip(*(part.samples for part in measured[1 : num_together + 1]), strict=True)
    added = [
        [
            (sum(of_alone) - whole) / (len(of_alone) - 1)
            for *of_alone, whole in zip(*singles, both, strict=True)
        ]
        for singles, both in zip(rounds, together, strict=True)
    ]
    least = map(min, zip(*(median_times(part.samples) for part in measured), strict=True))
    by_action = zip(*added, strict=True)
    return PartTimes(
        *(min(_beyond_error(ns), most) for ns, most in zip(by_action, least, strict=True))
    )


def _beyond_error(values: Sequence[float]) -> float:
    """Their median, shrunk by the part of its square that its error explains."""
    median, error = statistics.median(values), median_error(values)
    return median * max(0.0, 1 - (error / median) ** 2) if median else 0.0


def pooled_samples(measured: Sequence[_Measured]) -> list[list[PartTimes]]:
    """Each part's samples, which are those of all equal layers where these cannot be told apart.

    Layers that hold other bytes are not equal, whatever few samples say.
    """
    by_kind: dict[object, list[int]] = {}
    for index in range(1, len(measured) - 1):
        part = measured[index]
        by_kind.setdefault((part.kind, part.costs.held_after_forward), []).append(index)
    pooled = [part.samples for part in measured]
    for equal in by_kind.values():
        totals = [[times.total_ns for times in measured[index].samples] for index in equal]
        if len(equal) > 1 and not are_told_apart(totals):
            together = [times for index in equal for times in measured[index].samples]
            for index in equal:
                pooled[index] = together
    return pooled


def _layer_costs(part: _Measured, samples: Sequence[PartTimes], added: PartTimes) -> StageCosts:
    times = median_times(samples)
    own = PartTimes(*(ns - more for ns, more in zip(times, added, strict=True)))
    longer_ns = _beyond_error([one.split_forward - one.forward for one in samples])
    return replace(
        part.costs,
        forward_ns=max(0.0, own.forward),
        backward_ns=max(0.0, own.backward),
        input_ns=max(0.0, own.input) + max(0.0, longer_ns),
        weight_ns=max(0.0, own.weight),
        error=relative_error(samples),
        optimizer_ns=max(0.0, own.optimizer),
    )
