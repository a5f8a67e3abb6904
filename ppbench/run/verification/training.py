"""The steps of the author's module: its forward on token ids, torch's backward and optimizer.

A stage that draws random numbers begins each forward at a known place of its rank's numbers. The
author's module is set to the same place where that stage's first layer is called: with that it
draws what the ranks must have drawn, whatever order they came to their microbatches in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

IGNORED = -100


@dataclass(frozen=True)
class Place:
    """Where a stage's forward of a microbatch began to draw."""

    entrance: str  # name of the module that it enters the stage by; empty: the whole module's
    state: Tensor


@dataclass
class Step:
    """What the author's module computes of a step; its gradients are in its parameters."""

    loss: float
    has_drawn: bool = False
    unplaced: set[str] = field(default_factory=set)  # entrances that were not called once


def loss_of(output: object, targets: Tensor, num_tokens: int) -> Tensor:
    """A microbatch's share of the step's mean loss per token, in at least float32."""
    logits = _logits(output)
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    total = cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return total / num_tokens


def call(module: nn.Module, ids: Tensor) -> object:
    """The forward, as the module's author calls it in training."""
    if hasattr(module, "base_model_prefix"):  # transformers'
        return module(input_ids=ids, use_cache=False)
    return module(ids)


def train_step(
    module: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    places: Sequence[Sequence[Place]],
) -> Step:
    """All microbatches, one after the other, forward and backward; gradients begin at None.

    `places[microbatch]` has those of every stage that draws.
    """
    module.zero_grad(set_to_none=True)
    num_tokens = sum(int((target != IGNORED).sum()) for target in targets)
    step = Step(0.0)
    for ids, target, of_stages in zip(inputs, targets, places, strict=True):
        before = random_state(ids.device)
        with _Placed(module, of_stages, ids.device) as placed:
            loss = loss_of(call(module, ids), target, num_tokens)
        step.has_drawn |= bool(of_stages) or not torch.equal(before, random_state(ids.device))
        step.unplaced |= placed.unplaced()
        torch.autograd.backward(loss)
        step.loss += loss.item()
    return step


def random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_random_state(state: Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class _Placed:
    """Sets the random state where stages are entered, during one forward."""

    def __init__(self, module: nn.Module, places: Sequence[Place], device: torch.device) -> None:
        self._module, self._places, self._device = module, places, device
        self._num_calls: dict[str, int] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Self:
        for place in self._places:
            if not place.entrance:
                set_random_state(place.state, self._device)
                continue
            self._num_calls[place.entrance] = 0
            part = self._module.get_submodule(place.entrance)
            self._handles.append(part.register_forward_pre_hook(self._setter(place)))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _setter(self, place: Place) -> Callable[..., None]:
        def enter(*_: object) -> None:
            self._num_calls[place.entrance] += 1
            set_random_state(place.state, self._device)

        return enter

    def unplaced(self) -> set[str]:
        return {name for name, count in self._num_calls.items() if count != 1}


def _logits(output: object) -> Tensor:
    if isinstance(output, Tensor):
        return output
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    if isinstance(output, tuple | list) and isinstance(output[0], Tensor):
        return output[0]
    raise TypeError(f"the module returns a {type(output).__name__}, in which no logits are found")


def build_optimizer(
    name: str, module: nn.Module, rate: float, decay: float, momentum: float
) -> torch.optim.Optimizer:
    """torch's own, over all parameters."""
    parameters = list(module.parameters())
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum)
