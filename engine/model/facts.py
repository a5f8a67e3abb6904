"""Finds what a sweep must know of a model before it starts: sizes, limits, or a problem."""

from __future__ import annotations

import dataclasses

import torch

from engine.model.data import DataError, load_tokenizer
from engine.model.descriptions import Facts, Identity, Problem
from engine.model.spec import ModelSpec
from engine.model.split import open_model
from engine.model.stage_module import ModelError

TRACED_SHAPE = (1, 16)
"""The shape of the microbatch that a module is traced with, to see whether it can be."""


def spec_of(identity: Identity) -> ModelSpec:
    return ModelSpec(
        identity.model,
        identity.dtype,
        weights=identity.weights,
        trust_remote_code=identity.trust_remote_code,
        split=identity.split,
        split_points=tuple(identity.split_points),
        layers=identity.layers,
        before_layers=tuple(identity.before_layers),
        after_layers=tuple(identity.after_layers),
    )


def facts_of(identity: Identity) -> Facts:
    """Opens the model, without weights, and the tokenizer; what fails becomes the problem."""
    spec = spec_of(identity)
    try:
        model = open_model(spec, TRACED_SHAPE, torch.device("cpu"))
    except ModelError as error:
        return Facts(problem=Problem(error.key, str(error)))
    sizes = (model.num_layers, model.max_positions, model.task.vocab_size, model.num_parameters)
    facts = Facts(*sizes, costs=model.costs)
    if model.task.vocab_size is None:
        return dataclasses.replace(facts, targets_per_sample=model.task.example(1, 0)[1].numel())
    try:
        tokenizer = load_tokenizer(
            identity.tokenizer,
            spec.home,
            trust_remote_code=identity.trust_remote_code,
        )
    except DataError as error:
        return dataclasses.replace(facts, problem=Problem("data.tokenizer", str(error)))
    if tokenizer is None:
        return facts
    return dataclasses.replace(facts, tokenizer_size=max(tokenizer.get_vocab().values()) + 1)
