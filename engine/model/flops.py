"""Counts the facts that a formula for a model's FLOPs per token needs.

Tried out rather than read from a configuration, whose attributes each architecture names and
combines in its own way: the whole model runs once on the meta device, without weights, with an
attention that only looks at shapes. Counting every operation there (torch's FlopCounterMode) would
give another number, which no paper reports: it counts what a kernel does, not what the model asks
for.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from engine.model.chain import Chain
from engine.model.descriptions import Attention, FlopFacts
from engine.model.stage_module import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RECORDING = "engine_recording"
"""The attention that looks at shapes, as transformers knows it."""


@functools.lru_cache(maxsize=4)  # cases of a launch often have the same model
def flop_facts(model: Model) -> FlopFacts:
    """The facts of a model that was opened; builds it once more on the meta device."""
    if model.task.vocab_size is None:  # what is counted as a token is not what is computed
        return FlopFacts(None, note="not given: the factory brings its own batches")
    if isinstance(model, Chain):
        return FlopFacts(num_multiplying(model.skeleton()), note="attention is not known")
    from engine.model.causal_lm import CausalLM  # a chain needs no transformers

    if not isinstance(model, CausalLM):
        return FlopFacts(None, note=f"not given: a {type(model).__name__} is not known")
    skeleton = model.skeleton()
    if has_experts(skeleton):
        return FlopFacts(None, note="not given: mixture of experts")
    number = num_multiplying(skeleton)
    try:
        attentions = _attentions(skeleton)
    except Exception as error:  # a model's code raises what it likes
        return FlopFacts(number, note=f"attention is not known: {type(error).__name__}")
    if not attentions:
        return FlopFacts(number, note="attention is not known: computed in the model's own way")
    is_in_all = len(attentions) >= model.num_layers
    return FlopFacts(number, attentions, "" if is_in_all else "L are the layers with attention")


def num_multiplying(module: nn.Module) -> int:
    """Parameters without the tables that are only looked up; a tied head's table multiplies."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    multiplying = {
        id(parameter): parameter.numel()
        for owner in module.modules()
        if not isinstance(owner, tables)
        for parameter in owner.parameters(recurse=False)
    }
    return sum(multiplying.values())


def has_experts(model: nn.Module) -> bool:
    """Whether tokens are routed: by the name that transformers gives to the experts."""
    return any(
        name.rpartition(".")[2] == "experts" and any(True for _ in module.parameters())
        for name, module in model.named_modules()
    )


def _attentions(model: PreTrainedModel) -> tuple[Attention, ...]:
    from transformers import AttentionInterface

    found: list[Attention] = []

    def attend(
        _module: nn.Module,
        query: Tensor,  # [batch, heads, seq, width of queries and keys]
        _key: Tensor,
        value: Tensor,  # [batch, key heads, seq, width of values]
        _mask: Tensor | None,
        *,
        sliding_window: int | None = None,
        **_settings: object,
    ) -> tuple[Tensor, None]:
        batch, heads, seq, width = query.shape
        found.append(Attention(heads * (width + value.shape[-1]) / 2, sliding_window))
        return query.new_empty(batch, seq, heads, value.shape[-1]), None

    nn.Module.to(model, "meta")  # a factory's buffers
    usual = model.config._attn_implementation
    AttentionInterface.register(RECORDING, attend)
    model.set_attn_implementation(RECORDING)
    try:
        with torch.no_grad():
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device="meta"), use_cache=False)
    finally:
        model.set_attn_implementation(
            usual
        )  # a factory may use one configuration for all its models
    return tuple(found)
