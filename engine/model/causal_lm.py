"""Stages of a transformers causal LM: built on the meta device, cut, then given their weights.

Generic over `base_model_pp_plan`, by which an architecture names what comes before, in and after
its list of layers. The cut keeps the model's own forward: what a stage does not own is replaced by
a module that passes its first argument through, and the layer list keeps its length, so that masks,
rotary positions and per-layer attributes are computed by the model's own code on every stage and
parameters keep the names that they have in the unsplit model. Trimming the list instead would shift
whatever depends on a layer's index.

    first    token ids -> [ before, layers 0..a ] ------------------------------> hidden
    middle   hidden -> (1) [ before: skipped ] (2) -> [ layers b..c ] (3) -> hidden
    last     hidden -> (1) [ before: skipped ] (2) -> [ layers d..n, after, head ] -> logits

(1) The base model is called with `inputs_embeds`. (2) Whatever it does to embeddings (scaling,
dropout) was done on the first stage already, so at the entrance of the list its result is replaced
by what was received. (3) What leaves the list is what is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from engine.model.factory import check_hooks, hook_on
from engine.model.partition import Costs
from engine.model.stage_module import (
    Message,
    ModelError,
    Partition,
    SharedWeight,
    StageModule,
    TensorSpec,
)
from engine.model.storages import first_names, sources_of
from engine.model.task import NextToken, Own, Task

CAUSAL = "engine_causal"
"""transformers' SDPA attention under a name for which it builds no mask.

Without a mask SDPA is causal by itself. Building one looks at the positions' values, which on CUDA
would make the host wait for the device in each forward.
"""
AttentionInterface.register(CAUSAL, sdpa_attention_forward)

Fill = Callable[[PreTrainedModel], None]
"""Gives a cut model, which is on the meta device, its weights, on the CPU."""


@dataclass(frozen=True)
class Plan:
    """Where an architecture says its parts are: names of the base model's children."""

    before: tuple[str, ...]  # on the first stage
    layers: str
    after: tuple[str, ...]  # on the last stage


class _Absent(nn.Module):
    """Stands where another stage's module would: passes its first argument through.

    Takes over the attributes that the model reads from a layer (such as `attention_type`).
    """

    def __init__(self, replaced: nn.Module) -> None:
        super().__init__()
        for name, value in vars(replaced).items():
            if isinstance(value, int | float | str | bool) and name != "training":
                setattr(self, name, value)

    def forward(self, hidden_states: Tensor, *_args: object, **_kwargs: object) -> Tensor:
        return hidden_states


