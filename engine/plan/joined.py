"""Runs D replicas of a lowered program in time, each with its own durations, joined at collectives.

As `engine.plan.replay` runs one. Rank r of every replica has one lane, on which its UNSHARDs and
REDUCE_GRADs are done in the order of its row. One is issued when the row comes to it, which blocks
nothing; it begins when those before it on the lane are done, is ready when it has begun on all
replicas, and then moves bytes for as long as each replica is given:

    replica 0   0B1 |REDUCE_GRAD ......======|
    replica 1   0B1 ........... |REDUCE_GRAD ======|
                    ^ begins     ^ ready           ^ ends

A computation waits for the latest UNSHARD of its stage before it in its row, and the optimizer for
everything; RESHARD takes no time. The step begins with its first computation, or when the first
UNSHARD is ready, if that is earlier. One replica without collectives is a `replay`.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from engine.arrays import Arrays, Ints, Maker, filled, listed, maker, run_all
from engine.plan import kernels
from engine.plan.action import COMPUTE_OPS, Action, Op
from engine.plan.joined_kernel import replay_joined as kernel
from engine.plan.program import Program
from engine.plan.rules import columns_of, kinds_of, num_links

JOINING_OPS = (Op.UNSHARD, Op.REDUCE_GRAD)
"""The collectives in which replicas wait for each other."""


class ReplicaTimes(NamedTuple):
    """The nanoseconds of one replica's step."""

    took: Ints  # of each action in the order of the table; a message's at its SEND
    collectives: Ints  # that each of `joining(program)` moves bytes, rank after rank


def joining(program: Program) -> tuple[tuple[Action, ...], ...]:
    """By rank, what it puts on its lane: its UNSHARDs and REDUCE_GRADs in the order of its row."""
    return tuple(tuple(a for a in row if a.op in JOINING_OPS) for row in program.rows)


@dataclass(frozen=True)
class JoinedReplay:
    """One step that starts at 0 ns. What is by replica is in the order of `ReplicaTimes`."""

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


def replay_joined(lowered: Program, times: Sequence[ReplicaTimes]) -> JoinedReplay:
    """Run replicas of a program that has its transfers, and that `lower` has proved."""
    return next(replay_joined_all(lowered, [times]))


def replay_joined_all(
    lowered: Program, many: Sequence[Sequence[ReplicaTimes]]
) -> Iterator[JoinedReplay]:
    """Run a program as `replay_joined` does, with each of some times of its replicas.

    On all cores where there is much to do. Raises ProgramError where a stage is not on its rank,
    ValueError where times are missing or there are too many.
    """
    lengths = lowered.table.num_actions, sum(map(len, joining(lowered)))
    if not all(many) or any(tuple(map(len, one)) != lengths for times in many for one in times):
        text = "expected of each replica the times of {} actions and {} collectives"
        raise ValueError(text.format(*lengths))
    size = lengths[0] * sum(map(len, many))
    walks = _Walks(lowered, maker(size))
    for arguments in run_all(size, kernel, map(walks.call, many)):
        yield walks.result(arguments)


class _Walks:
    """Walks over one program, whatever its times."""

    def __init__(self, lowered: Program, made_by: Maker) -> None:
        self._lowered, self._made_by = lowered, made_by
        table, width = columns_of(lowered, is_proved=True)
        fixed: list[tuple[Any, ...]] = [table, _lanes(lowered)]
        if made_by is listed:
            fixed = [tuple(map(list, arrays)) for arrays in fixed]
        self._table, self._lanes = fixed
        self._kinds = kinds_of(lowered.placement, width, made_by)
        self._num_links, self._width = num_links(lowered), width
        codes = [table[1][begin:end] for begin, end in itertools.pairwise(table[0])]
        computing = ((at for at, code in enumerate(row) if code <= kernels.W) for row in codes)
        firsts = [next(places, None) for places in computing]
        self._firsts = [b + at for b, at in zip(table[0], firsts, strict=False) if at is not None]
        joined = itertools.chain.from_iterable(joining(lowered))
        self._gathers = [at for at, action in enumerate(joined) if action.op is Op.UNSHARD]

    def call(self, given: Sequence[ReplicaTimes]) -> tuple[Any, ...]:
        """The arguments of the kernel for one step."""
        made_by, size, walkers = self._made_by, len(given), len(given) * self._lowered.world_size
        (offset, op, *_), (first, before, _) = self._table, self._lanes
        took, moving, stack = made_by(0, 0), made_by(0, 0), made_by(0, walkers)
        for one in given:
            took.extend(one.took)
            moving.extend(one.collectives)
        for walker in range(walkers):
            stack[~walker] = walker  # from the first on
        links = size * self._num_links
        now, blocked = made_by(0, walkers), made_by(kernels.NONE, walkers)
        turn, channel_free = first[:-1] * size, made_by(0, links)
        walk = offset[:-1] * size, now, blocked, turn, stack, channel_free
        message = tuple(made_by(kernels.NONE, links * self._width) for _ in "pa")
        times = took, moving, *(made_by(0, size * len(op)) for _ in "se")
        meeting = (
            made_by(0, len(before)),
            *(made_by(kernels.NONE, size * len(before)) for _ in "bro"),
        )
        return self._table, self._kinds, self._lanes, times, walk, message, meeting

    def result(self, arguments: tuple[Any, ...]) -> JoinedReplay:
        """The step that a call has filled in."""
        *_, (took, _, *spans), (position, now, *_), _, (_, *meeting) = arguments
        size = len(now) // self._lowered.world_size
        assert position == self._table[0][1:] * size, "a program that hangs passed the proof"
        by_replica = [_by_replica(values, size) for values in (*spans, *meeting, took)]
        begun = [starts[at] for starts in by_replica[0] for at in self._firsts]
        begun += [ready[at] for ready in by_replica[3] for at in self._gathers]
        begin = min(begun, default=0)
        last, done = max(now), max(meeting[-1], default=0)
        return JoinedReplay(self._lowered, max(last, done) - begin, *by_replica)


def _by_replica(values: Ints, num_replicas: int) -> tuple[Ints, ...]:
    each = len(values) // num_replicas
    return tuple(values[d * each : (d + 1) * each] for d in range(num_replicas))


def _lanes(lowered: Program) -> Arrays:
    """The first collective of each rank, what each stands before, and which each action awaits."""
    first, before = array("q", [0]), array("q")
    awaits = filled(kernels.NONE, lowered.table.num_actions)
    for rank, row in enumerate(lowered.rows):
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
    return first, before, awaits
