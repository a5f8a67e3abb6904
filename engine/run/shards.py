"""What the replicas of a rank's stages share: parameters, gradients and optimizer states in shards.

    bucket   parameters of one dtype, end to end in one flat tensor, padded to D equal shards
    shard    the D-th part of a bucket that one replica keeps
    piece    what of a parameter lies in the shard: there the optimizer trains it

    policy            parameters           gradients            optimizer states
    none, ddp         whole                whole, summed        whole
    ZeRO-1            whole                whole, summed        of pieces
    ZeRO-2            whole                of pieces            of pieces
    ZeRO-3, torch     of pieces, the whole between UNSHARD and RESHARD

Parameters are views of their bucket. RESHARD frees the memory behind it and UNSHARD gives it memory
again: the tensors stay, and so do their version counters, so that what a forward has saved of them
for its backward holds the gathered values again when the stage is unsharded for the backward.

Not torch's `fully_shard`: on the host its reductions and gathers block the thread that calls them,
so that nothing overlaps and no collective can be timed apart; it takes gradients in hooks of
autograd, which a W that adds to `.grad` by itself never calls; and it has no ZeRO-1.

A parameter that no replica has used keeps no gradient: zeros would decay it. So what has no
gradient is filled with zeros that are negative, and gradients are freed of these. Negative zeros
alone add up to a negative zero: the sum itself tells whether there was a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from engine.model.stage_module import ModelError, StageModule
from engine.model.storages import address
from engine.plan.action import Action, Op
from engine.plan.collectives import CollectivePolicy, Zero1, Zero2, most_unsharded
from engine.plan.sharded_bytes import BUCKET_BYTES, BucketBytes, SharedBytes
from engine.run import device as devices
from engine.run.backward import laid_out_as
from engine.run.collective_lane import CollectiveLane, Job
from engine.run.p2p.channel import Transfer

_ALIGNED_BYTES = 64
"""Parameters and shards begin at multiples of it: kernels load whole vectors."""


_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""By the names of torch 2.13, where it has them: the older ones warn."""


class ReplicaGroup:
    """The same rank of all replicas. Each method is collective and blocks the host or a stream."""

    def __init__(self, group: dist.ProcessGroup, replica: int, replicas: int) -> None:
        self._group, self.replica, self.replicas = group, replica, replicas
        self._is_gloo = dist.get_backend(group) == "gloo"

    @property
    def is_on_stream(self) -> bool:
        """Whether the device's streams wait for its work, and not the thread that calls."""
        return not self._is_gloo

    def gather(self, whole: Tensor, shard: Tensor) -> None:
        """Put the shards of all replicas together; `shard` may be this replica's part of it."""
        self._exchange(_gather, whole, shard)

    def sum(self, flat: Tensor) -> None:
        """Replace it by the sum over replicas, equal on all of them bit for bit."""
        dist.all_reduce(flat, group=self._group)

    def sum_shard(self, shard: Tensor, flat: Tensor) -> None:
        """Write this replica's part of the sum over replicas."""
        self._exchange(_reduce_scatter, shard, flat)

    def _exchange(self, collective: Callable[..., object], result: Tensor, given: Tensor) -> None:
        if self._is_gloo and devices.is_accelerator(result.device):  # gloo knows host memory only
            on_host = torch.empty_like(result, device="cpu")
            collective(on_host, given.cpu(), group=self._group)
            result.copy_(on_host)
        else:
            collective(result, given, group=self._group)


@dataclass(frozen=True)
class ParameterPiece:
    """Elements `first` to `last` of a flattened parameter: what is trained of it here."""

    own: nn.Parameter  # a view of the shard, or the parameter itself
    first: int
    last: int

    @classmethod
    def all_of(cls, parameter: nn.Parameter) -> ParameterPiece:
        return cls(parameter, 0, parameter.numel())


@dataclass(frozen=True)
class Sharded:
    """What of a stage's training a replica keeps in shards only."""

    parameters: bool
    gradients: bool
    optimizer: bool

    @classmethod
    def by(cls, policy: CollectivePolicy) -> Sharded:
        parameters = most_unsharded(policy) is not None
        gradients = parameters or isinstance(policy, Zero2)
        return cls(parameters, gradients, gradients or isinstance(policy, Zero1))


