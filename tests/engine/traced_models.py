"""Modules for split = "trace", each awkward in its own way."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from awkward_models import VOCABULARY, WIDTH, Normed, Rotary
from models import sequential
from torch import Tensor, nn
from torch.nn import functional

LONGEST = 32


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


class Frame(nn.Module):
    """Embeddings, three layers and a head around what `middle` does with them, given this."""

    def __init__(self, middle: Callable[..., Tensor] = lambda own, x, skip: x + skip) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.register_buffer("scale", torch.ones(()))
        self.calls, self.middle = 0, middle

    def forward(self, ids: Tensor) -> Any:
        x = self.first(self.embed(ids)) * self.scale.clone()
        return self.head(self.third(self.middle(self, self.second(x), x)))


class Blocks(Frame):
    """A block of every kind, before, between and after the split points."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.counter, self.attention = Normed(), Counter(), Attention()
        self.rotation, self.pair, self.named = Rotary(), Pair(), Named()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.counter(self.first(self.embed(ids))))
        x = x * (ids % 3 > 0).unsqueeze(-1) + (ids.cumsum(-1) % 5).unsqueeze(-1)
        y, z = self.pair(self.attention(self.second(x)))
        y = torch.cat([y.split(3, -1)[0], z.split(3, -1)[1], x[..., 6:]], -1)
        result = self.named(self.rotation(self.third(y)), other=x)
        x = result["sum"].masked_fill(result["mask"], 0.5) + y.detach() * torch.tensor(0.5)
        return functional.linear(self.inner(x), self.embed.weight)


class WrittenSkip(Frame):
    """The skip is written to after the split point."""

    def forward(self, ids: Tensor) -> Tensor:
        skip = self.first(self.embed(ids))
        x = self.second(skip * 2)
        skip += x
        return self.head(self.third(x) + skip)


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
        super().__init__(Mixed.mix)
        self.second = nn.utils.parametrizations.spectral_norm(self.second)
        self.spare = nn.Linear(3, 3)
        self.register_buffer("note", torch.arange(3))
        self.plain = torch.linspace(0, 1, WIDTH)

    def mix(self, x: Tensor, skip: Tensor) -> Tensor:
        with torch.no_grad():
            mean = skip.mean(-1, keepdim=True) + torch.arange(x.shape[1]).unsqueeze(-1)
        with torch.autocast("cpu", enabled=False):
            again = self.first(torch.tanh(x * self.plain))
        again = again + self.second(skip)
        return again if x.shape[1] > LONGEST else again * x.shape[1] - mean

    def forward(self, ids: Tensor) -> Any:
        return {"logits": super().forward(ids), "sizes": [ids.shape[0], None]}


class Encoder(nn.Module):
    """Down and up again, with a skip at each width."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        widths = [(8, 6), (6, 4)]
        self.down = nn.ModuleList(nn.Linear(wide, narrow) for wide, narrow in widths)
        self.up = nn.ModuleList(nn.Linear(narrow, wide) for wide, narrow in reversed(widths))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x, skips = self.embed(ids), []
        for layer in self.down:
            skips.append(x)
            x = torch.relu(layer(x))
        for layer in self.up:
            x = torch.tanh(layer(x)) + skips.pop()
        return self.head(x)


class Trunk(nn.Module):
    """A vision transformer's, on token ids for patches: a token of its own in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Embedding(VOCABULARY, WIDTH)
        self.token = nn.Parameter(torch.randn(1, 1, WIDTH))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, norm_first=True)
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(ids), -1, -1), self.patches(ids)], 1)
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, 1:] + x[:, :1])


class Tutorial(nn.Module):
    """The module of which `models.sequential` is the manual cut."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.positions, *layers, self.norm, self.output = sequential()
        self.layers = nn.ModuleDict({str(index): layer for index, layer in enumerate(layers)})

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.positions(self.tok_embeddings(tokens))
        for layer in self.layers.values():
            h = layer(h)
        return self.output(self.norm(h))


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: object, gradient: Tensor) -> Tensor:
        return -gradient


def write_beside_a_view(own: Frame, x: Tensor, skip: Tensor) -> Tensor:
    skip = skip + 1
    part = skip[..., :2]
    y = own.head(part.repeat(1, 1, WIDTH // 2))[..., :WIDTH]  # the split point
    skip.add_(x)
    return y + part.repeat(1, 1, WIDTH // 2) + own.third(skip)


def hook_a_tensor(_own: Frame, x: Tensor, skip: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient * 2)
    return x + skip


def count_calls(own: Frame, x: Tensor, skip: Tensor) -> Tensor:
    own.calls += 1
    return x * own.calls + skip


def change_a_buffer(own: Frame, x: Tensor, skip: Tensor) -> Tensor:
    own.scale += 1
    return x + skip


def cut_in_a_block(own: Frame, x: Tensor, skip: Tensor) -> Tensor:
    with torch.no_grad():
        return own.third(x) + skip


def mix_complex(own: Frame, x: Tensor, turned: Tensor) -> Tensor:
    return own.third(x) + (turned * turned.conj()).real


def mix_number(own: Frame, x: Tensor, largest: float) -> Tensor:
    return own.third(x) * largest


def hooked_backward() -> Frame:
    model = Frame()
    model.second.register_full_backward_hook(lambda _m, gradients, _o: (gradients[0] * 2,))
    return model


def returning(what: Callable[[Tensor], Any]) -> Frame:
    model = Frame()
    model.register_forward_hook(lambda _module, _ids, logits: what(logits))
    return model


used_twice = partial(Frame, lambda own, x, skip: own.first(torch.tanh(x)) + own.second(skip))
with_dropout = partial(
    Frame,
    lambda own, x, skip: functional.dropout(x, 0.5, own.training) + skip * torch.rand_like(skip),
)
tuple_output = partial(returning, lambda logits: (logits, logits.mean()))
nameless = partial(returning, lambda logits: {"result": logits})
flat = partial(returning, lambda logits: logits.flatten(0, 1))
complex_skip = partial(Frame, lambda own, x, skip: mix_complex(own, x, torch.fft.fft(skip)))
number_across = partial(Frame, lambda own, x, skip: mix_number(own, x, skip.max().item()))
branching = partial(Frame, lambda own, x, skip: x if x.sum() > 0 else skip)
custom_backward = partial(Frame, lambda own, x, skip: Reversed.apply(x) + skip)
tensor_hook = partial(Frame, hook_a_tensor)
python_counter = partial(Frame, count_calls)
python_random = partial(Frame, lambda own, x, skip: x * random.random() + skip)
shared_buffer = partial(Frame, change_a_buffer)
written_view = partial(Frame, write_beside_a_view)
in_a_block = partial(Frame, cut_in_a_block)
