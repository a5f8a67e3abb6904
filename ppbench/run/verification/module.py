"""The author's module: its construction, its initial weights, and its training steps.

The engine's code for splitting a model and filling its stages is not used here: a mistake there
would be made on both sides. The seeding of random weights is implemented a second time, from its
rule. A step is the module's forward on token ids, torch's backward and torch's optimizer.

A stage that draws random numbers begins each forward at a known state of its rank's generator. The
author's module is set to the same state where that stage's first layer is called. So it draws what
the ranks must have drawn, in whatever order they computed their microbatches.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import importlib
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
        prefix, _, own = name.rpartition(".")
        is_state = own not in module.get_submodule(prefix)._non_persistent_buffers_set
        if hasattr(module, "base_model_prefix") and not is_state:
            continue  # as in `from_pretrained`, which does not convert frequencies and the like
        if tensor.is_complex():  # which `nn.Module.to` would make real
            tensor.data = tensor.data.to(COMPLEX_DTYPES[dtype])
        elif tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return module


def _from_name(request: Request, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    consent = {"trust_remote_code": request.trust_remote_code}
    if reads_checkpoint(request):
        read: nn.Module = AutoModelForCausalLM.from_pretrained(
            request.model, dtype=dtype, **consent
        )
        return read
    if request.model in PRESETS:
        from engine.model.pretrained import preset_config

        config, consent = preset_config(request.model), {}
    else:
        config = AutoConfig.from_pretrained(request.model, **consent)
    drawn: nn.Module = AutoModelForCausalLM.from_config(config, dtype=dtype, **consent)
    return drawn


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
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        torch.default_generator.manual_seed(int.from_bytes(digest[:8], "little", signed=True))
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
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    first = output[:1] if isinstance(output, tuple | list) else ()
    logits = next((part for part in (output, named, *first) if isinstance(part, Tensor)), None)
    if logits is None:
        raise TypeError(f"the module returns a {type(output).__name__} without logits")
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
    step, num_calls, device = Step(0.0), collections.Counter[str](), inputs[0].device
    for ids, target, of_stages in zip(inputs, targets, places, strict=True):
        before = random_state(device)
        num_calls.clear()
        with contextlib.ExitStack() as hooks:
            for place in of_stages:
                if not place.entrance:
                    set_random_state(place.state, device)
                    continue

                def enter(
                    *_: object, name: str = place.entrance, state: Tensor = place.state
                ) -> None:
                    num_calls[name] += 1
                    set_random_state(state, device)

                part = module.get_submodule(place.entrance)
                hooks.callback(part.register_forward_pre_hook(enter).remove)
            loss = loss_of(call(module, ids), target, num_tokens)
        step.has_drawn |= bool(of_stages) or not torch.equal(before, random_state(device))
        entrances = {place.entrance for place in of_stages} - {""}
        step.unplaced |= {name for name in entrances if num_calls[name] != 1}
        torch.autograd.backward(loss)
        step.loss += loss.item()
    return step


def build_optimizer(
    name: str, module: nn.Module, rate: float, decay: float, momentum: float
) -> torch.optim.Optimizer:
    """Build torch's own optimizer over all parameters."""
    parameters = list(module.parameters())
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum)
