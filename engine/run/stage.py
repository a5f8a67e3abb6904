"""Forward and backward of one stage: what is kept for each microbatch, and when it is let go.

Between its forward and its backward a microbatch keeps the stage's inputs (leaves that receive the
input gradients) and the edges into the autograd graph. Not the outputs: once they are sent nothing
here holds them, and the graph itself saves only what its operations need.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from engine.model.data import IGNORED
from engine.model.stage_module import Message, StageModule

Tensors = tuple[Tensor, ...]


@dataclass
class _Held:
    """One microbatch between forward and backward."""

    leaves: Tensors  # the inputs; those that want a gradient require it
    edges: tuple[GradientEdge | None, ...]  # of the outputs; None where no gradient flows


class Stage:
    """Runs one stage's module on microbatches; counts how many it holds."""

    def __init__(
        self,
        module: StageModule,
        sends: Message | None,
        autocast: AbstractContextManager[object],
    ) -> None:
        """`sends` is what goes to the next stage, None on the last; its dtypes are kept to.

        `autocast` is entered for each forward and must be reentrant.
        """
        self.module = module
        self._sends, self._autocast = sends, autocast
        self._tokens_per_step = 0
        self._held: dict[int, _Held] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

    def begin_step(self, num_tokens: int) -> None:
        """`num_tokens`: targets that count over the whole step; the loss is per token of these."""
        self._tokens_per_step = num_tokens

    def forward(self, microbatch: int, inputs: Tensors, targets: Tensor | None) -> Tensors:
        """Run the module; keep what the backward needs.

        `inputs`: token ids `[batch, seq]` on the first stage, else a message. Returns the next
        message, detached; on the last stage, which needs `targets` `[batch, seq]`, this
        microbatch's share of the step's mean loss per token.
        """
        if not self.module.is_first:
            for leaf in inputs:
                leaf.requires_grad_(leaf.is_floating_point())
        with self._autocast:
            outputs = self.module(*inputs)
        if self.module.is_last:
            assert targets is not None
            outputs = (self._loss(outputs[0], targets),)
        else:
            outputs = self._as_agreed(outputs)
        edges = tuple(get_gradient_edge(o) if o.requires_grad else None for o in outputs)
        self._held[microbatch] = _Held(inputs, edges)
        return tuple(output.detach() for output in outputs)

    def _as_agreed(self, outputs: Tensors) -> Tensors:
        assert self._sends is not None
        return tuple(o.to(spec.dtype) for o, spec in zip(outputs, self._sends, strict=True))

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed cross entropy over the tokens of the whole step, in at least float32."""
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        total = cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
        )
        return total / self._tokens_per_step

    def backward(self, microbatch: int, output_gradients: Tensors | None) -> Tensors:
        """Accumulate parameter gradients and release the microbatch.

        `output_gradients` has a tensor for each floating-point output, None on the last stage.
        Returns the gradient of each floating-point input, nothing on the first stage.
        """
        held = self._held.pop(microbatch)
        if output_gradients is None:
            torch.autograd.backward([e for e in held.edges if e is not None])
        else:
            self._propagate(held, output_gradients)
        if self.module.is_first:
            return ()
        leaves = [leaf for leaf in held.leaves if leaf.is_floating_point()]
        return tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in leaves)

    def _propagate(self, held: _Held, output_gradients: Tensors) -> None:
        gradients = iter(output_gradients)
        assert self._sends is not None
        received = [
            next(gradients) if spec.dtype.is_floating_point else None for spec in self._sends
        ]
        pairs = [(e, g) for e, g in zip(held.edges, received, strict=True) if e is not None]
        if pairs:
            torch.autograd.backward([e for e, _ in pairs], [g for _, g in pairs])


def gradient_message(message: Message) -> Message:
    """What comes back for a message: a gradient for each floating-point tensor."""
    return tuple(spec for spec in message if spec.dtype.is_floating_point)


def recompute_layers(module: StageModule) -> None:
    """Keep each layer's input only; its backward runs its forward again."""
    for unit in module.units:
        unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False)


def compile_layers(module: StageModule) -> None:
    """Compile each layer by itself: equal layers share one compilation, whole stages would not."""
    for unit in module.units:
        unit.compile()