class Bucket:
    """Parameters of one dtype that are gathered and summed together."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], group: ReplicaGroup, sharded: Sharded
    ) -> None:
        self.parameters, self._group, self._sharded = list(parameters), group, sharded
        first = self.parameters[0]
        self.is_trained = first.requires_grad
        self._dtype, self._device = first.dtype, first.device
        aligned = max(1, _ALIGNED_BYTES // first.dtype.itemsize)
        sizes = [-(-p.numel() // aligned) * aligned for p in self.parameters]
        self._starts = [sum(sizes[:at]) for at in range(len(sizes))]
        self._shard_size = -(-sum(sizes) // (group.replicas * aligned)) * aligned
        self._size = self._shard_size * group.replicas
        self._begin = group.replica * self._shard_size
        self.is_reduced = False  # in this step
        self.num_users = 0  # unsharded stages that have its parameters
        self._used: set[int] = set()  # parameters with a gradient on this replica in this step
        self._sum: Tensor | None = None  # of gradients over replicas, in whole or this shard of it
        self.pieces: dict[nn.Parameter, ParameterPiece] = {}
        if sharded.optimizer:  # parameters become views of one flat tensor, pieces of the shard
            self._whole = self._filled(self._size, 0.0)
            for parameter, view in zip(self.parameters, self._views(self._whole), strict=True):
                view.copy_(parameter.detach())
                parameter.data = view
            self._shard = self._whole[self._begin : self._begin + self._shard_size]
            if self._sharded.parameters:
                self._shard = self._shard.clone()
                self.free()
            for parameter, start in zip(self.parameters, self._starts, strict=True):
                begin = max(self._begin, start)
                end = min(self._begin + self._shard_size, start + parameter.numel())
                if begin < end:
                    view = self._shard[begin - self._begin : end - self._begin]
                    own = nn.Parameter(view, requires_grad=self.is_trained)
                    self.pieces[parameter] = ParameterPiece(own, begin - start, end - start)

    @property
    def num_bytes(self) -> int:
        return self._size * self._dtype.itemsize

    def bytes_of(self, stages: Iterable[int]) -> BucketBytes:
        """Its bytes, for the prediction of memory."""
        shard_bytes = self._shard_size * self._dtype.itemsize
        gradients = tuple(p.nbytes for p in self.parameters) if self.is_trained else ()
        sum_bytes = shard_bytes if self._sharded.gradients else self.num_bytes
        return BucketBytes(frozenset(stages), self.num_bytes, sum_bytes, gradients)

    def _filled(self, size: int, value: float) -> Tensor:
        return torch.full((size,), value, dtype=self._dtype, device=self._device)

    def _views(self, flat: Tensor) -> Iterator[Tensor]:
        """Each parameter's part of a flat tensor, in its shape."""
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            yield flat[start : start + parameter.numel()].view(parameter.shape)

    def make_room(self) -> None:
        """Give the whole parameters memory, of any content."""
        self._whole.untyped_storage().resize_(self.num_bytes)

    def gather(self) -> None:
        """Collective: make the parameters whole, of the shards of all replicas."""
        self._group.gather(self._whole, self._shard)

    @torch.no_grad()
    def keep_own(self) -> None:
        """Take this replica's shard out of whole parameters, as they were read."""
        own = self._whole[self._begin : self._begin + self._shard_size]
        self._shard.copy_(own)

    def free(self) -> None:
        """Free the whole parameters. Their tensors stay, without memory."""
        self._whole.untyped_storage().resize_(0)

    def begin_step(self) -> None:
        """Forget the gradients."""
        self.is_reduced, self._sum = False, None
        self._used.clear()
        for piece in self.pieces.values():
            piece.own.grad = None

    def take_gradients(self) -> Callable[[], None]:
        """Take what the parameters have in `.grad`; returns what sums it, which is collective."""
        self.is_reduced = True
        flat = self._filled(self._size, -0.0)
        for index, view in enumerate(self._views(flat)):
            parameter = self.parameters[index]
            if parameter.grad is not None:
                torch.add(parameter.grad, 0.0, out=view)  # -0.0 + 0.0 is 0.0
                parameter.grad = None
                self._used.add(index)
        shard = self._filled(self._shard_size, 0.0) if self._sharded.gradients else None

        def add() -> None:
            if shard is None:
                self._group.sum(flat)
            else:
                self._group.sum_shard(shard, flat)
            own = flat if shard is None else shard
            self._sum = own if self._sum is None else self._sum.add_(own)

        return add

    def hand_out(self) -> None:
        """Put the sums in `.grad` of what the optimizer trains. Blocks only for unused ones."""
        if self._sum is None:
            return
        at = 0 if self._sharded.gradients else self._begin
        shard = self._sum[at : at + self._shard_size]
        for index, (parameter, start) in enumerate(zip(self.parameters, self._starts, strict=True)):
            if not self._sharded.optimizer:
                found = self._sum[start : start + parameter.numel()]
                holder: nn.Parameter = parameter
            elif piece := self.pieces.get(parameter):
                begin = start + piece.first - self._begin
                found, holder = shard[begin : begin + piece.own.numel()], piece.own
            else:
                continue
            if index in self._used or was_used(found):
                holder.grad = laid_out_as(holder, found.view(holder.shape))

    @torch.no_grad()
    def gathered(self, of: Callable[[nn.Parameter], Tensor | None]) -> list[Tensor | None]:
        """Collective: what each replica has of its pieces, put together for each parameter."""
        shard = self._filled(self._shard_size, -0.0)
        for parameter, start in zip(self.parameters, self._starts, strict=True):
            piece = self.pieces.get(parameter)
            if piece is not None and (value := of(piece.own)) is not None:
                begin = start + piece.first - self._begin
                torch.add(value, 0.0, out=shard[begin : begin + piece.own.numel()])
        flat = self._filled(self._size, 0.0)
        self._group.gather(flat, shard)
        return [view if was_used(view) or not view.numel() else None for view in self._views(flat)]


