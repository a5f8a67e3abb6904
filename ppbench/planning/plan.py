"""A plan: what is asked for, the pipelines that are proposed, and what limits them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from engine.plan.program import Placement, Program
from engine.plan.schedules.registry import SCHEDULES
from ppbench.errors import UsageError
from ppbench.planning.cost_set import CostSet
from ppbench.planning.layout import partition_of

if TYPE_CHECKING:
    import pandas as pd

AUTO: Final = "auto"
"""It means a program of the solver as a schedule, and only where memory needs it as `recompute`."""


@dataclass(frozen=True)
class PlanRequest:
    """The devices, the batch, and what a plan may choose from.

    `memory_bytes` is what each rank has (None: no limit). `global_batch` is in sequences of one of
    the `replicas` of the pipeline, which all train in a step and share by the policy `sharding`.
    Without `microbatch_sizes`, all that have costs and divide the global batch are tried.
    `recompute` is "none", "all" layers, or "auto": those of the fewest stages, where a rank would
    not fit. Ranks meet after a step, or go on by themselves (`engine.plan.period`). Schedules that
    take microbatches in slices are tried with these `slices`, each with its share of the time.
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
    meets: bool = True
    slices: tuple[float, ...] = ()


@dataclass(frozen=True)
class Configuration:
    """Everything that a plan decides about a training.

    `layers` are counts by stage of one direction, `recompute` says by stage, each copy counted,
    whether its layers recompute their activations. `schedule` is a registered name, or "auto" for
    a program of the solver.
    """

    schedule: str
    ranks: int
    stages_per_rank: int
    placement: Placement
    layers: tuple[int, ...]
    microbatch_size: int
    num_microbatches: int
    recompute: tuple[bool, ...]
    num_slices: int = 1  # that each microbatch comes in

    @property
    def partition(self) -> list[range]:
        """The layers of each stage of one direction, in order."""
        return list(partition_of(self.layers))

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.microbatch_size * self.num_microbatches


@dataclass(frozen=True)
class Proposal:
    """A configuration with its program and its predicted step; times in ns, memory by rank.

    `step_ns` is simulated with the costs as they are. Were nothing but these off, the interval from
    `step_low_ns` to `step_high_ns` would hold the step with a probability of 90 %. The step is the
    period of steps in a row; no program for this placement and these stages has one below
    `bound_ns`.
    """

    configuration: Configuration
    program: Program
    step_ns: int
    step_low_ns: int
    step_high_ns: int
    bound_ns: int
    peak_bytes: tuple[int, ...]
    bubble_fraction: float
    tokens_per_s: float


class FrontierPoint(NamedTuple):
    """The shortest step, in ns, that was found for ranks with so much memory."""

    memory_bytes: int
    step_ns: int
    configuration: Configuration


class Loss(NamedTuple):
    """A cause that makes the first choice's step longer, and the step without it in ns.

    The cause is "schedule" (its bubble), "imbalance" (of stages), "memory" or "link".
    """

    cause: str
    step_ns: int


@dataclass(frozen=True)
class Plan:
    """The proposals, the best first; none fits into less memory than it says.

    `registered` is the best that needs no program of the solver, `baseline` the best 1F1B within
    the same memory; either is None where none fits. `losses` are of the first choice, the largest
    first. `more_memory` is the point of the frontier that most gains from up to twice the memory,
    None where nothing does; `faster_link_ns` the best step of the proposals with half the latency
    and twice the bandwidth.
    """

    request: PlanRequest
    costs: CostSet
    proposals: tuple[Proposal, ...]
    frontier: tuple[FrontierPoint, ...]
    registered: Proposal | None
    baseline: Proposal | None
    losses: tuple[Loss, ...]
    more_memory: FrontierPoint | None
    faster_link_ns: int
    notes: tuple[str, ...] = ()

    @property
    def first(self) -> Proposal:
        """The first choice."""
        return self.proposals[0]

    @property
    def gain(self) -> float | None:
        """The first choice's throughput over that of the baseline, less 1."""
        if self.baseline is None:
            return None
        return self.baseline.step_ns / self.first.step_ns - 1

    @property
    def registered_loss(self) -> float | None:
        """How much longer the best registered schedule takes than the first choice."""
        if self.registered is None:
            return None
        return self.registered.step_ns / self.first.step_ns - 1

    @property
    def most_left(self) -> float:
        """The part of the first choice's step that another program for its stages might save."""
        return 1 - self.first.bound_ns / self.first.step_ns

    @property
    def frame(self) -> pd.DataFrame:
        """A row for each proposal, the best first, and last the 1F1B they are compared with."""
        import pandas as pd

        from ppbench.planning.words import row_of

        proposals = list(self.proposals)
        if self.baseline is not None and self.baseline not in proposals:
            proposals.append(self.baseline)
        return pd.DataFrame(
            {
                name: json.dumps(value) if isinstance(value, tuple) else value
                for name, value in row_of(proposal).items()
            }
            for proposal in proposals
        )

    @property
    def sentences(self) -> list[str]:
        """What to run, what it gains on 1F1B, what limits it, and what more would bring."""
        from ppbench.planning.words import sentences_of

        return sentences_of(self)


class NoPlanError(UsageError):
    """There is no such pipeline: `key` of `[plan]` is at fault.

    Where it is the memory, `least` is what needs the least of all that was found.
    """

    def __init__(self, key: str, message: str, least: FrontierPoint | None = None) -> None:
        super().__init__(message)
        self.key, self.least = key, least
