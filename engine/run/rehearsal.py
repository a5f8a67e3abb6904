"""Runs each stage's computations once, alone, before any message is on its way.

What a device does for the first time may synchronise all of it: kernels are loaded, algorithms
tried out, memory asked for. Under an open receive that is a deadlock, since the receive ends only
when the peer has sent, and the peer may wait for this rank. So F, B, I and W are run on made-up
messages first. Weights, gradients, buffers and random numbers are afterwards as they were before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, nn

from engine.model.factory import seeded
from engine.model.stage_module import Message, gradient_message
from engine.plan.action import Op
from engine.run.stage import Stage, Tensors

_MICROBATCH = 0
_SEED = 0


def rehearse(
    stage: Stage,
    takes: Message | None,
    sends: Message | None,
    example: tuple[Tensor, Tensor],
    ops: Collection[Op],
) -> None:
    """Run a stage forward and backward: whole where B is among `ops`, in halves where I is.

    It is run forward alone where neither is.

    `takes`: the message from the stage before, None on the first; `sends`: to the next, None on the
    last; `example`: inputs and targets of a microbatch, which these take.
    """
    inputs, targets = example
    device = inputs.device

    def forward() -> None:
        taken = (inputs.clone(),) if takes is None else made_up(takes, device)
        stage.forward(_MICROBATCH, taken, targets)

    with _unchanged(stage.module):
        stage.begin_step(0, targets.numel())
        if Op.B not in ops and Op.I not in ops:
            forward()
        if Op.B in ops:
            forward()
            stage.backward(_MICROBATCH, _returned(sends, device))
        if Op.I in ops:
            forward()
            stage.backward_input(_MICROBATCH, _returned(sends, device))
            stage.backward_weight(_MICROBATCH)


def made_up(message: Message, device: torch.device) -> Tensors:
    """Random hidden states; whole numbers are zero, which every embedding knows."""
    return tuple(
        torch.randn(spec.shape, device=device).to(spec.dtype)
        if spec.dtype.is_floating_point
        else torch.zeros(spec.shape, dtype=spec.dtype, device=device)
        for spec in message
    )


def _returned(sends: Message | None, device: torch.device) -> Tensors | None:
    return None if sends is None else made_up(gradient_message(sends), device)


@contextlib.contextmanager
def _unchanged(module: nn.Module) -> Iterator[None]:
    """Put weights, gradients, buffers, attributes and random numbers back.

    Weights are kept on the host: embeddings with a largest norm change theirs in the forward.
    """
    weights = [
        (p, p._version, p.grad, p.detach().to("cpu", copy=True)) for p in module.parameters()
    ]
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    attributes = [(one, dict(vars(one)), dict(one._buffers)) for one in module.modules()]
    for parameter, *_ in weights:
        parameter.grad = None
    try:
        with seeded(_SEED):
            yield
    finally:
        for one, plain, of_module in attributes:  # a forward may replace a buffer by another
            vars(one).update(plain)
            one._buffers.update(of_module)
        _write_back(buffers)
        _write_back([(p, before) for p, version, _, before in weights if p._version != version])
        for parameter, _, gradient, _ in weights:
            parameter.grad = gradient


@torch.no_grad()
def _write_back(values: Iterable[tuple[Tensor, Tensor]]) -> None:
    for tensor, before in values:
        tensor.copy_(before)
