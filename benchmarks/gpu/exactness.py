"""Several ranks on one GPU against the unsplit model there: loss and every gradient, in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.gpu.findings import Bound, Finding
from benchmarks.gpu.ranks import on_ranks
from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.plan.spans import Span
from engine.run.clock import clock_for
from engine.run.memory import MemoryUse
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, TrainerConfig, agree

CASES = (("afab", 2), ("1f1b", 2), ("1f1b", 4), ("interleaved_1f1b", 2), ("zbv", 2))
NUM_MICROBATCHES = 4
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Trained:
    """A rank's part of a training of three steps, on the CPU."""

    loss: float | None
    gradients: dict[str, Tensor]
    spans: list[Span]
    transport: str
    memory: MemoryUse


@dataclass(frozen=True)
class Measurements:
    """By case, the largest relative difference from the unsplit model, and what moved messages."""

    differences: dict[str, float]
    transports: dict[str, str]
    check: str = "exactness"


def judge(measured: Measurements) -> list[Finding]:
    return [
        Finding.of(
            measured.check,
            f"{case}: loss and gradients off those of the unsplit model",
            difference,
            Bound(at_most=TOLERANCE),
            note=f"float64, relative to each largest element; over {measured.transports[case]}",
        )
        for case, difference in measured.differences.items()
    ]


def measure(device: torch.device) -> Measurements:
    return compared(device, CASES, is_shared=True)


def compared(
    device: torch.device,
    cases: tuple[tuple[str, int], ...],
    *,
    is_shared: bool,
    check: str = "exactness",
) -> Measurements:
    """Train each case on ranks of this kind of device, and once on one rank."""
    fabric = Fabric(device, clock_for(device), is_device_shared=False)
    unsplit = train(fabric, settings_of("afab", 1))
    differences, transports = {}, {}
    for num_ranks in sorted({size for _, size in cases}):
        schedules = [schedule for schedule, size in cases if size == num_ranks]
        every = [settings_of(schedule, num_ranks) for schedule in schedules]
        ranks = on_ranks(num_ranks, device.type, train_all, every, is_shared=is_shared)
        for schedule, parts in zip(schedules, zip(*ranks, strict=True), strict=True):
            case = f"{schedule} on {num_ranks} ranks"
            differences[case] = difference(parts, unsplit)
            transports[case] = parts[0].transport
    return Measurements(differences, transports, check)


def train_all(fabric: Fabric, every: Sequence[TrainerConfig]) -> list[Trained]:
    """One rank's part of several cases, one after the other."""
    return [train(fabric, settings) for settings in every]


def settings_of(schedule: str, world_size: int) -> TrainerConfig:
    data = DataSpec(seq_len=32, num_microbatches=NUM_MICROBATCHES)
    return TrainerConfig(ModelSpec("llama-tiny", "float64"), data, schedule, world_size)


def train(fabric: Fabric, settings: TrainerConfig) -> Trained:
    """One rank's gradients of step 0, the spans of step 1, and the memory of step 2."""
    trainer = Trainer(agree(settings, fabric), fabric)
    loss = trainer.compute_gradients(0)
    grads = {name: p.grad for name, p in trainer.parameters().items()}
    gradients = {name: grad.cpu() for name, grad in grads.items() if grad is not None}
    spans = trainer.step(1).spans
    memory = trainer.measure_memory(2)
    trainer.close()
    return Trained(loss, gradients, spans, fabric.transport, memory)


def difference(parts: Sequence[Trained], unsplit: Trained) -> float:
    """The largest relative difference; infinite where a gradient is missing."""
    merged = {name: gradient for part in parts for name, gradient in part.gradients.items()}
    if merged.keys() != unsplit.gradients.keys():
        return float("inf")
    (loss,) = (part.loss for part in parts if part.loss is not None)
    assert unsplit.loss is not None
    worst = abs(loss / unsplit.loss - 1)
    for name, gradient in merged.items():
        theirs = unsplit.gradients[name]
        largest = float(theirs.abs().max()) or 1.0
        worst = max(worst, float((gradient - theirs).abs().max()) / largest)
    return worst
