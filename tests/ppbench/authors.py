"""Models as authors write them, small, for verification: what each can lose in silence."""

from __future__ import annotations

import traceback
from collections.abc import Callable

import torch
from torch import Tensor, nn

WIDTH = 16
VOCABULARY = 256


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, WIDTH) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


class Layer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        mixed = x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device)[:, None]
        return self.norm(x + self.drop(self.down(torch.tanh(self.up(mixed)))))


class Twice(nn.Module):
    """One layer, used two times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


class Batched(nn.Module):
    """BatchNorm over all tokens; its running mean and variance are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.flatten(0, 1)).view_as(x)


class Rotation(nn.Module):
    """Turns pairs of channels by angles that are trained, as complex numbers; some are masked."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.linspace(0, 3, WIDTH // 2)
        self.turns = nn.Parameter(torch.polar(torch.ones_like(angles), angles))
        self.register_buffer("is_kept", torch.arange(WIDTH) % 5 > 0)
        self.register_buffer("num_calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        self.num_calls += 1
        return torch.view_as_real(pairs * self.turns).flatten(-2) * self.is_kept


def _of(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), Positions(), *layers, nn.Linear(WIDTH, VOCABULARY)
    )


def plain() -> nn.Sequential:
    model = _of(Layer(), Layer(), Twice(), Layer())
    model[3].register_forward_hook(lambda _module, _inputs, output: output * 1.5)
    model[2].up.weight.requires_grad_(False)
    return model


def tied() -> nn.Sequential:
    model = plain()
    model[-1].weight = model[0].weight
    return model


def dropping() -> nn.Sequential:
    return _of(Layer(0.3), Layer(0.3), Layer(0.3), Layer(0.3))


def batched() -> nn.Sequential:
    return _of(Layer(), Batched(), Batched(), Layer())


def rotating() -> nn.Sequential:
    return _of(Rotation(), Layer(), Rotation(), Layer())


class Skipping(nn.Module):
    """No chain: the embeddings are used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = Layer(0.2), Layer(0.2)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        embedded = self.embed(ids)
        return self.head(self.second(self.first(embedded)) + embedded)


def skipping() -> nn.Module:
    return Skipping()


class Acting(nn.Module):
    """Does something where it is called with true tensors; shapes are found with fake ones."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        if type(x) is Tensor:
            self.act()
        return x


class Viewing(nn.Module):
    """Uses a view of its weight that it has kept as a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(8, WIDTH)
        self.top = self.layer.weight[:8]

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(torch.tanh(nn.functional.linear(x, self.top)))


class Drifting(nn.Module):
    """Its forward changes its weight behind autograd's back, by what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale
        if type(x) is Tensor:
            self.scale.data = self.scale.data + 0.01 * x.detach().mean((0, 1))
        return y


class Growing(nn.Module):
    """Gives two more positions than it takes, and from the 30th forward on six."""

    def __init__(self) -> None:
        super().__init__()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += type(x) is Tensor
        return torch.cat([x, x[:, : 2 if self.num_calls < 30 else 6]], 1)


class Trimmed(nn.Module):
    """Takes the last two positions away."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :-2]


class Differentiating(nn.Module):
    """Moves along the gradient of its own energy."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.requires_grad_()
        energy = torch.tanh(self.inner(x)).square().sum()
        return x + torch.autograd.grad(energy, x, create_graph=True)[0]


class Swapping(nn.Module):
    """Adds a product of two thin matrices to a weight for the call, as LoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.a, self.b = (nn.Parameter(torch.randn(2, WIDTH) * 0.1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.inner.weight + self.a.t() @ self.b
        return x + torch.func.functional_call(self.inner, {"weight": weight}, x)


def viewing() -> nn.Sequential:
    return _of(Viewing(), Layer())


def drifting() -> nn.Sequential:
    return _of(Drifting(), Layer())


def growing() -> nn.Sequential:
    return _of(Layer(), Growing(), Layer(), Trimmed(), Layer())


def differentiating() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), Differentiating(), Layer(), nn.Linear(WIDTH, VOCABULARY)
    )


def swapping() -> nn.Sequential:
    return _of(Swapping(), Layer(), Swapping(), Layer())


def too_large() -> nn.Sequential:
    """Finds no memory where it is called unsplit."""

    def act() -> None:
        if "train_unsplit" in {frame.name for frame in traceback.extract_stack()}:
            raise MemoryError

    return _of(Acting(act), Layer())


def failing() -> nn.Sequential:
    def act() -> None:
        raise RuntimeError("the author's own mistake")

    return _of(Acting(act), Layer())


class Fixed(nn.Module):
    """Takes sequences of 24 tokens alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], 24, WIDTH)


class Single(nn.Module):
    """Has no kernel for double precision, and draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x @ torch.eye(WIDTH), 0.1)


def fixed() -> nn.Sequential:
    return _of(Layer(), Fixed(), Layer(), Fixed())


def single() -> nn.Sequential:
    return _of(Layer(), Single(), Layer(), Single())


class Redrawing(nn.Module):
    """Draws twice from the layer where its second stage begins; has no double precision."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.first = nn.Embedding(VOCABULARY, WIDTH), Layer()
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(self.embed(ids)) @ torch.eye(WIDTH)
        return self.head(self.drop(torch.tanh(self.drop(x))))
