"""The author's module: its construction, its initial weights, and its training steps.

The engine's code for splitting a model and filling its stages is not used here: a mistake there
would be made on both sides. The seeding of random weights is implemented a second time, from its
rule. A step is the module's forward on token ids, torch's backward and torch's optimizer.

A stage that draws random numbers begins each forward at a known state of its rank's generator. The
author's module is set to the same state where that stage's first layer is called. So it draws what
the ranks must have drawn, in whatever order they computed their microbatches.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from engine.model.presets import PRESETS
from engine.run.device import random_state, set_random_state
from ppbench.run.verification.exchange import Request, Way

IGNORED = -100
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
COMPLEX_DTYPES = {
    torch.float64: torch.complex128,
    torch.float32: torch.complex64,
    torch.bfloat16: torch.complex64,
}


def author_module(request: Request, way: Way) -> nn.Module:
    """Make the whole module in a dtype and on a device, ready to train."""
    dtype = DTYPES[way.dtype]
    module = _from_factory(request, dtype) if ":" in request.model else _from_name(request, dtype)
    return module.to(way.device).train()


def reads_checkpoint(request: Request) -> bool:
    """Whether the model's weights are read rather than drawn."""
    if request.weights == "random" or ":" in request.model or request.model in PRESETS:
        return False
    folder = Path(request.model)
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


def initial_weights(request: Request, way: Way, module: nn.Module) -> dict[str, Tensor]:
    """Return the state that training must begin with, by name, as far as it is defined.

    It is the content of a checkpoint. A factory defines it by a call right after seeding; a tensor
    that differs in a second such call is not defined. Where transformers initialises, each of its
    modules is seeded by its name. `module` is the author's, newly made.
    """
    state = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
    if reads_checkpoint(request):
        return {name: tensor.clone() for name, tensor in state.items()}
    if ":" in request.model:
        again = author_module(request, way).state_dict()
        return {n: again[n] for n, t in state.items() if n in again and is_same(t, again[n])}
    return _seeded_by_name(author_module(request, way).cpu(), request.seed)


def is_same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether all elements are equal; NaN equals NaN."""
    if ours.shape != theirs.shape:
        return False
    theirs = theirs.to(ours.device, ours.dtype)
    return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())  # noqa: PLR0124


def _from_factory(request: Request, dtype: torch.dtype) -> nn.Module:
    name, _, attribute = request.model.partition(":")
    if os.getcwd() not in sys.path:  # noqa: PTH109  # as `python -m` has it
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    factory = getattr(importlib.import_module(name), attribute)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(request.seed)
        random.seed(request.seed)
        np.random.seed(request.seed % 2**32)  # noqa: NPY002  # the one that factories draw from
        module: nn.Module = factory()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if hasattr(module, "base_model_prefix") and not _is_state(module, name):
            continue  # as in `from_pretrained`, which does not convert frequencies and the like
        if tensor.is_complex():  # which `nn.Module.to` would make real
            tensor.data = tensor.data.to(COMPLEX_DTYPES[dtype])
        elif tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return module


def _is_state(module: nn.Module, name: str) -> bool:
    """Whether checkpoints contain a tensor."""
    prefix, _, own = name.rpartition(".")
    return own not in module.get_submodule(prefix)._non_persistent_buffers_set


def _from_name(request: Request, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    if request.model in PRESETS:
        from engine.model.pretrained import preset_config

        preset: nn.Module = AutoModelForCausalLM.from_config(
            preset_config(request.model), dtype=dtype
        )
        return preset
    consent = request.trust_remote_code
    if reads_checkpoint(request):
        read: nn.Module = AutoModelForCausalLM.from_pretrained(
            request.model, dtype=dtype, trust_remote_code=consent
        )
        return read
    config = AutoConfig.from_pretrained(request.model, trust_remote_code=consent)
    drawn: nn.Module = AutoModelForCausalLM.from_config(
        config, dtype=dtype, trust_remote_code=consent
    )
    return drawn


def _seed(text: str, num_bytes: int, *, signed: bool = False) -> int:
    digest = hashlib.sha256(text.encode()).digest()
    return int.from_bytes(digest[:num_bytes], "little", signed=signed)


def _seeded_by_name(module: nn.Module, seed: int) -> dict[str, Tensor]:
    """Return the parameters that transformers' own initialisation sets.

    A tied weight is drawn where it is declared to come from, and not again by the head.
    """
    parameters = dict(module.named_parameters(remove_duplicate=False))
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(torch.nan)
        for part in module.modules():
            part._is_hf_initialized = False  # type: ignore[assignment]  # transformers' own mark
        for parameter in parameters.values():
            parameter._is_hf_initialized = False  # type: ignore[attr-defined]  # likewise
        _initialise(module, "", module, seed, set(getattr(module, "all_tied_weights_keys", ())))
    return {name: p.detach() for name, p in parameters.items() if not p.isnan().any()}


def _initialise(part: nn.Module, name: str, owner: Any, seed: int, tied: set[str]) -> None:
    """Initialise children first, since a parent may set its children's tensors again."""
    for child_name, child in part.named_children():
        inner = child if hasattr(child, "_init_weights") else owner
        _initialise(child, f"{name}.{child_name}" if name else child_name, inner, seed, tied)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(_seed(f"{seed}:{name}", 8, signed=True))
        if not any(f"{name}.{own}" in tied for own, _ in part.named_parameters(recurse=False)):
            owner._init_weights(part)


@dataclass(frozen=True)
class Place:
    """The random state with which a stage's forward of a microbatch began."""

    entrance: str  # name of the submodule that the stage begins with; empty: the whole module
    state: Tensor


@dataclass
class Step:
    """A step of the author's module; its gradients are in its parameters."""

    loss: float
    has_drawn: bool = False
    unplaced: set[str] = field(default_factory=set)  # entrances that were not called once


def loss_of(output: object, targets: Tensor, num_tokens: int) -> Tensor:
    """Return a microbatch's share of the step's mean loss per token, in at least float32."""
    logits = _logits(output)
    if logits.dtype not in (torch.float32, torch.float64):
        logits = logits.float()
    total = cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum", ignore_index=IGNORED
    )
    return total / num_tokens


def call(module: nn.Module, ids: Tensor) -> object:
    """Call the forward as the module's author does in training."""
    if hasattr(module, "base_model_prefix"):  # transformers'
        return module(input_ids=ids, use_cache=False)
    return module(ids)


def train_step(
    module: nn.Module,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    places: Sequence[Sequence[Place]],
) -> Step:
    """Run all microbatches, one after the other, forward and backward; gradients begin at None.

    `places[microbatch]` has the places of every stage that draws.
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
    raise TypeError(f"the module returns a {type(output).__name__} without logits")


def build_optimizer(
    name: str, module: nn.Module, rate: float, decay: float, momentum: float
) -> torch.optim.Optimizer:
    """Build torch's own optimizer over all parameters."""
    parameters = list(module.parameters())
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum)
