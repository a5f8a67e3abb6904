"""Whether an architecture trains exactly: a tiny one is cut, and compared with itself whole.

A plan only names the parts. An architecture may also hand values from layer to layer beside the
hidden state, look at token ids inside its layers or run them several times; then a cut one would
train on wrong numbers without any error. So each is tried before it is used: loss and gradients of
a tiny model in three stages, in this process, against transformers' own.
"""

from __future__ import annotations

import copy
import functools
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from engine.model.author import (
    TOLERANCE,
    Pair,
    farthest,
    largest,
    pairs_of_gradients,
    train_unsplit,
)
from engine.model.causal_lm import CausalLM, with_plain_attention
from engine.model.data import StepBatch
from engine.model.partition import partition_layers
from engine.model.spec import ModelSpec
from engine.model.stage_module import ModelError, StageModule, first_line
from engine.model.structure import CutPlan, declared_plan, found_plan
from engine.model.tiny import VOCAB_SIZE, random_settings, tiny_config
from engine.model.weights import initialise

NUM_STAGES = 3
SEQUENCES, SEQ_LEN = 2, 24  # of each of two microbatches
SLICES = (11, 8, 1, 4)
MOST_PARAMETERS = 100_000_000
SEEN = 0.5
"""The least probability or noise with which what draws is sure to give something else."""
EXACT = {"float64": 1e-10, "float32": 1e-5}
"""The largest difference relative to the largest element; in float32 all there may be is rounding.

Some mixtures of experts have no kernel for float64."""
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Check:
    """The result of trying an architecture.

    `status`: `exact`; `refused`, with the error that a user gets before any rank starts; or
    `error`. `plan`: `declared` by the architecture, or `found`. The `largest_difference` is of
    losses and gradients, relative to the largest element.
    """

    architecture: str
    status: str
    plan: str | None = None
    dtype: str | None = None
    largest_difference: float | None = None
    num_parameters: int | None = None
    seconds: float | None = None
    reason: str = ""


