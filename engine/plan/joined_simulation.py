"""Predicts what D replicas of a program would do, from costs of computations and collectives.

As `engine.plan.simulate` for one. Each replica has durations of its own, so that what a slow one
costs the others can be asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.plan.action import CODES, COMPUTE_OPS, NO_INDEX, SEND_OPS, Action, Op
from engine.plan.collectives import CollectivePolicy, Zero2, most_unsharded, with_collectives
from engine.plan.joined import JoinedReplay, ReplicaTimes, joining, replay_joined
from engine.plan.lower import counterpart, lower
from engine.plan.program import Program
from engine.plan.replay import of_kinds
from engine.plan.rules import check
from engine.plan.simulate import FREE_TRANSFERS, Durations, TransferModel
from engine.plan.spans import Lane, Span, lane_of


@dataclass(frozen=True)
class CollectiveModel:
    """How long gathering a stage's parameters and summing its gradients moves bytes, by stage."""

    gather_ns: tuple[int, ...]
    reduce_ns: tuple[int, ...]


def ring_ns(
    num_bytes: int, replicas: int, bytes_per_s: float, latency_ns: int = 0, *, is_summed_whole: bool
) -> int:
    """The latency plus bytes x (D - 1) / D over the bandwidth of a link.

    That is a ring's all-gather or reduce-scatter, and no algorithm sends less; an all-reduce, which
    leaves the whole sum on each replica, is one after the other (Patarasuk and Yuan 2009,
    doi 10.1016/j.jpdc.2008.09.002).
    """
    passes = 2 if is_summed_whole else 1
    share = (replicas - 1) / replicas
    return latency_ns + round(passes * num_bytes * share / bytes_per_s * 1e9)


def ring(
    parameter_bytes: Sequence[int],
    gradient_bytes: Sequence[int],
    replicas: int,
    policy: CollectivePolicy,
    bytes_per_s: float,
    latency_ns: int = 0,
) -> CollectiveModel:
    """Collectives over a ring, from the bytes of each stage."""
    is_whole = not isinstance(policy, Zero2) and most_unsharded(policy) is None
    given = replicas, bytes_per_s, latency_ns
    return CollectiveModel(
        tuple(ring_ns(size, *given, is_summed_whole=False) for size in parameter_bytes),
        tuple(ring_ns(size, *given, is_summed_whole=is_whole) for size in gradient_bytes),
    )


@dataclass(frozen=True)
class JoinedSimulation:
    """One step of all replicas, which starts at 0 ns."""

    replay: JoinedReplay
    message_bytes: int = 0

    @property
    def program(self) -> Program:
        return self.replay.program

    @property
    def num_replicas(self) -> int:
        return len(self.replay.starts_ns)

    @property
    def makespan_ns(self) -> int:
        """From the first computation or gather to the last end of a computation or collective."""
        return self.replay.makespan_ns

    @property
    def compute_ns(self) -> int:
        """Summed over ranks and replicas."""
        return sum(map(sum, self.replay.compute_ns))

    @property
    def _capacity_ns(self) -> int:
        return self.num_replicas * self.program.world_size * self.makespan_ns

    @property
    def bubble_fraction(self) -> float:
        """1 - compute / (replicas x ranks x makespan)."""
        return (self._capacity_ns - self.compute_ns) / self._capacity_ns

    @property
    def bubble_idle_over_ideal(self) -> float:
        """Idle time over compute time."""
        return (self._capacity_ns - self.compute_ns) / self.compute_ns

    @property
    def bubble_max_stage_span(self) -> float:
        """1 - (compute per rank) / (the longest time that a rank takes from its start to its end).

        As of `engine.plan.simulate`; a rank ends when its last collective is over.
        """
        first, last = dict[tuple[int, int], int](), dict[tuple[int, int], int]()
        for span in self.spans():
            if span.lane in (Lane.COMPUTE, Lane.COLLECTIVE):
                of = span.replica, span.rank
                last[of] = max(last.get(of, 0), span.end_ns)
                if span.lane is Lane.COMPUTE:
                    first[of] = min(first.get(of, span.start_ns), span.start_ns)
        longest = max(last[of] - start for of, start in first.items())
        capacity_ns = self.num_replicas * self.program.world_size * longest
        return (capacity_ns - self.compute_ns) / capacity_ns

    def spans(self) -> Iterator[Span]:
        """Computations, both ends of each message and collectives, by replica, all of step 0."""
        ranks = self.program.placement.ranks
        actions = [action for row in self.program.actions for action in row]
        for replica in range(self.num_replicas):
            times = self.replay.starts_ns[replica], self.replay.ends_ns[replica]
            for action, start, end in zip(actions, *times, strict=True):
                num_bytes = 0 if action.op in COMPUTE_OPS else self.message_bytes
                ends = (action, counterpart(action)) if action.op in SEND_OPS else ()
                for stage, op, m in (action,) if action.op in COMPUTE_OPS else ends:
                    lane, rank = lane_of(op), ranks[stage]
                    yield Span(0, rank, lane, stage, op, m, start, end, num_bytes, replica)
            yield from self.collectives(replica)

    def collectives(self, replica: int) -> Iterator[Span]:
        """Those of a replica, each from when its lane begins it: rank after rank."""
        replay = self.replay
        times = replay.collective_starts_ns[replica], replay.collective_ends_ns[replica]
        lanes = enumerate(joining(self.program))
        placed = ((rank, action) for rank, lane in lanes for action in lane)
        for (rank, (stage, op, _)), start, end in zip(placed, *times, strict=True):
            yield Span(0, rank, Lane.COLLECTIVE, stage, op, NO_INDEX, start, end, 0, replica)


def simulate_joined(
    program: Program,
    durations: Sequence[Durations],
    policy: CollectivePolicy,
    collectives: CollectiveModel,
    transfers: TransferModel = FREE_TRANSFERS,
) -> JoinedSimulation:
    """Run replicas of a program in time, each with its durations.

    The program has its own collectives and transfers, or gets those of the policy and of `lower`.
    Raises ProgramError if it is illegal or could hang, ValueError where transfers are to block
    their sender, which is not simulated here, or where times are not of its stages.
    """
    if not transfers.overlaps:
        raise ValueError("transfers that block their sender are not simulated with replicas")
    check(program)
    lowered = with_collectives(lower(program), program, policy)
    num_stages = lowered.num_stages
    if {len(collectives.gather_ns), len(collectives.reduce_ns)} != {num_stages}:
        raise ValueError(f"expected the times of collectives of {num_stages} stages")
    moving = array("q", [_moving_ns(a, collectives) for lane in joining(lowered) for a in lane])
    times = [ReplicaTimes(_took(lowered, one, transfers), moving) for one in durations]
    return JoinedSimulation(replay_joined(lowered, times), transfers.message_bytes)


def _moving_ns(action: Action, collectives: CollectiveModel) -> int:
    by_stage = collectives.gather_ns if action.op is Op.UNSHARD else collectives.reduce_ns
    return by_stage[action.stage]


def _took(lowered: Program, durations: Durations, transfers: TransferModel) -> array[int]:
    """The nanoseconds of each action, in the order of the table."""
    num_stages = lowered.num_stages
    by_kind = durations.by_kind(num_stages)
    for op in SEND_OPS:
        first = CODES[op] * num_stages
        by_kind[first : first + num_stages] = [transfers.duration_ns] * num_stages
    return of_kinds(lowered, by_kind)
