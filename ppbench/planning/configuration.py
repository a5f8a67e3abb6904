"""A pipeline that could be run, and what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.layout import partition_of
from engine.plan.program import Placement, Program


@dataclass(frozen=True)
class Configuration:
    """Everything that a plan decides about a training.

    `layers` are counts by stage, `recompute` says by stage whether its layers recompute their
    activations. `schedule` is a registered name, or "auto" for a program of the solver.
    """

    schedule: str
    ranks: int
    stages_per_rank: int
    placement: Placement
    layers: tuple[int, ...]
    microbatch_size: int
    num_microbatches: int
    recompute: tuple[bool, ...]

    @property
    def partition(self) -> list[range]:
        """The layers of each stage, in order."""
        return list(partition_of(self.layers))

    @property
    def global_batch(self) -> int:
        """Sequences of a step."""
        return self.microbatch_size * self.num_microbatches


@dataclass(frozen=True)
class Proposal:
    """A configuration with its program and its predicted step; times in ns, memory by rank.

    `step_ns` is simulated with the costs as they are; the interval from `step_low_ns` to
    `step_high_ns` holds the step with a probability of 90 %, as far as it depends on the errors of
    the costs. The step is the makespan and the optimizer; no program for this placement and these
    stages has a step below `bound_ns`.
    """

    configuration: Configuration
    program: Program
    step_ns: int
    step_low_ns: int
    step_high_ns: int
    bound_ns: int
    peak_bytes: tuple[int, ...]
    peak_high_bytes: tuple[int, ...]
    bubble_fraction: float
    tokens_per_s: float
