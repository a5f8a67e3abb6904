"""Factories that bring their own batches and loss: a classifier of images, and an encoder."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from models import small_llama
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from transformers import ViTConfig, ViTForImageClassification

WIDTH, NUM_CLASSES, LENGTH = 16, 10, 6
Factory = tuple[nn.Module, Callable[..., Any], Callable[..., Any]]


class Patches(nn.Module):
    """Images to rows of embedded patches, with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv2d(3, WIDTH, 4, stride=4)
        self.positions = nn.Parameter(0.1 * torch.randn(16, WIDTH))

    def forward(self, images: Tensor) -> Tensor:
        return self.embed(images).flatten(2).transpose(1, 2) + self.positions


class Block(nn.Module):
    """An encoder's layer: every patch attends to every other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.mix = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(self.norm(x)).chunk(3, -1)
        x = x + (q @ k.transpose(1, 2) / WIDTH**0.5).softmax(-1) @ v
        return x + self.mix(x)


class Head(nn.Module):
    """Scores of the classes, from the mean of the patches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.score = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.norm(x).mean(1))


class ViT(nn.Module):
    """The same parts in a module of its own, to be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = Patches()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = Head()

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def images(_step: int, size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, 3, 16, 16), torch.randint(NUM_CLASSES, (size,))


def vit() -> Factory:
    return nn.Sequential(Patches(), *(Block() for _ in range(4)), Head()), images, cross_entropy


WEIGHTED = nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, NUM_CLASSES))
"""One for all models, whatever their dtype and device; its classes have weights."""


def traced_vit() -> Factory:
    return ViT(), images, WEIGHTED


def transformers_vit() -> Factory:
    """A classifier of transformers, to be traced: its first message begins with a mask."""
    config = ViTConfig(
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=24,
        image_size=16,
        patch_size=4,
        num_labels=NUM_CLASSES,
    )
    return ViTForImageClassification(config), images, cross_entropy


class Encoder(nn.Module):
    """Restores rows of numbers from those that are not masked; the first has a skip to the last."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.restore = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        entered = self.enter(x)
        h = entered
        for layer in self.layers:
            h = layer(h)
        return self.restore(h + entered)


def encoder() -> Factory:
    """Batches of a data set that the factory makes: the same ones again after two steps."""
    rows = torch.randn(64, LENGTH, 4)

    def masked(step: int, size: int) -> tuple[Tensor, Tensor]:
        chosen = rows[torch.arange(size) % 32 + 32 * (step % 2)]
        return chosen * (torch.rand(size, LENGTH, 1) > 0.3), chosen

    return Encoder(), masked, mse_loss


def sequential_encoder() -> Factory:
    _, masked, loss = encoder()
    layers = [Block() for _ in range(3)]
    return nn.Sequential(nn.Linear(4, WIDTH), *layers, nn.Linear(WIDTH, 4)), masked, loss


def classified_llama() -> Factory:
    """A causal LM of transformers on ids of its own, by a loss of its last token alone."""
    vocabulary = 64

    def batches(_step: int, size: int) -> tuple[Tensor, Tensor]:
        return torch.randint(vocabulary, (size, 5)), torch.randint(vocabulary, (size,))

    return small_llama(), batches, lambda logits, labels: cross_entropy(logits[:, -1], labels)


def two_values() -> object:
    return vit()[:2]


def no_functions() -> object:
    return vit()[0], images, 1.0


def batches_of(batches: Callable[[int, int], object]) -> Any:
    return vit()[0], batches, cross_entropy


def too_few_rows() -> Any:
    return batches_of(lambda step, size: (images(step, size)[0], torch.zeros(size + 1)))


def three_tensors() -> Any:
    return batches_of(lambda step, size: (*images(step, size), torch.zeros(size)))


def failing_batches() -> Any:
    return batches_of(lambda size: images(0, size))


def not_again() -> Any:
    numbers = itertools.count()
    return batches_of(
        lambda step, size: (images(step, size)[0], torch.full((size,), next(numbers)))
    )


def loss_of_each() -> Any:
    return vit()[0], images, nn.CrossEntropyLoss(reduction="none")


def detached_loss() -> Any:
    return vit()[0], images, lambda scores, labels: cross_entropy(scores.detach(), labels)


def failing_loss() -> Any:
    return vit()[0], images, lambda scores, labels: cross_entropy(scores, labels[:1])


def loss_with_weights() -> Any:
    return vit()[0], images, nn.Sequential(nn.Linear(NUM_CLASSES, 1))


def several_results() -> Any:
    return nn.Sequential(nn.GRU(4, 4, batch_first=True)), encoder()[1], mse_loss
