"""Predicts what a program would do with given costs and transfers.

The spans are the same type that the executor measures, so that every figure can be computed for a
plan as for a run. The program is walked once and times are kept as plain lists, spans being made
only when asked for: a plan of a million actions takes seconds, and time grows with its length.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from engine.plan.action import Action, Op
from engine.plan.lower import edge_of, outgoing
from engine.plan.program import Placement, Program
from engine.plan.rules import play, steps_of
from engine.plan.spans import Lane, Span


@dataclass(frozen=True)
class Durations:
    """Nanoseconds of one microbatch's forward and of the two halves of its backward, by stage.

    A full backward takes as long as its halves.
    """

    forward_ns: tuple[int, ...]
    input_ns: tuple[int, ...]
    weight_ns: tuple[int, ...]

    def by_op(self) -> dict[Op, tuple[int, ...]]:
        both = tuple(i + w for i, w in zip(self.input_ns, self.weight_ns, strict=True))
        return {Op.F: self.forward_ns, Op.I: self.input_ns, Op.W: self.weight_ns, Op.B: both}


def uniform(placement: Placement, forward_ns: int, input_ns: int, weight_ns: int) -> Durations:
    """Equal stages. The times are those of a rank's whole share; a stage of v takes 1/v of them.

    Whole nanoseconds: where v does not divide a time, it is rounded.
    """
    num_stages = placement.num_stages
    f, i, w = (
        (round(time * placement.world_size / num_stages),) * num_stages
        for time in (forward_ns, input_ns, weight_ns)
    )
    return Durations(f, i, w)


@dataclass(frozen=True)
class TransferModel:
    """A message takes `latency_ns` plus its bytes over `bytes_per_s`; one at a time per channel.

    Where transfers do not overlap compute, the sender computes nothing until its message is over.
    """

    latency_ns: int = 0
    bytes_per_s: float = float("inf")
    message_bytes: int = 0
    overlaps: bool = True

    @property
    def duration_ns(self) -> int:
        return self.latency_ns + round(self.message_bytes / self.bytes_per_s * 1e9)


FREE_TRANSFERS = TransferModel()


class Held(NamedTuple):
    """From `time_ns` on a rank holds `num_held` activations, each of one microbatch of a stage."""

    time_ns: int
    num_held: int


@dataclass(frozen=True)
class Simulation:
    """One step that starts at 0 ns: when each action starts and ends, by rank and position."""

    program: Program  # its compute actions
    transfers: TransferModel
    start_ns: list[list[int]]
    end_ns: list[list[int]]

    @property
    def makespan_ns(self) -> int:
        """The time from the first start to the last end of a compute action."""
        first = min((starts[0] for starts in self.start_ns if starts), default=0)
        return max((ends[-1] for ends in self.end_ns if ends), default=0) - first

    @property
    def compute_ns(self) -> int:
        """Summed over ranks."""
        return sum(map(sum, self.end_ns)) - sum(map(sum, self.start_ns))

    @property
    def bubble_fraction(self) -> float:
        """1 - compute / (ranks x makespan)."""
        return _idle_share(self.program.world_size * self.makespan_ns, self.compute_ns)

    @property
    def bubble_idle_over_ideal(self) -> float:
        """Idle time over compute time."""
        compute_ns = self.compute_ns
        return (self.program.world_size * self.makespan_ns - compute_ns) / compute_ns

    @property
    def bubble_max_stage_span(self) -> float:
        """1 - (compute per rank) / (the longest time that a rank takes from its start to its end).

        What remains idle if every rank may begin the next step when it is done with this one.
        """
        spans = zip(self.start_ns, self.end_ns, strict=True)
        longest = max(ends[-1] - starts[0] for starts, ends in spans if starts)
        return _idle_share(self.program.world_size * longest, self.compute_ns)

    def held_over_time(self, rank: int) -> list[Held]:
        """Each change of what a rank holds: a forward adds one, its B or W takes it away again."""
        changes, held = [], 0
        for position, action in enumerate(self.program.actions[rank]):
            if action.op is Op.F:
                held += 1
                changes.append(Held(self.start_ns[rank][position], held))
            elif action.op is not Op.I:
                held -= 1
                changes.append(Held(self.end_ns[rank][position], held))
        return changes

    def spans(self) -> Iterator[Span]:
        """Compute by rank, then both ends of each transfer, all of step 0."""
        for rank, row in enumerate(self.program.actions):
            times = zip(row, self.start_ns[rank], self.end_ns[rank], strict=True)
            for (stage, op, microbatch), start, end in times:
                yield Span(0, rank, Lane.COMPUTE, stage, op, microbatch, start, end, 0)
        ranks, num_bytes = self.program.placement.ranks, self.transfers.message_bytes
        for send, start, end in self.messages():
            channel = edge_of(send)
            receive = Op.RECV_F if send.op is Op.SEND_F else Op.RECV_B
            ends = (
                (channel.source, Lane.SEND, send.op),
                (channel.target, Lane.RECV, receive),
            )
            for stage, lane, op in ends:
                yield Span(0, ranks[stage], lane, stage, op, send.microbatch, start, end, num_bytes)

    def messages(self) -> Iterator[tuple[Action, int, int]]:
        """Each SEND with the times between which its message moves, by sender in its order."""
        duration, placement = self.transfers.duration_ns, self.program.placement
        sends = {
            (op, stage): send
            for op in (Op.F, Op.B, Op.I)
            for stage in range(placement.num_stages)
            if (send := outgoing(Action(stage, op, 0), self.program)) is not None
        }
        for row, ends in zip(self.program.actions, self.end_ns, strict=True):
            free: dict[tuple[int, Op], int] = {}  # by stage and direction: one channel each
            for (stage, op, microbatch), end in zip(row, ends, strict=True):
                if (send := sends.get((op, stage))) is not None:
                    start = max(end, free.get(send[:2], 0))
                    free[send[:2]] = start + duration
                    yield send._replace(microbatch=microbatch), start, start + duration


def _idle_share(capacity_ns: int, compute_ns: int) -> float:
    """In whole numbers up to the division, which alone is rounded."""
    return (capacity_ns - compute_ns) / capacity_ns


def simulate(
    program: Program, durations: Durations, transfers: TransferModel = FREE_TRANSFERS
) -> Simulation:
    """Run a legal program in time; transfers follow from the placement, whatever the program says.

    Raises ProgramError if the program can never finish.
    """
    compute = program.compute_only()
    steps = steps_of(compute, durations.by_op(), _crossing_links(compute.placement))
    times = play(compute, steps, transfers.duration_ns, overlaps=transfers.overlaps)
    return Simulation(compute, transfers, *times)


def _crossing_links(placement: Placement) -> frozenset[int]:
    """The links whose maker and user are on different ranks."""
    way = [*placement.ranks, *reversed(placement.ranks)]  # of the stage that needs each link
    pairs = enumerate(itertools.pairwise(way), start=1)
    return frozenset(link for link, (here, there) in pairs if here != there)


def peak_activations(program: Program) -> list[int]:
    """Return the most activations that each rank holds at once, each of a stage's microbatch.

    A forward adds one; the action that makes W true (B or W) releases it.
    """
    peaks = []
    for row in program.actions:
        held = peak = 0
        for _, op, _ in row:
            if op is Op.F:
                held += 1
                peak = max(peak, held)
            elif op is Op.B or op is Op.W:
                held -= 1
        peaks.append(peak)
    return peaks
