"""Compares every run's losses with those of the same training elsewhere.

    first step   with the unsplit model's, computed once for all ways to run a training (`unsplit`)
    last step    with that of the engine's first run of the same training, in whatever way, by the
                 same code, on the same machine and data

    results/verified/last-KEY.json

So the first launch of a sweep runs a case on the engine before it runs it on other runtimes. A run
that disagrees is `invalid`, without figures.

Losses reveal gradients only through the optimizer: `adamw` trains the same with all gradients
doubled. `measure.verify` compares each of them.

A model that draws random numbers has another loss for every order of actions; then nothing is
compared.
"""

from __future__ import annotations

import math
from pathlib import Path

from ppbench.config.case import Case
from ppbench.run.job import PlannedRun
from ppbench.run.machine.environment import fingerprint_here
from ppbench.run.machine.inputs import hashes_of_text
from ppbench.run.verification.record import (
    file_of_record,
    key_of_facts,
    read_record,
    write_record,
)
from ppbench.runtimes import ENGINE

FIRST_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
"""The largest difference of a first loss that is rounding, relative to the loss or to 1."""
GROWTH = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-3}
"""How much the tolerance grows with each step, since training amplifies rounding. In float32,
weights that differ by rounding led to 1e-6 after 30 steps and 2e-2 after 300 at a learning rate of
1e-2; a run without any training differs by 2e-2 after 4 steps at 1e-4."""


class DisagreementError(ValueError):
    """A runtime's loss differs from that of the same training elsewhere."""


_WAYS = (
    *("schedule", "program_digest", "memory_limit", "stages_per_rank", "world_size", "runtime"),
    *("num_microbatches", "replicas", "model_partition", "data_num_workers"),
    *("train_recompute", "train_recompute_stages", "train_compile"),
)
"""Settings that say how a training is run, and not what is trained; with those of `_WAYS_OF`."""
_WAYS_OF = ("emulated_", "launch_", "sharding_", "slices_", "transfer_")


def key_of_training(case: Case) -> str:
    """Return the key of what is trained, but for how many microbatches a step has.

    It stands for settings, model, text, and our code. Steps of more microbatches begin with those
    of fewer, so runs of one key have the same losses of the microbatches that they share. What
    depends on the order of microbatches alone, such as dropout, is not in it.
    """
    training = {
        name: value
        for name, value in case.settings().items()
        if name not in _WAYS and not name.startswith(_WAYS_OF)
    }
    return key_of_facts(case, training, hashes_of_text(case.data_source))


def check_first_loss(case: Case, loss: float | None, expected: float) -> None:
    """Compare the first step's loss with the unsplit model's. Raises DisagreementError."""
    _compare(case, "first", loss, expected, "the unsplit model", 0)


def check_last_loss(
    results: Path, item: PlannedRun, training: str, loss: float | None, run_id: str
) -> None:
    """Compare the last step's loss with that of the engine's first run of the same training.

    `training` is its key. Where there is no such run yet, an engine's run becomes it. Raises
    DisagreementError.
    """
    case, num_steps = item.case, item.measure.warmup_steps + item.measure.steps
    machine = fingerprint_here(case.device, 1, case.launch_threads_per_rank)
    num_microbatches = case.replicas * case.num_microbatches
    key = f"last-{training}-{num_microbatches}-{num_steps}-{machine}"
    known = read_record(results, key)
    if known is not None:
        of = f"the engine's run {known['run_id']}, which {file_of_record(results, key)} has,"
        _compare(case, "last", loss, known["loss"], of, num_steps)
    elif case.runtime == ENGINE and loss is not None and math.isfinite(loss):
        write_record(results, key, {"loss": loss, "run_id": run_id})


def _compare(
    case: Case, step: str, loss: float | None, expected: float, of: str, num_steps: int
) -> None:
    kind = "bfloat16" if case.train_autocast == "bfloat16" else case.model_dtype
    tolerance = FIRST_TOLERANCE[kind] + GROWTH[kind] * num_steps
    are_nan = loss is not None and math.isnan(loss) and math.isnan(expected)
    is_near = loss is not None and abs(loss - expected) <= tolerance * max(1.0, abs(expected))
    if not (loss == expected or are_nan or is_near):
        raise DisagreementError(
            f'runtime "{case.runtime}": {step}-step loss {loss!r} differs from {expected!r} of '
            f"{of} by more than {tolerance:g} ({kind} rounding after {num_steps} steps)"
        )
