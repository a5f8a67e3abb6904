"""The walk over a program: when each action starts and ends, why, and where a rank is stuck.

A program is rows of actions. An action computes, or is one end of a meeting: a message has two
ends, a collective one on each of D replicas, the norm of all gradients one on every rank. A meeting
is over when all its ends are there; who waits for that goes on then.

    rank 0   F0 |SEND0  F1
    rank 1      |RECV0  ...............  F0
                        ^ moving: from the later of the two, for as long as it is given

A rank does one computation at a time in the order of its row; its SENDs, RECVs, UNSHARDs and
REDUCE_GRADs only stand in line. A message moves once both ends are ready, are the first of their
lines, and the message before it has left their channel. In a program without transfers, a message
moves as soon as it is made and its channel is free.

Rank r of every replica has one lane, on which its UNSHARDs and REDUCE_GRADs are done in the order
of its row. One begins when those before it on the lane are done, is ready when it has begun on all
replicas, and then moves bytes for as long as each replica is given:

    replica 0   0B1 |REDUCE_GRAD ......======|
    replica 1   0B1 ........... |REDUCE_GRAD ======|
                    ^ begins     ^ ready           ^ ends

Where one replica has each stage on two ranks, a REDUCE_GRAD joins these two instead.

A computation waits for the latest UNSHARD of its stage before it in its row, OPT and NORM for all
collectives before them; RESHARD takes no time. All ranks of all replicas are needed for a NORM, and
each waits for it.

A pair, a forward that is one with the backward behind it, starts when both have their input. Its
two halves share its time, and both messages are made when it is over.

A training is steps in a row, each rank beginning the next one when its own is done. Nothing else
keeps steps apart. Every action takes as long in each of them, or has a time of its own in each.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from typing import NamedTuple

from engine.arrays import Arrays, Ints, Maker, filled, largest, listed, maker, packed, run, run_all
from engine.plan import kernels
from engine.plan.action import CODES, OPS, RECV_OPS, SEND_OPS, Action
from engine.plan.kernels import NONE
from engine.plan.messages import counterpart, crossing, edge_of
from engine.plan.program import Placement, Program
from engine.plan.rules import columns_of, kinds_of, num_links

MOST_NS = 2**63 - 1


class Sharing(StrEnum):
    """Which transfers share one in-order channel, and so have to be posted in one order."""

    STAGE_EDGE = "stage_edge"  # each directed edge between two stages has its own: the engine
    RANK_EDGE = "rank_edge"  # each direction between two ranks
    RANK = "rank"  # everything that a rank sends and receives


LineName = tuple[int, ...]
"""Names a channel's line at one rank: the transfers that must complete in the order posted."""


def line_of(placement: Placement, sharing: Sharing, transfer: Action) -> LineName:
    """The name of the line that a transfer stands in at its rank."""
    rank, channel = placement.ranks[transfer.stage], edge_of(transfer)
    source, target = (placement.ranks[stage] for stage in channel)
    match sharing:
        case Sharing.STAGE_EDGE:
            return (rank, *channel)
        case Sharing.RANK_EDGE:
            return (rank, source, target)
        case Sharing.RANK:
            return (rank,)


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


@dataclass(frozen=True)
class Walk:
    """How far a walk came, and when; times are by replica, step and action of the table."""

    program: Program
    steps: int
    replicas: int
    starts_ns: Ints
    ends_ns: Ints
    moves_ns: Ints
    """When what an action lets move begins to: its message, or its collective's bytes; or NONE."""
    why: Arrays
    """It says what ended for each action to start, and its message to move (`walk_back`)."""
    positions: Ints
    """By replica and rank, the index of the action before which it stands."""
    step_ends_ns: Ints
    """By replica, rank and step, when all of it was done."""
    misdelivered: int
    """The index of a RECV that would get another microbatch's message, or NONE."""
    heads: Ints
    """By line, the transfer that is left in it, or NONE."""

    @cached_property
    def is_over(self) -> bool:
        """Whether every rank has done all."""
        return self.misdelivered == NONE and (
            list(self.positions) == list(self.program.table.offset[1:]) * self.replicas
        )

    def of_step(self, times: Ints, replica: int = 0, step: int = 0) -> Ints:
        """The part of some times that is of one step of a replica."""
        size = self.program.table.num_actions
        first = (replica * self.steps + step) * size
        return times[first : first + size]


