"""A plan: what to run, how sure that is, what limits it, and what more would bring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ppbench.errors import UsageError
from ppbench.planning.configuration import Configuration, Proposal
from ppbench.planning.cost_set import CostSet
from ppbench.planning.request import PlanRequest

if TYPE_CHECKING:
    import pandas as pd


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
        from ppbench.planning.words import frame_of

        return frame_of(self)

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
