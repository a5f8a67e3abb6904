"""Adds to a program what the replicas of its stages do together: a pass beside lowering.

With D replicas of a pipeline, rank r of all of them holds the same stages. Where parameters are
sharded, each keeps 1/D of a stage; UNSHARD gathers the whole and RESHARD frees it again. Gradients
are summed by REDUCE_GRAD once they are complete. Two stages on one rank, one of them unsharded at
most, and the same with one stage of look-ahead:

    residency 1   0UNSHARD 0F0 0RESHARD 2UNSHARD 2F0 2B0 2REDUCE_GRAD 2RESHARD 0UNSHARD 0B0 ...
    residency 2   0UNSHARD 2UNSHARD 0F0 2F0 2B0 2REDUCE_GRAD 2RESHARD 0B0 0REDUCE_GRAD 0RESHARD

UNSHARD and REDUCE_GRAD only begin what they name. A rank's collectives are done in its order, by
the same rank of all replicas. As all replicas have one program, none waits for another in a circle.

Where two pipelines go over the ranks of one replica, each stage is on two ranks. Their gradients
are summed when a rank has computed all, one part of the model after the other: the same order on
all ranks, so that none waits for another in a circle.

ZeRO's stages are those of arXiv 1910.02054; DDP is arXiv 2006.15704, FSDP arXiv 2304.11277.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from engine.plan.action import COMPUTE_OPS, NO_INDEX, SEND_OPS, Action, Op
from engine.plan.program import Program
from engine.plan.table import Table


@dataclass(frozen=True)
class NoCollectives:
    """A program has no collectives: gradients are summed once, when all of its actions are done."""


@dataclass(frozen=True)
class DataParallel:
    """Gradients are summed once for a stage, after its last B or W (DDP, arXiv 2006.15704)."""


@dataclass(frozen=True)
class Zero1:
    """As `DataParallel`: only the optimizer is sharded, and its step is no part of a program."""


@dataclass(frozen=True)
class Zero2:
    """Gradients are sharded: summed after every B or W of a stage, or after its last alone."""

    every_backward: bool = True


@dataclass(frozen=True)
class Zero3:
    """Parameters are sharded too; ZeRO-3, or FSDP (arXiv 2304.11277).

    At most `residency` stages of a rank are unsharded. While a stage is computed on, the next
    `look_ahead` stages are too, or are being. Where there is no room, the stage that is needed
    last is resharded: with no look-ahead, no order has fewer UNSHARDs (Belady 1966,
    doi 10.1147/sj.52.0078).
    """

    residency: int = 2
    look_ahead: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.look_ahead < self.residency:
            raise ValueError(
                f"look_ahead must be at least 0 and below the residency, since a stage ahead is "
                f"resident too; got look_ahead {self.look_ahead}, residency {self.residency}"
            )


@dataclass(frozen=True)
class TorchWindow:
    """Parameters are sharded as torch.distributed.pipelining does it (`_add_unshard_reshard`).

    Before each computation exactly the `max_active_stages` stages that are needed next are
    unsharded. Several that are resharded at once come in the order of a Python set, as there.
    Of a pair that torch may overlap (DualPipeV) each computation counts alone, since it is run
    alone: in a window of 1 torch has both stages of a pair unsharded, here it is one after the
    other. Larger windows are torch's.
    """

    max_active_stages: int = 3

    def __post_init__(self) -> None:
        if self.max_active_stages < 1:
            raise ValueError(f"max_active_stages must be at least 1, got {self.max_active_stages}")


CollectivePolicy = NoCollectives | DataParallel | Zero1 | Zero2 | Zero3 | TorchWindow


POLICIES: dict[str, type[CollectivePolicy]] = {
    "none": NoCollectives,
    "ddp": DataParallel,
    "zero1": Zero1,
    "zero2": Zero2,
    "zero3": Zero3,
    "torch": TorchWindow,
}
"""By their names in commands and sweep files; their fields are the other settings."""


def most_unsharded(policy: CollectivePolicy) -> int | None:
    """How many stages of a rank may be unsharded at once; None if parameters are never sharded."""
    match policy:
        case Zero3():
            return policy.residency
        case TorchWindow():
            return policy.max_active_stages
        case _:
            return None


def reduces_every_backward(policy: CollectivePolicy) -> bool:
    """Whether gradients are summed after each B or W, not once for a stage."""
    return isinstance(policy, Zero2) and policy.every_backward


def leaves_whole_sums(policy: CollectivePolicy) -> bool:
    """Whether each replica gets the sums of all gradients, not only those of its shard."""
    return most_unsharded(policy) is None and not isinstance(policy, Zero2)


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


def add_collectives(program: Program, policy: CollectivePolicy) -> Program:
    """The program with the collectives of a policy instead of those that it has.

    Computations and transfers keep their order. An UNSHARD comes directly before the computation
    that it is added for, a REDUCE_GRAD behind the SEND of its backward.
    """
    rows = []
    for row in program.without_collectives().actions:
        computations = [action for action in row if action.op in COMPUTE_OPS]
        sharding = _around([action.stage for action in computations], policy)
        last = {a.stage: at for at, a in enumerate(computations) if a.op in (Op.B, Op.W)}
        around = []
        for at, (unsharded, resharded) in enumerate(sharding):
            stage, op, _ = computations[at]
            is_complete = reduces_every_backward(policy) or last.get(stage) == at
            is_summed = is_complete and not isinstance(policy, NoCollectives)
            sums = [_collective(stage, Op.REDUCE_GRAD)] if op in (Op.B, Op.W) and is_summed else []
            around.append((unsharded, sums + resharded))
        rows.append(_placed(row, [], around))
    return replace(program, actions=Table.of(rows))


def _placed(
    row: Sequence[Action],
    first: list[Action],
    around: Iterable[tuple[list[Action], list[Action]]],
) -> list[Action]:
    """A row with what comes first, and what stands around each computation.

    What follows a computation waits until its result is sent.
    """
    out, waiting, of_computations = list[Action](), first, iter(around)
    for action in row:
        if action.op not in SEND_OPS:
            out += waiting
            waiting = []
        if action.op in COMPUTE_OPS:
            before, waiting = next(of_computations)
            out += before
        out.append(action)
    return out + waiting


def with_collectives(lowered: Program, program: Program, policy: CollectivePolicy) -> Program:
    """The lowered program with the collectives that `program` has, else with those of a policy.

    Where `program` has transfers of its own too, it is run as it is written. Else what it has
    comes as early as its order allows, but behind the SEND of the computation before it.
    """
    if not program.has_collectives:
        return add_collectives(lowered, policy)
    if program.has_transfers:
        return program
    rows = []
    for row, written in zip(lowered.actions, program.actions, strict=True):
        before = [list[Action]()]  # each computation, and the end
        for action in written:
            if action.op in COMPUTE_OPS:
                before.append([])
            else:
                before[-1].append(action)
        first, *others = before
        rows.append(_placed(row, first, (([], group) for group in others)))
    return replace(lowered, actions=Table.of(rows))


def with_sums_of_copies(lowered: Program) -> Program:
    """The program of one replica with the sums of the gradients of stages that two ranks have."""
    placement, rows = lowered.placement, []
    if placement.directions == 1 or not lowered.has_backward:
        return lowered
    for rank, row in enumerate(lowered.actions):
        own = sorted(placement.stages_of(rank), key=lambda stage: stage % placement.depth)
        summed = [stage for stage in own if len(placement.owners_of(stage)) > 1]
        rows.append((*row, *(_collective(stage, Op.REDUCE_GRAD) for stage in summed)))
    return replace(lowered, actions=Table.of(rows))


def _collective(stage: int, op: Op) -> Action:
    return Action(stage, op, NO_INDEX)


def _around(
    stages: Sequence[int], policy: CollectivePolicy
) -> Iterator[tuple[list[Action], list[Action]]]:
    """The UNSHARDs and RESHARDs before and after each computation of a rank."""
    if most_unsharded(policy) is None:
        yield from (([], []) for _ in stages)
        return
    uses: dict[int, deque[int]] = {}
    for at, stage in enumerate(stages):
        uses.setdefault(stage, deque()).append(at)
    unsharded: set[int] = set()  # its order depends on what was added and removed, one by one
    for at, stage in enumerate(stages):
        upcoming = sorted(uses, key=lambda one: uses[one][0])  # those still needed, the next first
        uses[stage].popleft()
        is_over = not uses[stage]
        if is_over:
            del uses[stage]
        evicted, missing, after = list[int](), list[int](), list[int]()
        match policy:
            case Zero3():
                wanted = upcoming[: policy.look_ahead + 1]
                missing = [one for one in wanted if one not in unsharded]
                others = [s for s in reversed(upcoming) if s in unsharded and s not in wanted]
                evicted = others[: max(0, len(unsharded) + len(missing) - policy.residency)]
                after = [stage] if is_over else []
            case TorchWindow():
                wanted = upcoming[: policy.max_active_stages]
                evicted = [one for one in unsharded if one not in wanted]
                missing = [one for one in wanted if one not in unsharded]
        for one in evicted:
            unsharded.remove(one)
        for one in missing:
            unsharded.add(one)
        if isinstance(policy, TorchWindow) and at + 1 == len(stages):
            after = list(unsharded)
        before = [_collective(one, Op.RESHARD) for one in evicted]
        before += [_collective(one, Op.UNSHARD) for one in missing]
        unsharded.difference_update(after)
        yield before, [_collective(one, Op.RESHARD) for one in after]
