"""Whether an architecture can be cut: a tiny one is, and compared with itself unsplit.

A plan only names the parts. An architecture may also hand values from layer to layer beside the
hidden state, look at token ids inside its layers or run them several times; then a cut one would
train on wrong numbers without any error. So each is tried before it is used: loss and gradients of
a tiny model in three stages, in this process, against transformers' own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from engine.model.author import Pair, farthest, largest, pairs_of_gradients, train_unsplit
from engine.model.causal_lm import CausalLM, plan_of, with_plain_attention
from engine.model.data import StepBatch
from engine.model.partition import partition_layers
from engine.model.spec import DTYPES
from engine.model.stage_module import ModelError, first_line
from engine.model.tiny import VOCAB_SIZE, tiny_config
from engine.model.weights import initialise

SEQ_LEN = 24
MOST_PARAMETERS = 100_000_000
EXACT = {"float64": 1e-10, "float32": 1e-5}
"""The largest difference relative to the largest element; in float32 all there may be is rounding.

Some mixtures of experts have no kernel for float64."""


@dataclass(frozen=True)
class Tiny:
    """A tiny model of an architecture, in the most exact dtype in which it runs."""

    model: CausalLM
    config: PreTrainedConfig
    kind: str  # its dtype
    whole: Callable[[], PreTrainedModel]  # makes transformers' own, in training mode


def tiny_of(config: PreTrainedConfig, owner: type[PreTrainedModel] | None = None) -> Tiny:
    """A tiny model of a configuration, made by its own class or by `owner`.

    Raises ModelError when the architecture cannot be made tiny, does not run, or has no usable
    plan.
    """
    name = config.model_type
    try:
        small = tiny_config(config)
        with torch.device("meta"):  # nothing gets memory before the model is known to be tiny
            skeleton = _whole(small, "float32", owner)
    except Exception as error:
        raise ModelError(f"{name}: no small model can be made to try it: {_line(error)}") from error
    plan_of(skeleton)
    num_parameters = sum(parameter.numel() for parameter in skeleton.parameters())
    if num_parameters > MOST_PARAMETERS:
        raise ModelError(f"{name}: no small model can be made to try it: {num_parameters:,} remain")
    reason = ""
    for kind in EXACT:
        whole = functools.partial(_whole, small, kind, owner)
        try:
            train_unsplit(whole(), batch())
        except Exception as error:
            reason = _line(error)
        else:
            fill = functools.partial(initialise, seed=0, rebuild=whole)
            return Tiny(CausalLM(functools.partial(_skeleton, whole), fill), small, kind, whole)
    raise ModelError(f"{name}: a small model of it does not run: {reason}")


def batch() -> StepBatch:
    """One microbatch of random token ids and targets, always the same."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(1, VOCAB_SIZE, (1, SEQ_LEN + 1), generator=generator)
    return StepBatch((drawn[:, :-1].contiguous(),), (drawn[:, 1:].contiguous(),), SEQ_LEN)


def _skeleton(whole: functools.partial[PreTrainedModel]) -> PreTrainedModel:
    with torch.device("meta"):
        return with_plain_attention(whole())


def _whole(
    config: PreTrainedConfig, kind: str, owner: type[PreTrainedModel] | None
) -> PreTrainedModel:
    config = copy.deepcopy(config)
    if owner is None:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=DTYPES[kind])
    else:
        model = nn.Module.to(owner(config), DTYPES[kind])
    return nn.Module.train(model)


def check_splits(config: PreTrainedConfig, owner: type[PreTrainedModel] | None = None) -> None:
    """Raises ModelError unless a tiny model of this configuration's architecture splits exactly."""
    key = (config.to_json_string(use_diff=False), owner)
    if key not in _VERDICTS:
        _VERDICTS[key] = why_not_exact(tiny_of(config, owner))
    if _VERDICTS[key]:
        raise ModelError(f"architecture {config.model_type} cannot be split: {_VERDICTS[key]}")


_VERDICTS: dict[tuple[str, type[PreTrainedModel] | None], str] = {}


def why_not_exact(tiny: Tiny) -> str:
    """What goes wrong when the tiny model is cut into three stages; empty if nothing does."""
    partition = partition_layers("uniform", tiny.model.num_layers, 3)
    stages = [tiny.model.build_stage(partition, s, torch.device("cpu")) for s in range(3)]
    ids, targets = batch().inputs[0], batch().targets[0]
    try:
        x = ids
        for stage in stages:
            (x,) = stage(x)
        x = x if x.dtype in (torch.float32, torch.float64) else x.float()
        loss = cross_entropy(x.flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
    except Exception as error:
        return f"its layers need more from each other than the hidden state: {_line(error)}"
    whole = tiny.whole()
    state = {name: t.detach() for stage in stages for name, t in stage.own_state().items()}
    missing, unexpected = whole.load_state_dict(state, strict=False)
    if left := [*unexpected, *(set(missing) - set(whole.all_tied_weights_keys))]:
        return f"its stages and the unsplit model do not have the same weights: {min(left)}"
    expected = torch.tensor(train_unsplit(whole, batch()), dtype=torch.float64)
    gradients = {n: p.grad for stage in stages for n, p in stage.own_parameters().items()}
    for weight in tiny.model.shared_weights(partition):
        parts = [gradients.pop(name) for _, name in weight.owners]
        there = [part for part in parts if part is not None]
        gradients[weight.name] = functools.reduce(torch.add, there) if there else None
    theirs = dict(whole.named_parameters(remove_duplicate=False))
    ours = ((name, name, gradient) for name, gradient in gradients.items())
    pairs: list[Pair] = [("the loss of its stages", loss, expected, largest(expected))]
    apart, text = farthest([*pairs, *pairs_of_gradients(ours, theirs, tiny.kind)])
    return "" if apart <= EXACT[tiny.kind] else text


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"
