"""The first step and rank of a run where a number was NaN or infinite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

LOSS = "loss"


@dataclass(frozen=True)
class NotFinite:
    """Where a rank first saw a number that is not finite."""

    step: int  # as in `steps`: warm-up steps come first
    rank: int
    what: str  # such as `loss` or `gradient of lm_head.weight`


def first_of(seen: Iterable[NotFinite | None]) -> NotFinite | None:
    """The earliest of what the ranks saw: of a step, the loss comes before its gradients."""
    known = [one for one in seen if one is not None]
    return min(known, key=lambda one: (one.step, one.what != LOSS, one.rank), default=None)


def first_loss_not_finite(losses: Mapping[int, float], rank: int) -> NotFinite | None:
    """For training of others, of which the losses are known: by step."""
    wrong = (step for step, loss in sorted(losses.items()) if not math.isfinite(loss))
    return next((NotFinite(step, rank, LOSS) for step in wrong), None)


def columns_of(first: NotFinite | None, *, is_known: bool) -> dict[str, object]:
    """Columns of `runs`; all null where nothing was computed or looked at."""
    return {
        "is_finite": first is None if is_known else None,
        "not_finite_step": None if first is None else first.step,
        "not_finite_rank": None if first is None else first.rank,
        "not_finite_what": None if first is None else first.what,
    }
