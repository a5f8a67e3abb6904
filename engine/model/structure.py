"""Where the parts of a transformers model are: the layers that are cut, and what is around them.

An architecture declares it (`base_model_pp_plan`), or it is found: the one list whose modules a
forward calls, what it calls earlier, and what it calls later. Whether a model that is cut so trains
like the uncut one is another question, which `probe` answers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from engine.model.spec import ModelSpec
from engine.model.stage_module import ModelError


@dataclass(frozen=True)
class CutPlan:
    """Which stage has which part of a model: names of modules, all of them from its root."""

    before: tuple[str, ...]  # on the first stage
    layers: str  # the list that is cut
    after: tuple[str, ...]  # on the last stage, the head among them
    num_outputs: int = 0  # of a layer whose outputs are a tuple; 0: it returns the hidden state

    def layers_of(self, model: nn.Module) -> nn.ModuleList:
        layers = model.get_submodule(self.layers)
        assert isinstance(layers, nn.ModuleList)
        return layers

    @property
    def path(self) -> list[str]:
        """The modules that the list is in, the whole model first."""
        parts = self.layers.split(".")
        return [".".join(parts[:end]) for end in range(len(parts))]

    def part_of(self, name: str) -> str:
        """Which part has a parameter, a buffer or a module: `before`, `layers`, `after` or none."""
        parts = (("layers", (self.layers,)), ("before", self.before), ("after", self.after))
        is_in = (part for part, names in parts for own in names if f"{name}.".startswith(f"{own}."))
        return next(is_in, "")


def declared_plan(model: PreTrainedModel) -> CutPlan | None:
    """The plan that the architecture declares; None if it has none. Raises ModelError."""
    declared = model.config.base_model_pp_plan
    if not declared:
        return None
    base, prefix = model.base_model, model.base_model_prefix
    lists = [part for part in declared if isinstance(getattr(base, part, None), nn.ModuleList)]
    if base is model or len(lists) != 1:
        raise ModelError(
            f"architecture {type(model).__name__}: its plan {list(declared)} must name one list of "
            f"layers, found {lists}"
        )
    names = [f"{prefix}.{part}" for part in declared]
    split = names.index(f"{prefix}.{lists[0]}")
    outside = [name for name, child in model.named_children() if child is not base]
    return CutPlan(tuple(names[:split]), names[split], (*names[split + 1 :], *outside))


def found_plan(model: PreTrainedModel, ids: Tensor, keys: ModelSpec) -> CutPlan:
    """The plan that follows from the order in which a forward of token ids calls the modules.

    What the `keys` `layers`, `before_layers` and `after_layers` name is where they say. Raises
    ModelError where something stays open, and what the forward raises.
    """
    calls: list[tuple[str, object]] = []  # as they end: the module, and what it returns
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, module in model.named_modules():

            def note(_module: nn.Module, _args: object, output: object, name: str = name) -> None:
                calls.append((name, output))

            hooks.callback(module.register_forward_hook(note).remove)
        model(input_ids=ids, use_cache=False)
    called = {name.rpartition(".")[0] for name, _ in calls}
    modules = dict(model.named_modules())
    lists = [
        name
        for name, module in modules.items()
        if isinstance(module, nn.ModuleList) and name in called and _is_trained(module)
    ]
    lists = [n for n in lists if not any(n.startswith(f"{outer}.") for outer in lists)]
    what = f"architecture {type(model).__name__}"
    if keys.layers and keys.layers not in lists:
        raise ModelError(
            f'"{keys.layers}" is no list of layers that the forward of {type(model).__name__} '
            f"calls one by one; there is {in_words(lists)}",
            "model.layers",
        )
    if not keys.layers and len(lists) != 1:
        raise ModelError(
            f"{what} declares no plan, and its forward calls the modules of {in_words(lists)}: "
            "name the list that is to be cut (model.layers)"
        )
    layers = keys.layers or lists[0]
    times = [i for i, (name, _) in enumerate(calls) if name.rpartition(".")[0] == layers]
    output = calls[times[0]][1]
    num_outputs = len(output) if isinstance(output, tuple | list) else 0
    hidden = output[0] if isinstance(output, tuple | list) else output
    beside = {
        f"{parent}.{name}".removeprefix("."): child
        for parent in CutPlan((), layers, ()).path
        for name, child in modules[parent].named_children()
        if not f"{layers}.".startswith(f"{parent}.{name}.".removeprefix("."))
    }
    for key, names in (("before_layers", keys.before_layers), ("after_layers", keys.after_layers)):
        if unknown := [name for name in names if name not in beside]:
            raise ModelError(
                f'"{unknown[0]}" is no module beside {layers}; there is {in_words(beside)}',
                f"model.{key}",
            )
    before, after = list[str](), list[str]()
    for name, child in beside.items():
        own = [i for i, (n, _) in enumerate(calls) if f"{n}.".startswith(f"{name}.")]
        if name in keys.before_layers:
            before.append(name)
        elif name in keys.after_layers:
            after.append(name)
        elif own and own[-1] < times[0]:
            # What only makes something for every layer, such as rotary embeddings, is kept by all.
            if _is_trained(child) or any(_is_like(calls[i][1], hidden) for i in own):
                before.append(name)
        elif not own or own[0] > times[-1]:
            after.append(name)
        elif _is_trained(child):
            raise ModelError(
                f"{what}: its forward calls {name} between the layers of {layers}, or before and "
                "after them, so it has no stage of its own"
            )
    return CutPlan(tuple(before), layers, tuple(after), num_outputs)


def in_words(names: Collection[str]) -> str:
    return ", ".join(names) or "nothing"


def _is_like(output: object, hidden: object) -> bool:
    return isinstance(output, Tensor) and getattr(hidden, "shape", None) == output.shape


def _is_trained(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
