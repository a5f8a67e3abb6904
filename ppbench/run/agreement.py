"""Whether a run has trained what the others train: its losses beside those that they have.

    first step   against the unsplit model's, computed within the run (`runtimes.reference`)
    last step    against that of the engine's run of the same, where the store has one: one that a
                 sweep would not make again, by the same code, on the same machine and data

The engine itself is held to the unsplit model by its tests and by `measure.verify`; any other
runtime, also one from another package, by this. So a sweep runs the engine's case before its
likes of other runtimes in its first launch. One that disagrees is `invalid`, and has no figures:
how fast something else is computed is no answer.

Losses tell of gradients only by what an optimizer makes of them: `adamw` trains the same with all
of them doubled. What each of them is, `measure.verify` compares.

A model that draws random numbers has another loss for every order of actions; then nothing is
compared.
"""

from __future__ import annotations

import math

from ppbench.config.case import Case
from ppbench.run.job import Item
from ppbench.runtimes import ENGINE
from ppbench.store import Store

FIRST_TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 2e-2}
"""How far a first loss may be from the expected one, relative to it or to 1: that is rounding."""
GROWTH = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 1e-3}
"""By how much more after each step of training, which makes differences of rounding larger. Seen of
weights that were changed by their rounding: in float32 1e-6 after 30 steps, 2e-2 after 300 at a
learning rate of 1e-2. Without any training, 2e-2 after 4 steps at 1e-4."""


class DisagreementError(ValueError):
    """A runtime's loss is not the one that the same training has elsewhere."""


def must_agree(case: Case) -> bool:
    """Whether the case is of another runtime than the engine, and computes."""
    return case.runtime != ENGINE and not case.is_emulated


def check_first_loss(case: Case, loss: float | None, expected: float) -> None:
    """Raises DisagreementError."""
    tolerance = FIRST_TOLERANCE[_kind_of(case)]
    if not _agree(loss, expected, tolerance):
        raise DisagreementError(
            f"{_told(case, loss)} in the first step, and the unsplit model {expected!r}; at most "
            f"{tolerance:g} of it is rounding in {_kind_of(case)}"
        )


def check_last_loss(item: Item, loss: float | None, store: Store) -> None:
    """Raises DisagreementError."""
    case, kind = item.case, _kind_of(item.case)
    num_steps = item.measure.warmup_steps + item.measure.steps
    tolerance = FIRST_TOLERANCE[kind] + GROWTH[kind] * num_steps
    reference = _loss_of_engine(item, store)
    if reference is not None and not _agree(loss, reference[1], tolerance):
        run_id, expected = reference
        raise DisagreementError(
            f"{_told(case, loss)} in the last step, and the engine's run {run_id} {expected!r}; at "
            f"most {tolerance:g} of it is rounding in {kind} after {num_steps} steps"
        )


def _loss_of_engine(item: Item, store: Store) -> tuple[str, float] | None:
    """The engine's newest run of the same: its id and last loss."""
    runs = store.runs(["run_id", "resume_key", "status", "last_loss"])
    runs = runs[runs["resume_key"].isin(item.references) & (runs["status"] == "ok")]
    runs = runs[runs["last_loss"].notna()].sort_values("run_id")
    return None if runs.empty else (str(runs["run_id"].iloc[-1]), float(runs["last_loss"].iloc[-1]))


def _agree(loss: float | None, expected: float, tolerance: float) -> bool:
    if loss is None:
        return False
    if math.isnan(expected):
        return math.isnan(loss)
    return loss == expected or abs(loss - expected) <= tolerance * max(1.0, abs(expected))


def _told(case: Case, loss: float | None) -> str:
    has = "tells no loss" if loss is None else f"has the loss {loss!r}"
    return f'runtime "{case.runtime}" {has}'


def _kind_of(case: Case) -> str:
    return "bfloat16" if case.train_autocast == "bfloat16" else case.model_dtype
