"""The module that a model's author wrote, whole: how it is made, and how a step of it is trained.

Nothing here cuts a model or fills its stages: a mistake of that code would be made on both sides of
a comparison. A step is the module's own forward on token ids, torch's cross entropy and backward;
or on the batches that its factory brings, by the factory's own loss.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from engine.model.data import IGNORED, StepBatch
from engine.model.factory import dtype_for, find_factory, parts_of, seeded
from engine.model.presets import PRESETS
from engine.model.spec import ModelSpec

TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 5e-2}
"""The largest difference that is rounding, relative to the largest element of the same tensor.

In float64 rounding is 1e-12, or a millionth if the model computes some parts in float32. The values
of float32 and bfloat16 were observed for sums over many layers and tokens."""
LEAST_SCALE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 1e-1}
"""The least scale of a gradient, relative to the largest element of any gradient: before a
BatchNorm, say, the gradient of a bias is 0, and its computed value is rounding of others."""


Criterion = Callable[[Tensor, Tensor], Tensor]
"""A factory's own loss, the mean over a microbatch, of output and targets."""


def author_module(spec: ModelSpec, device: torch.device) -> tuple[nn.Module, Criterion | None]:
    """Make the whole module of a model, ready to train, and the loss that a factory brings.

    Raises what the author's code raises.
    """
    if spec.is_factory:
        with seeded(spec.seed):
            module, brought = parts_of(spec.name, find_factory(spec.name)())
        loss = None if brought is None else brought[1]
        if isinstance(loss, nn.Module):
            wide = torch.promote_types(spec.torch_dtype, torch.float32)
            loss = copy.deepcopy(loss).to(device, wide)
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            owner, _, own = name.rpartition(".")
            is_state = own not in module.get_submodule(owner)._non_persistent_buffers_set
            if is_state or not is_transformers(module):  # `from_pretrained` casts no frequencies
                tensor.data = tensor.data.to(dtype_for(tensor, spec.torch_dtype))
        return module.to(device).train(), loss
    from transformers import AutoConfig, AutoModelForCausalLM

    consent = {"trust_remote_code": spec.trust_remote_code}
    if reads_checkpoint(spec):
        read: nn.Module = AutoModelForCausalLM.from_pretrained(
            spec.name, dtype=spec.torch_dtype, **consent
        )
        return read.to(device).train(), None
    if spec.name in PRESETS:
        from engine.model.pretrained import preset_config

        config, consent = preset_config(spec.name), {}
    else:
        config = AutoConfig.from_pretrained(spec.name, **consent)
    with seeded(spec.seed):
        drawn: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=spec.torch_dtype, **consent
        )
    return drawn.to(device).train(), None


def reads_checkpoint(spec: ModelSpec) -> bool:
    """Whether the model's weights are read rather than drawn."""
    if spec.weights == "random" or spec.is_factory or spec.name in PRESETS:
        return False
    folder = Path(spec.name)
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


