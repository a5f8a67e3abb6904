"""The backward in two halves: what the stage before waits for, then what only the optimizer needs.

    F   y = x Wᵀ + b
    I   x.grad = g W,  and (x, g) is queued
    W   W.grad += gᵀ x,  b.grad += Σ g

Put off are the products with x of each plain nn.Linear, and of transformers' Conv1D, a linear whose
weight lies the other way round: that is where weight gradients take their time. Every other
parameter (norms, embeddings, experts, a weight that is used functionally) gets its gradient in I,
from ordinary autograd, so that I and W together are exact whatever a stage is made of.

Asking autograd for the gradients of the inputs first and of the parameters later, as torch's own
pipelining does, needs no function of ours, but keeps the whole graph until W. Here it dies with I.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import TensorWeakRef

from engine.model.stage_module import ModelError, StageModule

Product = tuple[Tensor, Tensor | None, bool, Tensor, Tensor]
"""The gradients that a call of a linear owes: its weight `[out, in]`, its bias `[out]`, whether the
weight is `[in, out]` instead, its input `[..., in]` as multiplied (autocast may have cast it), and
its output's gradient `[..., out]`.

A bare tuple, for one is made per call: naming the fields took 1 % of a small model's backward.
"""


class Deferral:
    """Where a stage's linears leave their products: the list that its I sets while it runs.

    Plain state, not a thread's own: on CUDA autograd runs on another thread than the stage.
    """

    def __init__(self) -> None:
        self.products: list[Product] | None = None
        self.module: nn.Module | None = None  # whose linears they are
        self._last_cast: tuple[TensorWeakRef, int, TensorWeakRef] | None = None

    def name_of(self, parameter: Tensor) -> str:
        """A weight's name in the unsplit module, for a message."""
        own = self.module.own_parameters() if isinstance(self.module, StageModule) else {}
        return next((name for name, weight in own.items() if weight is parameter), "a linear")

    def cast_input(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Cast as autocast would, but once for linears in a row that share their input (q, k, v).

        Nothing is kept alive by remembering it.
        """
        if self._last_cast is not None:
            source, version, result = self._last_cast
            cast: Tensor | None = result()
            if cast is not None and source() is x and x._version == version and cast.dtype == dtype:
                return cast
        cast = _cast(x, dtype)
        self._last_cast = TensorWeakRef(x), x._version, TensorWeakRef(cast)
        return cast


def defer_linears(module: nn.Module) -> Deferral:
    """Give every plain linear in the module a forward whose weight gradients can be put off.

    Not for a module that is compiled: its backward is, too, and knows no queue.
    """
    deferral = Deferral()
    deferral.module = module
    for inner in module.modules():
        is_transposed = _is_conv1d(inner)
        if (type(inner) is nn.Linear or is_transposed) and _is_plain(inner):
            linear: Any = inner
            own = linear.weight, linear.bias
            forward = _forward_of_conv1d if is_transposed else _forward
            _replace_forward(inner, functools.partial(forward, linear, own, deferral))
    return deferral


def accumulate(products: list[Product]) -> None:
    """Do the work of W: add the gradients to `.grad`.

    Takes the products out of the list, each of which frees what it alone has held.
    """
    while products:
        weight, bias, is_transposed, x, gradient = products.pop()
        x, gradient = _rows(x), _rows(gradient)
        if weight.requires_grad:
            _add_product(weight, *((x.t(), gradient) if is_transposed else (gradient.t(), x)))
        if bias is not None and bias.requires_grad:
            _add(bias, gradient.sum(0))


def separate_gradients(parameters: Iterable[Tensor], others: Iterable[Tensor]) -> None:
    """Give memory of its own to each `.grad` that shares its memory with another or with `others`.

    Autograd may take a view of what it hands to several for a parameter's first gradient, and adds
    to that in place in later backwards. It would add to what W still needs or a message holds.
    """
    taken = {_address(tensor) for tensor in others}
    for parameter in parameters:
        if parameter.grad is not None:
            if _address(parameter.grad) in taken:
                parameter.grad = parameter.grad.clone()
            taken.add(_address(parameter.grad))


class _Context(Protocol):
    """The values that autograd carries from a forward to its backward."""

    deferred: tuple[Tensor, Tensor | None, Deferral, bool, bool, bool]
    needs_input_grad: tuple[bool, ...]

    @property
    def saved_tensors(self) -> tuple[Tensor, Tensor]: ...
    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


class _Deferrable(torch.autograd.Function):
    """A linear. Kept short: in small models its own lines take longer than its products."""

    @staticmethod
    def forward(
        ctx: _Context,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        deferral: Deferral,
        is_transposed: bool,
    ) -> Tensor:
        # What I recomputes is only reached by a model that differentiates itself: it wants all now.
        device = x.device.type
        is_cast = torch.is_autocast_enabled(device)
        is_first = deferral.products is None
        ctx.deferred = weight, bias, deferral, is_first, is_cast, is_transposed
        ctx.set_materialize_grads(False)
        if is_cast:
            # Not left to autocast: it would remember a cast that was made without a graph, also
            # for functional uses of the weight, which would then get no gradient.
            dtype = torch.get_autocast_dtype(device)
            x, weight = deferral.cast_input(x, dtype), _cast(weight, dtype)
            bias = None if bias is None else _cast(bias, dtype)
        ctx.save_for_backward(x, weight)
        y = functional.linear(x, weight.t() if is_transposed else weight, bias)
        # A view that is made here could not be written to, as in-place activations do.
        return y.data if y._is_view() else y

    @staticmethod
    def backward(
        ctx: _Context, gradient: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if gradient is None:
            return None, None, None, None, None
        x, weight = ctx.saved_tensors
        parameter, bias, deferral, is_first, is_cast, is_transposed = ctx.deferred
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = gradient.matmul(weight.t() if is_transposed else weight)
        if is_cast and torch.is_grad_enabled():
            # The graph of this backward would end at the casts, which were made without one.
            raise ModelError(
                f"{deferral.name_of(parameter)}: a gradient is taken through it "
                "within the forward with a graph of its own (create_graph), which a split "
                "backward under autocast would lose; use a schedule whose backward is whole, such "
                'as 1f1b, or train.autocast = "none"',
                "train.autocast",
            )
        if is_first and deferral.products is not None:
            # Detached, or the queue would keep the graph that x came from.
            deferral.products.append((parameter, bias, is_transposed, x.detach(), gradient))
            return of_x, None, None, None, None
        _, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gradient = _rows(gradient)
        of_weight = None
        if needs_weight:
            x = _rows(x)
            of_weight = x.t() @ gradient if is_transposed else gradient.t() @ x
        return of_x, of_weight, gradient.sum(0) if needs_bias else None, None, None


_apply: Callable[[Tensor, Tensor, Tensor | None, Deferral, bool], Tensor]
_apply = super(torch.autograd.Function, _Deferrable).apply
"""`Function.apply` less its checks for torch.func, which are half the overhead of a forward."""


def _forward(
    linear: Any,
    own: tuple[Tensor, Tensor | None],
    deferral: Deferral,
    input: Tensor,  # noqa: A002  # as nn.Linear names it
    *,
    is_transposed: bool = False,
) -> Tensor:
    """A linear whose weight was swapped for the call, as by LoRA, gets its gradient in I."""
    weight, bias = linear.weight, linear.bias
    is_swapped = weight is not own[0] or bias is not own[1]
    if is_swapped or not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return functional.linear(input, weight.t() if is_transposed else weight, bias)
    return _apply(input, weight, bias, deferral, is_transposed)


def _forward_of_conv1d(
    linear: Any,
    own: tuple[Tensor, Tensor | None],
    deferral: Deferral,
    x: Tensor,  # as Conv1D names it
) -> Tensor:
    return _forward(linear, own, deferral, x, is_transposed=True)


def _replace_forward(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> None:
    module.forward = forward


def _is_conv1d(module: nn.Module) -> bool:
    """Whether it is transformers' Conv1D, which only a model of transformers has imported."""
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def _is_plain(linear: Any) -> bool:
    """Whether its forward is its class's own, on parameters that are nothing but parameters."""
    weight, bias = linear.weight, linear.bias
    return (
        "forward" not in vars(linear)
        and weight.requires_grad
        and weight.is_floating_point()
        and _is_bare(weight)
        and (bias is None or _is_bare(bias))
    )


def _is_bare(tensor: Tensor) -> bool:
    """Whether only its `.grad` matters: a leaf, without hooks that want to see its gradients."""
    is_hooked = tensor._backward_hooks or tensor._post_accumulate_grad_hooks
    return type(tensor) is nn.Parameter and not is_hooked


def _rows(x: Tensor) -> Tensor:
    """`[..., n]` as `[rows, n]`."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast what autocast would."""
    return x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x


def _add_product(parameter: Tensor, a: Tensor, b: Tensor) -> None:
    grad = parameter.grad
    if grad is not None and grad.dtype == b.dtype:
        grad.addmm_(a, b)  # no pass over the gradient of its own
    else:
        _add(parameter, a @ b)


def _add(parameter: Tensor, term: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = laid_out_as(parameter, term.to(parameter.dtype))
    else:
        parameter.grad.add_(term)


def laid_out_as(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the parameter's strides, as autograd gives it and fused kernels need it."""
    if parameter.is_contiguous():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
