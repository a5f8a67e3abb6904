"""Runs D replicas of a lowered program in time, each with its own durations, joined at collectives.

`engine.plan.simulate` answers what a program would do if every stage had one cost; this answers
what it did, or would have done with some of its times changed: the question behind "where did the
idle time go". It keeps to what the executor does. A rank does one computation at a time in the
order of its row; SEND and RECV only stand in line. A message moves once both ends are ready and the
message before it has left their channel:

    rank 0   F0 |SEND0  F1
    rank 1      |RECV0  ...............  F0
                        ^ moving: from the later of the two, for as long as it is given

Rank r of every replica has one lane, on which its UNSHARDs and REDUCE_GRADs are done in the order
of its row. One is issued when the row comes to it, which blocks nothing; it begins when those
before it on the lane are done, is ready when it has begun on all replicas, and then moves bytes for
as long as each replica is given:

    replica 0   0B1 |REDUCE_GRAD ......======|
    replica 1   0B1 ........... |REDUCE_GRAD ======|
                    ^ begins     ^ ready           ^ ends

A computation waits for the latest UNSHARD of its stage before it in its row, and the optimizer for
everything; RESHARD takes no time. The step begins with its first computation, or when the first
UNSHARD is ready, if that is earlier. With one replica, free transfers and one cost per stage and op
the times are those of `simulate`.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from engine.arrays import Arrays, Ints, filled, listed, maker, run_all
from engine.plan import kernels
from engine.plan.action import COMPUTE_OPS, NO_INDEX, SEND_OPS, Action, Op
from engine.plan.lower import counterpart
from engine.plan.program import Program
from engine.plan.rules import columns_of, kinds_of, num_links
from engine.plan.spans import Lane, Span, lane_of

JOINING_OPS = (Op.UNSHARD, Op.REDUCE_GRAD)
"""The collectives in which replicas wait for each other."""


class ReplicaTimes(NamedTuple):
    """The nanoseconds of one replica's step."""

    took: Sequence[int]  # of each action in the order of the table; a message's at its SEND
    collectives: Sequence[int] = ()  # that each of `joining(program)` moves bytes, rank after rank


def joining(program: Program) -> tuple[tuple[Action, ...], ...]:
    """By rank, what it puts on its lane: its UNSHARDs and REDUCE_GRADs in the order of its row."""
    by_rank = program.table.collectives or ((),) * program.world_size
    return tuple(tuple(a for _, a in placed if a.op in JOINING_OPS) for placed in by_rank)


def of_kinds(program: Program, took: Sequence[int]) -> array[int]:
    """The nanoseconds of each action, in the order of the table, where all of a kind take as long.

    `took` is by op and stage, as `engine.plan.rules.Kinds`; a SEND's is its message's.
    """
    pairs = zip(program.table.op, program.table.stage, strict=True)
    return array("q", (took[op * program.num_stages + stage] for op, stage in pairs))


@dataclass(frozen=True)
class Replay:
    """One step that starts at 0 ns. What is by replica is in the order of `ReplicaTimes`.

    Times are in the order of the program's table; a transfer's are those between which its message
    moves.
    """

    program: Program  # lowered
    makespan_ns: int  # from its first computation or gather to its last one's or collective's end
    starts_ns: tuple[Ints, ...]
    ends_ns: tuple[Ints, ...]
    collective_starts_ns: tuple[Ints, ...]
    collective_ready_ns: tuple[Ints, ...]
    collective_ends_ns: tuple[Ints, ...]
    took_ns: tuple[Ints, ...]

    @cached_property
    def compute_ns(self) -> list[list[int]]:
        """Time in computation, by replica and rank."""
        table = self.program.table
        is_compute = [code <= kernels.W for code in table.op]
        rows = [slice(*ends) for ends in itertools.pairwise(table.offset)]
        return [
            [sum(itertools.compress(took[row], is_compute[row])) for row in rows]
            for took in self.took_ns
        ]

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
        return len(self.starts_ns) * self.program.world_size

    def spans(self, message_bytes: int = 0) -> Iterator[Span]:
        """Computations, both ends of each message and collectives, by replica, all of step 0.

        A collective lasts from when its lane begins it.
        """
        ranks = self.program.placement.ranks
        actions = [action for row in self.program.actions for action in row]
        lanes = [
            (rank, action) for rank, lane in enumerate(joining(self.program)) for action in lane
        ]
        for replica, times in enumerate(zip(self.starts_ns, self.ends_ns, strict=True)):
            for action, start, end in zip(actions, *times, strict=True):
                if action.op in COMPUTE_OPS:
                    stage, op, microbatch = action
                    yield Span(
                        0, ranks[stage], Lane.COMPUTE, stage, op, microbatch, start, end, 0, replica
                    )
                for stage, op, m in (action, counterpart(action)) if action.op in SEND_OPS else ():
                    lane, rank = lane_of(op), ranks[stage]
                    yield Span(0, rank, lane, stage, op, m, start, end, message_bytes, replica)
            joined = self.collective_starts_ns[replica], self.collective_ends_ns[replica]
            for (rank, (stage, op, _)), start, end in zip(lanes, *joined, strict=True):
                yield Span(0, rank, Lane.COLLECTIVE, stage, op, NO_INDEX, start, end, 0, replica)


