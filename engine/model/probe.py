"""Whether an architecture can be cut: a tiny one is, and compared with itself unsplit.

A plan only names the parts. An architecture may also hand values from layer to layer beside the
hidden state, look at token ids inside its layers or run them several times; then a cut one would
train on wrong numbers without any error. So each is tried before it is used: loss and gradients of
a tiny model in three stages, in this process, against transformers' own.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.model.causal_lm import CausalLM, plan_of, with_plain_attention
from engine.model.partition import partition_layers
from engine.model.stage_module import ModelError, first_line
from engine.model.tiny import VOCAB_SIZE, tiny_config
from engine.model.weights import initialise

SEQ_LEN = 24
MOST_PARAMETERS = 100_000_000
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest difference relative to the largest element; in float32 rounding is all there may be."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model of an architecture, and what the unsplit one computes."""

    model: CausalLM
    config: PreTrainedConfig
    dtype: torch.dtype
    kind: type[PreTrainedModel] | None

    def unsplit(self, state: dict[str, Tensor]) -> PreTrainedModel:
        """transformers' own model with these weights, none left out; in training mode."""
        whole = _whole(self.config, self.dtype, self.kind)
        missing, unexpected = whole.load_state_dict(state, strict=False)
        left = set(missing) - set(whole.all_tied_weights_keys)
        assert not left, f"not set: {left}"
        assert not unexpected, f"not known: {unexpected}"
        whole.train()
        return whole


def tokens(batch: int, seq_len: int = SEQ_LEN) -> tuple[Tensor, Tensor]:
    """Random token ids and targets, `[batch, seq]`."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(1, VOCAB_SIZE, (batch, seq_len + 1), generator=generator)
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def tiny_of(config: PreTrainedConfig, kind: type[PreTrainedModel] | None = None) -> Tiny:
    """A tiny model in the most exact dtype in which the architecture runs.

    Raises ModelError when the architecture cannot be made tiny, does not run, or has no usable
    plan.
    """
    name = config.model_type
    try:
        small = tiny_config(config)
    except Exception as error:
        raise ModelError(f"{name}: no small model can be made to try it: {_line(error)}") from error
    # Before anything gets memory: the plan must be usable, and the tiny model tiny.
    try:
        with torch.device("meta"):
            skeleton = _whole(small, torch.float32, kind)
    except Exception as error:
        raise ModelError(f"{name}: a small model of it cannot be made: {_line(error)}") from error
    plan_of(skeleton)
    num_parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ModelError(f"{name}: no small model can be made to try it: {num_parameters:,} remain")
    reason = ""
    dtype: torch.dtype | None = None
    for tried in TOLERANCE:  # some mixtures of experts have no float64 kernel
        try:
            ids = tokens(1)[0]
            next_token_loss(_whole(small, tried, kind)(input_ids=ids, use_cache=False).logits)
        except Exception as error:
            reason = _line(error)
        else:
            dtype = tried
            break
    if dtype is None:
        raise ModelError(f"{name}: a small model of it does not run: {reason}")

    def whole() -> PreTrainedModel:
        return _whole(small, dtype, kind)

    def build() -> PreTrainedModel:
        with torch.device("meta"):
            return with_plain_attention(whole())

    fill = functools.partial(initialise, seed=0, rebuild=whole)
    return Tiny(CausalLM(build, fill), small, dtype, kind)


def _whole(
    config: PreTrainedConfig, dtype: torch.dtype, kind: type[PreTrainedModel] | None
) -> PreTrainedModel:
    config = copy.deepcopy(config)
    if kind is not None:
        made: PreTrainedModel = nn.Module.to(kind(config), dtype)
        return made
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model


def check_splits(config: PreTrainedConfig, kind: type[PreTrainedModel] | None = None) -> None:
    """Raises ModelError unless a tiny model of this configuration's architecture splits exactly."""
    key = (config.to_json_string(use_diff=False), kind)
    if key not in _VERDICTS:
        _VERDICTS[key] = why_not_exact(tiny_of(config, kind))
    if _VERDICTS[key]:
        raise ModelError(f"architecture {config.model_type} cannot be split: {_VERDICTS[key]}")


_VERDICTS: dict[tuple[str, type[PreTrainedModel] | None], str] = {}


def why_not_exact(tiny: Tiny) -> str:
    """What goes wrong when the tiny model is cut into three stages; empty if nothing does."""
    partition = partition_layers("uniform", tiny.model.num_layers, 3)
    stages = [tiny.model.build_stage(partition, s, torch.device("cpu")) for s in range(3)]
    try:
        x = tokens(1)[0]
        for stage in stages:
            (x,) = stage(x)
        ours = float(next_token_loss(x))
    except Exception as error:
        return f"its layers need more from each other than the hidden state: {_line(error)}"
    state = {name: t.detach() for stage in stages for name, t in stage.own_state().items()}
    whole = tiny.unsplit(state)
    theirs = float(next_token_loss(whole(input_ids=tokens(1)[0], use_cache=False).logits))
    if not abs(ours - theirs) <= TOLERANCE[tiny.dtype] * abs(theirs):
        return f"the loss of its stages is {ours!r}, unsplit {theirs!r}"
    gradients = {n: p.grad for stage in stages for n, p in stage.own_parameters().items()}
    for weight in tiny.model.shared_weights(partition):
        parts = [gradients.pop(name) for _, name in weight.owners]
        there = [part for part in parts if part is not None]
        gradients[weight.name] = functools.reduce(torch.add, there) if there else None
    difference, name = largest_difference(gradients, whole)
    if not difference <= TOLERANCE[tiny.dtype]:
        return f"the gradient of {name} differs by {difference:.1e} from the unsplit model's"
    return ""


def largest_difference(
    gradients: dict[str, Tensor | None], whole: PreTrainedModel
) -> tuple[float, str]:
    """The worst relative difference from the unsplit model's gradients, and whose it is.

    Relative to the largest element of the parameter's gradient, or a millionth of the largest of
    any, where a gradient is nothing but rounding. Infinite where only one side has a gradient.
    """
    theirs = {name: p.grad for name, p in whole.named_parameters()}
    largest = max(float(g.abs().max()) for g in theirs.values() if g is not None)
    worst = (0.0, "")
    for name in sorted(gradients.keys() | theirs.keys()):
        split, unsplit = gradients.get(name), theirs.get(name)
        if split is None or unsplit is None:
            difference = 0.0 if split is unsplit else math.inf
        else:
            scale = max(float(unsplit.abs().max()), largest * 1e-6)
            difference = float((split - unsplit).abs().max()) / scale
        worst = max(worst, (math.inf if math.isnan(difference) else difference, name))
    return worst


def next_token_loss(logits: Tensor) -> Tensor:
    """Mean cross entropy of the fixed tokens; its gradients are left in the parameters."""
    if logits.dtype not in TOLERANCE:
        logits = logits.float()
    loss = cross_entropy(logits.flatten(0, 1), tokens(1)[1].flatten())
    torch.autograd.backward(loss)
    return loss.detach()


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
