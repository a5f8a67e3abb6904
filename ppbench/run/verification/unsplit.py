"""Computes the loss that every runtime must have in the first step, with the unsplit model.

One stage after the other takes the microbatches forward, on one rank, and keeps nothing for a
backward. So it needs no more memory than the largest stage and one message per microbatch, even if
the whole model does not fit. Steps of more microbatches begin with those of fewer, so each
microbatch is computed once, for all ways to run a training on this machine and for any number.

    results/verified/first-KEY.json
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from engine.configuration import data_of, lowered_of, model_of, tokenizer_of
from engine.connection import autocast_of
from engine.model.partition import partition_layers
from engine.run.device import random_state, set_random_state
from engine.trainer import TrainerConfig
from ppbench.run.verification.record import read_record, write_record


def first_loss(
    results: Path, training: str, config: TrainerConfig, device: torch.device
) -> float | None:
    """Return the first step's mean loss per token.

    `training` is its key (`losses.key_of_training`). None where there is no room to compute it, and
    for a model that draws random numbers, as dropout does, or whose forwards change its buffers, as
    a power iteration does: its loss depends on the order in which a rank computes its microbatches,
    which differs between schedules.
    """
    key, num = f"first-{training}", config.replicas * config.data.num_microbatches
    if config.model.is_factory and model_of(config, device).task.vocab_size is None:
        key += f"-{num}"  # its batches of more microbatches may begin with others
    known = read_record(results, key) or {"sums": []}
    sums: list[tuple[float, int]] | None = known["sums"]
    if sums is not None and len(sums) < num:
        with contextlib.suppress(MemoryError, torch.OutOfMemoryError):  # beside what is there
            further = sums_of_losses(config, device, len(sums))
            sums = None if further is None else [*sums, *further]
            write_record(results, key, {"sums": sums})
    if sums is None or len(sums) < num:
        return None
    return sum(loss for loss, _ in sums[:num]) / sum(tokens for _, tokens in sums[:num])


def sums_of_losses(
    config: TrainerConfig, device: torch.device, begin: int
) -> list[tuple[float, int]] | None:
    """The summed loss and the number of tokens of each microbatch from one on, in the first step.

    None where the order of microbatches decides the loss.
    """
    model = model_of(config, device)
    data = data_of(config, model, tokenizer_of(config), device)
    try:
        batch = data.step(0).to(device)
    finally:
        data.close()
    before = random_state(device)
    num_stages = lowered_of(config).placement.depth
    partition = partition_layers("uniform", model.num_layers, num_stages)
    # Messages of all microbatches are kept, but never their logits.
    carried: list[tuple[Tensor, ...]] = [(inputs,) for inputs in batch.inputs[begin:]]
    sums: list[tuple[float, int]] = []
    has_state = False
    with torch.no_grad():
        for stage in range(len(partition)):
            state = random_state(device)
            module = model.build_stage(partition, stage, device)
            if not config.trains:
                module.eval()
            set_random_state(state, device)  # drawing its weights has changed it
            states = _states(module)
            for microbatch, targets in enumerate(batch.targets[begin:]):
                with autocast_of(config.autocast, device):
                    outputs = module(*carried[microbatch])
                carried[microbatch] = outputs
                if module.is_last:
                    loss = model.task.loss(outputs[0], targets, 1)
                    sums.append((float(loss), model.task.num_counted(targets)))
                    carried[microbatch] = ()
            has_state |= _states(module) != states
    has_drawn = not torch.equal(before, random_state(device))
    return None if has_drawn or has_state else sums


def _states(module: nn.Module) -> dict[tuple[int, str], tuple[int, int]]:
    """The tensor of each buffer, and how often it was written to; in training no norm reads its."""
    return {
        (id(inner), name): (id(buffer), buffer._version)
        for inner in module.modules()
        if not isinstance(inner, _NormBase)
        for name, buffer in inner._buffers.items()
        if buffer is not None
    }
