"""Predicts what a program would do with given costs and transfers.

The spans are the same type that the executor measures, so that every figure can be computed for a
plan as for a run. The program is walked once and times are kept as arrays, spans being made only
when asked for.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import mul
from typing import NamedTuple

from engine.arrays import Ints
from engine.plan.action import OPS, Action, Op
from engine.plan.check import explain
from engine.plan.messages import outgoing
from engine.plan.program import Placement, Program
from engine.plan.replay import spans_of
from engine.plan.rules import check_facts
from engine.plan.spans import Span
from engine.plan.walk import Moving, Walk, of_kinds, walk_all


@dataclass(frozen=True)
class Durations:
    """Nanoseconds of one microbatch's forward and of the two halves of its backward, by stage.

    A whole backward takes `backward_ns`; without these, as long as its halves.
    """

    forward_ns: tuple[int, ...]
    input_ns: tuple[int, ...]
    weight_ns: tuple[int, ...]
    backward_ns: tuple[int, ...] | None = None

    @property
    def whole_ns(self) -> tuple[int, ...]:
        """How long a whole backward takes, by stage."""
        if self.backward_ns is not None:
            return self.backward_ns
        return tuple(i + w for i, w in zip(self.input_ns, self.weight_ns, strict=True))

    def by_op(self) -> dict[Op, tuple[int, ...]]:
        halves = {Op.I: self.input_ns, Op.W: self.weight_ns}
        return {Op.F: self.forward_ns, **halves, Op.B: self.whole_ns}

    def by_kind(self, num_stages: int) -> list[int]:
        """By op and stage, as `engine.plan.rules.Kinds`. Raises ValueError on other stages."""
        of_ops = {"forward": self.forward_ns, "input": self.input_ns, "weight": self.weight_ns}
        if self.backward_ns is not None:
            of_ops["backward"] = self.backward_ns
        if any(len(of_op) != num_stages for of_op in of_ops.values()):
            given = ", ".join(str(len(of_op)) for of_op in of_ops.values())
            raise ValueError(
                f"durations of {given} stages ({', '.join(of_ops)}) for a program of {num_stages}"
            )
        by_op, none = self.by_op(), (0,) * num_stages
        return [ns for op in OPS for ns in by_op.get(op, none)]


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
    """One step that starts at 0 ns: when each action starts and ends, in the table's order."""

    walk: Walk  # over its compute actions
    transfers: TransferModel
    took_ns: list[int]  # by kind of action

    @property
    def program(self) -> Program:
        return self.walk.program

    @property
    def starts_ns(self) -> Ints:
        return self.walk.starts_ns

    @property
    def ends_ns(self) -> Ints:
        return self.walk.ends_ns

    @cached_property
    def start_ns(self) -> list[list[int]]:
        """By rank and position."""
        return [list(self.starts_ns[begin:end]) for begin, end in self._rows]

    @cached_property
    def end_ns(self) -> list[list[int]]:
        """By rank and position."""
        return [list(self.ends_ns[begin:end]) for begin, end in self._rows]

    @property
    def _rows(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.program.table.offset))

    @property
    def makespan_ns(self) -> int:
        """The time from the first start to the last end of a compute action."""
        rows = [(begin, end) for begin, end in self._rows if end > begin]
        first = min((self.starts_ns[begin] for begin, _ in rows), default=0)
        return max((self.ends_ns[end - 1] for _, end in rows), default=0) - first

    @cached_property
    def compute_ns(self) -> int:
        """Summed over ranks."""
        return sum(map(mul, self.program.num_of_kind, self.took_ns))

    @property
    def bubble_fraction(self) -> float:
        """1 - compute / (ranks x makespan)."""
        capacity_ns = self.program.world_size * self.makespan_ns
        return (capacity_ns - self.compute_ns) / capacity_ns

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
        rows = [(begin, end) for begin, end in self._rows if end > begin]
        longest = max(self.ends_ns[end - 1] - self.starts_ns[begin] for begin, end in rows)
        capacity_ns = self.program.world_size * longest
        return (capacity_ns - self.compute_ns) / capacity_ns

    def held_over_time(self, rank: int) -> list[Held]:
        """Each change of what a rank holds: a forward adds one, its B or W takes it away again."""
        changes, held, begin = [], 0, self.program.table.offset[rank]
        for index, action in enumerate(self.program.table.part(rank), begin):
            if action.op is Op.F:
                held += 1
                changes.append(Held(self.starts_ns[index], held))
            elif action.op is not Op.I:
                held -= 1
                changes.append(Held(self.ends_ns[index], held))
        return changes

    def spans(self) -> Iterator[Span]:
        """Compute by rank, then both ends of each transfer, all of step 0."""
        duration_ns, num_bytes = self.transfers.duration_ns, self.transfers.message_bytes
        return spans_of(self.walk, transfer_ns=duration_ns, message_bytes=num_bytes)

    def messages(self) -> Iterator[tuple[Action, int, int]]:
        """Each SEND with the times between which its message moves, by sender in its order."""
        duration = self.transfers.duration_ns
        for index, start in enumerate(self.walk.moves_ns):
            if start >= 0:
                send = outgoing(self.program.table.at(index), self.program)
                assert send is not None
                yield send, start, start + duration


def simulate(
    program: Program,
    durations: Durations,
    transfers: TransferModel = FREE_TRANSFERS,
    *,
    has_why: bool = False,
) -> Simulation:
    """Run a program in time; transfers follow from the placement, whatever the program says.

    With `has_why` its critical path is known at once. Raises ProgramError if the program is
    illegal, as `engine.plan.check.check` does.
    """
    return next(simulate_all([(program, durations)], transfers, has_why=has_why))


def simulate_all(
    cases: Iterable[tuple[Program, Durations]],
    transfers: TransferModel = FREE_TRANSFERS,
    *,
    has_why: bool = False,
) -> Iterator[Simulation]:
    """Simulate programs, each with its durations: one with many, many with the same, or pairs.

    In the order given, on all cores where there is much to do. What is not kept of the simulations
    takes no memory. Raises ProgramError at an illegal program, as `engine.plan.check.check`.
    """
    pairs = list(cases)
    computes = {id(program): program.compute_only() for program, _ in pairs}
    for compute in computes.values():
        check_facts(compute)
    kinds = [durations.by_kind(program.num_stages) for program, durations in pairs]
    timed = [
        (computes[id(program)], [of_kinds(computes[id(program)], took)])
        for (program, _), took in zip(pairs, kinds, strict=True)
    ]
    moving = Moving(transfers.duration_ns, transfers.overlaps)
    for walked, took in zip(walk_all(timed, moving, has_why=has_why), kinds, strict=True):
        explain(walked)
        yield Simulation(walked, transfers, took)