class CausalLMStage(StageModule):
    """A transformers model without what belongs to other stages."""

    def __init__(
        self, model: PreTrainedModel, plan: Plan, layers: range, *, is_first: bool, is_last: bool
    ) -> None:
        super().__init__(layers, is_first=is_first, is_last=is_last)
        self.model, self._listed = model, plan.layers
        listed = getattr(model.base_model, plan.layers)
        self._units = [listed[index] for index in layers]
        self._received: Tensor | None = None
        self._leaving: Tensor | None = None
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
        given = {"input_ids": x} if self.is_first else {"inputs_embeds": x.detach()}
        try:
            if self.is_last:
                return (self.model(**given, use_cache=False).logits,)
            self.model.base_model(**given, use_cache=False)
            assert self._leaving is not None
            return (self._leaving,)
        finally:
            self._received = self._leaving = None

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
        return f"{self.model.base_model_prefix}.{self._listed}.{self.layers.start}"

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
        hooked: Collection[str] = (),
        own: Own | None = None,
    ) -> None:
        """`build` makes the whole model on the meta device; `fill` gives a cut one its weights.

        `hooked` are the weights whose own hooks look at their gradients, `own` the batches and loss
        that a factory brings.
        Raises ModelError when the architecture has no plan, or one that does not say where
        everything belongs.
        """
        self._build, self._fill = build, fill
        skeleton = build()
        self.config: PreTrainedConfig = skeleton.config
        self.architecture = type(skeleton).__name__
        self.plan = plan_of(skeleton)
        self._base = f"{skeleton.base_model_prefix}."
        self._sources = sources_of(skeleton, skeleton.all_tied_weights_keys)
        self._names = [name for name, _ in skeleton.named_parameters(remove_duplicate=False)]
        buffers = first_names(skeleton.named_buffers(remove_duplicate=False))
        self._shared_buffers = {name: first for name, first in buffers.items() if name != first}
        layers = getattr(skeleton.base_model, self.plan.layers)
        self._hooked = frozenset(hooked)
        # Where a cut goes through: on the model, its base model and the last layer.
        last = f"{self._base}{self.plan.layers}.{len(layers) - 1}"
        cut = {n: skeleton.get_submodule(n) for n in ("", skeleton.base_model_prefix, last)}
        hooks = {name or self.architecture: hook_on(module) for name, module in cut.items()}
        self._hooks = {name: what for name, what in hooks.items() if what}
        self.num_layers = len(layers)
        self.num_parameters = _num_parameters(skeleton)
        self.task: Task = own or NextToken(int(self.config.vocab_size))
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self.dtype = skeleton.dtype
        sizes = [_num_parameters(layer) for layer in layers]
        before, after = (
            sum(_num_parameters(getattr(skeleton.base_model, name)) for name in names)
            for names in (self.plan.before, self.plan.after)
        )
        head = sum(_num_parameters(getattr(skeleton, name)) for name in _outside_base(skeleton))
        self.costs = Costs(tuple(sizes), before, after + head)  # tied weights count on both

    def skeleton(self) -> PreTrainedModel:
        """The whole model without its weights, made anew."""
        return self._build()

    def shared_weights(self, partition: Partition) -> list[SharedWeight]:
        """Raises ModelError for what is shared, or hooked, in a way that no cut can keep."""
        if len(partition) == 1:
            return []
        for name, first in self._shared_buffers.items():
            stages = self._stage_of(first, partition), self._stage_of(name, partition)
            if stages[0] != stages[1]:
                raise ModelError(
                    f"{self.architecture}: the buffers {first} and {name} are one tensor, but on "
                    f"the stages {stages[0]} and {stages[1]}; keep their layers on one stage "
                    "(partition), or give each its own"
                )
        for name, what in self._hooks.items():
            is_end = name == f"{self._base}{self.plan.layers}.{self.num_layers - 1}"
            if not is_end or not (partition[-1] or "backward" not in what):
                raise ModelError(
                    f"{self.architecture}: {name} has a {what}, which would see only a stage's "
                    "part of the model; register it on a layer that is not cut, or train on one "
                    "stage"
                )
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
        check_hooks(self.architecture, self._hooked, shared)
        return shared

    def _stage_of(self, name: str, partition: Partition) -> int:
        """The stage on which a parameter or buffer of this name is."""
        part, _, rest = name.removeprefix(self._base).partition(".")
        if not name.startswith(self._base) or part in self.plan.after:
            return len(partition) - 1
        if part != self.plan.layers:
            return 0
        layer = int(rest.partition(".")[0])
        return next(stage for stage, layers in enumerate(partition) if layer in layers)

    def messages(self, partition: Partition, batch: int, seq_len: int) -> list[Message]:
        ids, _ = self.task.example(batch, seq_len)
        hidden = TensorSpec((*ids.shape, int(self.config.hidden_size)), self.dtype)
        return [(hidden,)] * (len(partition) - 1)

    def output(self, batch: int, seq_len: int) -> TensorSpec:
        ids, _ = self.task.example(batch, seq_len)
        return TensorSpec((*ids.shape, int(self.config.vocab_size)), self.dtype)

    def build_stage(self, partition: Partition, stage: int, device: torch.device) -> StageModule:
        layers = partition[stage]
        is_first, is_last = stage == 0, stage == len(partition) - 1
        model = self._build()
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
        base = model.base_model
        listed = getattr(base, self.plan.layers)
        for index, layer in enumerate(listed):
            prefix = f"{self._base}{self.plan.layers}.{index}."
            if index not in owned and not _has_any(prefix, needed):
                listed[index] = _Absent(layer)
        children = () if is_first else self.plan.before
        children += () if is_last else self.plan.after
        elsewhere = [(base, self._base, name) for name in children]
        elsewhere += [(model, "", name) for name in (() if is_last else _outside_base(model))]
        for parent, prefix, name in elsewhere:
            if not _has_any(f"{prefix}{name}.", needed):
                setattr(parent, name, _Absent(getattr(parent, name)))


def _has_any(prefix: str, names: Collection[str]) -> bool:
    return any(name.startswith(prefix) for name in names)


def with_plain_attention(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without masks, where its layers' masks say no more than "causal".

    They do where nothing in the configuration speaks of windows, chunks or looking ahead.
    """
    config = model.config
    if config._attn_implementation != "sdpa":
        return model
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    marks = ("sliding", "window_size", "attention_chunk", "bidirectional", "block_size")
    is_marked = any(
        value for name, value in config.to_dict().items() if any(mark in name for mark in marks)
    )
    if kinds == {"full_attention"} and not is_marked:
        model.set_attn_implementation(CAUSAL)
    return model


def plan_of(model: PreTrainedModel) -> Plan:
    """The architecture's own plan. Raises ModelError where it leaves something open."""
    declared = model.config.base_model_pp_plan
    name = type(model).__name__
    if not declared:
        raise ModelError(
            f"architecture {name} declares no base_model_pp_plan, so nothing says how to cut it; "
            "use one that does (ppbench models check lists them), or let a factory "
            '("package.module:factory") return the model and cut it with split = "trace"'
        )
    parts = list(declared)
    base = model.base_model
    lists = [part for part in parts if isinstance(getattr(base, part, None), nn.ModuleList)]
    if base is model or len(lists) != 1:
        raise ModelError(
            f"architecture {name}: its plan {parts} must name one list of layers, found {lists}"
        )
    split = parts.index(lists[0])
    plan = Plan(tuple(parts[:split]), lists[0], tuple(parts[split + 1 :]))
    for child, module in base.named_children():
        if child not in parts and any(True for _ in module.parameters()):
            raise ModelError(
                f"architecture {name}: its plan {parts} does not say on which stage "
                f'"{child}" belongs, which has parameters'
            )
    loose = [name for name, _ in base.named_parameters(recurse=False)]
    if loose:
        raise ModelError(f"architecture {name}: parameters {loose} belong to no part of its plan")
    return plan


def _outside_base(model: PreTrainedModel) -> tuple[str, ...]:
    """What a causal LM has besides its base model: the head."""
    return tuple(name for name, child in model.named_children() if child is not model.base_model)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
