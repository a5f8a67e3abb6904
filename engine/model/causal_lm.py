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

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from engine.model.partition import Costs
from engine.model.stage_module import (
    Message,
    ModelError,
    Partition,
    SharedWeight,
    StageModule,
    TensorSpec,
)

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
        self.model = model
        listed = getattr(model.base_model, plan.layers)
        self._units = [listed[index] for index in layers]
        self._received: Tensor | None = None
        self._leaving: Tensor | None = None
        if not is_first:
            listed[0].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not is_last:
            listed[-1].register_forward_hook(self._leave)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        if self.is_empty:
            return (x,)
        self._received = None if self.is_first else x
        inputs = {"input_ids": x} if self.is_first else {"inputs_embeds": x.detach()}
        try:
            if self.is_last:
                return (self.model(**inputs, use_cache=False).logits,)
            self.model.base_model(**inputs, use_cache=False)
            assert self._leaving is not None
            return (self._leaving,)
        finally:
            self._received = self._leaving = None

    def _enter(
        self, _layer: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        if args:
            return (self._received, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._received}

    def _leave(self, _layer: nn.Module, _args: object, output: Tensor | tuple[Tensor]) -> None:
        self._leaving = output if isinstance(output, Tensor) else output[0]

    @property
    def units(self) -> list[nn.Module]:
        return self._units

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

    def __init__(self, build: Callable[[], PreTrainedModel], fill: Fill) -> None:
        """`build` makes the whole model on the meta device; `fill` gives a cut one its weights.

        Raises ModelError when the architecture has no plan, or one that does not say where
        everything belongs.
        """
        self._build, self._fill = build, fill
        skeleton = build()
        self.config: PreTrainedConfig = skeleton.config
        self.architecture = type(skeleton).__name__
        self.plan = plan_of(skeleton)
        self.tied = _tied_weights(skeleton, self.plan)
        layers = getattr(skeleton.base_model, self.plan.layers)
        self.num_layers = len(layers)
        self.num_parameters = _num_parameters(skeleton)
        self.vocab_size = int(self.config.vocab_size)
        self.max_positions: int | None = getattr(self.config, "max_position_embeddings", None)
        self.dtype = skeleton.dtype
        self._costs = _parameter_costs(skeleton, self.plan)

    @property
    def costs(self) -> Costs:
        return self._costs

    def skeleton(self) -> PreTrainedModel:
        """The whole model without its weights, made anew."""
        return self._build()

    def shared_weights(self, partition: Partition) -> list[SharedWeight]:
        last = len(partition) - 1
        if last == 0:
            return []
        return [
            SharedWeight(source, ((0, source), (last, target)))
            for target, source in self.tied.items()
        ]

    def messages(self, partition: Partition, batch: int, seq_len: int) -> list[Message]:
        hidden = TensorSpec((batch, seq_len, int(self.config.hidden_size)), self.dtype)
        return [(hidden,)] * (len(partition) - 1)

    def build_stage(self, partition: Partition, stage: int, device: torch.device) -> StageModule:
        layers = partition[stage]
        is_first, is_last = stage == 0, stage == len(partition) - 1
        model = self._build()
        self._cut(model, layers, is_first=is_first, is_last=is_last)
        self._fill(model)
        if is_last:
            self._tie(model, is_first=is_first)
        nn.Module.to(model, device)
        model.train()
        return CausalLMStage(model, self.plan, layers, is_first=is_first, is_last=is_last)

    def _cut(self, model: PreTrainedModel, owned: range, *, is_first: bool, is_last: bool) -> None:
        base = model.base_model
        listed = getattr(base, self.plan.layers)
        for index, layer in enumerate(listed):
            if index not in owned:
                listed[index] = _Absent(layer)
        if not is_first:
            self._drop(base, () if is_last and self.tied else self.plan.before)
        if not is_last:
            self._drop(base, self.plan.after)
            self._drop(model, _outside_base(model))

    def _tie(self, model: PreTrainedModel, *, is_first: bool) -> None:
        """On the last stage: the head takes the embeddings' weight, which then go."""
        for target, source in self.tied.items():
            module, _, name = target.rpartition(".")
            setattr(model.get_submodule(module), name, model.get_parameter(source))
        if not is_first:
            self._drop(model.base_model, self.plan.before)

    @staticmethod
    def _drop(parent: nn.Module, names: tuple[str, ...]) -> None:
        for name in names:
            setattr(parent, name, _Absent(getattr(parent, name)))


def with_plain_attention(model: PreTrainedModel) -> PreTrainedModel:
    """The same model without masks, where its layers' masks say no more than "causal"."""
    if model.config._attn_implementation == "sdpa" and _has_causal_masks_only(model.config):
        model.set_attn_implementation(CAUSAL)
    return model


def _has_causal_masks_only(config: PreTrainedConfig) -> bool:
    """Whether nothing in the configuration speaks of windows, chunks or looking ahead."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    marks = ("sliding", "window_size", "attention_chunk", "bidirectional", "block_size")
    is_marked = any(
        value for name, value in config.to_dict().items() if any(mark in name for mark in marks)
    )
    return kinds == {"full_attention"} and not is_marked


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


def _tied_weights(model: PreTrainedModel, plan: Plan) -> dict[str, str]:
    """Name of a tied weight -> name of the one it is tied to; the head and the embeddings."""
    tied: dict[str, str] = dict(model.all_tied_weights_keys)
    base = f"{model.base_model_prefix}."
    for target, source in tied.items():
        head_first = source.removeprefix(base).split(".")[0] in plan.before
        if not head_first or target.startswith(base):
            raise ModelError(f"{type(model).__name__} ties {target} to {source}, inside its layers")
    return tied


def _outside_base(model: PreTrainedModel) -> tuple[str, ...]:
    """What a causal LM has besides its base model: the head."""
    return tuple(name for name, child in model.named_children() if child is not model.base_model)


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _parameter_costs(model: PreTrainedModel, plan: Plan) -> Costs:
    """A tied weight counts on both stages: both hold it."""
    base = model.base_model
    layers = tuple(_num_parameters(layer) for layer in getattr(base, plan.layers))
    before = sum(_num_parameters(getattr(base, name)) for name in plan.before)
    after = sum(_num_parameters(getattr(base, name)) for name in plan.after)
    head = sum(_num_parameters(getattr(model, name)) for name in _outside_base(model))
    return Costs(layers, before, after + head)
