"""What a model can do, known before anything is started: its layers, positions, vocabulary.

Presets are plain numbers. Everything else (a hub id, a checkpoint folder, a factory, a tokenizer)
takes torch and transformers to look at, so one other process looks at all of them at once and
answers in JSON; this one stays free of both.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.model.presets import PRESETS
from ppbench.config.case import Case
from ppbench.errors import UsageError

COMMAND = (sys.executable, "-m", "engine.model.facts")


@dataclass(frozen=True)
class Identity:
    """The settings that say which model it is, and with which tokenizer."""

    model: str
    split: str
    split_points: tuple[str, ...]
    weights: str
    trust_remote_code: bool
    dtype: str
    tokenizer: str

    @property
    def is_plain_preset(self) -> bool:
        """Whether everything is known without looking."""
        is_bytes = self.tokenizer in ("auto", "bytes")
        return self.model in PRESETS and self.split == "auto" and is_bytes


@dataclass(frozen=True)
class Problem:
    """Why something cannot run: the setting that is at fault, and what is wrong with it."""

    key: str
    message: str


@dataclass(frozen=True)
class Facts:
    """What is known of a model; None where it sets no limit or is not known."""

    num_layers: int | None = None
    max_positions: int | None = None
    vocab_size: int | None = None
    num_parameters: int | None = None
    tokenizer_size: int | None = None  # None: text is read as bytes
    problem: Problem | None = None


def identity_of(case: Case) -> Identity:
    """The model that a case asks for."""
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
    """The facts of each distinct model. Raises UsageError when models cannot be looked at."""
    distinct = list(dict.fromkeys(identities))
    known = {one: _of_preset(one.model) for one in distinct if one.is_plain_preset}
    others = [one for one in distinct if one not in known]
    return {**known, **dict(zip(others, _looked_at(others), strict=True))}


def _of_preset(name: str) -> Facts:
    preset = PRESETS[name]
    return Facts(
        preset.num_hidden_layers,
        preset.max_position_embeddings,
        preset.vocab_size,
        preset.num_parameters,
    )


def _looked_at(identities: Sequence[Identity]) -> list[Facts]:
    if not identities:
        return []
    question = json.dumps([dataclasses.asdict(one) for one in identities])
    done = subprocess.run(COMMAND, input=question, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        names = ", ".join(dict.fromkeys(one.model for one in identities))
        raise UsageError(
            f"{names}: cannot be looked at; python -m engine.model.facts ended with exit code "
            f"{done.returncode}: {last}"
        )
    # What a factory's module prints when it is imported comes before the answer.
    return facts_from(json.loads(lines[-1]))


def facts_from(answers: Sequence[dict[str, object]]) -> list[Facts]:
    """Facts from the answers of `engine.model.facts`."""
    return [_fact(answer) for answer in answers]


def _fact(answer: dict[str, object]) -> Facts:
    problem = answer.get("problem")
    if isinstance(problem, dict):
        return Facts(problem=Problem(str(problem["key"]), str(problem["message"])))
    return Facts(**answer)  # type: ignore[arg-type]  # our own process wrote it
