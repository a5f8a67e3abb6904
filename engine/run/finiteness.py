"""Whether a rank's gradients and weights are still numbers, at the cost of reading them once.

A loss tells by itself. Gradients are looked at by their largest magnitudes: a sum or a norm could
overflow where every element is finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element is NaN or infinite. Waits for the device."""
    some = [tensor.detach() for tensor in tensors if tensor.numel()]
    return not some or bool(torch.isfinite(get_total_norm(some, torch.inf)))


def first_not_finite(
    parameters: Mapping[str, nn.Parameter], *, has_gradients: bool, has_weights: bool
) -> str | None:
    """The first gradient, else weight, that is not finite, in words; None if all are."""
    looked_at: dict[str, dict[str, Tensor]] = {}
    if has_gradients:
        gradients = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        looked_at["gradient"] = gradients
    if has_weights:
        looked_at["weight"] = dict(parameters)
    for what, tensors in looked_at.items():
        if not are_finite(tensors.values()):
            names = (name for name, tensor in tensors.items() if not are_finite([tensor]))
            return f"{what} of {next(names)}"
    return None
