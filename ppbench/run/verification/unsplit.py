"""Computes the loss that every runtime must have in the first step, with the unsplit model.

One stage after the other takes all microbatches forward, on one rank, and keeps nothing for a
backward. So it needs no more memory than the largest stage and one message per microbatch, even if
the whole model does not fit. It is computed once for all ways to run a training on this machine.

    results/verified/first-KEY.json
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from engine.configuration import data_of, lowered_of, model_of, partition_of, tokenizer_of
from engine.connection import autocast_of
from engine.run.device import random_state, set_random_state
from engine.run.stage import loss_of
from engine.trainer import TrainerConfig
from ppbench.run.verification.record import read_record, write_record


def first_loss(
    results: Path, training: str, config: TrainerConfig, device: torch.device
) -> float | None:
    """Return the first step's loss as `unsplit_loss` does, or as it was computed before.

    `training` is its key (`losses.key_of_training`). None, too, where there is no room for it.
    """
    key = f"first-{training}"
    known = read_record(results, key)
    if known is None:
        with contextlib.suppress(MemoryError, torch.OutOfMemoryError):  # beside what is there
            known = {"loss": unsplit_loss(config, device)}
            write_record(results, key, known)
    loss: float | None = (known or {}).get("loss")
    return loss


def unsplit_loss(config: TrainerConfig, device: torch.device) -> float | None:
    """Return the first step's mean loss per token; `config` is the one agreed on.

    None for a model that draws random numbers, as dropout does, or whose forwards change its
    buffers, as a power iteration does: its loss depends on the order in which a rank computes its
    microbatches, which differs between schedules.
    """
    model = model_of(config, device)
    data = data_of(config, model, tokenizer_of(config), device)
    try:
        batch = data.step(0).to(device)
    finally:
        data.close()
    before = random_state(device)
    partition = partition_of(config, model, lowered_of(config).num_stages)
    # Messages of all microbatches are kept, but never their logits.
    carried: list[tuple[Tensor, ...]] = [(inputs,) for inputs in batch.inputs]
    losses: list[Tensor] = []
    has_state = False
    with torch.no_grad():
        for stage in range(len(partition)):
            state = random_state(device)
            module = model.build_stage(partition, stage, device)
            set_random_state(state, device)  # drawing its weights has changed it
            states = _states(module)
            for microbatch, targets in enumerate(batch.targets):
                with autocast_of(config.autocast, device):
                    outputs = module(*carried[microbatch])
                carried[microbatch] = outputs
                if module.is_last:
                    losses.append(loss_of(outputs[0], targets, batch.num_tokens))
                    carried[microbatch] = ()
            has_state |= _states(module) != states
    has_drawn = not torch.equal(before, random_state(device))
    return None if has_drawn or has_state else float(torch.stack(losses).sum())


def _states(module: nn.Module) -> dict[tuple[int, str], tuple[int, int]]:
    """The tensor of each buffer, and how often it was written to; in training no norm reads its."""
    return {
        (id(inner), name): (id(buffer), buffer._version)
        for inner in module.modules()
        if not isinstance(inner, _NormBase)
        for name, buffer in inner._buffers.items()
        if buffer is not None
    }
