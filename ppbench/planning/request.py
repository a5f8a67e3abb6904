"""What a plan is asked for: devices, memory, batch, and what may be chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.plan.schedules.registry import SCHEDULES

AUTO: Final = "auto"
"""As a schedule, a program of the solver; as `recompute`, only where memory needs it."""


@dataclass(frozen=True)
class PlanRequest:
    """The devices, the batch, and what a plan may choose from.

    `memory_bytes` is what each rank has (None: no limit); `global_batch` is in sequences, of one of
    the `replicas` of the pipeline, which all train in a step and share by the policy `sharding`.
    Without `microbatch_sizes`, all that have costs and divide the global batch are tried.
    `recompute` is "none", "all" layers, or "auto": those of the fewest stages, where a rank would
    not fit.
    """

    ranks: tuple[int, ...]
    memory_bytes: int | None
    global_batch: int
    seq_len: int
    schedules: tuple[str, ...] = (*SCHEDULES, AUTO)
    stages_per_rank: tuple[int, ...] = (1, 2)
    microbatch_sizes: tuple[int, ...] = ()
    recompute: str = AUTO
    replicas: int = 1
    sharding: str = "ddp"
