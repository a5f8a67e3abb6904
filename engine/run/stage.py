"""Forward and backward of one stage: what is kept for each microbatch, and when it is let go.

    F  --inputs, graph-->  B
    F  --inputs, graph-->  I  --inputs and output gradients of linears-->  W

Between its forward and its backward a microbatch keeps the stage's inputs (leaves that receive the
input gradients) and the edges into the autograd graph. Not the outputs: once they are sent nothing
here holds them, and the graph itself saves only what its operations need. A backward in two halves
lets go of the graph with the first.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from engine.model.stage_module import Message, ModelError, StageModule
from engine.model.task import Loss
from engine.run.backward import Deferral, Product, accumulate, defer_linears, separate_gradients

if TYPE_CHECKING:
    from engine.model.prefix import Prefix

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
        *,
        loss: Loss | None = None,
        receives: Message | None = None,
        is_split: bool = False,
        keeps_shapes: bool = False,
        has_backward: bool = True,
        slices: Sequence[int] = (),
    ) -> None:
        """Run a stage between the message that it `receives` and the one that it `sends`.

        `sends` is what goes to the next stage, None on the last; its dtypes are kept to. A forward
        that gives other shapes is an error where the stage `keeps_shapes`.
        `receives` is what comes from the stage before; None on the first, or where it may be that
        no gradient goes back.

        `autocast` is entered for each forward and must be reentrant. `loss` is what the last stage
        makes of its output (`Task.loss`). `is_split` lets W have the
        weight gradients of linears, whose forward it replaces; without it I does all and W nothing,
        as it must be where the module is compiled. Without `has_backward`, forwards keep nothing.

        With `slices`, a microbatch here is a slice of one of the batch's, whose tokens they are.
        Slice j of microbatch m has the number m x slices + j.
        """
        self.module = module
        self._sends, self._receives, self._autocast = sends, receives, autocast
        self._wanted = [spec.has_gradient for spec in receives or ()]
        self._keeps_shapes, self._loss = keeps_shapes, loss
        self._has_backward = has_backward
        self._deferral = defer_linears(module) if is_split else Deferral()
        self._parameters = list(module.parameters())
        self._num_targets = 0
        self._has_run = False
        self._held: dict[int, _Held] = {}
        self._slices, self._begins = slices, [*itertools.accumulate(slices, initial=0)]
        self._prefixes: dict[int, Prefix] = {}
        self._products: dict[int, list[Product]] = {}

    @property
    def is_first(self) -> bool:
        return self.module.is_first

    @property
    def is_last(self) -> bool:
        return self.module.is_last

    @property
    def num_held(self) -> int:
        """Microbatches after their F and before their B or W."""
        return len(self._held) + len(self._products)

    def begin_step(self, step: int, num_tokens: int) -> None:  # noqa: ARG002  # all are alike
        """`num_tokens`: targets that count over the whole step; the loss is per token of these."""
        self._num_targets = num_tokens

    def forward(self, microbatch: int, inputs: Tensors, targets: Tensor | None) -> Tensors:
        """Run the module; keep what the backward needs, if there is one.

        `inputs`: the microbatch's, such as token ids, on the first stage, else a message. Returns
        the next message, detached; on the last stage, which needs `targets`, this microbatch's
        share of the step's mean loss.
        """
        if self._slices:
            whole, part = divmod(microbatch, len(self._slices))
            if part == 0:
                self._prefixes[whole] = self.module.prefix(self._begins[-1])
            self.module.cache = self._prefixes[whole].seen_by(self._begins[part])
            if not self._has_backward and part == len(self._slices) - 1:
                del self._prefixes[whole]
        with torch.set_grad_enabled(self._has_backward):
            outputs = self._outputs(inputs, targets)
        if self._slices:
            self.module.cache = None
        if self._has_backward:
            edges = tuple(get_gradient_edge(o) if o.requires_grad else None for o in outputs)
            self._held[microbatch] = _Held(inputs, edges)
        return tuple(output.detach() for output in outputs)

    def _outputs(self, inputs: Tensors, targets: Tensor | None) -> Tensors:
        """Run the module, and the loss on the last stage."""
        if not self.module.is_first and self._has_backward:
            wanted = self._wanted or [True] * len(inputs)
            for leaf, is_wanted in zip(inputs, wanted, strict=True):
                leaf.requires_grad_(is_wanted and leaf.is_floating_point())
        with self._autocast:
            outputs: Tensors = self.module(*inputs)
        if not self._has_run:
            self._has_run = True
            if any(isinstance(output, FakeTensor) for output in outputs):
                layers = self.module.layers
                raise ModelError(
                    f"layers {layers.start} to {layers.stop - 1}: the forward uses a tensor that "
                    "an earlier call has left outside the module (a global, a cached function); "
                    "that call found the shapes and gave it no values; keep it in a buffer"
                )
        if self.module.is_last:
            assert targets is not None
            assert self._loss is not None
            outputs = (self._loss(outputs[0], targets, self._num_targets),)
        else:
            assert self._sends is not None
            if self._keeps_shapes and any(
                o.shape != spec.shape for o, spec in zip(outputs, self._sends, strict=True)
            ):
                layers = self.module.layers
                raise ModelError(
                    f"layers {layers.start} to {layers.stop - 1}: the forward gives a message of "
                    f"shapes {[list(o.shape) for o in outputs]}, and its first one gave "
                    f"{[list(spec.shape) for spec in self._sends]}; a stage must send the same "
                    "shapes each time: keep them equal, or cut elsewhere (partition)"
                )
            outputs = tuple(o.to(spec.dtype) for o, spec in zip(outputs, self._sends, strict=True))
        return outputs

    def backward(self, microbatch: int, output_gradients: Tensors | None) -> Tensors:
        """B: accumulate parameter gradients and release the microbatch.

        `output_gradients` has a tensor for each floating-point output, None on the last stage.
        Returns the gradient of each floating-point input, nothing on the first stage.
        """
        return self._propagate(microbatch, output_gradients)

    def backward_input(self, microbatch: int, output_gradients: Tensors | None) -> Tensors:
        """I: as B, but leaves the weight gradients of linears, and the microbatch, to W."""
        products: list[Product] = []
        self._deferral.products = products
        try:
            input_gradients = self._propagate(microbatch, output_gradients)
        finally:
            self._deferral.products = None
        self._products[microbatch] = products
        return input_gradients

    def backward_weight(self, microbatch: int) -> None:
        """W: accumulate what the microbatch's I has left, and release the microbatch."""
        accumulate(self._products.pop(microbatch))

    def _propagate(self, microbatch: int, output_gradients: Tensors | None) -> Tensors:
        held = self._held.pop(microbatch)
        without = [p for p in self._parameters if p.grad is None]
        edges = [edge for edge in held.edges if edge is not None]
        gradients: list[Tensor] | None = None  # with 1, the loss's
        if output_gradients is not None:
            # Outputs that the loss does not depend on are left out: zeros would be another thing.
            # An optimizer leaves alone what has no gradient, and decays what has one of zeros.
            assert self._sends is not None
            floating = iter(output_gradients)
            received = [next(floating) if s.dtype.is_floating_point else None for s in self._sends]
            begins = [
                (edge, gradient)
                for edge, gradient, spec in zip(held.edges, received, self._sends, strict=True)
                if edge is not None and gradient is not None and spec.has_gradient
            ]
            edges, gradients = [edge for edge, _ in begins], [gradient for _, gradient in begins]
        if edges:
            torch.autograd.backward(edges, gradients)
        if self._slices and microbatch % len(self._slices) == 0:
            del self._prefixes[microbatch // len(self._slices)]
        input_gradients: Tensors = ()
        if not self.module.is_first:  # zeros for what has no influence
            leaves = [leaf for leaf in held.leaves if leaf.is_floating_point()]
            if any(leaf.grad is None for leaf in leaves):
                self._check_absent(held.leaves)
            input_gradients = tuple(
                torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves
            )
        first = [p for p in without if p.grad is not None]
        if first:  # their gradients are parted from what will be read after the next backward
            queued = (gradient for *_, gradient in self._deferral.products or ())
            separate_gradients(first, [*input_gradients, *(output_gradients or ()), *queued])
        return input_gradients

    def _check_absent(self, leaves: Tensors) -> None:
        """Raises ModelError where the stage before was told that a gradient would come back."""
        for leaf, spec in zip(leaves, self._receives or (), strict=self._receives is not None):
            if spec.has_gradient and leaf.is_floating_point() and leaf.grad is None:
                layers = self.module.layers
                raise ModelError(
                    f"layers {layers.start} to {layers.stop - 1}: no gradient comes back to the "
                    "stage before, because a layer detaches its input or runs without gradients; "
                    "weights before it would be trained with zeros; train on one rank, or cut "
                    "after that layer (partition)",
                    "model.partition",
                )


def compile_layers(module: StageModule) -> None:
    """Compile each layer by itself: equal layers share one compilation, whole stages would not."""
    for unit in module.units:
        unit.compile()