def was_used(total: Tensor) -> bool:
    """Whether anything but negative zeros was added up. Blocks until it is known."""
    first = torch.view_as_real(total.flatten()[:1])[:, 0] if total.is_complex() else total.flatten()
    return not bool(((first[:1] == 0) & torch.signbit(first[:1])).all())


def _all(works: Iterable[Callable[[], None]]) -> Callable[[], None]:
    """Do all of them, in one order on all replicas."""
    works = list(works)

    @torch.no_grad()
    def work() -> None:
        for one in works:
            one()

    return work


def check_views(module: StageModule) -> None:
    """Refuse plain attributes in the memory of parameters, which buckets move: they would be stale.

    Raises ModelError.
    """
    names = {address(parameter): name for name, parameter in module.own_parameters().items()}
    for inner in module.modules():
        for attribute, value in vars(inner).items():
            leaves = tree_leaves(value) if attribute not in _OF_TORCH else []
            for leaf in leaves:
                if isinstance(leaf, Tensor) and address(leaf) in names:
                    raise ModelError(
                        f"{type(inner).__name__} keeps a view of {names[address(leaf)]} in its "
                        f"attribute {attribute}, which would be stale where replicas share the "
                        "optimizer or the parameters; take the view within the forward, or set "
                        'sharding.policy = "ddp"',
                        "sharding.policy",
                    )


_OF_TORCH = frozenset(vars(nn.Module()))