def of_kinds(program: Program, took: Sequence[int]) -> Ints:
    """The nanoseconds of each action of the table, where all of an op and stage take as long.

    `took` is by op and stage, as `engine.plan.rules.Kinds`; a SEND's is its message's. Of slices it
    is the mean over those of a microbatch, each of which takes its share.
    """
    table, numbers = program.table, list(took)
    if max(numbers, default=0) > MOST_NS or maker(table.num_actions) is listed:
        kinds = zip(*table.made_by(listed)[1:3], strict=True)
        num_stages = program.num_stages
        each = [numbers[op * num_stages + max(0, stage)] for op, stage in kinds]
        return _in_slices(program, each)
    took = filled(0, table.num_actions)
    arguments = table.op, table.stage, program.num_stages, array("q", numbers), took
    run(table.num_actions, kernels.spread, *arguments)
    return _in_slices(program, took)


def _in_slices(program: Program, took: Ints) -> Ints:
    """Give the computations of each slice its share; `took` has the mean over all."""
    factors = [share * len(program.slices) for share in program.slices]
    if factors:
        table = program.table
        for at, (op, number) in enumerate(zip(table.op, table.microbatch, strict=True)):
            if op <= kernels.W:
                took[at] = round(took[at] * factors[number % len(factors)])
    return took


def walk(
    program: Program,
    took: Sequence[Ints],
    transfers: TransferModel = FREE_TRANSFERS,
    *,
    steps: int = 1,
    sharing: Sharing = Sharing.STAGE_EDGE,
    has_why: bool = False,
) -> Walk:
    """Walk over a program as `walk_all` does, once."""
    given = [(program, took)]
    return next(walk_all(given, transfers, steps=steps, sharing=sharing, has_why=has_why))


