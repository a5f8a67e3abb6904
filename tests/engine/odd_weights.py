"""Modules that do with weights, shapes or gradients what sharding and splitting may lose."""

from __future__ import annotations

import torch
from awkward_models import WIDTH, chain, mixer
from models import Of
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


def give_other_data(own: Of, x: Tensor) -> Tensor:
    own.inner.weight.data = own.inner.weight.data / own.inner.weight.data.norm()
    return own.inner(x)


def write_to_weight(own: Of, x: Tensor) -> Tensor:
    own.inner.weight.data.mul_(0.999)
    return own.inner(x)


def swap_weight(own: Of, x: Tensor) -> Tensor:
    """Put a tensor that is computed in the place of a weight for the call."""
    weight = own.inner._parameters.pop("weight")
    own.inner.weight = weight * 2
    try:
        return own.inner(x)
    finally:
        del own.inner.weight
        own.inner.register_parameter("weight", weight)


def call_with_another(own: Of, x: Tensor) -> Tensor:
    """Call a linear with other weights, as LoRA may."""
    weight = own.inner.weight + own.low @ own.low.t()
    return torch.func.functional_call(own.inner, {"weight": weight}, (x,))


def differentiate(own: Of, x: Tensor) -> Tensor:
    """Differentiate within the forward, through an own weight."""
    with torch.enable_grad():
        y = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(own.inner(y).tanh().sum(), y, create_graph=True)
    return x + slope


class Growing(nn.Module):
    """Its output has two more positions from the sixth forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.num_calls = mixer(), 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        y: Tensor = self.inner(x)
        return y if self.num_calls < 6 else torch.cat([y, y[:, -2:]], 1)


def twice(make):
    return chain(mixer(), make(), nn.Tanh(), make())


def viewed():
    return twice(Viewed)


def transposed():
    """Its weights lie in memory by columns."""

    def make():
        own = mixer()
        own.weight = nn.Parameter(own.weight.detach().t().contiguous().t())
        return own

    return twice(make)


def assigned():
    return twice(lambda: Of(give_other_data, inner=mixer()))


def scaled():
    return twice(lambda: Of(write_to_weight, inner=mixer()))


def swapped():
    return twice(lambda: Of(swap_weight, inner=mixer()))


def called():
    low = nn.Parameter(torch.ones(WIDTH, 1) / 3)
    return twice(lambda: Of(call_with_another, inner=mixer(), low=nn.Parameter(low.clone())))


def growing():
    cut = Of(lambda _own, x: x[:, :6])
    return chain(mixer(), Growing(), nn.Tanh(), mixer(), cut)


def differentiating():
    return twice(lambda: Of(differentiate, inner=mixer()))


def normalised():
    return chain(mixer(), parametrizations.weight_norm(mixer()), nn.Tanh(), mixer())


def hooked_when_accumulated():
    def halve(weight: Tensor) -> None:
        weight.grad /= 2

    module = chain(mixer(), nn.Tanh(), mixer(), mixer())
    for weight in module.parameters():
        weight.register_post_accumulate_grad_hook(halve)
    return module


def hooked_gradients():
    module = chain(mixer(), nn.Tanh(), mixer(), mixer())
    for weight in module.parameters():
        weight.register_hook(lambda gradient: gradient * gradient.abs().clamp(max=1))
    return module
