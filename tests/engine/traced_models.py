"""Modules for split = "trace", each awkward in its own way."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, VOCABULARY, LONGEST = 8, 256, 32


class Pair(nn.Module):
    """Two results."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x)
        return y, torch.tanh(y)


class Named(nn.Module):
    """A dictionary of results, and an argument by name."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, x: Tensor, *, other: Tensor) -> dict[str, Tensor]:
        return {"sum": x * self.scale + other, "mask": other > 0}


class Norm(nn.Module):
    """Batch normalisation over the width: buffers that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x.transpose(1, 2))
        return y.transpose(1, 2)  # not contiguous


class Counter(nn.Module):
    """A counter in place, a running mean by assignment, and positions that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        table = torch.linspace(-1, 1, LONGEST)[:, None].expand(LONGEST, WIDTH).clone()
        self.register_buffer("positions", table, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 1))
        return x / (1 + 0.1 * self.count) + self.mean + self.positions[: x.shape[1]]


class Attention(nn.Module):
    """Causal, its mask made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(1, 2)).masked_fill(~mask, -torch.inf)
        return scores.softmax(-1) @ v


class Rotation(nn.Module):
    """Complex numbers within, from a complex buffer."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.arange(LONGEST)[:, None] / (1 + torch.arange(WIDTH // 2))
        phases = torch.polar(torch.ones_like(angles), angles)
        self.register_buffer("phases", phases, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        return torch.view_as_real(pairs * self.phases[: x.shape[1]]).flatten(-2)


class Frame(nn.Module):
    """Embeddings, three layers and a head around what a subclass does with them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> object:
        x = self.first(self.embed(ids))
        return self.head(self.third(self.middle(self.second(x), x)))

    def middle(self, x: Tensor, skip: Tensor) -> Tensor:
        return x + skip


class Blocks(Frame):
    """A block of every kind, before, between and after the split points."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.counter, self.attention = Norm(), Counter(), Attention()
        self.rotation, self.pair, self.named = Rotation(), Pair(), Named()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))

    def forward(self, ids: Tensor) -> object:
        x = self.counter(self.norm(self.first(self.embed(ids))))
        x = x * (ids % 3 > 0).unsqueeze(-1) + (ids.cumsum(-1) % 5).unsqueeze(-1)
        y, z = self.pair(self.attention(self.second(x)))
        y = torch.cat([y.split(3, -1)[0], z.split(3, -1)[1], x[..., 6:]], -1)
        result = self.named(self.rotation(self.third(y)), other=x)
        x = result["sum"].masked_fill(result["mask"], 0.5) + y.detach() * torch.tensor(0.5)
        return functional.linear(self.inner(x), self.embed.weight)


class WrittenSkip(Frame):
    """The skip is written to after the split point."""

    def forward(self, ids: Tensor) -> object:
        skip = self.first(self.embed(ids))
        x = self.second(skip * 2)
        skip += x
        return self.head(self.third(x) + skip)


class ComplexSkip(Frame):
    def forward(self, ids: Tensor) -> object:
        turned = torch.fft.fft(self.first(self.embed(ids)))
        x = self.second(turned.imag)
        return self.head(self.third(x) + (turned * turned.conj()).real)


class Hooked(Frame):
    def __init__(self) -> None:
        super().__init__()
        self.second.register_forward_hook(lambda _module, _inputs, output: output * 2)
        self.third.register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 1,))
        self.register_forward_hook(lambda _module, _inputs, output: output / 3)
        self.third.weight.register_hook(lambda gradient: gradient * 0.5)


class Mixed(Frame):
    """What a trace keeps: it uses a layer twice, branches on a shape and returns a dictionary.

    One layer and a buffer are not used, a plain tensor is, and a part has no gradient.
    """

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.utils.parametrizations.spectral_norm(self.second)
        self.spare = nn.Linear(3, 3)
        self.register_buffer("note", torch.arange(3))
        self.plain = torch.linspace(0, 1, WIDTH)

    def middle(self, x: Tensor, skip: Tensor) -> Tensor:
        with torch.no_grad():
            mean = skip.mean(-1, keepdim=True) + torch.arange(x.shape[1]).unsqueeze(-1)
        again = self.first(torch.tanh(x * self.plain)) + self.second(skip)
        return again if x.shape[1] > LONGEST else again * x.shape[1] - mean

    def forward(self, ids: Tensor) -> object:
        return {"logits": super().forward(ids), "sizes": [ids.shape[0], None]}


class Dropped(Frame):
    def middle(self, x: Tensor, skip: Tensor) -> Tensor:
        return functional.dropout(x, 0.5, self.training) + skip * torch.rand_like(skip)


class TupleOutput(Frame):
    def forward(self, ids: Tensor) -> object:
        logits = super().forward(ids)
        return logits, logits.mean()


class Flat(Frame):
    def forward(self, ids: Tensor) -> object:
        logits = super().forward(ids)
        assert isinstance(logits, Tensor)
        return logits.flatten(0, 1)


class Branching(Frame):
    def middle(self, x: Tensor, skip: Tensor) -> Tensor:
        return x if x.sum() > 0 else skip


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> Tensor:
        return -gradient


class CustomBackward(Frame):
    def middle(self, x: Tensor, skip: Tensor) -> Tensor:
        return Reversed.apply(x) + skip


class BackwardHook(Frame):
    def __init__(self) -> None:
        super().__init__()
        self.second.register_full_backward_hook(lambda _m, gradients, _o: (gradients[0] * 2,))


class TensorHook(Frame):
    def middle(self, x: Tensor, skip: Tensor) -> Tensor:
        x.register_hook(lambda gradient: gradient * 2)
        return x + skip


class PythonCounter(Frame):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def middle(self, x: Tensor, skip: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls + skip


class PythonRandom(Frame):
    def middle(self, x: Tensor, skip: Tensor) -> Tensor:
        return x if random.random() < 0.5 else skip


class SharedBuffer(Frame):
    """Written by one piece, read by another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def middle(self, x: Tensor, skip: Tensor) -> Tensor:
        self.scale += 1
        return x + skip

    def forward(self, ids: Tensor) -> object:
        x = self.first(self.embed(ids)) * self.scale
        return self.head(self.third(self.middle(self.second(x), x)))


class WrittenView(Frame):
    """A view of what is written to after the split point passes it, too."""

    def forward(self, ids: Tensor) -> object:
        x = self.first(self.embed(ids)) + 1
        part = x[..., :2]
        y = self.second(part.repeat(1, 1, WIDTH // 2))
        x.add_(y)
        return self.head(self.third(x)) + part.sum(-1, keepdim=True)


class NumberAcross(Frame):
    def forward(self, ids: Tensor) -> object:
        largest = ids.max().item()
        x = self.second(self.first(self.embed(ids)))
        return self.head(self.third(x)) * largest
