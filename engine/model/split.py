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

from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.model.chain import Chain, sequential
from engine.model.factory import Factory, find_factory
from engine.model.spec import ModelSpec
from engine.model.stage_module import Model, ModelError
from engine.model.task import Own, own_of, task_of


def open_model(
    spec: ModelSpec,
    shape: tuple[int, int],
    device: torch.device,
    *,
    is_tried: bool = False,
) -> Model:
    """The model of a spec, without weights yet.

    An architecture of transformers is first tried, unless it `is_tried` already (`probe`).

    `shape` is that of a microbatch's token ids, `[batch, seq]`: what a factory's module is run or
    traced for. Of a factory's own batches only the first number counts. `device`: where it will
    run. Raises ModelError.
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

        return from_name(spec, is_tried)
    if spec.split == "trace" and not spec.split_points:
        raise ModelError('split = "trace" needs split points', "model.split_points")
    factory = Factory(spec.name, find_factory(spec.name), spec.seed)
    model = _cut_as_asked(spec, factory, shape, device, is_tried=is_tried)
    if isinstance(model.task, Own):
        model.task.check_loss(model.output(*shape), shape[0])
    return model


def _cut_as_asked(
    spec: ModelSpec,
    factory: Factory,
    shape: tuple[int, int],
    device: torch.device,
    *,
    is_tried: bool,
) -> Model:
    """What a factory returns, to be cut by what it is or by tracing."""
    trained = factory, spec.torch_dtype, device
    if spec.split == "trace":
        from engine.model.traced import traced  # the tracer takes half a second to import

        configuration: Any = getattr(factory.skeleton, "config", None)
        if getattr(configuration, "use_cache", False):  # of transformers; no training wants it
            configuration.use_cache = False
        return traced(factory, spec.split_points, spec.torch_dtype, shape, task_of(*trained))
    if spec.has_plan and isinstance(factory.skeleton, nn.Sequential):
        message = f'"{spec.name}" returns an nn.Sequential, each child of which is a layer'
        raise ModelError(f"{message}; model.layers is for transformers models", "model.layers")
    if isinstance(factory.skeleton, nn.Sequential):
        return sequential(factory, spec.torch_dtype, shape, task_of(*trained))
    from transformers import PreTrainedModel

    if isinstance(factory.skeleton, PreTrainedModel):
        from engine.model.pretrained import from_factory

        return from_factory(factory, spec, is_tried, own_of(*trained))
    raise ModelError(
        f'"{spec.name}" returns a {type(factory.skeleton).__name__}, which is neither an '
        'nn.Sequential nor a transformers model; set split = "trace" and split_points'
    )


def write_configuration(model: Model, folder: Path) -> None:
    """Beside saved tensors: what `AutoModelForCausalLM.from_pretrained` needs; else nothing."""
    if not isinstance(model, Chain):
        from engine.model.pretrained import write_configuration_of

        write_configuration_of(model, folder)


def check_configuration(model: Model, folder: Path) -> None:
    """Compare the model with the configuration beside saved tensors. Raises ModelError."""
    if not isinstance(model, Chain):
        from engine.model.pretrained import check_configuration_of

        check_configuration_of(model, folder)
