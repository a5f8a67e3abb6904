"""A module that code builds as it likes, without the memory of what is not owned.

The code (a user's `package.module:factory`) is called twice. First under fake tensors, which have
shapes but no memory: the structure. Then for real, and each parameter that this rank does not own
is moved to the meta device as soon as it is registered; so at any moment only the owned ones and
one other exist, and all that the user's code does to its own weights is done.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.stage_module import ModelError


class Factory:
    """A callable without arguments that returns a module, and the structure of that module."""

    def __init__(self, name: str, call: Callable[[], nn.Module], seed: int) -> None:
        """`name` is for messages. Raises ModelError when the call fails or returns no module."""
        self.name, self._call, self._seed = name, call, seed
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._first: dict[int, int] = {}  # registration -> first registration of that parameter
        self.skeleton = self._build_skeleton()
        self.canonical = _canonical_names(self.skeleton)

    def build(self, owned: set[str]) -> nn.Module:
        """The module with real buffers and, by canonical name, the owned parameters; else meta."""
        kept = {self._index[name] for name in owned}

        def drop(index: int, parameter: nn.Parameter) -> nn.Parameter | None:
            if self._first[index] in kept or parameter.is_meta:
                return None
            return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

        with torch.random.fork_rng(devices=[]), _on_registration(drop), _SeedEachDraw(self._seed):
            return self._called()

    def cast_skeleton(self, dtype: torch.dtype) -> None:
        """What `nn.Module.to` does, which does not take fake tensors."""
        cast: dict[int, Tensor] = {}  # so that a shared weight stays one
        with self.fake:
            for module in self.skeleton.modules():
                own = [
                    *module.named_parameters(recurse=False),
                    *module.named_buffers(recurse=False),
                ]
                for name, tensor in own:
                    if tensor.is_floating_point() and tensor.dtype != dtype:
                        if id(tensor) not in cast:
                            cast[id(tensor)] = _like(tensor, tensor.detach().to(dtype))
                        setattr(module, name, cast[id(tensor)])

    def _build_skeleton(self) -> nn.Module:
        first: dict[int, int] = {}
        alive: list[nn.Parameter] = []  # so that no two ever have one id

        def note(index: int, parameter: nn.Parameter) -> None:
            alive.append(parameter)
            self._first[index] = first.setdefault(id(parameter), index)

        with torch.random.fork_rng(devices=[]), self.fake, _on_registration(note):
            module = self._called()
        self._index = {name: first[id(parameter)] for name, parameter in module.named_parameters()}
        return module

    def _called(self) -> nn.Module:
        try:
            module = self._call()
        except (MemoryError, torch.OutOfMemoryError):  # says nothing of the model
            raise
        except Exception as error:
            message = f'"{self.name}": the factory failed: {type(error).__name__}: {error}'
            raise ModelError(message) from error
        if not isinstance(module, nn.Module):
            raise ModelError(
                f'"{self.name}": the factory must return a torch.nn.Module, '
                f"it returned {type(module).__name__}"
            )
        return module


class _SeedEachDraw(TorchDispatchMode):
    """Seeds each random operation by its number, those on the meta device, which draw nothing, too.

    So the weights do not depend on which of them are owned.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed, self._num_draws = seed, 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            digest = hashlib.sha256(f"{self._seed}:{self._num_draws}".encode()).digest()
            torch.default_generator.manual_seed(int.from_bytes(digest[:7], "little"))
            self._num_draws += 1
        return func(*args, **(kwargs or {}))


def find_factory(name: str) -> Callable[[], nn.Module]:
    """The callable of `package.module:factory`. Raises ModelError when there is none."""
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # noqa: PTH109  # as `python -m` does; torchrun may not
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        found = getattr(importlib.import_module(module_name), attribute, None)
    except Exception as error:
        message = f'"{name}": cannot import {module_name}: {type(error).__name__}: {error}'
        raise ModelError(message) from error
    if not callable(found):
        raise ModelError(f'"{name}": {module_name} has no callable "{attribute}"')
    called: Callable[[], nn.Module] = found
    return called


def _like(tensor: Tensor, value: Tensor) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(value, tensor.requires_grad) if is_parameter else value


def _canonical_names(module: nn.Module) -> dict[str, str]:
    """Every name of a parameter -> the name that `named_parameters` gives it."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: names[id(parameter)] for name, parameter in every}


@contextlib.contextmanager
def _on_registration(act: Callable[[int, nn.Parameter], nn.Parameter | None]) -> Iterator[None]:
    """Call `act` with the running number of each parameter registration; it may replace it."""
    num_seen = 0

    def hook(_module: nn.Module, _name: str, parameter: Tensor | None) -> nn.Parameter | None:
        nonlocal num_seen
        if not isinstance(parameter, nn.Parameter):
            return None
        num_seen += 1
        return act(num_seen - 1, parameter)

    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]  # stub
    try:
        yield
    finally:
        handle.remove()
