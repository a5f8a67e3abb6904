"""Measures the time of each layer here, which a partition by measured cost balances.

Each layer is built alone, run a few times and dropped, so that measuring needs no more memory than
a layer. The loss is part of what the last stage bears.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from engine.model.partition import Costs
from engine.model.stage_module import Message, Model, gradient_message
from engine.run.stage import Stage, Tensors

REPEATS = 5


def measure_costs(
    model: Model,
    shape: tuple[int, int],
    device: torch.device,
    autocast: AbstractContextManager[object] | None = None,
) -> Costs:
    """Seconds of a forward and backward of each layer, of what comes before and of what follows.

    `shape` is that of a microbatch's token ids. The median of a few repeats after one to warm up.
    """
    num_layers = model.num_layers
    alone = [range(0), *(range(i, i + 1) for i in range(num_layers)), range(num_layers, num_layers)]
    messages = model.messages(alone, *shape)
    ids = torch.randint(model.vocab_size, shape, device=device)
    seconds = []
    for stage in range(len(alone)):
        module = model.build_stage(alone, stage, device)
        sends = messages[stage] if stage < len(messages) else None
        runner = Stage(module, sends, autocast or contextlib.nullcontext())
        runner.begin_step(ids.numel())
        inputs = (ids,) if stage == 0 else None
        takes = messages[stage - 1] if stage else ()
        seconds.append(_median_s(runner, inputs, takes, sends, ids, device))
    return Costs(tuple(seconds[1:-1]), seconds[0], seconds[-1])


def _median_s(
    stage: Stage,
    inputs: Tensors | None,
    takes: Message,
    sends: Message | None,
    targets: Tensor,
    device: torch.device,
) -> float:
    seconds = []
    for _ in range(REPEATS + 1):
        given = inputs or _made_up(takes, device)
        gradients = None if sends is None else _made_up(gradient_message(sends), device)
        _synchronize(device)
        start = time.perf_counter()
        stage.forward(0, given, targets)
        stage.backward(0, gradients)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def _made_up(message: Message, device: torch.device) -> Tensors:
    """Random hidden states; whole numbers are zero, which every embedding knows."""
    return tuple(
        torch.randn(spec.shape, device=device).to(spec.dtype)
        if spec.dtype.is_floating_point
        else torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        for spec in message
    )


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
