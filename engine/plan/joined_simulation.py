"""Predicts what D replicas of a program would do, from costs of computations and collectives.

As `engine.plan.simulate` for one. Each replica has durations of its own, so that what a slow one
costs the others can be asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.plan.action import CODES, SEND_OPS, Op
from engine.plan.check import check
from engine.plan.collectives import CollectivePolicy, Zero2, most_unsharded, with_collectives
from engine.plan.lower import lower
from engine.plan.program import Program
from engine.plan.replay import Replay, replay
from engine.plan.simulate import FREE_TRANSFERS, Durations, TransferModel
from engine.plan.walk import of_kinds


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


def simulate_joined(
    program: Program,
    durations: Sequence[Durations],
    policy: CollectivePolicy,
    collectives: CollectiveModel,
    transfers: TransferModel = FREE_TRANSFERS,
) -> Replay:
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
    times = []
    for of_replica in durations:
        by_kind = of_replica.by_kind(num_stages)
        message = (transfers.duration_ns,) * num_stages
        others = {Op.UNSHARD: collectives.gather_ns, Op.REDUCE_GRAD: collectives.reduce_ns}
        for op, of_stages in {**dict.fromkeys(SEND_OPS, message), **others}.items():
            first = CODES[op] * num_stages
            by_kind[first : first + num_stages] = of_stages
        times.append(of_kinds(lowered, by_kind))
    return replay(lowered, times)
