"""Whether a rank's gradients and weights are still numbers, at the cost of reading them once.

A sum is not finite if one of its elements is not, and adding up is as fast as reading. A sum of
finite elements may overflow: then each element is looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

_SMALL = (torch.float16, torch.bfloat16)


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no element is NaN or infinite. Waits for the device."""
    some = [tensor.detach() for tensor in tensors]
    sums = [t.sum(dtype=torch.float32 if t.dtype in _SMALL else None) for t in some]
    if not sums or all(torch.stack([torch.isfinite(one) for one in sums]).tolist()):
        return True
    return all(bool(torch.isfinite(tensor).all()) for tensor in some)


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
