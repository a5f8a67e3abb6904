"""Finds what the pieces of a chain do to the values that they take, by running fake tensors.

The pieces run once. The values say which messages pass a cut; versions and autograd's graph say
what a piece writes to and through what gradients come back. What a piece takes in other ways (a
global, another piece's weight) is missing where a cut parts the two, and its forward then fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves, tree_map

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
    def memory(self) -> dict[str, Tensor]: ...


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


def survey(
    pieces: Sequence[Surveyed], values: Values, run: Callable[[int, Values], None]
) -> Survey:
    """Run the pieces one after the other, under the caller's fake mode.

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
        for tensor in (*changed, *_running_statistics(module)):
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


def _running_statistics(module: nn.Module) -> Iterator[Tensor]:
    """Yield the running statistics of norms, whose kernels change them without a trace."""
    for inner in module.modules():
        if isinstance(inner, _NormBase) and inner.track_running_stats:
            yield from inner.buffers(recurse=False)
