"""The bytes that a replica keeps of its stages, by policy: arithmetic beside what is measured.

Of a stage with P bytes of parameters, G of gradients and O of optimizer states, D replicas keep

                     parameters                     gradients                 optimizer states
    none, ddp        P                              G                         O
    ZeRO-1           P                              G                         O / D
    ZeRO-2           P                              G, once summed G / D      O / D
    ZeRO-3, torch    P / D, and P while unsharded   G, once summed G / D      O / D

each, as in ZeRO (arXiv 1910.02054, section 5). What is padded for equal shards is not counted.

Along a step there is more: gradients are copied into flat tensors of their buckets and go one by
one, and what a sum was made of goes once it is done, when another collective is begun.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from engine.plan.action import Action, Op
from engine.plan.collectives import CollectivePolicy, Zero1, Zero2, most_unsharded

BUCKET_BYTES = 25 * 2**20
"""A bucket is as large as in torch's DistributedDataParallel; while it takes gradients, these are
there twice."""


class TrainingBytes(NamedTuple):
    """Bytes of parameters, gradients and optimizer states: of a stage, or what is kept of it."""

    parameters: int
    gradients: int
    optimizer: int


def kept_bytes(whole: TrainingBytes, policy: CollectivePolicy, replicas: int) -> TrainingBytes:
    """What one of the replicas keeps of a stage after its gradients are summed and it is sharded.

    Equal shards: a byte that cannot be divided is one more for each.
    """
    shard = TrainingBytes(*(-(-num_bytes // replicas) for num_bytes in whole))
    if most_unsharded(policy) is not None:
        return shard
    match policy:
        case Zero2():
            return shard._replace(parameters=whole.parameters)
        case Zero1():
            return whole._replace(optimizer=shard.optimizer)
        case _:
            return whole


class ActionBytes(NamedTuple):
    """The effect of one action on the bytes allocated."""

    rise_bytes: int  # at its highest, above its start
    net_bytes: int  # at its end, above its start
    handed_bytes: int = 0  # of what it leaves, what goes once the message is sent


NO_BYTES = ActionBytes(0, 0)


class BucketBytes(NamedTuple):
    """A bucket of a rank: what replicas gather together, and sum together where it is trained."""

    stages: frozenset[int]  # of the rank that have a part of it
    whole_bytes: int  # flat, padded for equal shards
    sum_bytes: int  # of its gradients' sum that are kept: a shard, or all
    gradients: tuple[int, ...] = ()  # bytes of each; none where it is not trained


class SharedBytes(NamedTuple):
    """What a rank has in common with its replicas.

    `waiting` is, for each UNSHARD and REDUCE_GRAD of its row, how many before it were not done when
    it was begun: none where it does not say.
    """

    buckets: Sequence[BucketBytes] = ()
    waiting: Sequence[int] = ()


NOTHING_SHARED = SharedBytes()


def buckets_of(
    stage: int, gradients: Sequence[int], policy: CollectivePolicy, replicas: int
) -> list[BucketBytes]:
    """The buckets of a stage whose layers have gradients of so many bytes."""
    parts: list[list[int]] = []
    for num_bytes in filter(None, gradients):
        if not parts or sum(parts[-1]) + num_bytes > BUCKET_BYTES:
            parts.append([])
        parts[-1].append(num_bytes)
    wholes = [TrainingBytes(0, sum(part), 0) for part in parts]
    kept = [kept_bytes(whole, policy, replicas).gradients for whole in wholes]
    of_all = zip(wholes, kept, parts, strict=True)
    stages = frozenset([stage])
    return [BucketBytes(stages, one.gradients, own, tuple(part)) for one, own, part in of_all]


def changes_along(row: Sequence[Action], shared: SharedBytes) -> list[ActionBytes]:
    """What each action of a row does to gathered parameters, gradients and their sums.

    The last is what follows the row: what it has not summed is. A B or W makes all gradients of its
    stage that are not there; all others do nothing and may be left out.
    """
    walk = _Walk(shared)
    return [*map(walk.come_to, row), walk.finish()]


class _Walk:
    """What of the buckets is there, at a place in the row."""

    def __init__(self, shared: SharedBytes) -> None:
        self._buckets = list(enumerate(shared.buckets))
        self._num_waiting = iter(shared.waiting)
        self._used_up = deque[int]()  # by collectives that are not known to be done
        self._users = Counter[int]()
        self._made, self._summed = set[int](), set[int]()
        self._level = self._highest = 0

    def come_to(self, action: Action) -> ActionBytes:
        stage, op, _ = action
        before = self._highest = self._level
        mine = [(at, bucket) for at, bucket in self._buckets if stage in bucket.stages]
        if op in (Op.B, Op.W):
            for at, bucket in mine:
                self._add(0 if at in self._made else sum(bucket.gradients))
                self._made.add(at)
        elif op is Op.UNSHARD:
            self._add(sum(bucket.whole_bytes for at, bucket in mine if not self._users[at]))
            self._users.update(at for at, _ in mine)
            self._begin_next()
        elif op is Op.RESHARD:
            self._users.subtract(at for at, _ in mine)
            self._add(-sum(bucket.whole_bytes for at, bucket in mine if not self._users[at]))
        elif op is Op.REDUCE_GRAD:
            self._reduce(mine)
        return ActionBytes(self._highest - before, self._level - before)

    def finish(self) -> ActionBytes:
        before = self._highest = self._level
        self._add(-sum(self._used_up))
        self._used_up.clear()
        self._reduce([(at, bucket) for at, bucket in self._buckets if at not in self._summed])
        self._add(-sum(self._used_up))
        return ActionBytes(self._highest - before, self._level - before)

    def _reduce(self, mine: Sequence[tuple[int, BucketBytes]]) -> None:
        used_up = 0
        for at, bucket in mine:
            if not bucket.gradients:
                continue
            is_sharded = bucket.sum_bytes < bucket.whole_bytes
            self._add(bucket.whole_bytes)
            self._add(-sum(bucket.gradients) if at in self._made else 0)
            self._add(bucket.sum_bytes if is_sharded else 0)
            used_up += bucket.whole_bytes if is_sharded else 0
            used_up += bucket.sum_bytes if at in self._summed else 0
            self._made.discard(at)
            self._summed.add(at)
        self._begin_next(used_up)

    def _begin_next(self, used_up: int = 0) -> None:
        """Let go of what those that are done have used up; what this one will follows later."""
        num_waiting = next(self._num_waiting, 0)
        while len(self._used_up) > num_waiting:
            self._add(-self._used_up.popleft())
        self._used_up.append(used_up)

    def _add(self, num_bytes: int) -> None:
        self._level += num_bytes
        self._highest = max(self._highest, self._level)
