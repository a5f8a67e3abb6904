"""What the pieces of a chain do beside taking and giving values, seen on fake tensors.

A chain may be cut where nothing but the named values passes. A piece may do more than that: use
another's weights, read what another has kept aside, write to its input, its weights or its buffers.
Each operation shows which memory it touches, so that such a cut can be refused and never trains
something else. Values of Python (counters, strings in globals) are not seen.

    values --clone--> piece --> values     memory made in an earlier piece, or by an earlier
                        |                  call, and not handed in, came by another way
                        v
              every operation's tensors
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_leaves, tree_map

from engine.model.storages import address

Values = dict[str, Any]
"""Values that pass from piece to piece by name: tensors, or tuples, lists and dicts of them."""


class Surveyed(Protocol):
    """The interface of a piece that is surveyed."""

    @property
    def module(self) -> nn.Module: ...
    @property
    def takes(self) -> tuple[str, ...]: ...
    @property
    def gives(self) -> tuple[str, ...]: ...
    def run(self, values: Values) -> None: ...


@dataclass(frozen=True)
class Link:
    """Memory that a piece touches although it is another piece's, or of an earlier call."""

    user: int
    source: int  # the same piece, where its own earlier call left the memory outside the module
    name: str  # of the weight or buffer; empty where it is a value


@dataclass
class Survey:
    """The results of the survey; pieces by their index."""

    values: Values = field(default_factory=dict)
    links: list[Link] = field(default_factory=list)
    kept_outside: list[int] = field(default_factory=list)
    users: dict[int, set[int]] = field(default_factory=dict)  # of each weight's or buffer's memory
    names: dict[int, str] = field(default_factory=dict)  # of that memory
    changed: dict[int, int] = field(default_factory=dict)  # memory -> the first that changes it
    statistics: dict[int, int] = field(default_factory=dict)  # the same for those of norms
    saved: set[int] = field(default_factory=set)  # memory that a backward reads
    written: dict[int, set[str]] = field(default_factory=dict)  # piece -> values it writes to
    flows: dict[int, set[tuple[int, int]]] = field(default_factory=dict)
    """For each piece, the tensors given that get their gradient from tensors taken."""


def survey(
    pieces: Sequence[Surveyed],
    values: Values,
    names: Callable[[int], Mapping[str, Tensor]],
    run: Callable[[int, Values], None],
) -> Survey:
    """Run the pieces twice, under the caller's fake mode; what the second call sees is reported.

    `names(piece)` are a piece's own parameters and buffers; `run(piece, values)` runs one.
    """
    result = Survey()
    owned: list[set[int]] = []
    for index in range(len(pieces)):
        own = {address(tensor): name for name, tensor in names(index).items()}
        owned.append(set(own))
        result.names |= {key: result.names.get(key, name) for key, name in own.items()}
    watch = _Watch(result, owned)
    watch.keep(tensor for index in range(len(pieces)) for tensor in names(index).values())
    for call in range(2):
        result.values = dict(values)
        for index, piece in enumerate(pieces):
            watch.begin(call, index, piece.module)
            _survey_piece(index, piece, run, result, watch)
    watch.finish(pieces)
    return result


