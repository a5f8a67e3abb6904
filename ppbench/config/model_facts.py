"""Facts of a model, known before anything starts: layers, positions, vocabulary.

Presets are plain numbers. Everything else (a hub id, a checkpoint folder, a factory, a tokenizer)
needs torch and transformers, so a separate process inspects all of them at once and answers in
JSON; this process imports neither.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence

from engine.model.descriptions import Facts, Identity, Problem
from engine.model.partition import Costs
from engine.model.presets import PRESETS
from ppbench.config.case import Case
from ppbench.errors import UsageError

COMMAND = (sys.executable, "-m", "engine.model.facts")


def is_plain_preset(identity: Identity) -> bool:
    """Whether all facts are known without that process."""
    is_bytes = identity.tokenizer in ("auto", "bytes")
    return identity.model in PRESETS and identity.split == "auto" and is_bytes


def identity_of(case: Case) -> Identity:
    """The identity of a case's model."""
    return Identity(
        case.model_preset,
        case.model_split,
        case.model_split_points,
        case.model_weights,
        case.model_trust_remote_code,
        case.model_dtype,
        case.data_tokenizer,
    )


def facts_of(identities: Iterable[Identity]) -> dict[Identity, Facts]:
    """The facts of each distinct model. Raises UsageError when models cannot be inspected."""
    distinct = list(dict.fromkeys(identities))
    known = {model: _of_preset(model.model) for model in distinct if is_plain_preset(model)}
    others = [model for model in distinct if model not in known]
    return {**known, **dict(zip(others, _inspected(others), strict=True))}


def _of_preset(name: str) -> Facts:
    preset = PRESETS[name]
    table = preset.vocab_size * preset.hidden_size
    layers = (preset.layer_parameters,) * preset.num_hidden_layers
    return Facts(
        preset.num_hidden_layers,
        preset.max_position_embeddings,
        preset.vocab_size,
        preset.num_parameters,
        costs=Costs(layers, table, preset.hidden_size + table),
    )


def _inspected(identities: Sequence[Identity]) -> list[Facts]:
    if not identities:
        return []
    question = json.dumps([dataclasses.asdict(one) for one in identities])
    done = subprocess.run(COMMAND, input=question, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        names = ", ".join(dict.fromkeys(one.model for one in identities))
        raise UsageError(
            f"{names}: cannot be inspected; python -m engine.model.facts ended with exit code "
            f"{done.returncode}: {last}"
        )
    # A factory's module may print when it is imported, before the answer.
    return facts_from(json.loads(lines[-1]))


def facts_from(answers: Sequence[dict[str, object]]) -> list[Facts]:
    """Facts from the answers of `engine.model.facts`."""
    return [_fact(answer) for answer in answers]


def _fact(answer: dict[str, object]) -> Facts:
    problem = answer.get("problem")
    if isinstance(problem, dict):
        return Facts(problem=Problem(str(problem["key"]), str(problem["message"])))
    costs = answer.get("costs")
    if isinstance(costs, dict):
        answer = {**answer, "costs": Costs(tuple(costs["layers"]), costs["before"], costs["after"])}
    return Facts(**answer)  # type: ignore[arg-type]  # our own process wrote it
