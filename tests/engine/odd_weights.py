"""Modules that do with weights, shapes or gradients what sharding and splitting may lose."""

from __future__ import annotations

from typing import Any

import torch
from awkward_models import WIDTH, chain, mixer
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.utils import parametrizations


class Viewed(nn.Module):
    """Keeps views of a weight as plain attributes, and uses those."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mixer()
        half = WIDTH // 2
        self.top, self.rest = self.inner.weight[:half], self.inner.weight[half:]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x, self.top), linear(x, self.rest)], -1)


class Assigned(nn.Module):
    """Gives its weight other data in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mixer()

    def forward(self, x: Tensor) -> Tensor:
        self.inner.weight.data = self.inner.weight.data / self.inner.weight.data.norm()
        return self.inner(x)


class Scaled(Assigned):
    """Writes to its weight in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        self.inner.weight.data.mul_(0.999)
        return self.inner(x)


class Swapped(Assigned):
    """Puts a tensor that it has computed in the place of its weight for the call."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner._parameters.pop("weight")
        self.inner.weight = weight * 2
        try:
            return self.inner(x)
        finally:
            del self.inner.weight
            self.inner.register_parameter("weight", weight)


class Called(Assigned):
    """Calls its linear with other weights, as LoRA may."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.ones(WIDTH, 1) / 3)

    def forward(self, x: Tensor) -> Tensor:
        given: dict[str, Any] = {"weight": self.inner.weight + self.low @ self.low.t()}
        return torch.func.functional_call(self.inner, given, (x,))


class Growing(nn.Module):
    """Its output has two more positions from the sixth forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.num_calls = mixer(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        y: Tensor = self.inner(x)
        return y if self.num_calls < 6 else torch.cat([y, y[:, -2:]], 1)


class Cut(nn.Module):
    """Takes back the positions that were added."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :6]


class Differentiating(nn.Module):
    """Differentiates within its forward, through its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mixer()

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.inner(y).tanh().sum(), y, create_graph=True)
        return x + slope


def viewed() -> nn.Sequential:
    return chain(mixer(), Viewed(), nn.Tanh(), Viewed())


def assigned() -> nn.Sequential:
    return chain(mixer(), Assigned(), nn.Tanh(), Assigned())


def scaled() -> nn.Sequential:
    return chain(mixer(), Scaled(), nn.Tanh(), Scaled())


def swapped() -> nn.Sequential:
    return chain(mixer(), Swapped(), nn.Tanh(), Swapped())


def called() -> nn.Sequential:
    return chain(mixer(), Called(), nn.Tanh(), Called())


def growing() -> nn.Sequential:
    return chain(mixer(), Growing(), nn.Tanh(), mixer(), Cut())


def differentiating() -> nn.Sequential:
    return chain(mixer(), Differentiating(), nn.Tanh(), Differentiating())


def normalised() -> nn.Sequential:
    return chain(mixer(), parametrizations.weight_norm(mixer()), nn.Tanh(), mixer())


def hooked_when_accumulated() -> nn.Sequential:
    module = chain(mixer(), nn.Tanh(), mixer(), mixer())
    for weight in module.parameters():
        weight.register_post_accumulate_grad_hook(_halve)
    return module


def hooked_gradients() -> nn.Sequential:
    module = chain(mixer(), nn.Tanh(), mixer(), mixer())
    for weight in module.parameters():
        weight.register_hook(lambda gradient: gradient * gradient.abs().clamp(max=1))
    return module


def _halve(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad /= 2
