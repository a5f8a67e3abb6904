"""Weights that several stages own, such as tied embeddings: they train as one.

Where two pipelines go over the ranks, every weight is one of them: both copies of a stage own it.

within a rank   the stages hold one parameter
over ranks      each rank holds a copy; the gradients are added up, so that all copies stay equal
over replicas   as all weights, before; in buckets of their own, so that owners have equal shards
a checkpoint    has the copy of the first rank that owns it
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from engine.connection import owners_of
from engine.model.stage_module import SharedWeight, StageModule
from engine.plan.program import Placement
from engine.plan.sharded_bytes import BUCKET_BYTES
from engine.run.p2p.fabric import Ranks
from engine.run.shards import ParameterPiece, was_used


class SumOver(Protocol):
    """Replaces a tensor by its sum over some ranks. Blocks until they are there."""

    def __call__(self, tensor: Tensor, ranks: Ranks) -> None: ...


PiecesOf = Callable[[nn.Parameter], Sequence[ParameterPiece]]
"""What is trained of a parameter on this rank."""


@dataclass(frozen=True)
class _Summed:
    """A parameter of this rank whose gradient is a sum over several ranks."""

    parameter: nn.Parameter
    ranks: Ranks
    is_first: bool  # this rank is the first of them
    part: int | None  # of the model, if its copies alone own it


def _sum_part(part: Sequence[nn.Parameter], sum_all: Callable[[Tensor], None]) -> None:
    """Sum the gradients of some parameters of one dtype, which the same ranks own."""
    totals = []
    for own in part:
        total = torch.full_like(own, -0.0) if own.grad is None else own.grad
        if own.grad is not None:
            total[(slice(0, 1),) * total.dim()] += 0.0  # -0.0 + 0.0 is 0.0
        totals.append(total)
    if len(totals) == 1:
        sum_all(totals[0])
    else:
        flat = torch.cat([total.flatten() for total in totals])
        sum_all(flat)
        begin = 0
        for total in totals:
            total.copy_(flat[begin : begin + total.numel()].view(total.shape))
            begin += total.numel()
    for own, total in zip(part, totals, strict=True):
        # None if no owner has used the parameter: with zeros its weights would decay.
        is_used = own.grad is not None or was_used(total[(slice(0, 1),) * total.dim()])
        own.grad = total if is_used else None


class SharedWeights:
    """Those of this rank's stages."""

    def __init__(
        self,
        weights: Sequence[SharedWeight],
        modules: Mapping[int, StageModule],
        placement: Placement,
        rank: int,
    ) -> None:
        """`weights` are those that several parts of the model own."""
        rank_of, copies = placement.ranks, placement.copies_of
        weights = [
            replace(one, owners=tuple((s, name) for own, name in one.owners for s in copies(own)))
            for one in weights
        ]
        self._tied, self._depth = list(weights), placement.depth
        self._parts_done = set[int | None]()  # of the model, in this step
        if placement.directions > 1:
            known = {owner for weight in weights for owner in weight.owners}
            for first in range(placement.depth):
                here = next((modules[s] for s in copies(first) if s in modules), None)
                names = [] if here is None else list(here.own_parameters())
                single = [name for name in names if (first, name) not in known]
                each = [tuple((s, name) for s in copies(first)) for name in single]
                weights += map(SharedWeight, single, each)
        self._weights, self._modules = weights, modules
        for weight in weights:  # stages of this rank that share one hold one parameter
            held = [(modules[stage], name) for stage, name in weight.owners if stage in modules]
            for module, name in held[1:]:
                old, new = module.own_parameters()[name], held[0][0].own_parameters()[held[0][1]]
                for part in module.modules():
                    parameters = part.named_parameters(recurse=False, remove_duplicate=False)
                    for key in [key for key, own in parameters if own is old]:
                        setattr(part, key, new)
        # What other ranks own as well, in one order on all ranks.
        self._summed: list[_Summed] = []
        for weight in weights:
            owners = owners_of((stage for stage, _ in weight.owners), rank_of)
            if len(owners) < 2 or rank not in owners:
                continue
            stage, name = next(owner for owner in weight.owners if owner[0] in modules)
            parameter = modules[stage].own_parameters()[name]
            if parameter.requires_grad:
                parts = {own % placement.depth for own, _ in weight.owners}
                alone = parts.pop() if len(parts) == 1 else None
                self._summed.append(_Summed(parameter, owners, rank == owners[0], alone))

    def sum_gradients(self, sum_over: SumOver, pieces_of: PiecesOf) -> None:
        """Blocks until the other owners are here. All end with the same sum, bit for bit.

        What `sum_copies` has summed in this step is done.
        """
        self._sum(sum_over, pieces_of, [s for s in self._summed if s.part not in self._parts_done])
        self._parts_done.clear()

    def sum_copies(self, stage: int, sum_over: SumOver, pieces_of: PiecesOf) -> None:
        """Sum what a stage and its copy alone own, as `sum_gradients`."""
        part = stage % self._depth
        self._parts_done.add(part)
        self._sum(sum_over, pieces_of, [one for one in self._summed if one.part == part])

    def _sum(self, sum_over: SumOver, pieces_of: PiecesOf, every: Sequence[_Summed]) -> None:
        """Sum some gradients; what the same ranks own goes together, a bucket at a time."""
        buckets: dict[tuple[Ranks, torch.dtype], list[list[nn.Parameter]]] = {}
        filled = Counter[tuple[Ranks, torch.dtype]]()  # bytes in the last bucket of each
        for summed in every:
            for piece in pieces_of(summed.parameter):
                key = summed.ranks, piece.own.dtype
                some = buckets.setdefault(key, [[]])
                if some[-1] and filled[key] + piece.own.nbytes > BUCKET_BYTES:
                    some.append([])
                    filled[key] = 0
                some[-1].append(piece.own)
                filled[key] += piece.own.nbytes
        for (ranks, _), parts in buckets.items():
            for part in parts:
                _sum_part(part, functools.partial(sum_over, ranks=ranks))

    def counted_elsewhere(self, pieces_of: PiecesOf) -> set[int]:
        """The ids of what is trained whose gradients another rank adds to the norm over all."""
        elsewhere = (summed.parameter for summed in self._summed if not summed.is_first)
        return {id(piece.own) for parameter in elsewhere for piece in pieces_of(parameter)}

    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank that several parts of the model own, here or elsewhere."""
        return [
            self._modules[stage].own_parameters()[name]
            for weight in self._tied
            for stage, name in weight.owners
            if stage in self._modules
        ]

    def unsplit_names(self, stage: int) -> dict[str, str]:
        """Map names on a stage to names in the unsplit model, where they differ."""
        return {
            name: weight.name
            for weight in self._weights
            for owner, name in weight.owners
            if owner == stage
        }