class Shards:
    """The buckets of a rank's stages, on the lane that its collectives are done on."""

    def __init__(
        self,
        parameters_of: Mapping[int, Iterable[nn.Parameter]],
        alone: Iterable[nn.Parameter],
        policy: CollectivePolicy,
        group: ReplicaGroup,
        lane: CollectiveLane,
    ) -> None:
        """`parameters_of` each stage of the rank; `alone`: those that are not to share a bucket.

        What several stages own must be alone: its shards are then the same for all its owners.
        """
        self.sharded, self.replica, self.lane = Sharded.by(policy), group.replica, lane
        lonely = {id(parameter) for parameter in alone}
        self._of_stage: dict[int, list[Bucket]] = {}
        self._bucket_of: dict[nn.Parameter, Bucket] = {}
        for stage, parameters in parameters_of.items():
            kinds: dict[object, list[nn.Parameter]] = {}
            mine = list(parameters)
            for parameter in mine:
                own = id(parameter) if id(parameter) in lonely else None
                kind = (own, parameter.dtype, parameter.requires_grad)
                if parameter not in self._bucket_of:
                    kinds.setdefault(kind, []).append(parameter)
            # Parts of at most a bucket's bytes, or one parameter that is larger.
            parts: list[list[nn.Parameter]] = []
            for equal in kinds.values():
                parts.append([])
                for parameter in equal:
                    num_bytes = sum(p.nbytes for p in parts[-1]) + parameter.nbytes
                    if parts[-1] and num_bytes > BUCKET_BYTES:
                        parts.append([])
                    parts[-1].append(parameter)
            for part in parts:
                self._bucket_of |= dict.fromkeys(part, Bucket(part, group, self.sharded))
            self._of_stage[stage] = list(dict.fromkeys(self._bucket_of[p] for p in mine))
        self._buckets = list(dict.fromkeys(self._bucket_of.values()))
        self._unsharding: dict[int, Job] = {}

    def begin(self, action: Action) -> None:
        """Effect: an UNSHARD or REDUCE_GRAD is on the lane, a RESHARD done.

        Never blocks, but for a stage that is resharded before it was ever needed.
        """
        buckets = self._of_stage[action.stage]
        if action.op is Op.UNSHARD:
            missing = [bucket for bucket in buckets if not bucket.num_users]
            for bucket in buckets:
                bucket.num_users += 1
            for bucket in missing:
                bucket.make_room()
            works = _all([bucket.gather for bucket in missing])
            num_bytes = sum(bucket.num_bytes for bucket in missing)
            self._unsharding[action.stage] = self.lane.issue(action, works, num_bytes)
        elif action.op is Op.RESHARD:
            self.lane.wait(self._unsharding.pop(action.stage))
            for bucket in buckets:
                bucket.num_users -= 1
                if not bucket.num_users:
                    bucket.free()
        else:
            self._reduce(action, [bucket for bucket in buckets if bucket.is_trained])

    def wait_for(self, stage: int) -> None:
        """Block until the stage's parameters are whole."""
        self.lane.wait(self._unsharding[stage])

    def finish_step(self) -> list[Transfer]:
        """Block until the lane is empty."""
        return self.lane.finish()

    @torch.no_grad()
    def _reduce(self, action: Action | None, buckets: Sequence[Bucket]) -> None:
        works = [bucket.take_gradients() for bucket in buckets]
        self.lane.issue(action, _all(works), sum(bucket.num_bytes for bucket in buckets))

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self.lane.waiting.clear()
        for bucket in self._buckets:
            bucket.begin_step()

    def sum_gradients(self) -> None:
        """Leave the sums over replicas in `.grad`, also of what the program has not summed."""
        self._reduce(None, [b for b in self._buckets if b.is_trained and not b.is_reduced])
        self.lane.finish()
        for bucket in self._buckets:
            bucket.hand_out()

    def bytes_shared(self) -> SharedBytes | None:
        """The buckets for the prediction of memory, and, once a step is done, how the lane lagged.

        None: there is nothing to predict it from.
        """
        of_stage = self._of_stage.items()
        buckets = [b.bytes_of(s for s, mine in of_stage if b in mine) for b in self._buckets]
        return SharedBytes(buckets, self.lane.waiting)

    def gather_updated(self) -> None:
        """Gather what the optimizer has updated, where parameters are kept whole."""
        if self.sharded.optimizer and not self.sharded.parameters:
            for bucket in self._buckets:
                if bucket.is_trained:
                    self.lane.issue(None, _all([bucket.gather]))
            self.lane.finish()

    def pieces(self, parameter: nn.Parameter) -> list[ParameterPiece]:
        """What the optimizer trains of a parameter here: one piece, or none, or all of it."""
        if not self.sharded.optimizer:
            return [ParameterPiece.all_of(parameter)]
        piece = self._bucket_of[parameter].pieces.get(parameter)
        return [] if piece is None else [piece]

    def gathered(
        self, stages: Iterable[int], of: Callable[[nn.Parameter], Tensor | None]
    ) -> dict[nn.Parameter, Tensor | None]:
        """Collective: for each parameter of some stages, `of` its pieces on all replicas, as one.

        None where no replica has anything.
        """
        buckets = dict.fromkeys(b for stage in stages for b in self._of_stage[stage])
        if not self.sharded.optimizer:
            return {p: of(p) for bucket in buckets for p in bucket.parameters}
        found = ((bucket.parameters, bucket.gathered(of)) for bucket in buckets)
        return {p: value for some, them in found for p, value in zip(some, them, strict=True)}

    @contextmanager
    def written_whole(self) -> Iterator[None]:
        """Meanwhile the parameters have memory, and what is written there is kept."""
        sharded = self._buckets if self.sharded.parameters else []
        for bucket in sharded:
            bucket.make_room()
        yield
        for bucket in sharded:
            bucket.keep_own()
            bucket.free()

    def close(self) -> None:
        """Give back the lane; it is not used again."""
        self.lane.close()
