"""Stages of a module that is a chain of pieces: the children of an nn.Sequential, or traced ones.

Pieces are to a chain what layers are to a causal LM. What passes from a stage to the next is every
value made before the cut and used after it: one hidden state in a Sequential, more where a traced
module has skip connections; a value that skips a stage travels through it.

    ids -> [ piece 0, piece 1 ] -- hidden, skip --> [ piece 2 ] -- hidden, skip --> [ piece 3 ] ->

A value may be a tuple, list or dict; its tensors are sent one by one and put together again. What
passes a cut is known from one forward on fake tensors. What a cut changes without any error, such
as a weight that a forward changes on one of its stages only, trains differently from the author's
module, and `engine.exactness` finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from engine.model.factory import Caster, Factory
from engine.model.stage_module import (
    Message,
    ModelError,
    Partition,
    SharedWeight,
    StageModule,
    TensorSpec,
)
from engine.model.storages import own_tensors
from engine.model.task import Task

INPUT = "input"
OUTPUT = "output"

Values = dict[str, Any]
"""Values that pass from piece to piece by name: tensors, or tuples, lists and dicts of them."""

_Edge = tuple[Node, int]
"""A place in autograd's graph: an operation, and which of its outputs."""


@dataclass(frozen=True)
class ChainPiece:
    """A part of the chain, and the names of the values that it takes and gives."""

    module: nn.Module
    prefix: str  # of its parameters' names in the unsplit module
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    is_one_value: bool = False  # whatever it returns is the value; else a tuple has one for each
    entrance: str | None = None  # the submodule of the unsplit module that it begins with

    def run(self, values: Values) -> None:
        """Add what it gives to the values."""
        output = self.module(*(values[name] for name in self.takes))
        if self.is_one_value:
            values[self.gives[0]] = output
            return
        outputs = output if isinstance(output, tuple | list) else (output,)
        values.update(zip(self.gives, outputs, strict=True))

    def tensors(self, *, is_state: bool = False) -> dict[str, Tensor]:
        """Its parameters, or the parameters and buffers that a checkpoint holds, by full name."""
        own: dict[str, Tensor] = (
            self.module.state_dict(keep_vars=True)
            if is_state
            else dict(self.module.named_parameters(remove_duplicate=False))
        )
        tensors = {name: tensor for name, tensor in own.items() if isinstance(tensor, Tensor)}
        return {f"{self.prefix}{name}": tensor for name, tensor in tensors.items()}


@dataclass(frozen=True)
class Layout:
    """The structure of a value that is made of tensors and None."""

    spec: TreeSpec
    is_tensor: tuple[bool, ...]

    @classmethod
    def of(cls, value: object) -> Layout:
        leaves, spec = tree_flatten(value)
        return cls(spec, tuple(isinstance(leaf, Tensor) for leaf in leaves))

    def take(self, tensors: Iterable[Tensor]) -> Any:
        """The value, made of the next of these tensors."""
        incoming = iter(tensors)
        leaves = [next(incoming) if is_tensor else None for is_tensor in self.is_tensor]
        return tree_unflatten(leaves, self.spec)


class ChainStage(StageModule):
    """Some pieces in a row."""

    def __init__(
        self,
        pieces: list[ChainPiece],
        layers: range,
        takes: tuple[str, ...],
        gives: tuple[str, ...],
        canonical: Mapping[str, str],
        layouts: Mapping[str, Layout] | None = None,
        *,
        is_first: bool,
        is_last: bool,
    ) -> None:
        """`takes` and `gives` name values, `layouts` are those of values that are no tensors."""
        super().__init__(layers, is_first=is_first, is_last=is_last)
        self.modules_of_pieces = nn.ModuleList(piece.module for piece in pieces)
        self._pieces, self._takes, self._gives = pieces, takes, gives
        self._canonical, self._layouts = canonical, layouts or {}

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        tensors = iter(inputs)
        values = {
            name: self._layouts[name].take(tensors) if name in self._layouts else next(tensors)
            for name in self._takes
        }
        for piece in self._pieces:
            piece.run(values)
        return tuple(tensor for name in self._gives for tensor in self._sent(values[name], name))

    def _sent(self, value: Any, name: str) -> list[Tensor]:
        layout = self._layouts.get(name)
        if layout is None and isinstance(value, Tensor):
            return [value]
        if layout is None or Layout.of(value) != layout:
            raise ModelError(
                f"{name}: a {type(value).__name__} of another structure than in the first forward "
                "cannot be sent to the next stage; return the same structure each time"
            )
        return _tensors_in(value)

    @property
    def entrance(self) -> str | None:
        if self.is_first or not self._pieces:
            return super().entrance
        return self._pieces[0].entrance

    @property
    def units(self) -> list[nn.Module]:
        return list({id(piece.module): piece.module for piece in self._pieces}.values())

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


