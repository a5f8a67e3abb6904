"""Shares stages among replicas as users of torch do, for comparison with the engine.

    none           as the engine: gradients are summed once, after torch's schedule
    ddp            `replicate`, which torch's schedules reduce by REDUCE_GRAD, a W included
    zero3, torch   `fully_shard`; torch places UNSHARD and RESHARD, for three stages of a rank

torch turns parameters into its own, of which a replica has the first rows, the next ones, and so
on. The optimizer, clipping and shared weights are the trainer's, and see the local part as a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from engine.flight import Flight
from engine.plan.collectives import DataParallel, NoCollectives, most_unsharded
from engine.run.shards import ParameterPiece, ReplicaGroup, Sharded, Shards, was_used
from engine.shared_weights import SharedWeights
from engine.trainer import Trainer, shards_of
from ppbench.run.runtimes.runtime import RefusalError

Submodules = Callable[[Trainer, int], nn.Module]
"""Makes what torch runs of a stage."""


def torch_shards_of(
    trainer: Trainer, shared: SharedWeights, flight: Flight, submodule_of: Submodules
) -> Shards:
    """Wrap the stages of a rank by the policy of its configuration. Raises RefusalError."""
    policy = trainer.config.sharding
    if isinstance(policy, NoCollectives):
        return shards_of(trainer, shared, flight)
    if not isinstance(policy, DataParallel) and most_unsharded(policy) is None:
        raise RefusalError(
            f'runtime "torch" shares nothing by {type(policy).__name__}; expected sharding.policy '
            '"none", "ddp", "zero3" or "torch"'
        )
    return TorchShards(trainer, submodule_of)


class TorchShards(Shards):
    """The stages of a rank as torch shares them: its schedule calls what the lane does else."""

    def __init__(self, trainer: Trainer, submodule_of: Submodules) -> None:
        is_sharded = most_unsharded(trainer.config.sharding) is not None
        self.sharded = Sharded(is_sharded, is_sharded, is_sharded)
        self.replica, num_replicas = trainer.replica, trainer.config.replicas
        mesh = trainer.fabric.mesh_of(trainer.counterparts, trainer.pipeline, trainer.everyone)
        self._group = ReplicaGroup(mesh.get_group("replica"), self.replica, num_replicas)
        self.submodules: dict[int, nn.Module] = {}
        self._piece_of: dict[
            nn.Parameter, ParameterPiece
        ] = {}  # by the parameter, and by what it became
        self._made: dict[nn.Parameter, ParameterPiece] = {}  # of torch's parameters
        for stage, module in trainer.modules.items():
            before = dict(module.named_parameters(remove_duplicate=False))
            if any(parameter in self._piece_of for parameter in before.values()):
                raise RefusalError(
                    'runtime "torch" cannot share weights that two stages of one rank have in '
                    'common; expected sharding.policy "none", or runtime "engine"'
                )
            self.submodules[stage] = self._wrapped(submodule_of(trainer, stage), mesh["replica"])
            for name, made in module.named_parameters(remove_duplicate=False):
                self._add(before[name], made)

    def _wrapped(self, submodule: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Wrap a stage; gradients are summed, since the loss is a mean over all replicas."""
        if self.sharded.parameters:
            wrapped: object = fully_shard(submodule, mesh=mesh, reshard_after_forward=False)
        else:
            wrapped = replicate(submodule, mesh=mesh)
        assert isinstance(wrapped, FSDPModule)
        wrapped.set_gradient_divide_factor(1.0)
        wrapped.set_force_sum_reduction_for_comms(True)
        return submodule

    def _add(self, whole: nn.Parameter, made: nn.Parameter) -> None:
        local = _local(made)
        rows = -(-whole.shape[0] // self._group.replicas) if self.sharded.parameters else 0
        first = min(self.replica * rows, whole.shape[0]) * whole[:1].numel()
        own = nn.Parameter(local, requires_grad=whole.requires_grad)
        piece = self._made.setdefault(made, ParameterPiece(own, first, first + local.numel()))
        self._piece_of |= {whole: piece, made: piece}

    def begin_step(self) -> None:
        for piece in self._made.values():
            piece.own.grad = None

    def sum_gradients(self) -> None:
        """Hand torch's sums to the pieces, and where torch keeps the parameters by now."""
        for made, piece in self._made.items():
            piece.own.data = _local(made)
            piece.own.grad = None if made.grad is None else _local(made.grad)

    def bytes_shared(self) -> None:
        """torch does not tell when it makes room."""

    def gather_updated(self) -> None:
        """Do nothing: torch gathers parameters when it needs them."""

    def pieces(self, parameter: nn.Parameter) -> list[ParameterPiece]:
        piece = self._piece_of[parameter]
        return [piece] if piece.own.numel() else []

    @torch.no_grad()
    def gathered(
        self, stages: Iterable[int], of: Callable[[nn.Parameter], Tensor | None]
    ) -> dict[nn.Parameter, Tensor | None]:
        parameters = dict.fromkeys(p for s in stages for p in self.submodules[s].parameters())
        return {p: self._gathered(p, of(self._made[p].own)) for p in parameters}

    def _gathered(self, parameter: nn.Parameter, value: Tensor | None) -> Tensor | None:
        if not self.sharded.parameters:
            return value
        rows = -(-parameter.shape[0] // self._group.replicas)
        shard = torch.full_like(_local(parameter).new_empty(rows, *parameter.shape[1:]), -0.0)
        if value is not None:
            torch.add(value, 0.0, out=shard[: len(value)])
        whole = shard.new_zeros(rows * self._group.replicas, *parameter.shape[1:])
        self._group.gather(whole, shard)
        return whole[: parameter.shape[0]] if was_used(whole) else None

    def close(self) -> None:
        """Do nothing: there is no lane."""


def _local(tensor: Tensor) -> Tensor:
    """Return what a replica has of one of torch's distributed tensors."""
    local: Tensor = getattr(tensor, "_local_tensor", tensor).detach()
    return local
