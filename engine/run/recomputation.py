"""Recomputation: a layer keeps its input only, and its backward runs its forward again.

The second forward must see what the first one saw. Torch's checkpoint restores the random state;
here are the input, where a layer writes to it in place, and the buffers that a forward changes
(running statistics, the vectors of a power iteration), which moreover must change only once.

    forward    input -clone-> layer             buffers before: kept
    backward   input -clone-> layer -> graph    meanwhile the kept ones, then the current ones again
"""

from __future__ import annotations

import contextlib
import functools
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint, noop_context_fn

from engine.model.stage_module import ModelError, StageModule

Buffers = dict[tuple[nn.Module, str], Tensor]


def recompute_layers(module: StageModule) -> None:
    """Keep each layer's input only; its backward runs its forward again.

    A layer that is but a linear keeps nothing else anyway. Hooks on what is inside a layer run
    with both forwards, as under torch's checkpoint.
    """
    for unit in module.units:
        if type(unit) is not nn.Linear:
            unit.forward = _Recomputed(unit)


class _Recomputed:
    """A layer's forward; finds out with its first call what the second forward must be given."""

    def __init__(self, layer: nn.Module) -> None:
        self._forward = layer.forward
        self._layer, self._modules = layer, list(layer.modules())
        self._writes: bool | None = None  # to its input
        self._changing: list[tuple[nn.Module, str]] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)
        before = self._states()
        may_change = before if self._changing is None else self._changing
        kept = {(m, name): getattr(m, name).detach().clone() for m, name in may_change}
        forward, contexts = self._forward, noop_context_fn
        if self._writes is not False or self._changing != []:
            forward = forward if self._writes is False else self._on_clones
            contexts = functools.partial(_contexts, kept)
        result = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
        changed = [key for key, state in self._states().items() if state != before.get(key)]
        if self._changing is None:  # not every kernel counts what it writes, such as BatchNorm's
            others = [key for key in kept if key not in changed]
            changed += [key for key in others if not torch.equal(getattr(*key), kept[key])]
            self._changing = changed
        elif late := [name for module, name in changed if (module, name) not in self._changing]:
            raise ModelError(
                f"recompute: a forward of {type(self._layer).__name__} changes its buffer "
                f"{late[0]}, which the first forward did not; it would be changed twice. Train "
                "without recomputation, or change the buffer in every forward",
                "train.recompute",
            )
        return result

    def _on_clones(self, *args: Any, **kwargs: Any) -> Any:
        """The layer on clones of its inputs, which stay as they were for the second forward."""
        clones: dict[int, Tensor] = {}  # what is given twice stays one

        def clone(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return clones.setdefault(id(value), value.clone())

        args, kwargs = tree_map(clone, (args, kwargs))
        versions = [tensor._version for tensor in clones.values()]
        result = self._forward(*args, **kwargs)
        if self._writes is None:
            self._writes = versions != [tensor._version for tensor in clones.values()]
        return result

    def _states(self) -> dict[tuple[nn.Module, str], tuple[int, int]]:
        """Return the tensor of each buffer, and how often it has been written to."""
        return {
            (module, name): (id(buffer), buffer._version)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None
        }


def _contexts(
    buffers: Buffers,
) -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
    return contextlib.nullcontext(), _Restored(buffers)


class _Restored(contextlib.AbstractContextManager[None]):
    """Meanwhile modules have the buffers that they had before."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._current: dict[tuple[nn.Module, str], Tensor | None] = {}

    def __enter__(self) -> None:
        for (module, name), value in self._buffers.items():
            self._current[module, name] = module._buffers[name]
            module._buffers[name] = value

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for (module, name), value in self._current.items():
            module._buffers[name] = value