def _tensors_in(value: object) -> list[Tensor]:
    """The tensors in a value, in the order in which they are sent."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


class Chain:
    """A chain without weights."""

    def __init__(
        self,
        factory: Factory,
        pieces: list[ChainPiece],
        realise: Callable[[nn.Module, list[ChainPiece]], list[ChainPiece]],
        dtype: torch.dtype,
        shape: tuple[int, int],
        task: Task,
    ) -> None:
        """`pieces` are fake; `realise` puts real weights, found in a built module, into some.

        `shape` is that of a microbatch's token ids, `[batch, seq]`.
        """
        self._factory, self._pieces, self._realise = factory, pieces, realise
        self._shape = shape
        self._dtype = dtype
        self._canonical = factory.canonical | factory.canonical_buffers
        self._forwards: dict[tuple[int, int], tuple[Values, list[list[bool]]]] = {}
        self.num_layers = len(pieces)
        self.num_parameters = sum(p.numel() for p in factory.skeleton.parameters())
        self.max_positions: int | None = None
        self.task = task
        sizes = [sum(p.numel() for p in set(piece.tensors().values())) for piece in pieces]
        self.part_sizes: tuple[int, ...] = (0, *sizes, 0)

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
        """Raises ModelError for a module that fails, and for what cannot be sent."""
        values, have_gradients = self._on_fakes(batch, seq_len)
        messages = []
        for cut in [layers.stop for layers in partition[:-1]]:
            passing = {name: values[name] for name in self._crossing(cut)}
            for name, leaf in [(n, leaf) for n, v in passing.items() for leaf in tree_leaves(v)]:
                is_dense = isinstance(leaf, Tensor) and leaf.layout == torch.strided
                if leaf is not None and (not is_dense or leaf.is_complex()):
                    what = str(leaf.dtype) if isinstance(leaf, Tensor) else type(leaf).__name__
                    maker = next((i for i, p in enumerate(self._pieces) if name in p.gives), 0)
                    raise self._error(
                        f"{self._called(maker)} returns {what}, which cannot be sent to the "
                        "next stage; cut elsewhere (partition), or return dense real tensors"
                    )
            sent = zip(_tensors_in(list(passing.values())), have_gradients[cut], strict=True)
            messages.append(tuple(TensorSpec(tuple(t.shape), t.dtype, is_on) for t, is_on in sent))
        return messages

    def output(self, batch: int, seq_len: int) -> TensorSpec:
        output = self._on_fakes(batch, seq_len)[0][OUTPUT]
        return TensorSpec(tuple(output.shape), output.dtype)

    def _on_fakes(self, batch: int, seq_len: int) -> tuple[Values, list[list[bool]]]:
        """The values of a forward on fake tensors, and whose gradients come back over each cut.

        Of each cut, the tensors that pass it, in order: whether the output depends on them.
        """
        if (batch, seq_len) in self._forwards:
            return self._forwards[batch, seq_len]
        edges: list[list[_Edge | None]] = [[None]]  # of what passes each cut, when it passes it
        example, _ = self.task.example(batch, seq_len)
        with self._factory.fake:
            values: Values = {INPUT: self._factory.fake.from_tensor(example)}
            for index, piece in enumerate(self._pieces):
                try:
                    piece.run(values)
                except Exception as error:  # an author's code raises what it likes
                    what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    raise self._error(f"{self._called(index)} fails: {what}") from error
                for name in piece.gives:  # as it is where it was sent: no view of another value
                    values[name] = tree_map_only(Tensor, Tensor.clone, values[name])
                passing = _tensors_in([values[name] for name in self._crossing(index + 1)])
                edges.append(
                    [get_gradient_edge(t)[:2] if t.requires_grad else None for t in passing]
                )
        if problem := self.task.problem_of(values[OUTPUT], batch, seq_len):
            raise self._error(problem)
        waiting = [edge for edge in edges[-1] if edge is not None]
        if not waiting:
            raise self._error(
                "the output depends on no parameter that requires a gradient, so there is "
                "nothing to train; do not detach what they are computed from, or freeze less"
            )
        reached: set[_Edge] = set()
        while waiting:
            edge = waiting.pop()
            if edge not in reached:
                reached.add(edge)
                waiting += [(node, nr) for node, nr in edge[0].next_functions if node is not None]
        with self._factory.fake:  # without the graph
            values = tree_map_only(Tensor, Tensor.detach, values)
        found = values, [[edge in reached for edge in passing] for passing in edges]
        self._forwards[batch, seq_len] = found
        return found

    def _error(self, message: str) -> ModelError:
        return ModelError(f'"{self._factory.name}": {message}')

    def _called(self, index: int) -> str:
        return self._pieces[index].prefix.rstrip(".") or f"traced piece {index}"

    def write_configuration(self, folder: Path) -> None:
        """Write nothing: the factory is the configuration."""

    def check_configuration(self, folder: Path) -> None:
        """Accept any: names and shapes of tensors are compared elsewhere."""

    def build_stage(self, partition: Partition, stage: int, device: torch.device) -> StageModule:
        layers = partition[stage]
        module = self._factory.build(self._names(layers))
        pieces = self._realise(module, [self._pieces[index] for index in layers])
        caster = Caster(device, self._dtype)
        for piece in pieces:
            caster.apply(piece.module)
            piece.module.train()
        return ChainStage(
            pieces,
            layers,
            self._crossing(layers.start),
            self._crossing(layers.stop),
            self._canonical,
            self._layouts_at(layers.start) | self._layouts_at(layers.stop),
            is_first=stage == 0,
            is_last=stage == len(partition) - 1,
        )

    def _layouts_at(self, cut: int) -> dict[str, Layout]:
        """Return the layouts of the values that cross a cut and are not tensors."""
        structured = {n for piece in self._pieces if piece.is_one_value for n in piece.gives}
        layouts = {}
        for name in structured.intersection(self._crossing(cut)) - {OUTPUT}:
            values, _ = self._on_fakes(*self._shape)
            if not isinstance(values[name], Tensor):
                layouts[name] = Layout.of(values[name])
        return layouts

    def _names(self, layers: range) -> set[str]:
        pieces = (self._pieces[index] for index in layers)
        return {self._canonical[name] for piece in pieces for name in piece.tensors()}

    def _crossing(self, cut: int) -> tuple[str, ...]:
        """Names of the values made before the cut and used after it, in the order they are made."""
        made = [INPUT, *(name for piece in self._pieces[:cut] for name in piece.gives)]
        used = {name for piece in self._pieces[cut:] for name in piece.takes} or {OUTPUT}
        return tuple(name for name in made if name in used)


def sequential(factory: Factory, dtype: torch.dtype, shape: tuple[int, int], task: Task) -> Chain:
    """A chain of the children of an nn.Sequential, one that is used twice twice.

    Raises ModelError for a container that does more than call its children in a row.
    """
    skeleton = factory.skeleton
    assert isinstance(skeleton, nn.Sequential)
    _check_plain(factory.name, skeleton)
    factory.cast_skeleton(dtype)
    names = list(skeleton._modules)  # named_children() leaves out what was there before
    values = [INPUT, *(f"after {name}" for name in names[:-1]), OUTPUT]
    pieces = [
        ChainPiece(getattr(skeleton, name), f"{name}.", (values[i],), (values[i + 1],), True, name)
        for i, name in enumerate(names)
    ]

    def realise(module: nn.Module, owned: list[ChainPiece]) -> list[ChainPiece]:
        return [replace(p, module=module.get_submodule(p.prefix.rstrip("."))) for p in owned]

    return Chain(factory, pieces, realise, dtype, shape, task)


_OR_TRACE = 'or set split = "trace" with split_points'


def _check_plain(name: str, skeleton: nn.Sequential) -> None:
    kind = type(skeleton)
    if kind.forward is not nn.Sequential.forward or "forward" in vars(skeleton):
        raise ModelError(
            f'"{name}": the nn.Sequential is a {kind.__name__} with a forward of its own, '
            "which running its children in a row would leave out; return a plain "
            f"nn.Sequential, {_OR_TRACE}",
            "model.split",
        )
    if not len(skeleton) or None in skeleton._modules.values():
        raise ModelError(f'"{name}": the nn.Sequential has no children, or one that is None')
    if own := own_tensors(skeleton):
        raise ModelError(
            f'"{name}": {own[0][0]} belongs to the nn.Sequential itself, so to no stage; '
            "register it on the child that uses it"
        )
