"""Runs a lowered program in time with a duration for every single action and message.

`engine.plan.simulate` answers what a program would do if every stage had one cost; this answers
what it did, or would have done with some of its times changed: the question behind "where did the
idle time go". It keeps to what the executor does. A rank does one computation at a time in the
order of its row; SEND and RECV only stand in line. A message moves once both ends are ready and the
message before it has left their channel:

    rank 0   F0 |SEND0  F1
    rank 1      |RECV0  ...............  F0
                        ^ moving: from the later of the two, for as long as it is given

With free transfers and one cost per stage and op the times are those of `simulate`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from engine.arrays import Ints, filled, run, run_all
from engine.plan import kernels
from engine.plan.action import COMPUTE_OPS, SEND_OPS, Action, Op
from engine.plan.lower import counterpart
from engine.plan.program import Program
from engine.plan.rules import columns_of, kinds_of, num_links
from engine.plan.spans import Span, lane_of

Times = dict[Action, tuple[int, int]]
"""By action, its start and end in nanoseconds."""


@dataclass(frozen=True)
class Replay:
    """One step that starts at 0 ns, in the order of the program's table.

    A transfer's times are those between which its message moves.
    """

    program: Program  # lowered
    starts_ns: Ints
    ends_ns: Ints

    @cached_property
    def _summary(self) -> tuple[int, array[int]]:
        table, busy = self.program.table, filled(0, self.program.world_size)
        arguments = table.offset, table.op, self.starts_ns, self.ends_ns, busy
        return run(table.num_actions, kernels.find_makespan, *arguments), busy

    @property
    def makespan_ns(self) -> int:
        """The time from the first start to the last end of a computation."""
        return self._summary[0]

    def compute_ns(self) -> list[int]:
        """Time in computation, by rank."""
        return self._summary[1].tolist()

    def idle_ns(self) -> list[int]:
        """Return the part of the makespan without computation, by rank."""
        return [self.makespan_ns - compute_ns for compute_ns in self.compute_ns()]

    @property
    def compute(self) -> Times:
        """The times are those of each computation."""
        return self._times(COMPUTE_OPS)

    @property
    def messages(self) -> Times:
        """By SEND: from when the bytes move until they are there."""
        return self._times(SEND_OPS)

    def _times(self, ops: frozenset[Op]) -> Times:
        actions = (action for row in self.program.actions for action in row)
        times = zip(actions, zip(self.starts_ns, self.ends_ns, strict=True), strict=True)
        return {action: both for action, both in times if action.op in ops}

    def spans(self) -> Iterator[Span]:
        """Computations and both ends of each message, all of step 0."""
        for action, (start, end) in self.compute.items():
            yield self._span(action, start, end)
        for send, (start, end) in self.messages.items():
            yield self._span(send, start, end)
            yield self._span(counterpart(send), start, end)

    def _span(self, action: Action, start_ns: int, end_ns: int) -> Span:
        stage, op, microbatch = action
        rank = self.program.placement.ranks[stage]
        return Span(0, rank, lane_of(op), stage, op, microbatch, start_ns, end_ns, 0)


def replay(
    lowered: Program, compute_ns: Mapping[Action, int], moving_ns: Mapping[Action, int]
) -> Replay:
    """Run a program that has its transfers, and that `lower` has proved.

    `compute_ns` holds every F, B, I and W of it; `moving_ns`, by SEND, how long a message's bytes
    move, nothing where it is not given.
    """
    actions = (action for row in lowered.actions for action in row)
    took = (compute_ns[a] if a.op in COMPUTE_OPS else moving_ns.get(a, 0) for a in actions)
    return next(replay_all(lowered, [array("q", took)]))


def of_kinds(program: Program, took: Ints) -> array[int]:
    """The nanoseconds of each action, in the order of the table, where all of a kind take as long.

    `took` is by op and stage, as `engine.plan.rules.Kinds`; a SEND's is its message's.
    """
    pairs = zip(program.table.op, program.table.stage, strict=True)
    return array("q", (took[op * program.num_stages + stage] for op, stage in pairs))


def replay_all(lowered: Program, times: Sequence[Ints]) -> Iterator[Replay]:
    """Run a program as `replay` does, once with each of some nanoseconds of its actions.

    These are in the order of the table, a message's at its SEND. On all cores where there is much
    to do. Raises ProgramError where a stage is not on its rank, ValueError where there are not as
    many times as actions.
    """
    arrays, width = columns_of(lowered, is_proved=True)
    if any(len(took) != lowered.table.num_actions for took in times):
        raise ValueError(f"expected the times of {lowered.table.num_actions} actions")
    num_actions, kinds = lowered.table.num_actions, kinds_of(lowered.placement, width)
    num_ranks, links = len(lowered.table), num_links(lowered)

    def call(took: Ints) -> tuple[Any, ...]:
        blocked, stack = filled(kernels.NONE, num_ranks), array("q", range(num_ranks))
        walk = lowered.table.offset[:-1], filled(0, num_ranks), blocked, stack, filled(0, links)
        message = filled(kernels.NONE, links * width), filled(kernels.NONE, links * width)
        return arrays, kinds, took, walk, message, *(filled(0, num_actions) for _ in "se")

    for *_, (position, *_), _, starts, ends in run_all(
        num_actions * len(times), kernels.replay, map(call, times)
    ):
        assert position == lowered.table.offset[1:], "a program that hangs passed the proof"
        yield Replay(lowered, starts, ends)
