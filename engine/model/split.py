"""Finds the kind of model that a name means, and opens it ready to be split.

name                                       becomes
preset                                     a Llama configuration of `presets`, random weights
local folder, hub id                       its configuration and, if it has them, its weights
package.module:factory                     what the factory returns: a transformers model, an
                                           nn.Sequential, or any module with split = "trace"

What opens each kind is imported when one is asked for: a user's own modules need no transformers,
which takes longer to import than torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.model.chain import Chain, sequential
from engine.model.factory import Factory, find_factory
from engine.model.presets import PRESETS
from engine.model.spec import ModelSpec
from engine.model.stage_module import Model, ModelError
from engine.model.task import FactoryTask, factory_task, task_of


def open_model(
    spec: ModelSpec, shape: tuple[int, int], device: torch.device, *, trains: bool = True
) -> Model:
    """The model of a spec, without weights yet. Whether it can be cut, `try_model` says.

    `shape` is that of a microbatch's token ids, `[batch, seq]`: what a factory's module is run or
    traced for. Of a factory's own batches only the first number counts. `device`: where it will
    run. A module is traced as it `trains`, or as in `eval()`. Raises ModelError.
    """
    if spec.split != "trace" and spec.split_points:
        raise ModelError('split points are for split = "trace" only', "model.split_points")
    if not spec.is_factory:
        if spec.split == "trace":
            raise ModelError(
                f'split = "trace" cuts what a factory returns ("package.module:factory"); '
                f'"{spec.name}" is none',
                "model.split",
            )
        from engine.model.pretrained import from_name

        return from_name(spec)
    if spec.split == "trace" and not spec.split_points:
        raise ModelError('split = "trace" needs split points', "model.split_points")
    factory = Factory(spec.name, find_factory(spec.name), spec.seed)
    skeleton, trained = factory.skeleton, (factory, spec.torch_dtype, device)
    if spec.split == "trace":
        from engine.model.traced import traced  # the tracer takes half a second to import

        configuration: Any = getattr(skeleton, "config", None)
        if getattr(configuration, "use_cache", False):  # of transformers; no training wants it
            configuration.use_cache = False
        task = task_of(*trained)
        factory.skeleton.train(trains)
        model: Model = traced(factory, spec.split_points, spec.torch_dtype, shape, task)
    elif isinstance(skeleton, nn.Sequential):
        if spec.has_plan:
            message = f'"{spec.name}" returns an nn.Sequential, each child of which is a layer'
            raise ModelError(f"{message}; model.layers is for transformers models", "model.layers")
        model = sequential(factory, spec.torch_dtype, shape, task_of(*trained))
    else:
        from transformers import PreTrainedModel

        if not isinstance(skeleton, PreTrainedModel):
            raise ModelError(
                f'"{spec.name}" returns a {type(skeleton).__name__}, which is neither an '
                'nn.Sequential nor a transformers model; set split = "trace" and split_points'
            )
        from engine.model.pretrained import from_factory

        model = from_factory(factory, spec, factory_task(*trained))
    if isinstance(model.task, FactoryTask):
        model.task.check_loss(model.output(*shape), shape[0])
    return model


def try_model(
    model: Model, spec: ModelSpec, *, is_sliced: bool = False, trains: bool = True
) -> None:
    """Raise ModelError for an architecture of transformers that cannot be cut exactly (`probe`).

    With `is_sliced`, also for a model that cannot take a sequence in slices, or that `trains` with
    random numbers: it would draw others for each slice.
    """
    if not isinstance(model, Chain) and spec.name not in PRESETS:
        from engine.model.causal_lm import CausalLM
        from engine.model.probe import try_architecture

        assert isinstance(model, CausalLM)
        try_architecture(model, spec)
    if is_sliced:
        from engine.model.causal_lm import CausalLM
        from engine.model.probe import drawing_settings, try_slices

        if not isinstance(model, CausalLM) or isinstance(model.task, FactoryTask):
            raise ModelError(
                f'"{spec.name}" cannot come in slices: only a causal LM of transformers keeps the '
                "keys and values of what comes before, and its loss must be that of the next token",
                "slices.number",
            )
        if trains and (drawing := drawing_settings(model, spec)):
            listed = ", ".join(f"{name} = {value:g}" for name, value in drawing.items())
            raise ModelError(
                f'"{spec.name}" has {listed}, which would draw other numbers for each slice than '
                f"for the whole; set {'it' if len(drawing) == 1 else 'each'} to 0",
                "slices.number",
            )
        if spec.name not in PRESETS:
            try_slices(model, spec)