def replay(lowered: Program, times: Sequence[ReplicaTimes]) -> Replay:
    """Run replicas of a program that has its transfers, and that `lower` has proved."""
    return next(replay_all(lowered, [times]))


def replay_all(lowered: Program, many: Sequence[Sequence[ReplicaTimes]]) -> Iterator[Replay]:
    """Run a program as `replay` does, with each of some times of its replicas.

    On all cores where there is much to do. Raises ProgramError where a stage is not on its rank,
    ValueError where times are missing or there are too many.
    """
    arrays, width = columns_of(lowered, is_proved=True)
    table: tuple[Any, ...] = arrays
    lanes: tuple[Any, ...] = _lanes(lowered)
    lengths = lowered.table.num_actions, len(lanes[1])
    if not all(many) or any(tuple(map(len, one)) != lengths for times in many for one in times):
        text = "expected of each replica the times of {} actions and {} collectives"
        raise ValueError(text.format(*lengths))
    num_actions = lengths[0] * sum(map(len, many))
    made_by = maker(num_actions)
    if made_by is listed:
        table, lanes = tuple(map(list, table)), tuple(map(list, lanes))
    kinds = kinds_of(lowered.placement, width, made_by)
    offset, codes = lowered.table.offset, lowered.table.op
    firsts = [
        next(places, None)
        for begin, end in itertools.pairwise(offset)
        for places in [(at for at in range(begin, end) if codes[at] <= kernels.W)]
    ]
    joined = itertools.chain.from_iterable(joining(lowered))
    gathers = [at for at, action in enumerate(joined) if action.op is Op.UNSHARD]

    def call(given: Sequence[ReplicaTimes]) -> tuple[Any, ...]:
        size, walkers = len(given), len(given) * lowered.world_size
        took, moving, stack = made_by(0, 0), made_by(0, 0), made_by(0, walkers)
        for one in given:
            took.extend(one.took)
            moving.extend(one.collectives)
        for walker in range(walkers):
            stack[~walker] = walker  # from the first on
        links = size * num_links(lowered)
        now, blocked = made_by(0, walkers), made_by(kernels.NONE, walkers)
        turn, channel_free = lanes[0][:-1] * size, made_by(0, links)
        walk = table[0][:-1] * size, now, blocked, turn, stack, channel_free
        message = tuple(made_by(kernels.NONE, links * width) for _ in "pa")
        times = took, moving, *(made_by(0, size * lengths[0]) for _ in "se")
        meetings = (made_by(kernels.NONE, size * lengths[1]) for _ in "bro")
        return table, kinds, lanes, times, walk, message, (made_by(0, lengths[1]), *meetings)

    for *_, (took, _, *spans), (position, now, *_), _, (_, *meeting) in run_all(
        num_actions, kernels.replay, map(call, many)
    ):
        size = len(now) // lowered.world_size
        assert position == table[0][1:] * size, "a program that hangs passed the proof"
        by_replica = [
            tuple(
                values[d * len(values) // size : (d + 1) * len(values) // size] for d in range(size)
            )
            for values in (*spans, *meeting, took)
        ]
        begun = [starts[at] for starts in by_replica[0] for at in firsts if at is not None]
        begun += [ready[at] for ready in by_replica[3] for at in gathers]
        end = max(*now, max(meeting[-1], default=0))
        yield Replay(lowered, end - min(begun, default=0), *by_replica)


def _lanes(lowered: Program) -> Arrays:
    """The first collective of each rank, what each stands before, and which each action awaits."""
    first, before = array("q", [0]), array("q")
    awaits = filled(kernels.NONE, lowered.table.num_actions)
    for rank, row in enumerate(lowered.rows if lowered.has_collectives else ()):
        at = lowered.table.offset[rank]
        unshards: dict[int, int] = {}
        for action in row:
            if action.op in JOINING_OPS:
                if action.op is Op.UNSHARD:
                    unshards[action.stage] = len(before)
                before.append(at)
            elif action.op is not Op.RESHARD:
                if action.op in COMPUTE_OPS:
                    awaits[at] = unshards.get(action.stage, kernels.NONE)
                at += 1
        first.append(len(before))
    return (first if lowered.has_collectives else filled(0, lowered.world_size + 1)), before, awaits
