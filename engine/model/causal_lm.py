"""Stages of a transformers causal LM: built on the meta device, cut, then given their weights.

Generic over a plan: what comes before, in and after the list of layers. The cut keeps the model's
own forward: what a stage does not own is replaced by a module that passes the hidden state through,
and the layer list keeps its length, so that masks, rotary positions and per-layer attributes are
computed by the model's own code on every stage and parameters keep the names that they have in the
unsplit model. Trimming the list instead would shift whatever depends on a layer's index.

    first    token ids -> [ before, layers 0..a ] ------------------------------> hidden
    middle   hidden -> (1) [ before: skipped ] (2) -> [ layers b..c ] (3) -> hidden
    last     hidden -> (1) [ before: skipped ] (2) -> [ layers d..n, after, head ] -> logits

(1) The base model is called with `inputs_embeds`. (2) Whatever it does to embeddings (scaling,
positions, dropout) was done on the first stage already, so at the entrance of the list its result
is replaced by what was received. (3) What leaves the list is what is sent.
"""

from __future__ import annotations

import copy
import functools
import inspect
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from engine.model.checkpoint import read_json
from engine.model.prefix import Prefix
from engine.model.stage_module import (
    Message,
    ModelError,
    Partition,
    SharedWeight,
    StageModule,
    TensorSpec,
)
from engine.model.storages import sources_of
from engine.model.structure import CutPlan, in_words
from engine.model.task import FactoryTask, NextToken, Task

CAUSAL = "engine_causal"
"""transformers' SDPA attention under a name for which it builds no mask.

Without a mask SDPA is causal by itself. Building one looks at the positions' values, which on CUDA
would make the host wait for the device in each forward.
"""


def _causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **how: Any,
) -> tuple[Tensor, Tensor | None]:
    """SDPA, with a mask where a slice sees what comes before it; see `engine.model.prefix`."""
    num_queries, num_keys = query.shape[2], key.shape[2]
    if attention_mask is None and 1 < num_queries < num_keys:
        allowed = torch.ones(num_queries, num_keys, dtype=torch.bool, device=query.device)
        attention_mask = allowed.tril_(num_keys - num_queries)[None, None]
    return sdpa_attention_forward(module, query, key, value, attention_mask, **how)


AttentionInterface.register(CAUSAL, _causal_attention)

_MAY_DIFFER = re.compile(
    r"transformers_version|_name_or_path|architectures|(torch_)?dtype|use_cache|.*_token_id|.*dropout.*"
)
"""Settings of a configuration that do not decide what the weights mean."""
_KEYS = "name its module in model.before_layers or model.after_layers"
Fill = Callable[[PreTrainedModel], None]
"""Gives a cut model, which is on the meta device, its weights, on the CPU."""


class _OnAnotherStage(nn.Module):
    """Stands where another stage's module would: passes the hidden state through.

    What is given none, as a table of positions, returns a zero: its result is added to a hidden
    state. Takes over the attributes that the model reads from a layer (such as `attention_type`).
    """

    def __init__(self, replaced: nn.Module, num_outputs: int = 0) -> None:
        super().__init__()
        for name in {*dir(replaced)} - {*dir(self)}:
            value = inspect.getattr_static(replaced, name, None)
            if isinstance(value, int | float | str | bool):
                setattr(self, name, value)
        self._num_outputs = num_outputs

    def forward(self, *args: object, **kwargs: object) -> object:
        named = (kwargs.get(name) for name in ("hidden_states", "inputs_embeds"))
        given = (x for x in (*args, *named) if isinstance(x, Tensor))
        hidden = next((x for x in given if x.is_floating_point() and x.ndim > 2), torch.zeros(()))
        return (hidden, *[None] * (self._num_outputs - 1)) if self._num_outputs else hidden


