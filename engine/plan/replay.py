"""Runs D replicas of a lowered program in time, each with its own durations, joined at collectives.

`engine.plan.simulate` answers what a program would do if every stage had one cost; this answers
what it did, or would have done with some of its times changed: the question behind "where did the
idle time go". It keeps to what the executor does, as `engine.plan.walk` says. The step begins with
its first computation, or when the first UNSHARD is ready, if that is earlier. With one replica,
free transfers and one cost per stage and op the times are those of `simulate`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from engine.arrays import Ints
from engine.plan import kernels
from engine.plan.action import COMPUTE_OPS, JOINING_OPS, NO_INDEX, SEND_OPS, Action, Op
from engine.plan.messages import counterpart, outgoing
from engine.plan.program import Program
from engine.plan.spans import Lane, Span, lane_of
from engine.plan.walk import Walk, walk_all


@dataclass(frozen=True)
class Replay:
    """One step that starts at 0 ns, of all replicas."""

    walk: Walk
    took_ns: tuple[Ints, ...]
    """How long each action took, by replica and in the order of the table."""

    @property
    def program(self) -> Program:
        return self.walk.program

    @cached_property
    def makespan_ns(self) -> int:
        """From its first computation or gather to its last one's or collective's end."""
        walked, table = self.walk, self.program.table
        begun = list[int]()
        for begin, end in itertools.pairwise(table.offset):
            computed = (at for at in range(begin, end) if table.op[at] <= kernels.W)
            for at in itertools.islice(computed, 1):
                begun += walked.starts_ns[at :: table.num_actions]
        if self.program.has_collectives:
            for at in range(table.num_actions):
                if table.op[at] == kernels.UNSHARD:
                    begun += walked.moves_ns[at :: table.num_actions]
        end = max(walked.step_ends_ns)
        if self.program.has_collectives:
            end = max(end, *walked.ends_ns)
        return end - min(begun, default=0)

    @cached_property
    def compute_ns(self) -> list[list[int]]:
        """Time in computation, by replica and rank."""
        return computing_ns(self.program, self.took_ns)

    def idle_ns(self) -> list[list[int]]:
        """Return the part of the makespan without computation, by replica and rank."""
        return [[self.makespan_ns - busy for busy in ranks] for ranks in self.compute_ns]

    @property
    def bubble_fraction(self) -> float:
        """1 - compute / (replicas x ranks x makespan)."""
        return sum(map(sum, self.idle_ns())) / (self._num_ranks * self.makespan_ns)

    @property
    def bubble_idle_over_ideal(self) -> float:
        """Idle time over compute time."""
        return sum(map(sum, self.idle_ns())) / sum(map(sum, self.compute_ns))

    @property
    def bubble_max_stage_span(self) -> float:
        """1 - (compute per rank) / (the longest time that a rank takes from its start to its end).

        As of `engine.plan.simulate`; a rank ends when its last collective is over.
        """
        first, last = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
        for span in self.spans():
            if span.lane in (Lane.COMPUTE, Lane.COLLECTIVE):
                worker = span.replica, span.rank
                last[worker] = max(last.get(worker, 0), span.end_ns)
                if span.lane is Lane.COMPUTE:
                    first[worker] = min(first.get(worker, span.start_ns), span.start_ns)
        capacity_ns = self._num_ranks * max(last[worker] - start for worker, start in first.items())
        return (capacity_ns - sum(map(sum, self.compute_ns))) / capacity_ns

    @property
    def _num_ranks(self) -> int:
        return self.walk.replicas * self.program.world_size

    def spans(self, message_bytes: int = 0) -> Iterator[Span]:
        """Computations, both ends of each message and collectives, by replica, all of step 0."""
        return spans_of(self.walk, message_bytes=message_bytes)


def spans_of(
    walked: Walk, step: int = 0, *, transfer_ns: int = 0, message_bytes: int = 0
) -> Iterator[Span]:
    """A step's computations and optimizers, both ends of each message, collectives, by replica.

    A collective lasts from when its lane begins it. Where messages follow from the placement, each
    takes `transfer_ns`. The spans are of step 0.
    """
    program = walked.program
    ranks, of_walk = program.placement.ranks, (walked.starts_ns, walked.ends_ns, walked.moves_ns)
    actions = [(rank, action) for rank, row in enumerate(program.actions) for action in row]
    for replica in range(walked.replicas):
        times = (walked.of_step(each, replica, step) for each in of_walk)
        sent, joined = list[tuple[Action, int, int]](), list[Span]()
        for (rank, action), start, end, moves in zip(actions, *times, strict=True):
            stage, op, m = action
            if op in COMPUTE_OPS or (op is Op.OPT and end > start):
                yield Span(0, rank, Lane.COMPUTE, stage, op, m, start, end, 0, replica)
                if not program.has_transfers and moves >= 0 and (send := outgoing(action, program)):
                    sent.append((send, moves, moves + transfer_ns))
            elif op in SEND_OPS:
                sent.append((action, start, end))
            elif op in JOINING_OPS:
                joined.append(
                    Span(0, rank, Lane.COLLECTIVE, stage, op, NO_INDEX, start, end, 0, replica)
                )
        for send, start, end in sent:
            for stage, op, m in (send, counterpart(send)):
                at = 0, ranks[stage], lane_of(op), stage, op, m
                yield Span(*at, start, end, message_bytes, replica)
        yield from joined


def computing_ns(program: Program, took_ns: Sequence[Ints]) -> list[list[int]]:
    """Nanoseconds in computation, by replica and rank, of the times of each action by replica."""
    table = program.table
    is_compute = [code <= kernels.W for code in table.op]
    rows = [slice(*ends) for ends in itertools.pairwise(table.offset)]
    return [
        [sum(itertools.compress(took[row], is_compute[row])) for row in rows] for took in took_ns
    ]


def replay(lowered: Program, took_ns: Sequence[Ints]) -> Replay:
    """Run replicas of a program that has its transfers, and that `lower` has proved."""
    return next(replay_all(lowered, [took_ns]))


def replay_all(lowered: Program, many: Sequence[Sequence[Ints]]) -> Iterator[Replay]:
    """Run a program as `replay` does, with each of some times of its replicas.

    Times are by replica, of each action in the order of the table: of a message at its SEND, of a
    collective those for which it moves bytes. On all cores where there is much to do. Raises
    ProgramError where a stage is not on its rank, ValueError where times are missing.
    """
    for took, walked in zip(many, walk_all((lowered, one) for one in many), strict=True):
        assert walked.is_over, "a program that hangs passed the proof"
        yield Replay(walked, tuple(took))
