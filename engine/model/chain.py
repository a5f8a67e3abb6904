"""Stages of a module that is a chain of pieces: the children of an nn.Sequential, or traced ones.

Pieces are to a chain what layers are to a causal LM. What passes from a stage to the next is every
value made before the cut and used after it: one hidden state in a Sequential, more where a traced
module has skip connections; a value that skips a stage travels through it.

    ids -> [ piece 0, piece 1 ] -- hidden, skip --> [ piece 2 ] -- hidden, skip --> [ piece 3 ] ->
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from engine.model.factory import Factory
from engine.model.partition import Costs
from engine.model.stage_module import (
    Message,
    ModelError,
    Partition,
    SharedWeight,
    StageModule,
    TensorSpec,
)

INPUT = "input"
OUTPUT = "output"


@dataclass(frozen=True)
class Piece:
    """A part of the chain, and the names of the values that it takes and gives."""

    module: nn.Module
    prefix: str  # of its parameters' names in the unsplit module
    takes: tuple[str, ...]
    gives: tuple[str, ...]

    def run(self, values: dict[str, Tensor]) -> None:
        """Add what it gives to the values."""
        output = self.module(*(values[name] for name in self.takes))
        outputs = output if isinstance(output, tuple | list) else (output,)
        values.update(zip(self.gives, outputs, strict=True))

    def tensors(self, *, is_state: bool = False) -> dict[str, Tensor]:
        """Its parameters, or the parameters and buffers that a checkpoint holds, by full name."""
        own: dict[str, Tensor] = (
            self.module.state_dict(keep_vars=True)
            if is_state
            else dict(self.module.named_parameters(remove_duplicate=False))
        )
        return {f"{self.prefix}{name}": tensor for name, tensor in own.items()}


class ChainStage(StageModule):
    """Some pieces in a row."""

    def __init__(
        self,
        pieces: list[Piece],
        layers: range,
        takes: tuple[str, ...],
        gives: tuple[str, ...],
        canonical: dict[str, str],
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        super().__init__(layers, is_first=is_first, is_last=is_last)
        self.modules_of_pieces = nn.ModuleList(piece.module for piece in pieces)
        self._pieces, self._takes, self._gives = pieces, takes, gives
        self._canonical = canonical
        first = pieces[0].module.modules() if pieces else ()
        self._writes_to_inputs = any(getattr(module, "inplace", False) for module in first)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._writes_to_inputs and not self.is_first:
            inputs = tuple(x.clone() for x in inputs)  # theirs is the gradient that is sent back
        values = dict(zip(self._takes, inputs, strict=True))
        for piece in self._pieces:
            piece.run(values)
        return tuple(values[name] for name in self._gives)

    @property
    def units(self) -> list[nn.Module]:
        return [piece.module for piece in self._pieces]

    def own_parameters(self) -> dict[str, nn.Parameter]:
        return {
            self._canonical[name]: parameter
            for piece in self._pieces
            for name, parameter in piece.tensors().items()
            if isinstance(parameter, nn.Parameter)
        }

    def own_state(self) -> dict[str, Tensor]:
        return {
            self._canonical.get(name, name): tensor
            for piece in self._pieces
            for name, tensor in piece.tensors(is_state=True).items()
        }


class Chain:
    """A chain without weights."""

    def __init__(
        self,
        factory: Factory,
        pieces: list[Piece],
        realise: Callable[[nn.Module, list[Piece]], list[Piece]],
        dtype: torch.dtype,
    ) -> None:
        """`pieces` are fake; `realise` puts real weights, found in a built module, into some."""
        self._factory, self._pieces, self._realise = factory, pieces, realise
        self._dtype = dtype
        self.num_layers = len(pieces)
        self.num_parameters = sum(p.numel() for p in factory.skeleton.parameters())
        self.max_positions: int | None = None
        self.vocab_size = _vocab_size(factory)
        sizes = [sum(p.numel() for p in set(piece.tensors().values())) for piece in pieces]
        self._costs = Costs(tuple(sizes))

    @property
    def costs(self) -> Costs:
        return self._costs

    @property
    def skeleton(self) -> nn.Module:
        """The whole module on fake tensors."""
        return self._factory.skeleton

    def shared_weights(self, partition: Partition) -> list[SharedWeight]:
        owners: dict[str, list[tuple[int, str]]] = {}
        for stage, layers in enumerate(partition):
            for name in sorted(self._names(layers)):
                owners.setdefault(name, []).append((stage, name))
        return [SharedWeight(n, tuple(o)) for n, o in sorted(owners.items()) if len(o) > 1]

    def messages(self, partition: Partition, batch: int, seq_len: int) -> list[Message]:
        with self._factory.fake:
            ids = torch.zeros(batch, seq_len, dtype=torch.int64)
            values = {INPUT: ids}
            for piece in self._pieces:
                self._run_fake(piece, values)
        return [
            tuple(
                TensorSpec(tuple(values[name].shape), values[name].dtype)
                for name in self._crossing(layers.stop)
            )
            for layers in partition[:-1]
        ]

    def _run_fake(self, piece: Piece, values: dict[str, Tensor]) -> None:
        try:
            piece.run(values)
        except Exception as error:
            where = piece.prefix.rstrip(".") or "a traced piece"
            message = f'"{self._factory.name}": {where} fails: {type(error).__name__}: {error}'
            raise ModelError(message) from error

    def build_stage(self, partition: Partition, stage: int, device: torch.device) -> StageModule:
        layers = partition[stage]
        module = self._factory.build(self._names(layers))
        pieces = self._realise(module, [self._pieces[index] for index in layers])
        for piece in pieces:
            piece.module.to(device, self._dtype).train()
        return ChainStage(
            pieces,
            layers,
            self._crossing(layers.start),
            self._crossing(layers.stop),
            self._factory.canonical,
            is_first=stage == 0,
            is_last=stage == len(partition) - 1,
        )

    def _names(self, layers: range) -> set[str]:
        pieces = (self._pieces[index] for index in layers)
        return {self._factory.canonical[name] for piece in pieces for name in piece.tensors()}

    def _crossing(self, cut: int) -> tuple[str, ...]:
        """Names of the values made before the cut and used after it, in the order they are made."""
        made = [INPUT, *(name for piece in self._pieces[:cut] for name in piece.gives)]
        used = {name for piece in self._pieces[cut:] for name in piece.takes} or {OUTPUT}
        return tuple(name for name in made if name in used)


def sequential(factory: Factory, dtype: torch.dtype) -> Chain:
    """A chain of the children of an nn.Sequential."""
    skeleton = factory.skeleton
    assert isinstance(skeleton, nn.Sequential)
    if not len(skeleton):
        raise ModelError(f'"{factory.name}": the nn.Sequential has no children')
    factory.cast_skeleton(dtype)
    names = [name for name, _ in skeleton.named_children()]
    values = [INPUT, *(f"after {name}" for name in names[:-1]), OUTPUT]
    pieces = [
        Piece(skeleton.get_submodule(name), f"{name}.", (values[i],), (values[i + 1],))
        for i, name in enumerate(names)
    ]

    def realise(module: nn.Module, owned: list[Piece]) -> list[Piece]:
        return [
            Piece(module.get_submodule(p.prefix.rstrip(".")), p.prefix, p.takes, p.gives)
            for p in owned
        ]

    return Chain(factory, pieces, realise, dtype)


def _vocab_size(factory: Factory) -> int:
    """That of the first embedding."""
    for module in factory.skeleton.modules():
        if isinstance(module, nn.Embedding):
            return module.num_embeddings
    raise ModelError(f'"{factory.name}": has no nn.Embedding, so its vocabulary is not known')
