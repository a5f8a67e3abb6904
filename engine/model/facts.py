"""Prints what a sweep must know of models before it starts: sizes, limits, or a problem.

    python -m engine.model.facts < requests.json

A process of its own, so that the caller needs no torch. Reads a JSON list of requests and prints a
JSON list of facts on one line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from typing import Any

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
    )


def facts_of(identity: Identity) -> Facts:
    """Opens the model, without weights, and the tokenizer; what fails becomes the problem."""
    spec = spec_of(identity)
    try:
        model = open_model(spec, TRACED_SHAPE, torch.device("cpu"))
    except ModelError as error:
        return Facts(problem=Problem(error.key, str(error)))
    sizes = (model.num_layers, model.max_positions, model.vocab_size, model.num_parameters)
    facts = Facts(*sizes, costs=model.costs)
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


def main() -> None:
    requests: list[dict[str, Any]] = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # what factories and libraries print is not part of the answer
        facts = [dataclasses.asdict(facts_of(Identity(**request))) for request in requests]
        answer.write(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