class Tiny:
    """A tiny model of a configuration's architecture, in the most exact dtype in which it runs."""

    def __init__(
        self, config: PreTrainedConfig, keys: ModelSpec, owner: type[PreTrainedModel] | None
    ) -> None:
        """Make it by its own class, or by `owner`, and find its plan.

        `keys` may name its layers, and what is around them. Raises ModelError when it cannot be
        made, does not run, or has no usable plan.
        """
        self.name = name = config.model_type
        try:
            self.small, self.owner = tiny_config(config), owner
            small = self.small
            with torch.device("meta"):  # nothing gets memory before the model is known to be tiny
                skeleton = _whole(small, "float32", owner)
        except Exception as error:
            raise ModelError(
                f"{name}: no small model can be made to try it: {_line(error)}"
            ) from error
        declared = None if keys.has_plan else declared_plan(skeleton)
        self.is_declared = declared is not None
        self.num_parameters = sum(parameter.numel() for parameter in skeleton.parameters())
        if self.num_parameters > MOST_PARAMETERS:
            raise ModelError(
                f"{name}: no small model can be made to try it: {self.num_parameters:,} remain"
            )
        self.batch = _batch(small)
        reason = ""
        for kind in EXACT:
            self.kind, self.whole = kind, functools.partial(_whole, small, kind, owner)
            try:
                train_unsplit(self.whole(), self.batch)
                break
            except Exception as error:
                reason = _line(error)
        else:
            raise ModelError(f"{name}: a small model of it does not run: {reason}")
        self.plan = declared or found_plan(self.whole(), self.batch.inputs[0], keys)

    def draws(self, name: str, value: float, attention: str) -> bool:
        """Whether its forward in training draws random numbers with this setting.

        `attention` is the implementation of it that transformers has under this name.
        """
        small = copy.deepcopy(self.small)
        for part in (small, small.get_text_config()):
            if hasattr(part, name):
                setattr(part, name, max(value, SEEN))
        ids = self.batch.inputs[0]
        try:
            model = _whole(small, self.kind, self.owner)
            if attention != model.config._attn_implementation:
                model.set_attn_implementation(attention)
            with torch.no_grad():
                first, second = (model(input_ids=ids, use_cache=False).logits for _ in range(2))
        except Exception:  # it is not known
            return True
        return not torch.equal(first, second)

    @functools.cached_property
    def difference(self) -> float:
        """How far it is from transformers' own model when it is cut. Raises ModelError if far."""
        return self._difference(())

    @functools.cached_property
    def difference_in_slices(self) -> float:
        """The same where its sequences come in slices. Raises ModelError, of `slices.number`."""
        return self._difference(SLICES)

    def _difference(self, slices: Sequence[int]) -> float:
        fill = functools.partial(initialise, seed=0, rebuild=self.whole)
        model = CausalLM(functools.partial(_skeleton, self.whole), fill, self.plan)
        partition = partition_layers("uniform", model.num_layers, NUM_STAGES)
        try:
            stages = [model.build_stage(partition, stage, CPU) for stage in range(NUM_STAGES)]
            state = {
                n: t.detach().clone() for stage in stages for n, t in stage.own_state().items()
            }
            loss = _train(model, stages, self.batch, slices)
        except Exception as error:
            why = "its layers need more from each other than the hidden state"
            why = "it does not run on slices of a sequence" if slices else why
            raise self._error(f"{why}: {_line(error)}", slices) from error
        whole = self.whole()
        missing, unexpected = whole.load_state_dict(state, strict=False)
        if left := [*unexpected, *(set(missing) - set(whole.all_tied_weights_keys))]:
            why = f"its stages and the whole do not have the same weights: {min(left)}"
            raise self._error(why, slices)
        told, expected = (
            torch.tensor(number, dtype=torch.float64)
            for number in (loss, train_unsplit(whole, self.batch))
        )
        gradients = {n: p.grad for stage in stages for n, p in stage.own_parameters().items()}
        for weight in model.shared_weights(partition):
            parts = [gradients.pop(name) for _, name in weight.owners]
            there = [part for part in parts if part is not None]
            gradients[weight.name] = functools.reduce(torch.add, there) if there else None
        theirs = dict(whole.named_parameters(remove_duplicate=False))
        ours = ((name, name, gradient) for name, gradient in gradients.items())
        pairs: list[Pair] = [("the loss of its stages", told, expected, largest(expected))]
        apart, text = farthest([*pairs, *pairs_of_gradients(ours, theirs, self.kind)])
        # What a model computes in float32 anyway is rounded otherwise for other lengths.
        if apart > (max(EXACT[self.kind], TOLERANCE["float64"]) if slices else EXACT[self.kind]):
            raise self._error(text, slices)
        return apart

    def _error(self, why: str, slices: Sequence[int]) -> ModelError:
        if not slices:
            return ModelError(f"architecture {self.name} cannot be split: {why}")
        needed = "it must keep the keys and values of what comes before, and attend to all of them"
        text = f"architecture {self.name} cannot come in slices: {why}; {needed}"
        return ModelError(text, "slices.number")


def plan_of(model: PreTrainedModel, keys: ModelSpec) -> CutPlan:
    """The plan by which a model is cut, which may not be exact. Raises ModelError without one."""
    declared = None if keys.has_plan else declared_plan(model)
    return declared or _tiny_of(model.config, keys, type(model)).plan


def try_architecture(model: CausalLM, keys: ModelSpec) -> None:
    """Raise ModelError unless a tiny model like this one is exact when it is cut."""
    _ = _tiny_of(model.config, keys, model.kind).difference


def try_slices(model: CausalLM, keys: ModelSpec) -> None:
    """Raise ModelError unless a tiny model like this one is exact in slices of a sequence."""
    _ = _tiny_of(model.config, keys, model.kind).difference_in_slices


def drawing_settings(model: CausalLM, keys: ModelSpec) -> dict[str, float]:
    """The settings by which a model's training draws random numbers, found by trying each.

    Some are of heads for other tasks, such as GPT-2's `summary_first_dropout`: they do nothing.
    """
    config = model.config
    given = random_settings(config) | random_settings(config.get_text_config())
    if not given:
        return {}
    tiny, attention = _tiny_of(config, keys, model.kind), config._attn_implementation
    return {name: value for name, value in given.items() if tiny.draws(name, value, attention)}


