"""Weights that several stages own, such as tied embeddings: they train as one.

within a rank   the stages hold one parameter
over ranks      each rank holds a copy; the gradients are added up, so that all copies stay equal
over replicas   as all weights, before; in buckets of their own, so that owners have equal shards
a checkpoint    has the copy of the first rank that owns it
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.connection import owners_of
from engine.model.stage_module import SharedWeight, StageModule
from engine.run.p2p.fabric import Ranks
from engine.run.shards import ParameterPiece, was_used

SumOver = Callable[[Tensor, Ranks], None]
"""Replaces a tensor by its sum over these ranks. Blocks until they are there."""
PiecesOf = Callable[[nn.Parameter], Sequence[ParameterPiece]]
"""What is trained of a parameter on this rank."""


@dataclass(frozen=True)
class _Summed:
    """A parameter of this rank whose gradient is a sum over several ranks."""

    parameter: nn.Parameter
    ranks: Ranks
    is_first: bool  # this rank is the first of them


class SharedWeights:
    """Those of this rank's stages."""

    def __init__(
        self,
        weights: Sequence[SharedWeight],
        modules: Mapping[int, StageModule],
        rank_of: Ranks,
        rank: int,
    ) -> None:
        """`rank_of` has the rank of each stage."""
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
                self._summed.append(_Summed(parameter, owners, rank == owners[0]))

    def sum_gradients(self, sum_over: SumOver, pieces_of: PiecesOf) -> None:
        """Blocks until the other owners are here. All end with the same sum, bit for bit."""
        for summed in self._summed:
            for piece in pieces_of(summed.parameter):
                gradient = piece.own.grad
                total = torch.full_like(piece.own, -0.0) if gradient is None else gradient
                first = total[(slice(0, 1),) * total.dim()]
                if gradient is not None:
                    first += 0.0  # -0.0 + 0.0 is 0.0
                sum_over(total, summed.ranks)
                # None if no owner has used the parameter: with zeros its weights would decay.
                piece.own.grad = total if gradient is not None or was_used(first) else None

    def counted_elsewhere(self, pieces_of: PiecesOf) -> set[int]:
        """The ids of what is trained whose gradients another rank adds to the norm over all."""
        elsewhere = (summed.parameter for summed in self._summed if not summed.is_first)
        return {id(piece.own) for parameter in elsewhere for piece in pieces_of(parameter)}

    def parameters(self) -> list[nn.Parameter]:
        """Those of this rank that several stages own, here or elsewhere."""
        return [
            self._modules[stage].own_parameters()[name]
            for weight in self._weights
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
