"""The author's module: what the factory or transformers returns, and the weights it begins with.

Nothing of how the engine splits a model or fills its stages is used here: a mistake there would be
made on both sides. The seeding of random weights is written down a second time, from its rule.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from engine.model.presets import PRESETS
from ppbench.run.verification.exchange import Request, Way

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
COMPLEX_DTYPES = {
    torch.float64: torch.complex128,
    torch.float32: torch.complex64,
    torch.bfloat16: torch.complex64,
}


def author_module(request: Request, way: Way) -> nn.Module:
    """The whole module in a dtype and on a device, ready to train."""
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
    """The state that training must begin with, by name, as far as it is defined.

    A checkpoint's is its content. A factory's is what a call of it sets right after seeding; what a
    second such call sets otherwise is not defined. Where transformers initialises, each of its
    modules is seeded by its name. `module` is the author's, fresh.
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
            continue  # as `from_pretrained`, which leaves frequencies and their like as they are
        if tensor.is_complex():  # which `nn.Module.to` would make real
            tensor.data = tensor.data.to(COMPLEX_DTYPES[dtype])
        elif tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    return module


def _is_state(module: nn.Module, name: str) -> bool:
    """Whether a tensor is part of what a checkpoint holds."""
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
    """Parameters as transformers' own initialisation sets them, those that it sets.

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
    """The children first, since a parent may set its children's tensors anew."""
    for child_name, child in part.named_children():
        inner = child if hasattr(child, "_init_weights") else owner
        _initialise(child, f"{name}.{child_name}" if name else child_name, inner, seed, tied)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_seed(f"{seed}:{name}", 8, signed=True))
        if not any(f"{name}.{own}" in tied for own, _ in part.named_parameters(recurse=False)):
            owner._init_weights(part)