def walk_all(
    cases: Iterable[tuple[Program, Sequence[Ints]]],
    transfers: TransferModel = FREE_TRANSFERS,
    *,
    steps: int = 1,
    sharing: Sharing = Sharing.STAGE_EDGE,
    has_why: bool = False,
) -> Iterator[Walk]:
    """Walk over programs, each with the nanoseconds of every action in each of its replicas.

    A replica's times are those of one step, or of several one behind the other; the walk goes over
    them `steps` times. A message's time is at its SEND, a collective's is that for which it moves
    bytes. In a program without transfers, messages move as `transfers` say. On all cores where
    there is much to do. Raises ProgramError where a stage is not on its rank, ValueError where
    times are missing.
    """
    cases = list(cases)
    tables: dict[tuple[int, Maker], tuple[Arrays, int]] = {}
    size = steps * sum(len(one) for _, took in cases for one in took)

    def call(program: Program, took: Sequence[Ints]) -> _Call:
        num_actions, replicas, ranks = program.table.num_actions, len(took), program.world_size
        num_steps = steps * _num_timed(program, took)
        longest = max(map(largest, took)) + transfers.duration_ns
        made_by = listed if num_steps * num_actions * longest > MOST_NS else maker(size)
        key = id(program), made_by
        if key not in tables:
            tables[key] = _table_of(program, made_by)
        table, width = tables[key]
        num_walkers, links = replicas * ranks, num_links(program)
        spans = replicas * num_steps * num_actions

        def zeros(length: int) -> Ints:
            return made_by(0, length)

        def never(length: int) -> Ints:
            return made_by(NONE, length)

        stack = zeros(0)
        stack.extend(reversed(range(num_walkers)))  # from the first on
        there = zeros(width)  # the inputs of a first stage, in each step
        there.extend(never((links // program.placement.directions - 1) * width))
        there *= replicas * num_steps * program.placement.directions  # type: ignore[operator,assignment]  # an array or list
        empty = zeros(0), zeros(0)
        lines = _lines(program.placement, sharing, made_by) if program.has_transfers else empty
        num_lines = max(lines[0], default=0) + 1
        of_steps = zeros(0)
        for one in took:
            for _ in range(steps):
                of_steps.extend(one)
        meets = largest(table[1]) > kernels.RECV_B
        return _Call(
            table,
            kinds_of(program.placement, width, made_by),
            lines,
            of_steps,
            (num_steps, replicas, width, program.num_stages, links),
            transfers.duration_ns,
            transfers.overlaps,
            _Walkers(
                table[0][:-1] * replicas,  # type: ignore[operator,arg-type]  # an array or list
                *(zeros(num_walkers), zeros(num_walkers)),
                *(never(num_walkers), never(num_walkers), stack, zeros(num_walkers * num_steps)),
            ),
            (there, never(len(there) if has_why else 0)),
            _Queue(
                *(never(num_lines * replicas), never(num_lines * replicas)),
                *(never(spans if lines[0] else 0), never(2 * num_lines * replicas)),
                zeros(num_lines),
            ),
            (
                *(zeros(links * replicas), never(links * replicas), zeros(num_walkers)),
                *(zeros((num_actions + 1) * num_steps if meets else 0), zeros(num_steps)),
            ),
            (never(spans), never(spans), never(spans)),
            (never(spans), never(spans)) if has_why else empty,
        )

    walked = run_all(size, kernels.walk, itertools.starmap(call, cases))
    for (program, _), (misdelivered, done) in zip(cases, walked, strict=True):
        num_steps, replicas, *_ = done.shape
        starts_ns, ends_ns, moves_ns = map(packed, done.times)
        yield Walk(
            program,
            num_steps,
            replicas,
            starts_ns,
            ends_ns,
            moves_ns,
            done.why,
            done.walkers.position,
            done.walkers.ends,
            misdelivered,
            done.queue.first,
        )


class _Walkers(NamedTuple):
    """The walkers of `kernels.walk`."""

    position: Ints
    step: Ints
    now: Ints
    latest: Ints
    blocked: Ints
    stack: Ints
    ends: Ints


class _Queue(NamedTuple):
    """The queue of `kernels.walk`."""

    first: Ints
    last: Ints
    behind: Ints
    todo: Ints
    is_todo: Ints


class _Call(NamedTuple):
    """The arguments of `kernels.walk`, which says what they are."""

    table: Arrays
    kinds: Arrays
    lines: Arrays
    took: Ints
    shape: tuple[int, int, int, int, int]
    transfer_ns: int
    overlaps: bool
    walkers: _Walkers
    links: Arrays
    queue: _Queue
    channel: Arrays
    times: Arrays
    why: Arrays


def _num_timed(program: Program, took: Sequence[Ints]) -> int:
    """For how many steps each replica has times; raises ValueError where some are missing."""
    num_actions, lengths = program.table.num_actions, {len(one) for one in took}
    steps = max(lengths, default=0) // num_actions if num_actions else 1
    if not steps or lengths != {steps * num_actions}:
        given = ", ".join(str(len(one)) for one in took) or "none"
        raise ValueError(f"expected the times of {num_actions} actions, got {given}")
    return steps


@lru_cache(maxsize=64)
def _lines(placement: Placement, sharing: Sharing, made_by: Maker) -> tuple[Ints, Ints]:
    """By kind, the line of a transfer and that of its other end."""
    names: dict[LineName, int] = {}
    lines = made_by(0, placement.num_stages * len(OPS)), made_by(0, placement.num_stages * len(OPS))
    for op in (*SEND_OPS, *RECV_OPS):
        for stage in range(placement.num_stages):
            if transfer := crossing(placement, stage, op, 0):
                kind = CODES[op] * placement.num_stages + stage
                for ends, end in zip(lines, (transfer, counterpart(transfer)), strict=True):
                    ends[kind] = names.setdefault(line_of(placement, sharing, end), len(names))
    return lines


def _table_of(program: Program, made_by: Maker) -> tuple[Arrays, int]:
    """The table with what each action waits for or is one with; and its `columns_of`."""
    table, width = columns_of(program, made_by)
    mates, copies = made_by(0, 0), made_by(0, 0)
    mates.extend(program.mates)
    if not program.has_collectives:
        return (*table, made_by(0, 0), mates, copies), width
    copies.extend(program.sums_of_copies)
    latest, awaits = made_by(NONE, program.num_stages), made_by(NONE, len(table[1]))
    run(len(awaits), kernels.find_awaited, *table[:3], latest, awaits)
    return (*table, awaits, mates, copies), width