class CausalLMStage(StageModule):
    """A transformers model without what belongs to other stages."""

    def __init__(
        self, model: PreTrainedModel, plan: CutPlan, layers: range, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__(layers, is_first=is_first, is_last=is_last)
        self.model, self._listed = model, plan.layers
        listed = plan.layers_of(model)
        self._num_listed = len(listed)
        self._units = [listed[index] for index in layers]
        self._received: Tensor | None = None
        self._leaving: Tensor | None = None
        self._seq_len: int | None = None  # of the whole sequences whose slices come
        if not is_first:
            # Before hooks of the model's own, which are to see what enters.
            listed[0].register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
        if not is_last:
            listed[-1].register_forward_hook(self._leave)

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self.is_empty:
            return inputs
        (x,) = inputs
        self._received = None if self.is_first else x
        given: dict[str, Any] = {"input_ids": x} if self.is_first else {"inputs_embeds": x.detach()}
        given["use_cache"] = self.cache is not None
        if self.cache is not None:
            given["past_key_values"] = self.cache
        try:
            if self.is_last:
                return (self.model(**given).logits,)
            self.model.base_model(**given)
            assert self._leaving is not None
            return (self._leaving,)
        finally:
            self._received = self._leaving = None

    def prefix(self, seq_len: int) -> Prefix:
        if self._seq_len is None:
            for module in self.model.modules():  # rotary positions that may depend on the length
                signature = inspect.signature(module.forward)
                is_scaled = getattr(module, "rope_type", "default") != "default"
                if is_scaled and "position_ids" in signature.parameters:
                    lengthen = functools.partial(self._lengthen, signature)
                    module.register_forward_pre_hook(lengthen, with_kwargs=True)
                    module.register_forward_hook(self._shorten)
        self._seq_len = seq_len
        return Prefix(self._num_listed, seq_len)

    def _lengthen(
        self,
        signature: inspect.Signature,
        _module: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Add the whole sequence's last position to a slice's: the largest chooses frequencies."""
        assert self._seq_len is not None
        bound, last = signature.bind(*args, **kwargs), self._seq_len - 1
        given = bound.arguments
        given["position_ids"] = nn.functional.pad(given["position_ids"], (0, 1), value=last)
        return bound.args, bound.kwargs

    def _shorten(self, _module: nn.Module, _args: object, output: Any) -> Any:
        """Take out what `_lengthen` added; tensors are `[..., positions, width]`."""
        if isinstance(output, Tensor):
            return output[..., :-1, :]
        return tuple(x[..., :-1, :] for x in output)

    def _enter(
        self, _layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Only the first time: a layer that is used twice stands in the list twice."""
        received, self._received = self._received, None
        if received is None:
            return args, kwargs
        if args:
            return (received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": received}

    def _leave(self, _layer: nn.Module, _args: object, output: Tensor | tuple[Tensor]) -> None:
        self._leaving = output if isinstance(output, Tensor) else output[0]

    @property
    def entrance(self) -> str | None:
        if self.is_first or not self.layers:
            return super().entrance
        return f"{self._listed}.{self.layers.start}"

    @property
    def units(self) -> list[nn.Module]:
        return list(dict.fromkeys(self._units))

    def own_parameters(self) -> dict[str, nn.Parameter]:
        return {} if self.is_empty else dict(self.model.named_parameters())

    def own_state(self) -> dict[str, Tensor]:
        if self.is_empty:
            return {}
        persistent = self.model.state_dict(keep_vars=True).keys()
        buffers = dict(self.model.named_buffers())
        return {**self.own_parameters(), **{n: b for n, b in buffers.items() if n in persistent}}


class CausalLM:
    """An architecture of transformers, without weights."""

    def __init__(
        self,
        build: Callable[[], PreTrainedModel],
        fill: Fill,
        plan: CutPlan,
        task: FactoryTask | None = None,
    ) -> None:
        """`build` makes the whole model on the meta device; `fill` gives a cut one its weights.

        `task` is what a factory trains on, if it says so.
        Raises ModelError when the plan does not say where every parameter belongs.
        """
        self._build, self._fill, self.plan = build, fill, plan
        skeleton = build()
        self.config: PreTrainedConfig = skeleton.config
        self.kind, self.architecture = type(skeleton), type(skeleton).__name__
        self._sources = sources_of(skeleton, skeleton.all_tied_weights_keys)
        self._names = [name for name, _ in skeleton.named_parameters(remove_duplicate=False)]
        there = dict(skeleton.named_modules(remove_duplicate=False))
        parts = plan.layers, *plan.before, *plan.after
        if gone := [name for name in parts if name not in there]:
            raise ModelError(
                f"{self.architecture} has no module {gone[0]}, which another model of its class "
                "has; keep the structure of the class, or give the model a class of its own"
            )
        if homeless := [name for name in self._names if not plan.part_of(name)]:
            is_loose = homeless[0].rpartition(".")[0] in plan.path
            fix = "put it into a module of its own" if is_loose else _KEYS
            raise ModelError(
                f"architecture {self.architecture}: its plan does not say on which stage "
                f'"{homeless[0]}" belongs, which has parameters: before {plan.layers} come '
                f"{in_words(plan.before)}, after it {in_words(plan.after)}; {fix}"
            )
        layers = plan.layers_of(skeleton)
        self.num_layers = len(layers)
        self.num_parameters = _num_parameters(skeleton)
        text = self.config.get_text_config()
        self._vocab_size, self._width = int(text.vocab_size), int(text.hidden_size)
        self.task: Task = task or NextToken(self._vocab_size)
        self.max_positions: int | None = getattr(text, "max_position_embeddings", None)
        self.dtype = skeleton.dtype
        before, after = (
            sum(_num_parameters(there[name]) for name in names)
            for names in (plan.before, plan.after)
        )  # tied weights count on both
        self.part_sizes: tuple[int, ...] = (before, *map(_num_parameters, layers), after)

    def skeleton(self) -> PreTrainedModel:
        """The whole model without its weights, made anew."""
        return self._build()

    def shared_weights(self, partition: Partition) -> list[SharedWeight]:
        if len(partition) == 1:
            return []
        aliases: dict[str, list[str]] = {}
        for name in self._names:
            aliases.setdefault(self._sources.get(name, name), []).append(name)
        shared = []
        for source, names in aliases.items():
            owners: dict[int, str] = {}
            for name in (source, *names):
                owners.setdefault(self._stage_of(name, partition), name)
            if len(owners) > 1:
                shared.append(SharedWeight(source, tuple(owners.items())))
        return shared

    def _stage_of(self, name: str, partition: Partition) -> int:
        """The stage on which a parameter or buffer of this name is."""
        part = self.plan.part_of(name)
        if part != "layers":
            return len(partition) - 1 if part == "after" else 0
        layer = int(name.removeprefix(f"{self.plan.layers}.").partition(".")[0])
        return next(stage for stage, layers in enumerate(partition) if layer in layers)

    def messages(self, partition: Partition, batch: int, seq_len: int) -> list[Message]:
        ids, _ = self.task.example(batch, seq_len)
        hidden = TensorSpec((*ids.shape, self._width), self.dtype)
        return [(hidden,)] * (len(partition) - 1)

    def output(self, batch: int, seq_len: int) -> TensorSpec:
        ids, _ = self.task.example(batch, seq_len)
        return TensorSpec((*ids.shape, self._vocab_size), self.dtype)

    def write_configuration(self, folder: Path) -> None:
        self._saved_configuration().save_pretrained(folder)

    def check_configuration(self, folder: Path) -> None:
        """Refuse a checkpoint of a model with as many weights that computes something else."""
        path = folder / "config.json"
        theirs = read_json(path)
        ours = json.loads(self._saved_configuration().to_json_string())
        same_version = theirs.get("transformers_version") == ours.get("transformers_version")
        names = theirs.keys() | ours.keys() if same_version else theirs.keys() & ours.keys()
        for name in sorted(names):
            if theirs.get(name) != ours.get(name) and not _MAY_DIFFER.fullmatch(name):
                saved, now = (json.dumps(values.get(name))[:200] for values in (theirs, ours))
                raise ModelError(
                    f"{path}: {name} is {saved}, the model's {now}: it is of another model"
                )

    def _saved_configuration(self) -> PreTrainedConfig:
        config = copy.deepcopy(self.config)
        config.architectures = [self.architecture]
        return config

    def build_stage(self, partition: Partition, stage: int, device: torch.device) -> StageModule:
        layers = partition[stage]
        is_first, is_last = stage == 0, stage == len(partition) - 1
        model = self._build()
        if len(partition) > 1:
            _check_outermost_forward(model)
        owned = {n for n in self._names if self._stage_of(n, partition) == stage}
        needed = {source for name, source in self._sources.items() if name in owned}
        self._cut(model, layers, needed, is_first=is_first, is_last=is_last)
        self._fill(model)
        # Every name of a shared weight is to have the one that was filled.
        present = dict(model.named_parameters(remove_duplicate=False))
        for target, source in self._sources.items():
            if target in present and source in present:
                module, _, name = target.rpartition(".")
                setattr(model.get_submodule(module), name, present[source])
        self._cut(model, layers, set(), is_first=is_first, is_last=is_last)
        nn.Module.to(model, device)
        model.train()
        return CausalLMStage(model, self.plan, layers, is_first=is_first, is_last=is_last)

    def _cut(
        self,
        model: PreTrainedModel,
        owned: range,
        needed: set[str],
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        """Take out what is not owned, but for what has a weight of these names."""
        listed = self.plan.layers_of(model)
        for index, layer in enumerate(listed):
            if index not in owned and not _has_any(f"{self.plan.layers}.{index}.", needed):
                listed[index] = _OnAnotherStage(layer, self.plan.num_outputs)
        elsewhere = (*(() if is_first else self.plan.before), *(() if is_last else self.plan.after))
        for name in elsewhere:
            if not _has_any(f"{name}.", needed):
                parent, _, own = name.rpartition(".")
                setattr(
                    model.get_submodule(parent), own, _OnAnotherStage(model.get_submodule(name))
                )


def _check_outermost_forward(model: PreTrainedModel) -> None:
    """Refuse what was put around the whole model's forward: stages but the last call its base."""
    around = {
        "a forward pre-hook": model._forward_pre_hooks,
        "a forward hook": model._forward_hooks,
        "a forward of its own instead of its class's": "forward" in vars(model),
    }
    if found := [name for name, is_there in around.items() if is_there]:
        raise ModelError(
            f"this {type(model).__name__} has {found[0]}, which only the last stage would run; "
            "put it on the model's base or a layer, or train on one rank"
        )


def _has_any(prefix: str, names: Collection[str]) -> bool:
    return any(name.startswith(prefix) for name in names)


def with_plain_attention(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without masks, where its layers' masks say no more than "causal".

    They do where nothing in the configuration speaks of windows, chunks or looking ahead. Layers
    that do not ask transformers for their attention would take no mask for no causality.
    """
    config = model.config
    if config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        return model
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    marks = ("sliding", "window_size", "attention_chunk", "bidirectional", "block_size")
    is_marked = any(
        value for name, value in text.to_dict().items() if any(mark in name for mark in marks)
    )
    if kinds == {"full_attention"} and not is_marked:
        model.set_attn_implementation(CAUSAL)
    return model


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
