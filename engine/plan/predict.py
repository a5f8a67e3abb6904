"""A program's step in time: predicted from costs, or with the times that its actions took.

Either way the program is walked once (`engine.plan.walk`), and every figure follows from when each
action starts and ends. The spans are the same type that the executor measures, so that every figure
can be computed for a plan as for a run; they are made only when asked for.

`predict` takes one cost per stage and op, and messages follow from the placement. `timed` takes the
time of every action of a program that has its messages, and its collectives if there are replicas:
what a run did, or would have done with some of its times changed. `predict_replicas` takes costs of
each replica and of collectives, so that what a slow one costs the others can be asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from engine.arrays import Ints, listed, maker, run
from engine.plan import kernels
from engine.plan.action import COMPUTE_OPS, JOINING_OPS, NO_INDEX, OPS, SEND_OPS, Action, Op
from engine.plan.check import check, explain
from engine.plan.collectives import CollectivePolicy, with_collectives, with_sums_of_copies
from engine.plan.lower import lower
from engine.plan.messages import counterpart, outgoing
from engine.plan.program import Placement, Program
from engine.plan.rules import check_facts
from engine.plan.spans import Lane, Span, lane_of
from engine.plan.walk import FREE_TRANSFERS, TransferModel, Walk, of_kinds, walk


@dataclass(frozen=True)
class Durations:
    """Nanoseconds of one microbatch's forward and of the two halves of its backward, by stage.

    Where microbatches come in slices, it is the mean over those of one.

    A whole backward takes `backward_ns`; without these, as long as its halves. A pair takes
    `pair_ns` of its forward's stage; without these, as long as both.
    """

    forward_ns: tuple[int, ...]
    input_ns: tuple[int, ...]
    weight_ns: tuple[int, ...]
    backward_ns: tuple[int, ...] | None = None
    pair_ns: tuple[int, ...] | None = None

    @property
    def whole_ns(self) -> tuple[int, ...]:
        """How long a whole backward takes, by stage."""
        if self.backward_ns is not None:
            return self.backward_ns
        return tuple(i + w for i, w in zip(self.input_ns, self.weight_ns, strict=True))

    def by_op(self) -> dict[Op, tuple[int, ...]]:
        halves = {Op.I: self.input_ns, Op.W: self.weight_ns}
        return {Op.F: self.forward_ns, **halves, Op.B: self.whole_ns}

    def by_kind(
        self, num_stages: int, others: Mapping[Op, Sequence[int]] = MappingProxyType({})
    ) -> list[int]:
        """By op and stage, as `engine.plan.rules.Kinds`; `others` are those of further ops.

        Raises ValueError on other stages.
        """
        given = {"forward": self.forward_ns, "input": self.input_ns, "weight": self.weight_ns}
        if self.backward_ns is not None:
            given["backward"] = self.backward_ns
        of_ops = {**given, **{str(op): others[op] for op in OPS if op in others}}
        if any(len(of_op) != num_stages for of_op in of_ops.values()):
            lengths = ", ".join(str(len(of_op)) for of_op in of_ops.values())
            raise ValueError(
                f"durations of {lengths} stages ({', '.join(of_ops)}) for a program of {num_stages}"
            )
        by_op, none = {**self.by_op(), **others}, (0,) * num_stages
        return [ns for op in OPS for ns in by_op.get(op, none)]


def took_by(
    program: Program,
    durations: Durations,
    others: Mapping[Op, Sequence[int]] = MappingProxyType({}),
) -> Ints:
    """The nanoseconds of each action of the table; `others` are those of further ops.

    The halves of a pair share its time as they would take it alone.
    """
    took = of_kinds(program, durations.by_kind(program.num_stages, others))
    return took if durations.pair_ns is None else with_pair_times(program, took, durations.pair_ns)


def with_pair_times(program: Program, took: Ints, pair_ns: Sequence[int]) -> Ints:
    """Return the times of a program's actions; a pair takes as long as its stage's `pair_ns`."""
    for at, mate in enumerate(program.mates):
        if mate != kernels.NONE:
            whole, alone = pair_ns[program.table.stage[at]], took[at] + took[mate]
            took[at] = whole * took[at] // alone if alone else 0
            took[mate] = whole - took[at]
    return took


def uniform(placement: Placement, forward_ns: int, input_ns: int, weight_ns: int) -> Durations:
    """Equal stages. The times are those of a rank's whole share; a stage of v takes 1/v of them.

    Whole nanoseconds: where v does not divide a time, it is rounded.
    """
    num_stages = placement.num_stages
    f, i, w = (
        (round(time * placement.world_size / placement.depth),) * num_stages
        for time in (forward_ns, input_ns, weight_ns)
    )
    return Durations(f, i, w)


class InFlight(NamedTuple):
    """From `time_ns` on a rank holds `num` activations, each of one microbatch of a stage."""

    time_ns: int
    num: int


@dataclass(frozen=True)
class WalkedStep:
    """One step of one or more replicas: when each action starts and ends.

    It begins at 0 ns with its first computation or, if that is earlier, when its first UNSHARD is
    ready. It ends with its last computation or collective.
    """

    walk: Walk
    took_ns: tuple[Ints, ...]
    """How long each action took, by replica and in the order of the table."""
    transfers: TransferModel
    """The bytes of its messages, and how those move that are no actions of the program."""

    @property
    def program(self) -> Program:
        return self.walk.program

    @property
    def num_ranks(self) -> int:
        """It counts the ranks of all replicas."""
        return self.walk.replicas * self.program.world_size

    @cached_property
    def start_ns(self) -> list[list[int]]:
        """By rank and position, of the first replica."""
        return [list(self.walk.starts_ns[begin:end]) for begin, end in self._rows]

    @cached_property
    def end_ns(self) -> list[list[int]]:
        """By rank and position, of the first replica."""
        return [list(self.walk.ends_ns[begin:end]) for begin, end in self._rows]

    @property
    def _rows(self) -> list[tuple[int, int]]:
        return list(itertools.pairwise(self.program.table.offset))

    @cached_property
    def _spells_ns(self) -> list[tuple[int, int, int]]:
        """By rank and replica: when its parameters are gathered, it computes, and it is done."""
        walked, table, spells = self.walk, self.program.table, []
        joined = (kernels.UNSHARD, kernels.REDUCE_GRAD) if self.program.has_collectives else ()
        for begin, end in self._rows:
            row, op = range(begin, end), table.op
            computed = next((at for at in row if op[at] <= kernels.W), None)
            if computed is None:
                continue
            # A rank does its collectives in the order of its row.
            gathered = [at for at in row if op[at] == kernels.UNSHARD][:1] if joined else []
            lasts = [at for at in row if op[at] in joined][-1:] if joined else []
            lasts.append(next(at for at in reversed(row) if op[at] <= kernels.W))
            for base in range(0, len(walked.starts_ns), table.num_actions):
                start = walked.starts_ns[base + computed]
                ready = min([start, *(walked.moves_ns[base + at] for at in gathered)])
                spells.append((ready, start, max(walked.ends_ns[base + at] for at in lasts)))
        return spells

    @property
    def makespan_ns(self) -> int:
        """The time from its first computation or gather to its last one's or collective's end."""
        begins, ends = ([spell[at] for spell in self._spells_ns] for at in (0, 2))
        return max(ends, default=0) - min(begins, default=0)

    @cached_property
    def compute_ns(self) -> list[list[int]]:
        """The time in computation, by replica and rank."""
        return computing_ns(self.program, self.took_ns)

    @property
    def idle_ns(self) -> list[list[int]]:
        """The part of the makespan without computation, by replica and rank."""
        makespan_ns = self.makespan_ns
        return [[makespan_ns - busy for busy in ranks] for ranks in self.compute_ns]

    @property
    def bubble_fraction(self) -> float:
        """1 - compute / (ranks of all replicas x makespan)."""
        return self._share_idle(self.makespan_ns)

    @property
    def bubble_idle_over_ideal(self) -> float:
        """Idle time over compute time."""
        compute_ns = sum(map(sum, self.compute_ns))
        return (self.num_ranks * self.makespan_ns - compute_ns) / compute_ns

    @property
    def bubble_max_stage_span(self) -> float:
        """1 - (compute per rank) / (the longest time that a rank takes from its start to its end).

        What remains idle if every rank may begin the next step when it is done with this one.
        """
        return self._share_idle(max(end - start for _, start, end in self._spells_ns))

    def _share_idle(self, each_ns: int) -> float:
        """The share without computation, if every rank has so long."""
        capacity_ns = self.num_ranks * each_ns
        return (capacity_ns - sum(map(sum, self.compute_ns))) / capacity_ns

    def in_flight(self, rank: int) -> list[InFlight]:
        """Each change of what a rank holds: a forward adds one, its B or W takes it away again.

        Without a backward, the forward's end does. Of the first replica.
        """
        changes, num, begin = [], 0, self.program.table.offset[rank]
        released_by = (Op.B, Op.W) if self.program.has_backward else (Op.F,)
        for index, action in enumerate(self.program.table.part(rank), begin):
            if action.op is Op.F:
                num += 1
                changes.append(InFlight(self.walk.starts_ns[index], num))
            if action.op in released_by:
                num -= 1
                changes.append(InFlight(self.walk.ends_ns[index], num))
        return changes

    def spans(self) -> Iterator[Span]:
        """Computations, both ends of each message and collectives, by replica, all of step 0."""
        return spans_of(self.walk, self.transfers)

    def messages(self) -> Iterator[tuple[Action, int, int]]:
        """Each SEND with the times between which its message moves, by sender in its order.

        Of the first replica.
        """
        return messages_of(self.walk, self.transfers)

    def critical_path(self) -> list[Action]:
        """The actions that leave no slack, first to last; SEND is a transfer that takes time.

        What would have to be faster for the step to be faster, of one replica whose messages follow
        from the placement. An action starts the moment that something else ends: the action before
        it on its rank, or else what it needs; where both end at once, the former is taken. A
        transfer starts the moment that its message is made or that the message before it has left
        their channel. So the durations add up to the makespan.
        """
        program, table, walked = self.program, self.program.table, self.walk
        if not table.num_actions:
            return []
        if not walked.why[0]:  # it was not asked for
            walked = walk(program, self.took_ns, self.transfers, has_why=True)
        _, last = max((walked.ends_ns[end - 1], -end) for end in table.offset[1:] if end > 0)
        is_large = isinstance(walked.why[0], list)
        path = (listed if is_large else maker(table.num_actions))(0, 2 * table.num_actions)
        arguments = walked.why, walked.starts_ns, -last - 1, path
        length = run(table.num_actions, kernels.walk_back, *arguments)
        takes_time = self.transfers.duration_ns > 0
        steps = [step for step in path[:length][::-1] if takes_time or step % 2 == 0]
        actions = table.those([step // 2 for step in steps])
        if not takes_time:
            return actions
        return [
            (outgoing(action, program) or action) if step % 2 else action
            for action, step in zip(actions, steps, strict=True)
        ]


def spans_of(walked: Walk, transfers: TransferModel, step: int = 0) -> Iterator[Span]:
    """A step's computations and optimizers, both ends of each message, collectives, by replica.

    A collective lasts from when its lane begins it. The spans are of step 0.
    """
    table, ranks = walked.program.table, walked.program.placement.ranks
    for replica in range(walked.replicas):
        starts, ends = (
            walked.of_step(times, replica, step) for times in (walked.starts_ns, walked.ends_ns)
        )
        collectives = list[Span]()
        for rank, begin in enumerate(table.offset[:-1]):
            for at, (stage, op, m) in enumerate(table.part(rank), begin):
                times = starts[at], ends[at], 0, replica
                if op in COMPUTE_OPS or (op is Op.OPT and ends[at] > starts[at]):
                    yield Span(0, rank, Lane.COMPUTE, stage, op, m, *times)
                elif op in JOINING_OPS:
                    place = 0, rank, Lane.COLLECTIVE, stage, op, NO_INDEX
                    collectives.append(Span(*place, *times))
        for send, start, end in messages_of(walked, transfers, step, replica):
            for stage, op, m in (send, counterpart(send)):
                place = 0, ranks[stage], lane_of(op), stage, op, m
                yield Span(*place, start, end, transfers.message_bytes, replica)
        yield from collectives


def messages_of(
    walked: Walk, transfers: TransferModel, step: int = 0, replica: int = 0
) -> Iterator[tuple[Action, int, int]]:
    """Each SEND with the times between which its message moves, by sender in its order."""
    table = walked.program.table
    moves, ends = (
        walked.of_step(times, replica, step) for times in (walked.moves_ns, walked.ends_ns)
    )
    for at, start in enumerate(moves):
        if start == kernels.NONE:
            continue
        action = table.at(at)
        if action.op in SEND_OPS:
            yield action, start, ends[at]
        elif send := outgoing(action, walked.program):
            yield send, start, start + transfers.duration_ns


def computing_ns(program: Program, took_ns: Sequence[Ints]) -> list[list[int]]:
    """Nanoseconds in computation, by replica and rank, of the times of each action by replica."""
    rows = [slice(*ends) for ends in itertools.pairwise(program.table.offset)]
    if program.num_computations == program.table.num_actions:
        return [[sum(took[row]) for row in rows] for took in took_ns]
    is_compute = [code <= kernels.W for code in program.table.op]
    return [
        [sum(itertools.compress(took[row], is_compute[row])) for row in rows] for took in took_ns
    ]


def predict(
    program: Program,
    durations: Durations,
    transfers: TransferModel = FREE_TRANSFERS,
    *,
    has_why: bool = False,
) -> WalkedStep:
    """The step of one replica of a program.

    Transfers follow from the placement, whatever the program says. Pairs are two actions in order
    where they have no time of their own. With `has_why` the critical path
    is known at once. Raises ProgramError at an illegal program, as `engine.plan.check.check`.
    """
    compute = program.compute_only()
    if durations.pair_ns is None:
        compute = compute.in_order()
    check_facts(compute)
    took = took_by(compute, durations)
    return timed(compute, [took], transfers, has_why=has_why)


def predict_replicas(
    program: Program,
    durations: Sequence[Durations],
    policy: CollectivePolicy,
    collectives: Mapping[Op, Sequence[int]],
    transfers: TransferModel = FREE_TRANSFERS,
) -> WalkedStep:
    """The step of replicas of a program, each with its durations.

    `collectives` has for how long UNSHARD and REDUCE_GRAD of each stage move bytes. The program has
    its own collectives and transfers, or gets those of the policy and of `lower`; one replica has
    the sums of the copies of its stages. Raises
    ProgramError if it is illegal or could hang, ValueError where transfers are to block their
    sender, which is not predicted here, or where times are not of its stages.
    """
    if not transfers.overlaps:
        raise ValueError("transfers that block their sender are not predicted with replicas")
    if any(each.pair_ns is None for each in durations):
        program = program.in_order()
    check(program)
    if len(durations) == 1:
        lowered = with_sums_of_copies(lower(program))
    else:
        lowered = with_collectives(lower(program), program, policy)
    num_stages = lowered.num_stages
    messages = dict.fromkeys(SEND_OPS, (transfers.duration_ns,) * num_stages)
    others: dict[Op, Sequence[int]] = {**messages, **collectives}
    took = [took_by(lowered, each, others) for each in durations]
    return timed(lowered, took, transfers)


def timed(
    program: Program,
    took_ns: Sequence[Ints],
    transfers: TransferModel = FREE_TRANSFERS,
    *,
    has_why: bool = False,
) -> WalkedStep:
    """The step of replicas of a program, each with the nanoseconds of every action.

    Times are as for `engine.plan.walk.walk_all`. Raises ProgramError where the program hangs or a
    stage is not on its rank, ValueError where times are missing.
    """
    walked = walk(program, took_ns, transfers, has_why=has_why)
    explain(walked)
    return WalkedStep(walked, tuple(took_ns), transfers)
