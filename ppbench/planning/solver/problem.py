"""A problem for the solver: a pipeline, its durations, and how much each rank can hold.

Memory is counted in one unit, such as bytes. A microbatch's forward on a stage takes what the stage
holds after it; the input-gradient half leaves part of that, the weight-gradient half nothing:

    held by a stage      F ######### I ##### W .

A rank runs one action at a time, so what it holds follows from the order of its row alone: an F
counts from its start, what an I or W frees is free at its end.

What is to be short is the period of steps in a row (`engine.plan.period`): where ranks meet after a
step, from one meeting to the next, each rank's optimizer first; where they do not, from one step of
a rank to its next.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.plan.predict import Durations
from engine.plan.program import Placement
from engine.plan.walk import FREE_TRANSFERS, TransferModel


class NoProgramError(ValueError):
    """No program keeps within the limits; `least` are the lowest that allow one, by rank."""

    def __init__(self, limits: tuple[int, ...], least: tuple[int, ...]) -> None:
        self.least = least
        short = [rank for rank, need in enumerate(least) if limits[rank] < need]
        text = ", ".join(f"rank {rank}: {least[rank]}, not {limits[rank]}" for rank in short)
        super().__init__(f"no program holds so little; the least limits that would do: {text}")


@dataclass(frozen=True)
class Problem:
    """A step to plan: times in nanoseconds, memory in a unit of the caller's.

    `limits` are by rank; `held_after_forward` and `held_after_input` by stage, for one microbatch.
    `optimizer_ns` is by rank, none taking no time; ranks meet before, or do not. Raises ValueError
    where there are not as many as ranks or stages, no microbatch, a negative number, or an input
    half that leaves more than its forward took.
    """

    placement: Placement
    num_microbatches: int
    durations: Durations
    limits: tuple[int, ...]
    held_after_forward: tuple[int, ...]
    held_after_input: tuple[int, ...]
    transfers: TransferModel = FREE_TRANSFERS
    optimizer_ns: tuple[int, ...] = ()
    meets: bool = True

    def __post_init__(self) -> None:
        ranks, stages = self.placement.world_size, self.placement.num_stages
        given = self.durations
        times = given.forward_ns, given.input_ns, given.weight_ns, given.backward_ns
        known = [of_op for of_op in times if of_op is not None]
        by_stage = (*known, self.held_after_forward, self.held_after_input)
        are_by_rank = len(self.limits) == ranks and len(self.optimizer_ns) in (0, ranks)
        if not are_by_rank or any(len(one) != stages for one in by_stage):
            raise ValueError(
                f"expected {ranks} limits and optimizers, durations and memory of {stages} stages"
            )
        if self.num_microbatches < 1:
            raise ValueError(f"expected at least one microbatch, got {self.num_microbatches}")
        if min(0, *self.optimizer_ns, *map(min, by_stage)) < 0:
            raise ValueError("durations and memory must not be negative")
        both = zip(self.held_after_forward, self.held_after_input, strict=True)
        if any(after_input > after_forward for after_forward, after_input in both):
            raise ValueError("an input half cannot leave more than its forward took")

    @property
    def num_each(self) -> int:
        """The number of microbatches that go through a stage."""
        return self.num_microbatches // self.placement.directions

    @property
    def optimizers(self) -> tuple[int, ...]:
        """How long each rank's optimizer takes, in nanoseconds."""
        return self.optimizer_ns or (0,) * self.placement.world_size

    @property
    def least_limits(self) -> tuple[int, ...]:
        """By rank, what one microbatch takes on all its stages: no program can do with less.

        A microbatch has gone forward through every stage of a rank before it comes back to any of
        them. And this is enough: the microbatches can go one after another. Of two directions each
        has its own, and the one that takes more counts.
        """
        depth, least = self.placement.depth, [0] * self.placement.world_size
        for first in self.placement.copies_of(0):
            taken = [0] * self.placement.world_size
            for stage in range(first, first + depth):
                taken[self.placement.ranks[stage]] += self.held_after_forward[stage]
            least = list(map(max, least, taken))
        return tuple(least)

    def check_limits(self) -> None:
        """Raise NoProgramError unless there is a program within the limits."""
        least = self.least_limits
        if any(limit < need for limit, need in zip(self.limits, least, strict=True)):
            raise NoProgramError(self.limits, least)


def counted(
    placement: Placement,
    num_microbatches: int,
    durations: Durations,
    limit: int,
    transfers: TransferModel = FREE_TRANSFERS,
) -> Problem:
    """The problem whose memory is counted in activations, each of one microbatch of a stage.

    An activation is held from its F to the end of its W, as `engine.plan.rules` counts.
    """
    one_each = (1,) * placement.num_stages
    limits = (limit,) * placement.world_size
    return Problem(placement, num_microbatches, durations, limits, one_each, one_each, transfers)