def tensors_of(value: object) -> list[Tensor]:
    """The tensors in a value, in the order in which they are sent."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _survey_piece(
    index: int,
    piece: Surveyed,
    run: Callable[[int, Values], None],
    result: Survey,
    watch: _Watch,
) -> None:
    leaves: list[Tensor] = []
    clones: dict[int, tuple[Tensor, Tensor]] = {}  # what was given twice stays one

    def apart(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in clones:
            leaf = value.detach().requires_grad_(value.requires_grad)
            clones[id(value)] = leaf, leaf.clone()
        leaves.append(clones[id(value)][0])
        return clones[id(value)][1]

    given = {name: tree_map(apart, result.values[name]) for name in piece.takes}
    inputs = [(name, tensor) for name in piece.takes for tensor in tensors_of(given[name])]
    watch.own([*leaves, *(tensor for _, tensor in inputs)])
    versions = [tensor._version for _, tensor in inputs]
    state = [*piece.module.parameters(), *piece.module.buffers()]
    state_versions = [tensor._version for tensor in state]
    local = dict(given)
    with watch, saved_tensors_hooks(watch.save, lambda saved: saved):
        run(index, local)
    pairs = zip(inputs, versions, strict=True)
    result.written[index] = {name for (name, t), version in pairs if t._version != version}
    now = {id(tensor) for tensor in (*piece.module.parameters(), *piece.module.buffers())}
    for tensor, version in zip(state, state_versions, strict=True):
        is_changed = tensor._version != version or id(tensor) not in now
        if is_changed and address(tensor) in result.names:
            result.changed.setdefault(address(tensor), index)
    outputs = [tensor for name in piece.gives for tensor in tensors_of(local[name])]
    result.flows[index] = _flows(leaves, outputs)
    result.values |= {name: local[name] for name in piece.gives}


def _flows(leaves: list[Tensor], outputs: list[Tensor]) -> set[tuple[int, int]]:
    nodes = [get_gradient_edge(t).node if t.requires_grad else None for t in leaves]
    found = set()
    for place, output in enumerate(outputs):
        reached: set[torch.autograd.graph.Node] = set()
        waiting = [get_gradient_edge(output).node] if output.requires_grad else []
        while waiting:
            below = waiting.pop()
            if below not in reached:
                reached.add(below)
                waiting.extend(node for node, _ in below.next_functions if node is not None)
        found |= {
            (place, i) for i, node in enumerate(nodes) if node is not None and node in reached
        }
    return found


class _Watch(TorchDispatchMode):
    """Notes the memory that each operation touches. Keeps all tensors, so that none is reused."""

    def __init__(self, result: Survey, owned: list[set[int]]) -> None:
        super().__init__()
        self._result, self._owned = result, owned
        self._call = self._piece = 0
        self._makers: dict[int, tuple[int, int] | None] = {}
        """Memory -> the call and piece that made it; None for what was there before."""
        self._alive: list[torch.UntypedStorage] = []  # a tensor may get another
        self._same: dict[int, int] = {}  # memory of a view -> what it is a view of
        self._kept: dict[int, set[int]] = {}  # what a piece's modules held before its calls
        self._strange: dict[tuple[int, int], int] = {}  # (user, memory) -> the call

    def begin(self, call: int, piece: int, module: nn.Module) -> None:
        self._call, self._piece = call, piece
        self._kept.setdefault(piece, set()).update(_kept_by(module))

    def keep(self, tensors: Iterable[Tensor]) -> None:
        """Let their memory not be taken by others, even where a module lets go of it."""
        self._alive += [tensor.untyped_storage() for tensor in tensors if _has_memory(tensor)]

    def own(self, tensors: Iterable[Tensor]) -> None:
        """Take these for made by the piece that is to run."""
        for tensor in tensors:
            self._alive.append(tensor.untyped_storage())
            self._makers.setdefault(self._memory_of(tensor), (self._call, self._piece))

    def save(self, tensor: Tensor) -> Tensor:
        self._result.saved.add(self._memory_of(tensor))
        return tensor

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        taken = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        for value in taken:
            self._touch(value)
        result = func(*args, **(kwargs or {}))
        if taken and isinstance(result, Tensor) and func.is_view:
            self._note_view(taken[0], result)
        made = (value for value in tree_iter(result) if isinstance(value, Tensor))
        self.own(value for value in made if _has_memory(value))
        return result

    def _note_view(self, tensor: Tensor, view: Tensor) -> None:
        """A view of a fake tensor may lie in other memory than the tensor says of itself."""
        if _has_memory(tensor) and _has_memory(view) and address(view) not in self._makers:
            self._same[address(view)] = self._memory_of(tensor)

    def _memory_of(self, tensor: Tensor) -> int:
        return self._same.get(address(tensor), address(tensor))

    def _touch(self, tensor: Tensor) -> None:
        if not _has_memory(tensor):
            return
        self._alive.append(tensor.untyped_storage())
        memory = self._memory_of(tensor)
        if memory in self._result.names:
            self._result.users.setdefault(memory, set()).add(self._piece)
            if memory not in self._owned[self._piece]:
                self._strange[self._piece, memory] = self._call
        elif self._makers.setdefault(memory) not in (None, (self._call, self._piece)):
            self._strange[self._piece, memory] = self._call

    def finish(self, pieces: Sequence[Surveyed]) -> None:
        """Turn what was strange into links; what a module keeps in itself is its own."""
        for (user, memory), call in self._strange.items():
            if memory in self._result.names:
                owner = next(i for i, own in enumerate(self._owned) if memory in own)
                self._result.links.append(Link(user, owner, self._result.names[memory]))
                continue
            made_in, maker = self._makers[memory] or (call, user)
            is_kept = memory in self._kept[user]
            if maker != user and (is_kept or made_in == call):
                self._result.links.append(Link(user, maker, ""))
            elif not is_kept and made_in != call:
                self._result.kept_outside.append(user)
        for index, piece in enumerate(pieces):
            for tensor in _running_statistics(piece.module):
                self._result.statistics.setdefault(address(tensor), index)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided


def _running_statistics(module: nn.Module) -> Iterator[Tensor]:
    """Yield the running statistics of norms, whose kernels change them without a trace."""
    for inner in module.modules():
        if isinstance(inner, _NormBase) and inner.track_running_stats:
            yield from inner.buffers(recurse=False)


def _kept_by(module: nn.Module) -> set[int]:
    """The memory of tensors that its modules hold as attributes, however nested."""
    held = (value for inner in module.modules() for value in vars(inner).values())
    return {address(t) for value in held for t in tensors_of(value) if _has_memory(t)}
