"""Results of verifications on this machine, so that each is done once: small files in the store.

    results/verified/KEY.json

A key is a hash of everything that the computation depends on: the measuring code, torch,
transformers and the machine, the runtime, the model with its factory's sources or its checkpoint's
files, the program, and all settings but those that change values and not the computation. A file
that cannot be written or read only costs another verification.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.model.presets import PRESETS
from engine.plan.program import Program, to_json
from ppbench.config.case import Case
from ppbench.errors import StoreError
from ppbench.files import whole_file
from ppbench.run.machine.environment import fingerprint_here, read_environment, runtime_code
from ppbench.run.machine.inputs import identity_of_model
from ppbench.run.machine.measuring_code import VERIFYING, code_hash

_NO_COMPUTATION = ("data_", "emulated_", "launch_", "train_learning_rate", "train_lr_")
"""Beginnings of the settings that change the values of a computation, or when it is done."""


@dataclass(frozen=True)
class Verified:
    """The way in which a run was verified, or `no: ` and the reason why it was not."""

    how: str
    difference: float | None = None  # the largest, relative
    seconds: float = 0.0  # that it took in this run


NOT_VERIFIED = Verified("no: nothing has been compared")


def is_asked_for(case: Case) -> bool:
    """Whether a case is verified the first time even if `measure.verify` is off.

    Presets on built-in schedules are compared with their unsplit model by our tests.
    """
    is_own = case.model_preset not in PRESETS or case.model_split == "trace"
    return is_own or bool(case.program_digest)


def key_of(case: Case, program: Program | None) -> str:
    """Return the key of a case; `program` is what one with schedule auto runs."""
    settings = {
        name: value
        for name, value in case.settings().items()
        if not name.startswith(_NO_COMPUTATION)
    }
    settings |= {"seq_len": not isinstance(case.seq_len, int), "train_microbatch_size": 0}
    machine = fingerprint_here(case.device, case.num_processes, case.launch_threads_per_rank)
    of_program = None if program is None else to_json(program)
    return key_of_facts(case, settings, of_program, runtime_code(case.runtime), machine)


def key_of_facts(case: Case, *facts: object) -> str:
    """Hash some facts, the code that verifies, and the model's and transformers' identity."""
    own = code_hash(VERIFYING), read_environment().transformers, read_environment().torch
    of_model = [identity_of_model(name) for name in (case.model_preset, case.data_tokenizer)]
    text = json.dumps([*facts, *own, of_model], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def read_record(results: Path, key: str) -> dict[str, Any] | None:
    """Read the key's file; None if there is none that can be read."""
    try:
        content: dict[str, Any] = json.loads(file_of_record(results, key).read_text())
    except (OSError, ValueError):
        return None
    return content


def write_record(results: Path, key: str, content: dict[str, Any]) -> None:
    """Keep a result, if there is room for it."""
    with contextlib.suppress(StoreError), whole_file(file_of_record(results, key)) as file:
        file.write(json.dumps(content).encode())


def file_of_record(results: Path, key: str) -> Path:
    return results / "verified" / f"{key}.json"
