"""Compares a run's losses with those of the same training elsewhere.

    first step   with the unsplit model's, computed within the run (`runtimes.reference`)
    last step    with that of the engine's run of the same case, if the store has one that a sweep
                 would not repeat: by the same code, on the same machine and data

The engine is compared with the unsplit model by its tests and by `measure.verify`, and with
replicas, which are verified one by one, by its first loss; any other runtime, also one of another
package, by both. So the first launch of a sweep runs a case on
the engine before it runs it on other runtimes. A run that disagrees is `invalid`, without figures.

Losses reveal gradients only through the optimizer: `adamw` trains the same with all gradients
doubled. `measure.verify` compares each of them.

A model that draws random numbers has another loss for every order of actions; then nothing is
compared.
"""

from __future__ import annotations

import math

from ppbench.config.case import Case
from ppbench.run.job import PlannedRun
from ppbench.runtimes import ENGINE
from ppbench.store import Store

FIRST_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
"""The largest difference of a first loss that is rounding, relative to the loss or to 1."""
GROWTH = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-3}
"""How much the tolerance grows with each step, since training amplifies rounding. In float32,
weights that differ by rounding led to 1e-6 after 30 steps and 2e-2 after 300 at a learning rate of
1e-2; a run without any training differs by 2e-2 after 4 steps at 1e-4."""


class DisagreementError(ValueError):
    """A runtime's loss differs from that of the same training elsewhere."""


def must_agree(case: Case) -> bool:
    """Whether a case's losses are compared: it computes, on another runtime than the engine."""
    return case.runtime != ENGINE and not case.is_emulated


def has_known_first_loss(case: Case) -> bool:
    """Whether the first loss is compared with the unsplit model's: also that over all replicas."""
    return must_agree(case) or (case.replicas > 1 and not case.is_emulated)


def check_first_loss(case: Case, loss: float | None, expected: float) -> None:
    """Compare the first step's loss with the unsplit model's. Raises DisagreementError."""
    tolerance = FIRST_TOLERANCE[_kind_of(case)]
    if not _agree(loss, expected, tolerance):
        raise DisagreementError(
            f"{_loss_in_words(case, 'first', loss)} differs from the unsplit model's {expected!r} "
            f"by more than {tolerance:g} ({_kind_of(case)} rounding)"
        )


def check_last_loss(item: PlannedRun, loss: float | None, store: Store) -> None:
    """Compare the last step's loss with that of the engine's newest run of the same case.

    Raises DisagreementError.
    """
    case, kind = item.case, _kind_of(item.case)
    num_steps = item.measure.warmup_steps + item.measure.steps
    tolerance = FIRST_TOLERANCE[kind] + GROWTH[kind] * num_steps
    runs = store.runs(["run_id", "resume_key", "status", "last_loss"])
    runs = runs[runs["resume_key"].isin(item.references) & (runs["status"] == "ok")]
    runs = runs[runs["last_loss"].notna()].sort_values("run_id")
    if len(runs) and not _agree(loss, expected := float(runs["last_loss"].iloc[-1]), tolerance):
        raise DisagreementError(
            f"{_loss_in_words(case, 'last', loss)} differs from {expected!r} of the engine's run "
            f"{runs['run_id'].iloc[-1]} by more than {tolerance:g} "
            f"({kind} rounding after {num_steps} steps)"
        )


def _agree(loss: float | None, expected: float, tolerance: float) -> bool:
    if loss is None:
        return False
    if math.isnan(expected):
        return math.isnan(loss)
    return loss == expected or abs(loss - expected) <= tolerance * max(1.0, abs(expected))


def _loss_in_words(case: Case, step: str, loss: float | None) -> str:
    return f'runtime "{case.runtime}": {step}-step loss {"unknown" if loss is None else repr(loss)}'


def _kind_of(case: Case) -> str:
    return "bfloat16" if case.train_autocast == "bfloat16" else case.model_dtype
