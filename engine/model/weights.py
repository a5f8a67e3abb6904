"""Weights for a cut transformers model: initialised by its own rules, or read from a checkpoint.

Only what the cut has left gets memory. `from_pretrained` is no alternative: it allocates the whole
model before anything can be dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig, local_torch_dtype
from transformers.utils import logging

from engine.model.checkpoint import open_tensors
from engine.model.factory import Factory, seed_from
from engine.model.stage_module import ModelError
from engine.model.storages import own_tensors, sources_of

_UNSET_INTEGER = -(2**31) + 1


def initialise(model: PreTrainedModel, seed: int, rebuild: Callable[[], nn.Module]) -> None:
    """Allocate on the CPU and initialise, each module from the seed and its name alone.

    The model's own `_init_weights` sets a module's parameters and buffers; what it leaves to the
    modules' constructors is taken from a model that `rebuild` makes. On the CPU, so that all
    devices get the same numbers. Tables of positions are computed in the model's dtype, as where
    transformers makes a model; it fills those of a checkpoint's model in float32.
    """
    allocated = _allocate(model, sources_of(model, model.all_tied_weights_keys))
    kind = model.config.dtype  # an empty stage has no parameter that would tell
    assert isinstance(kind, torch.dtype)
    with torch.no_grad(), local_torch_dtype(kind):
        _initialise_below(model, "", model, seed)
    _set_from_constructors(model, allocated, rebuild, seed)


def read_checkpoint(
    model: PreTrainedModel, files: Sequence[Path], rebuild: Callable[[], nn.Module]
) -> None:
    """Read from safetensors files, lazily, the tensors that the model has left, to the CPU.

    Names and layouts are converted as `from_pretrained` does. Raises ModelError when a tensor is
    missing or has another shape.
    """
    if not any(True for _ in model.parameters()):
        initialise(model, 0, rebuild)  # an empty stage
        return
    folder, sources = files[0].parent, sources_of(model, model.all_tied_weights_keys)
    logging.disable_progress_bar()  # each rank would draw its own
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open_tensors(file)) for file in files]
        slices = {name: file.get_slice(name) for file in opened for name in list(file.keys())}
        # A shared weight is found by its first name, whichever of them the checkpoint has.
        for name, source in sources.items():
            if name in slices and source not in slices:
                slices[source] = slices[name]
            elif name in slices and not torch.equal(slices[name][:], slices[source][:]):
                raise ModelError(
                    f"{folder}: the model ties {name} to {source}, but the checkpoint holds two "
                    "different ones; if it is config.json that ties them, set "
                    "tie_word_embeddings to false there"
                )
        mapping = get_model_conversion_mapping(model)
        config = LoadStateDictConfig(
            dtype=model.dtype,
            dtype_plan=model._get_dtype_plan(model.dtype),
            weight_mapping=mapping,  # type: ignore[arg-type]  # stub
        )
        # The fourth is a plan of tensor parallelism in older releases, and has no default there.
        info, _ = convert_and_load_state_dict_in_model(model, slices, config, None)
    missing = sorted(set(getattr(info, "missing_keys", ())) - set(sources))
    mismatched = sorted(getattr(info, "mismatched_keys", ()))
    failed = getattr(info, "conversion_errors", {})
    if missing:
        more = f" nor for {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelError(f"{folder}: the checkpoint has no tensor for {missing[0]}{more}")
    if mismatched:
        name, saved, expected = mismatched[0]
        raise ModelError(
            f"{folder}: {name} has shape {list(saved)}, its configuration says {list(expected)}"
        )
    if failed:
        raise ModelError(f"{folder}: cannot be converted: {next(iter(failed.values()))}")
    # A head that was saved apart and is another: transformers would not tie it either.
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for target, source in model.all_tied_weights_keys.items():
        ours, theirs = parameters.get(target), parameters.get(source)
        if ours is None or theirs is None or ours.is_meta or theirs.is_meta:
            continue
        if not torch.equal(ours, theirs):
            raise ModelError(
                f"{folder}: config.json ties {target} to {source}, but the checkpoint holds two "
                "different ones; set tie_word_embeddings to false in config.json"
            )
    allocated = _allocate(model, sources)
    with torch.no_grad(), init.guard_torch_init_functions():  # what was read is marked as set
        _initialise_below(model, "", model, 0)
    _set_from_constructors(model, allocated, rebuild, 0)


def _allocate(model: PreTrainedModel, sources: Mapping[str, str]) -> list[str]:
    """Give what is still on the meta device memory, filled so that what stays unset is seen.

    Returns the names. Further names of a shared weight are left out: they take it afterwards.
    """
    allocated = []
    for prefix, module in model.named_modules():
        for name, tensor in own_tensors(module):
            full_name = f"{prefix}.{name}"
            if tensor.is_meta and full_name not in sources:
                unset = torch.nan if tensor.is_floating_point() else _UNSET_INTEGER
                filling = 0 if tensor.dtype == torch.bool else unset
                _put(module, name, torch.full_like(tensor, filling, device="cpu"))
                allocated.append(full_name)
    return allocated


def _put(module: nn.Module, name: str, value: Tensor) -> None:
    """Replace a parameter or a buffer."""
    old = getattr(module, name)
    if isinstance(old, nn.Parameter):
        value = nn.Parameter(value, old.requires_grad)
    setattr(module, name, value)


def _is_unset(tensor: Tensor) -> bool:
    """Whether anything in it is still what it was filled with."""
    if tensor.dtype == torch.bool:
        return False
    unset = tensor.isnan() if tensor.is_floating_point() else tensor == _UNSET_INTEGER
    return bool(unset.any())


def _set_from_constructors(
    model: PreTrainedModel, allocated: list[str], rebuild: Callable[[], nn.Module], seed: int
) -> None:
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    unset = [name for name in allocated if _is_unset(tensors[name])]
    if unset:
        factory = Factory(type(model).__name__, rebuild, seed)
        whole = factory.build({factory.canonical[n] for n in unset if n in factory.canonical})
        for full_name in unset:
            prefix, _, name = full_name.rpartition(".")
            value = getattr(whole.get_submodule(prefix), name).detach()
            _put(model.get_submodule(prefix), name, value)


def cast_parameters(model: nn.Module, dtype: torch.dtype) -> None:
    """What `from_pretrained` does: buffers that are no state, such as frequencies, keep theirs."""
    state = [
        buffer
        for module in model.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]
    for tensor in (*model.parameters(), *state):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def copy_tensors(source: nn.Module, model: nn.Module) -> None:
    """Let the model have the parameters and buffers that a whole one has under the same names.

    The parameters themselves, so that what the whole one shares stays shared, and hooks stay on.
    """
    buffers: dict[int, Tensor] = {}
    for prefix, module in model.named_modules():
        tensors = own_tensors(module)
        theirs = source.get_submodule(prefix) if tensors else module
        for name, tensor in tensors:
            value = getattr(theirs, name)
            if isinstance(value, nn.Parameter):
                value.data = value.data.to(tensor.dtype)
            else:
                value = buffers.setdefault(id(value), value.detach().to(tensor.dtype))
            setattr(module, name, value)


def _initialise_below(
    module: nn.Module,
    name: str,
    owner: PreTrainedModel,
    seed: int,
    done: set[nn.Module] | None = None,
) -> None:
    """Children first, as transformers does: a parent may set its children's tensors anew.

    A module that is used twice is initialised by its first name.
    """
    done = set() if done is None else done
    for child_name, child in module.named_children():
        if child not in done:
            done.add(child)
            inner = child if isinstance(child, PreTrainedModel) else owner
            full_name = f"{name}.{child_name}" if name else child_name
            _initialise_below(child, full_name, inner, seed, done)
    with torch.random.fork_rng(devices=[]):
        # `torch.manual_seed` seeds GPUs too, and formats the stack for each that is not in use.
        torch.default_generator.manual_seed(seed_from(seed, name))
        owner._init_weights(module)
