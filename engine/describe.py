"""Describes models to those who have no torch: what they are, cost here, and whether they split.

    python -m engine.describe facts < request.json     a list of `Identity`s -> their `Facts`
    python -m engine.describe costs < request.json     a `CostRequest` -> see `engine.costs`
    python -m engine.describe check < request.json     a list of architectures, none for all ->
                                                       {"checks": [`Check`, ...], "problem": null}

A process of its own. The answer is one line of JSON; progress is told on standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from engine import device_variables
from engine.costs import answer_to, tell
from engine.model.data import DataError, load_tokenizer
from engine.model.descriptions import CostRequest, Facts, Identity, Problem
from engine.model.split import open_model, try_model
from engine.model.stage_module import ModelError
from engine.run.heap import keep_freed_memory

TRACED_SHAPE = (1, 16)
"""The shape of the microbatch that a module is traced with, to see whether it can be."""


def facts(request: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(facts_of(Identity.of(identity))) for identity in request]


def facts_of(identity: Identity) -> Facts:
    """Open the model, without weights, and the tokenizer; what fails becomes the problem."""
    spec = identity.spec
    try:
        model = open_model(spec, TRACED_SHAPE, torch.device("cpu"))
        try_model(model, spec)
    except ModelError as error:
        return Facts(problem=Problem(error.key, str(error)))
    sizes = (model.num_layers, model.max_positions, model.task.vocab_size, model.num_parameters)
    facts = Facts(*sizes, part_sizes=model.part_sizes)
    if model.task.vocab_size is None:
        return dataclasses.replace(facts, targets_per_sample=model.task.example(1, 0)[1].numel())
    try:
        tokenizer = load_tokenizer(
            identity.tokenizer, spec.home, trust_remote_code=spec.trust_remote_code
        )
    except DataError as error:
        return dataclasses.replace(facts, problem=Problem("data.tokenizer", str(error)))
    if tokenizer is None:
        return facts
    return dataclasses.replace(facts, tokenizer_size=max(tokenizer.get_vocab().values()) + 1)


def costs(request: dict[str, Any]) -> dict[str, Any]:
    keep_freed_memory()
    identity = Identity.of(request.pop("identity"))
    settings = tuple((int(size), bool(recompute)) for size, recompute in request.pop("settings"))
    return answer_to(CostRequest(identity, settings=settings, **request))


def check(request: list[str]) -> dict[str, Any]:
    from engine.model.probe import architectures, check_architectures

    known = architectures()
    names = list(dict.fromkeys(request or known))
    if unknown := [name for name in names if name not in known]:
        problem = f'transformers has no causal LM "{unknown[0]}"; it has {", ".join(known)}'
        return {"checks": [], "problem": problem}
    checks = []
    for result in check_architectures(names):
        checks.append(dataclasses.asdict(result))
        tell(f"{len(checks)} of {len(names)}: {result.architecture} {result.status}")
    return {"checks": checks, "problem": None}


def main() -> None:
    device_variables.prepare(os.environ)  # also for the other rank of a link
    questions: dict[str, Callable[[Any], object]] = {"facts": facts, "costs": costs, "check": check}
    request = json.load(sys.stdin)
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)  # what factories and libraries print is not part of the answer
        answer.write(json.dumps(questions[sys.argv[1]](request)) + "\n")


if __name__ == "__main__":
    main()
