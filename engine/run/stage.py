"""Forward and backward of one stage: what is kept for each microbatch, and when it is let go.

Between its forward and its backward a microbatch keeps the stage's input (a leaf that receives
the input gradient) and the edge into the autograd graph. Not the output: once it is sent nothing
here holds it, and the graph itself saves only what its operations need.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.functional import cross_entropy

from engine.model.split import StageModule


@dataclass
class _Held:
    """One microbatch between forward and backward."""

    leaf: Tensor | None  # the input that wants a gradient; None on the first stage
    edge: GradientEdge


class Stage:
    """Runs one stage's module on microbatches; counts how many it holds."""

    def __init__(self, module: StageModule, tokens_per_step: int) -> None:
        self.module = module
        self._tokens_per_step = tokens_per_step
        self._held: dict[int, _Held] = {}

    @property
    def num_held(self) -> int:
        return len(self._held)

    def forward(self, microbatch: int, x: Tensor, targets: Tensor | None) -> Tensor:
        """Run the module; keep what the backward needs.

        `x`: token ids `[batch, seq]` on the first stage, else hidden states
        `[batch, seq, hidden]`. Returns detached hidden states; on the last stage, which needs
        `targets` `[batch, seq]`, this microbatch's share of the step's mean loss per token.
        """
        leaf = None if self.module.is_first else x.requires_grad_()
        output: Tensor = self.module(x)
        if self.module.is_last:
            assert targets is not None
            output = self._loss(output, targets)
        self._held[microbatch] = _Held(leaf, get_gradient_edge(output))
        return output.detach()

    def _loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Summed cross entropy over the tokens of the whole step, in at least float32."""
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        total = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return total / self._tokens_per_step

    def backward(self, microbatch: int, output_gradient: Tensor | None) -> Tensor | None:
        """Accumulate parameter gradients and release the microbatch.

        `output_gradient` has the output's shape, None on the last stage. Returns the input's
        gradient, None on the first stage.
        """
        held = self._held.pop(microbatch)
        torch.autograd.backward((held.edge,), (output_gradient,))
        return None if held.leaf is None else held.leaf.grad
