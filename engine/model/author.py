"""The module that a model's author wrote, whole: how it is made, and how a step of it is trained.

Nothing here cuts a model or fills its stages: a mistake of that code would be made on both sides of
a comparison. A step is the module's own forward on token ids, torch's cross entropy and backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from engine.model.data import IGNORED, StepBatch
from engine.model.factory import dtype_for, find_factory, seeded
from engine.model.presets import PRESETS
from engine.model.spec import ModelSpec

TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 5e-2}
"""The largest difference that is rounding, relative to the largest element of the same tensor.

In float64 rounding is 1e-12, or a millionth if the model computes some parts in float32. The values
of float32 and bfloat16 were observed for sums over many layers and tokens."""
LEAST_SCALE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 1e-1}
"""The least scale of a gradient, relative to the largest element of any gradient: before a
BatchNorm, say, the gradient of a bias is 0, and its computed value is rounding of others."""


def author_module(spec: ModelSpec, device: torch.device) -> nn.Module:
    """Make the whole module of a model, ready to train. Raises what the author's code raises."""
    if spec.is_factory:
        with seeded(spec.seed):
            module = find_factory(spec.name)()
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            owner, _, own = name.rpartition(".")
            is_state = own not in module.get_submodule(owner)._non_persistent_buffers_set
            if is_state or not is_transformers(module):  # `from_pretrained` casts no frequencies
                tensor.data = tensor.data.to(dtype_for(tensor, spec.torch_dtype))
        return module.to(device).train()
    from transformers import AutoConfig, AutoModelForCausalLM

    consent = {"trust_remote_code": spec.trust_remote_code}
    if reads_checkpoint(spec):
        read: nn.Module = AutoModelForCausalLM.from_pretrained(
            spec.name, dtype=spec.torch_dtype, **consent
        )
        return read.to(device).train()
    if spec.name in PRESETS:
        from engine.model.pretrained import preset_config

        config, consent = preset_config(spec.name), {}
    else:
        config = AutoConfig.from_pretrained(spec.name, **consent)
    with seeded(spec.seed):
        drawn: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=spec.torch_dtype, **consent
        )
    return drawn.to(device).train()


def reads_checkpoint(spec: ModelSpec) -> bool:
    """Whether the model's weights are read rather than drawn."""
    if spec.weights == "random" or spec.is_factory or spec.name in PRESETS:
        return False
    folder = Path(spec.name)
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


def initial_weights(spec: ModelSpec, module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """The state that training must begin with, by name, as far as the author defines it.

    It is the content of a checkpoint, or what a factory sets. A tensor that differs in a second
    call of the factory is not defined. `module` is the author's, newly made.
    """
    state = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
    if reads_checkpoint(spec):
        return {name: tensor.clone() for name, tensor in state.items()}
    if not spec.is_factory:
        return {}
    again = author_module(spec, device).state_dict()
    return {n: again[n] for n, t in state.items() if n in again and is_same(t, again[n])}


def is_transformers(module: nn.Module) -> bool:
    return hasattr(module, "base_model_prefix")


def loss_of(module: nn.Module, ids: Tensor, targets: Tensor, num_tokens: int) -> Tensor:
    """Call the module as its author does; return a microbatch's share of the step's mean loss."""
    given: dict[str, object] = {"input_ids": ids, "use_cache": False}
    output = module(**given) if is_transformers(module) else module(ids)
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


def train_unsplit(
    module: nn.Module,
    batch: StepBatch,
    autocast: AbstractContextManager[object] | None = None,
    draws: Mapping[int, Sequence[AbstractContextManager[object]]] | None = None,
) -> float:
    """Leave a step's gradients in the module's parameters; return its mean loss per token.

    All microbatches are run one after the other, forward and backward. `draws` are entered for the
    forwards of some microbatches: they set the random state where a stage begins.
    """
    module.zero_grad(set_to_none=True)
    total = 0.0
    for index, (ids, targets) in enumerate(zip(batch.inputs, batch.targets, strict=True)):
        with contextlib.ExitStack() as stack:
            for draw in (draws or {}).get(index, ()):
                stack.enter_context(draw)
            if autocast is not None:
                stack.enter_context(autocast)
            loss = loss_of(module, ids.clone(), targets, batch.num_tokens)  # it may write to it
        torch.autograd.backward(loss)
        total += loss.item()
    return total


def is_same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether all elements are equal; NaN equals NaN."""
    if ours.shape != theirs.shape:
        return False
    theirs = theirs.to(ours.device, ours.dtype)
    return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())  # noqa: PLR0124


def largest(tensor: Tensor) -> float:
    """The magnitude of its largest element; torch computes none of bool."""
    held = tensor.detach()
    held = held.byte() if held.dtype == torch.bool else held
    return float(held.abs().max()) if held.numel() else 0.0


def difference(ours: Tensor | None, theirs: Tensor | None, least: float) -> float:
    """How far two gradients are apart, relative to the largest element of `theirs`, or `least`.

    It is infinite where only one side has a gradient.
    """
    if ours is None or theirs is None:
        return 0.0 if ours is theirs else float("inf")
    if ours.shape != theirs.shape:
        return float("inf")
    if is_same(ours, theirs):
        return 0.0
    scale = max(largest(theirs), least, torch.finfo(torch.float64).tiny)
    found = largest(ours.to(theirs.device, theirs.dtype) - theirs) / scale
    return found if found == found else float("inf")  # noqa: PLR0124  # NaN


def worst_gradient(
    gradients: Mapping[str, Tensor | None], module: nn.Module, kind: str
) -> tuple[float, str]:
    """The largest difference of some gradients from the module's own, and whose it is."""
    theirs = {name: p.grad for name, p in module.named_parameters(remove_duplicate=False)}
    least = max((largest(g) for g in theirs.values() if g is not None), default=0.0)
    found = (
        (difference(gradients[name], theirs[name], least * LEAST_SCALE[kind]), name)
        for name in sorted(gradients)
    )
    return max(found, default=(0.0, ""))