def _tiny_of(config: PreTrainedConfig, keys: ModelSpec, owner: type[PreTrainedModel]) -> Tiny:
    """A tiny model, made by the model's own class, which may be a user's. Kept."""
    parts = keys.layers, keys.before_layers, keys.after_layers
    key = config.to_json_string(use_diff=False), owner, parts
    if key not in _KEPT:
        _KEPT[key] = Tiny(config, keys, owner)
    return _KEPT[key]


_KEPT: dict[object, Tiny] = {}


def _train(
    model: CausalLM, stages: Sequence[StageModule], batch: StepBatch, slices: Sequence[int]
) -> float:
    """Leave a step's gradients in the stages; return its loss. Raises what a forward raises."""
    total, partition = 0.0, [stage.layers for stage in stages]
    for ids, targets in zip(batch.inputs, batch.targets, strict=True):
        prefixes = [stage.prefix(SEQ_LEN) for stage in stages] if slices else []
        losses, begin = [], 0
        for length in slices or [SEQ_LEN]:
            (expected, *_) = model.messages(partition, SEQUENCES, length)[0]
            x = ids[:, begin : begin + length]
            for number, stage in enumerate(stages):
                stage.cache = prefixes[number].seen_by(begin) if slices else None
                (x,) = stage(x)
                if not stage.is_last and x.shape != expected.shape:
                    shapes = list(x.shape), list(expected.shape)
                    raise ValueError("a layer returns {}, not {}".format(*shapes))
            own = targets[:, begin : begin + length]
            losses.append(model.task.loss(x, own, batch.num_tokens))
            begin += length
        for loss in reversed(losses):
            torch.autograd.backward(loss)
            total += loss.item()
        for prefix, stage in zip(prefixes, stages, strict=bool(slices)):
            if unkept := sorted({*stage.layers} - {*prefix.written()}):
                raise ValueError(f"layer {unkept[0]} keeps no keys and values")
    return total


def _batch(config: PreTrainedConfig) -> StepBatch:
    """Two microbatches, always the same: random token ids, among them those that mean something."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(1, VOCAB_SIZE, (2, SEQUENCES, SEQ_LEN + 1), generator=generator)
    special = (getattr(config, f"{name}_token_id", None) for name in ("pad", "eos", "bos"))
    for place, number in enumerate(special):
        if isinstance(number, int) and 0 <= number < VOCAB_SIZE:
            drawn[:, :, 5 + 3 * place] = number
    inputs, targets = drawn[..., :-1].contiguous(), drawn[..., 1:].contiguous()
    return StepBatch(tuple(inputs), tuple(targets), targets.numel())


def _skeleton(whole: functools.partial[PreTrainedModel]) -> PreTrainedModel:
    with torch.device("meta"):
        return with_plain_attention(whole())


def _whole(
    config: PreTrainedConfig, kind: str, owner: type[PreTrainedModel] | None
) -> PreTrainedModel:
    make = AutoModelForCausalLM.from_config if owner is None else owner._from_config
    model: PreTrainedModel = make(copy.deepcopy(config), dtype=getattr(torch, kind))
    return nn.Module.train(model)


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def architectures() -> list[str]:
    """The model types of causal LMs that the installed transformers has."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def check_architectures(names: Sequence[str]) -> Iterator[Check]:
    """Try one after the other as a model of each is before its use; an exception is a result."""
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    for name in names:
        check, started = Check(name, "refused"), time.monotonic()
        try:
            try:
                config = CONFIG_MAPPING[name]()
            except Exception as error:
                raise ModelError(
                    f"{name}: it has no usual configuration: {_line(error)}"
                ) from error
            tiny = Tiny(config, ModelSpec(), None)
            check = replace(check, plan="declared" if tiny.is_declared else "found")
            check = replace(check, dtype=tiny.kind, num_parameters=tiny.num_parameters)
            check = replace(check, status="exact", largest_difference=tiny.difference)
        except ModelError as error:
            check = replace(check, reason=str(error))
        except Exception as error:
            check = replace(check, status="error", reason=_line(error))
        yield replace(check, seconds=round(time.monotonic() - started, 2))
