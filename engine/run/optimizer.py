"""The optimizer, the learning rate of each step, and clipping by the norm over all stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

OPTIMIZERS = ("adamw", "sgd")
LR_SCHEDULES = ("constant", "cosine")


@dataclass(frozen=True)
class OptimizerSpec:
    """The optimizer's settings.

    The rate grows linearly from 0 over `lr_warmup_steps`; then it stays (`constant`), or falls as
    half a cosine to 0 at `lr_decay_steps` (`cosine`). `clip_norm` is the largest norm of all
    gradients together, 0 for no limit. `weight_decay` is AdamW's, `momentum` SGD's.
    """

    name: str = "adamw"
    learning_rate: float = 1e-4
    weight_decay: float = 0.01
    momentum: float = 0.0
    lr_schedule: str = "constant"
    lr_warmup_steps: int = 0
    lr_decay_steps: int = 0
    clip_norm: float = 0.0

    def __post_init__(self) -> None:
        """Raises ValueError for a setting that cannot be."""
        if self.name not in OPTIMIZERS:
            raise ValueError(f'unknown optimizer "{self.name}"; known: {", ".join(OPTIMIZERS)}')
        if self.lr_schedule not in LR_SCHEDULES:
            known = ", ".join(LR_SCHEDULES)
            raise ValueError(f'unknown lr_schedule "{self.lr_schedule}"; known: {known}')
        if self.lr_schedule == "cosine" and self.lr_decay_steps <= self.lr_warmup_steps:
            raise ValueError(
                f"lr_decay_steps is {self.lr_decay_steps}; cosine needs it to be more than the "
                f"{self.lr_warmup_steps} steps of warm-up"
            )

    def learning_rate_at(self, step: int) -> float:
        """The rate of a step, from 0; as transformers' `get_cosine_schedule_with_warmup`."""
        if step < self.lr_warmup_steps:
            return self.learning_rate * step / self.lr_warmup_steps
        if self.lr_schedule == "constant":
            return self.learning_rate
        steps = self.lr_decay_steps - self.lr_warmup_steps
        progress = min(1.0, (step - self.lr_warmup_steps) / steps)
        return self.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def build_optimizer(
    spec: OptimizerSpec, parameters: list[nn.Parameter]
) -> torch.optim.Optimizer | None:
    """None for a rank that owns no parameters."""
    if not parameters:
        return None
    rate = spec.learning_rate
    # Fused kernels take no complex numbers, and walk memory whatever its strides are.
    is_fused = all(p.is_contiguous() and not p.is_complex() for p in parameters)
    if spec.name == "adamw":
        decay = spec.weight_decay
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay, fused=is_fused)
    # The fused kernel for the CPU leaves weights in bfloat16 as they are (torch 2.13).
    is_fused &= not any(p.dtype == torch.bfloat16 and p.device.type == "cpu" for p in parameters)
    return torch.optim.SGD(parameters, lr=rate, momentum=spec.momentum, fused=is_fused)


def norm_over_ranks(
    gradients: Iterable[Tensor], device: torch.device, sum_over_ranks: Callable[[Tensor], None]
) -> Tensor:
    """The norm of all ranks' gradients together, as a scalar on `device`, the same everywhere.

    Each gradient must be given by one rank only. `sum_over_ranks` adds a tensor over the ranks in
    place, and blocks.
    """
    total = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient in gradients:
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        total += torch.linalg.vector_norm(gradient, dtype=dtype).double() ** 2
    sum_over_ranks(total)
    return total.sqrt()