def initial_weights(spec: ModelSpec, module: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """The state that training must begin with, by name, as far as the author defines it.

    It is the content of a checkpoint, or what a factory sets: what is equal in `module` and in
    another module that the author's code makes.
    """
    if not (spec.is_factory or reads_checkpoint(spec)):
        return {}
    state = {name: t for name, t in module.state_dict().items() if isinstance(t, Tensor)}
    again = author_module(spec, device)[0].state_dict()
    same = (name for name in state if name in again and is_same(state[name], again[name]))
    return {name: state[name].clone() for name in same}


def is_transformers(module: nn.Module) -> bool:
    return hasattr(module, "base_model_prefix")


def output_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Call the module as its author does; return its logits, or all that it returns."""
    if getattr(module, "main_input_name", "") == "input_ids":
        output = module(input_ids=inputs, use_cache=False)
    else:
        output = module(inputs)
    named = output.get("logits") if isinstance(output, dict) else getattr(output, "logits", None)
    first = output[:1] if isinstance(output, tuple | list) else ()
    result = next((part for part in (output, named, *first) if isinstance(part, Tensor)), None)
    if result is None:
        raise TypeError(f"the module returns a {type(output).__name__} without logits")
    return result.float() if result.dtype in (torch.bfloat16, torch.float16) else result


def train_unsplit(
    module: nn.Module,
    batch: StepBatch,
    autocast: AbstractContextManager[object] | None = None,
    criterion: Criterion | None = None,
) -> float:
    """Leave a step's gradients in the module's parameters; return its mean loss.

    It is the mean per token, or that of the microbatches' losses by the factory's `criterion`. All
    microbatches are run one after the other, forward and backward; forward alone where gradients
    are not enabled.
    """
    module.zero_grad(set_to_none=True)
    total = 0.0
    for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
        with autocast or contextlib.nullcontext():
            output = output_of(module, inputs.clone())  # it may write to it
        if criterion is None:
            tokens = output.flatten(0, 1), targets.flatten()
            loss = cross_entropy(*tokens, reduction="sum", ignore_index=IGNORED) / batch.num_tokens
        else:
            loss = criterion(output, targets) / len(batch.inputs)
        if torch.is_grad_enabled():
            torch.autograd.backward(loss)
        total += loss.item()
    return total


Pair = tuple[str, Tensor | None, Tensor | None, float]
"""A pair has a name, what the ranks have, what the author's module has, and the scale."""


def pairs_of_gradients(
    ours: Iterable[tuple[str, str, Tensor | None]], theirs: Mapping[str, Tensor], kind: str
) -> Iterator[Pair]:
    """Pair gradients with those of the author's tensors; each of ours has a place and a name."""
    sizes = {name: largest(t.grad) for name, t in theirs.items() if t.grad is not None}
    finite = {name: size for name, size in sizes.items() if math.isfinite(size)}
    least = max(finite.values(), default=0.0) * LEAST_SCALE[kind]
    for place, name, gradient in ours:
        scale = max(least, finite.get(name, 0.0))
        yield f"gradient of {place}", gradient, theirs[name].grad, scale


def farthest(pairs: Iterable[Pair]) -> tuple[float, str]:
    """The largest difference, relative to its scale, and the sentence that names it.

    It is infinite where only one side has a tensor, or the shapes differ. NaN equals NaN.
    """
    most, text = 0.0, ""
    for what, ours, theirs, scale in pairs:
        apart = 0.0 if ours is theirs else math.inf
        sides = f"{_in_words(ours)}, the author's module {_in_words(theirs)}"
        if ours is not None and theirs is not None and ours.shape == theirs.shape:
            elements = _apart(ours, theirs).flatten()
            apart = largest(elements)
            if apart:
                apart /= max(scale, torch.finfo(torch.float64).tiny)
                apart = math.inf if math.isnan(apart) else apart
                index = int(elements.argmax())
                there = [f"{t.detach().flatten()[index].item():.9g}" for t in (ours, theirs)]
                sides = f"{there[0]} at element {index}, the author's module {there[1]}"
        if apart > most:
            most, text = apart, f"{what} is {apart:.1e} away: {sides}"
    return most, text


def _in_words(tensor: Tensor | None) -> str:
    return "none" if tensor is None else f"shape {list(tensor.shape)}"


def is_same(ours: Tensor, theirs: Tensor) -> bool:
    """Whether all elements are equal; NaN equals NaN."""
    return ours.shape == theirs.shape and not distance(ours, theirs)


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest distance of two elements; infinite where only one of them is a finite number."""
    return largest(_apart(ours, theirs))


def largest(tensor: Tensor) -> float:
    """The magnitude of its largest element."""
    return float(_widened(tensor).abs().max()) if tensor.numel() else 0.0


def _apart(ours: Tensor, theirs: Tensor) -> Tensor:
    ours, theirs = _widened(ours), _widened(theirs)
    is_equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    apart = (ours - theirs).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    return apart.masked_fill(is_equal, 0.0)


def _widened(tensor: Tensor) -> Tensor:
    """Convert to double precision, or complex, on the CPU: some devices have none of it."""
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    return tensor.detach().cpu().to(kind)
