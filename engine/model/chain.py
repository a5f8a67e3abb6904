"""Stages of a module that is a chain of pieces: the children of an nn.Sequential, or traced ones.

Pieces are to a chain what layers are to a causal LM. What passes from a stage to the next is every
value made before the cut and used after it: one hidden state in a Sequential, more where a traced
module has skip connections; a value that skips a stage travels through it.

    ids -> [ piece 0, piece 1 ] -- hidden, skip --> [ piece 2 ] -- hidden, skip --> [ piece 3 ] ->

A value may be a tuple, list or dict; its tensors are sent one by one and put together again. What
a cut would change without any error (a weight that a forward changes on one of its stages only) is
looked for on fake tensors (`survey`) and refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from engine.model.factory import Caster, Factory, check_hooks, hook_on
from engine.model.partition import Costs
from engine.model.stage_module import (
    Message,
    ModelError,
    Partition,
    SharedWeight,
    StageModule,
    TensorSpec,
)
from engine.model.storages import address, own_tensors
from engine.model.task import Task

INPUT = "input"
OUTPUT = "output"

Values = dict[str, Any]
"""Values that pass from piece to piece by name: tensors, or tuples, lists and dicts of them."""


@dataclass(frozen=True)
class Piece:
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

    def memory(self) -> dict[str, Tensor]:
        """Its parameters and all buffers, by full name."""
        buffers = self.module.named_buffers(remove_duplicate=False)
        return {**self.tensors(), **{f"{self.prefix}{name}": tensor for name, tensor in buffers}}


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
        pieces: list[Piece],
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
        return tensors_of(value)

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


@dataclass
class Survey:
    """The results of the survey; pieces by their index."""

    values: Values
    state: list[dict[str, Tensor]]  # of each piece, its parameters and buffers before it has run
    changed: dict[int, int] = field(default_factory=dict)
    """Memory of a weight or buffer -> the first piece that changes it."""
    written: dict[int, set[str]] = field(default_factory=dict)  # piece -> values it writes to
    flows: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """For each piece, the tensors given that get their gradient from tensors taken."""


def survey(pieces: Sequence[Piece], values: Values, run: Callable[[int, Values], None]) -> Survey:
    """Run the pieces one after the other, once, under the caller's fake mode.

    The values say which messages pass a cut; versions and autograd's graph say what a piece writes
    to and through what gradients come back. What a piece takes in other ways (a global, another
    piece's weight) is missing where a cut parts the two, and its forward then fails.
    `run(piece, values)` runs one, and adds what it gives to the values.
    """
    result = Survey(dict(values), [piece.memory() for piece in pieces])
    for index, piece in enumerate(pieces):
        leaves: list[Tensor] = []
        clones: dict[int, tuple[Tensor, Tensor]] = {}  # what was given twice stays one

        def apart(value: Any, leaves: list[Tensor] = leaves, clones: Any = clones) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in clones:
                leaf = value.detach().requires_grad_(value.requires_grad)
                clones[id(value)] = leaf, leaf.clone()
            leaves.append(clones[id(value)][0])
            return clones[id(value)][1]

        given = {name: tree_map(apart, result.values[name]) for name in piece.takes}
        inputs = [(name, t, t._version) for name in piece.takes for t in tensors_of(given[name])]
        module = piece.module
        state = [(t, t._version) for t in (*module.parameters(), *module.buffers())]
        local = dict(given)
        run(index, local)
        result.written[index] = {name for name, t, version in inputs if t._version != version}
        now = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        changed = [t for t, version in state if t._version != version or id(t) not in now]
        for inner in module.modules():  # norms, whose kernels change theirs without a trace
            if isinstance(inner, _NormBase) and inner.track_running_stats:
                changed += inner.buffers(recurse=False)
        for tensor in changed:
            result.changed.setdefault(address(tensor), index)
        outputs = [tensor for name in piece.gives for tensor in tensors_of(local[name])]
        result.flows[index] = _flows(leaves, outputs)
        result.values |= {name: local[name] for name in piece.gives}
    return result


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in a value, in the order in which they are sent."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _flows(leaves: list[Tensor], outputs: list[Tensor]) -> set[tuple[int, int]]:
    nodes = [get_gradient_edge(t).node if t.requires_grad else None for t in leaves]
    flows = set()
    for place, output in enumerate(outputs):
        reached: set[torch.autograd.graph.Node] = set()
        waiting = [get_gradient_edge(output).node] if output.requires_grad else []
        while waiting:
            below = waiting.pop()
            if below not in reached:
                reached.add(below)
                waiting.extend(node for node, _ in below.next_functions if node is not None)
        flows |= {
            (place, i) for i, node in enumerate(nodes) if node is not None and node in reached
        }
    return flows


class Chain:
    """A chain without weights."""

    def __init__(
        self,
        factory: Factory,
        pieces: list[Piece],
        realise: Callable[[nn.Module, list[Piece]], list[Piece]],
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
        self._surveys: dict[tuple[int, int], Survey] = {}
        self.num_layers = len(pieces)
        self.num_parameters = sum(p.numel() for p in factory.skeleton.parameters())
        self.max_positions: int | None = None
        self.task = task
        sizes = [sum(p.numel() for p in set(piece.tensors().values())) for piece in pieces]
        self.costs = Costs(tuple(sizes))

    @property
    def skeleton(self) -> nn.Module:
        """The whole module on fake tensors."""
        return self._factory.skeleton

    def shared_weights(self, partition: Partition) -> list[SharedWeight]:
        """Raises ModelError for one whose own hooks would see parts of its gradient."""
        owners: dict[str, list[tuple[int, str]]] = {}
        for stage, layers in enumerate(partition):
            for name in sorted(self._names(layers)):
                owners.setdefault(name, []).append((stage, name))
        shared = [SharedWeight(n, tuple(o)) for n, o in sorted(owners.items()) if len(o) > 1]
        check_hooks(self._factory.name, self._factory.hooked, shared)
        return shared

    def messages(self, partition: Partition, batch: int, seq_len: int) -> list[Message]:
        """Raises ModelError for a partition that would cut what cannot be sent."""
        seen = self._survey(batch, seq_len)
        stage_of = [stage for stage, layers in enumerate(partition) for _ in layers]
        for index, state in enumerate(seen.state):  # others must see what a forward changes
            for memory in map(address, state.values()):
                changer = seen.changed.get(memory, index)
                if stage_of[changer] != stage_of[index]:
                    names = seen.state[changer].items()
                    name = next(name for name, tensor in names if address(tensor) == memory)
                    raise self._error(
                        f"the forward of {self._called(changer)} changes {name}, which "
                        f"{self._called(index)} on another stage uses too; keep both on one "
                        "stage (partition)"
                    )
        return [self._message(seen, layers.stop) for layers in partition[:-1]]

    def output(self, batch: int, seq_len: int) -> TensorSpec:
        output = self._survey(batch, seq_len).values[OUTPUT]
        return TensorSpec(tuple(output.shape), output.dtype)

    def check_recomputation(self, batch: int, seq_len: int, layers: Collection[int]) -> None:
        """Refuse layers that write to what others see: their recomputed forwards run on clones.

        `layers` are those that are recomputed.
        """
        if not layers:
            return
        seen = self._survey(batch, seq_len)
        recomputed = {index: names for index, names in seen.written.items() if index in layers}
        for index, written in recomputed.items():
            changed = {address(t) for name in written for t in tensors_of(seen.values[name])}
            for later in range(index, self.num_layers):
                names = self._pieces[later].takes
                taken = {id(t): t for name in names for t in tensors_of(seen.values[name])}
                num_seen = sum(address(tensor) in changed for tensor in taken.values())
                if num_seen > (len(changed) if later == index else 0):
                    raise self._error(
                        f"{self._called(index)} writes to its input, whose memory "
                        f"{self._called(later)} reads too, which it cannot when recomputed; set "
                        "recompute = false, or do not write in place"
                    )

    def _survey(self, batch: int, seq_len: int) -> Survey:
        if (batch, seq_len) not in self._surveys:

            def run(index: int, values: Values) -> None:
                try:
                    self._pieces[index].run(values)
                except Exception as error:
                    what = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                    raise self._error(f"{self._called(index)} fails: {what}") from error

            example, _ = self.task.example(batch, seq_len)
            with self._factory.fake:
                values = {INPUT: self._factory.fake.from_tensor(example)}
                seen = survey(self._pieces, values, run)
            output = seen.values[OUTPUT]
            if problem := self.task.problem_of(output, batch, seq_len):
                raise self._error(problem)
            if not output.requires_grad:
                raise self._error(
                    "the output depends on no parameter that requires a gradient, so there is "
                    "nothing to train; do not detach what they are computed from, or freeze less"
                )
            self._surveys[batch, seq_len] = seen
        return self._surveys[batch, seq_len]

    def _error(self, message: str) -> ModelError:
        return ModelError(f'"{self._factory.name}": {message}')

    def _called(self, index: int) -> str:
        return self._pieces[index].prefix.rstrip(".") or f"traced piece {index}"

    def _message(self, seen: Survey, cut: int) -> Message:
        names = self._crossing(cut)
        holders: dict[int, list[str]] = {}
        for name in names:
            for leaf in tree_flatten(seen.values[name])[0]:
                is_tensor = isinstance(leaf, Tensor)
                if leaf is None:
                    continue
                if is_tensor and leaf.layout == torch.strided and not leaf.is_complex():
                    holders.setdefault(address(leaf), []).append(name)
                    continue
                what = str(leaf.dtype) if is_tensor else type(leaf).__name__
                maker = next((i for i, piece in enumerate(self._pieces) if name in piece.gives), 0)
                raise self._error(
                    f"{self._called(maker)} returns {what}, which cannot be sent to the "
                    "next stage; cut elsewhere (partition), or return dense real tensors"
                )
        # One tensor is not sent as two where a later piece writes to it as one.
        for shared in (set(some) for some in holders.values() if len(some) > 1):
            for index in range(cut, self.num_layers):
                if seen.written[index] & shared:
                    raise self._error(
                        f"{self._called(index)} writes to its input, whose memory is passed on in "
                        f"another value too, across a cut after {self._called(cut - 1)}; cut "
                        "elsewhere (partition), or do not write in place"
                    )
        # The tensors, by value and place, for which a gradient comes back over the cut.
        needed = {(OUTPUT, 0)}
        for index in reversed(range(cut, self.num_layers)):
            piece = self._pieces[index]
            given, taken = _places(seen, piece.gives), _places(seen, piece.takes)
            needed |= {taken[i] for o, i in seen.flows[index] if given[o] in needed}
        return tuple(
            TensorSpec(tuple(tensor.shape), tensor.dtype, (name, place) in needed)
            for name in names
            for place, tensor in enumerate(tensors_of(seen.values[name]))
        )

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
            seen = self._survey(*self._shape)
            if not isinstance(seen.values[name], Tensor):
                layouts[name] = Layout.of(seen.values[name])
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
        Piece(getattr(skeleton, name), f"{name}.", (values[i],), (values[i + 1],), True, name)
        for i, name in enumerate(names)
    ]

    def realise(module: nn.Module, owned: list[Piece]) -> list[Piece]:
        return [replace(p, module=module.get_submodule(p.prefix.rstrip("."))) for p in owned]

    return Chain(factory, pieces, realise, dtype, shape, task)


_RUN_BY = ("forward", "__call__", "_call_impl", "_wrapped_call_impl", "__iter__")
_OR_TRACE = 'or set split = "trace" with split_points'


def _check_plain(name: str, skeleton: nn.Sequential) -> None:
    kind = type(skeleton)
    for method in _RUN_BY:
        if getattr(kind, method) is not getattr(nn.Sequential, method) or method in vars(skeleton):
            raise ModelError(
                f'"{name}": the nn.Sequential is a {kind.__name__} with a {method} of its own, '
                "which running its children in a row would leave out; return a plain "
                f"nn.Sequential, {_OR_TRACE}",
                "model.split",
            )
    if what := hook_on(skeleton):
        raise ModelError(
            f'"{name}": the nn.Sequential has a {what}, but stages run its children only; '
            f"register it on a child, {_OR_TRACE}",
            "model.split",
        )
    if not len(skeleton):
        raise ModelError(f'"{name}": the nn.Sequential has no children')
    for child, module in skeleton._modules.items():
        if module is None:
            raise ModelError(f'"{name}": child {child} of the nn.Sequential is None; remove it')
    if own := own_tensors(skeleton):
        raise ModelError(
            f'"{name}": {own[0][0]} belongs to the nn.Sequential itself, so to no stage; '
            "register it on the child that uses it"
        )


def _places(seen: Survey, names: tuple[str, ...]) -> list[tuple[str, int]]:
    """The name and place of each tensor of some values, in the order in which they are sent."""
    return [(n, place) for n in names for place, _ in enumerate(tensors_of(seen.values[n]))]
