"""A module that code builds as it likes, without the memory of what is not owned.

The code (a user's `package.module:factory`) is called at least twice, each time after
`torch.manual_seed`.
First under fake tensors, which have shapes but no memory: the structure. Then for real, and each
parameter that this rank does not own is moved to the meta device as soon as it is registered; its
random draws are made all the same. So owned weights are those of a plain seeded call, at any
moment only the owned ones and one other exist, and all that the code does to its own weights is
done.

Code that reads the values of weights while it builds cannot do with weights that have none. It is
noticed, and then the whole module is built before anything is dropped: right before small.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from engine.model.stage_module import ModelError
from engine.model.storages import first_names, own_tensors

Description = dict[str, tuple[str, tuple[int, ...]]]
"""Each name of a parameter or buffer -> the first name of the same tensor, and its shape."""


Brought = tuple[Callable[..., Any], Callable[..., Any]]
"""The batches and the loss that a factory returns beside its module (`task`)."""


class Factory:
    """A callable without arguments that returns a module, and the structure of that module.

    What it may bring beside the module, batches and loss, is that of a call for real.
    """

    def __init__(self, name: str, call: Callable[[], object], seed: int) -> None:
        """`name` is for messages. Raises ModelError when the call fails or returns no module."""
        self.name, self._call, self._seed = name, call, seed
        self.brought: Brought | None = None
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._first: dict[int, int] = {}  # registration -> first registration of that parameter
        self._index: dict[str, int] = {}  # name -> first registration of what was registered
        self._is_built_whole = False
        self.skeleton = self._build_skeleton()
        self.canonical = first_names(self.skeleton.named_parameters(remove_duplicate=False))
        self.canonical_buffers = first_names(self.skeleton.named_buffers(remove_duplicate=False))
        self._description = _describe(self.skeleton)
        _check_weights(name, self.skeleton)
        if self.brought is not None:
            self.build(set())

    def build(self, owned: set[str]) -> nn.Module:
        """The module with real buffers and, by canonical name, the owned parameters; else meta.

        Raises ModelError when the factory returns another module than the first time.
        """
        if not self._is_built_whole:
            module = self._build_without(owned)
            if module is not None:
                return module
            self._is_built_whole = True
        return self._build_whole(owned)

    def cast_skeleton(self, dtype: torch.dtype) -> None:
        """What `Caster` does to a real module, which does not take fake tensors."""
        with self.fake:
            for tensor in (*self.skeleton.parameters(), *self.skeleton.buffers()):
                wanted = dtype_for(tensor, dtype)
                if tensor.dtype != wanted:
                    tensor.data = tensor.detach().to(wanted)

    def _build_skeleton(self) -> nn.Module:
        first: dict[int, int] = {}
        alive: list[nn.Parameter] = []  # so that no two ever have one id

        def note(index: int, parameter: nn.Parameter) -> None:
            alive.append(parameter)
            self._first[index] = first.setdefault(id(parameter), index)

        try:
            with seeded(self._seed), self.fake, _on_registration(note):
                module = self._called()
        except ModelError:  # of reading values, or of the code itself: then it fails again
            self._is_built_whole = True
            with seeded(self._seed):
                module = self._called()
            _check_weights(self.name, module)
            fakes: dict[int, Tensor] = {}
            for tensor in (*module.parameters(), *module.buffers()):
                with self.fake:
                    fake = torch.empty_like(tensor.detach(), memory_format=torch.preserve_format)
                is_parameter = isinstance(tensor, nn.Parameter)
                value = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
                fakes[id(tensor)] = value
            _replace(module, fakes)
        known = {n: first.get(id(p)) for n, p in module.named_parameters()}
        self._index = {name: index for name, index in known.items() if index is not None}
        return module

    def _build_without(self, owned: set[str]) -> nn.Module | None:
        """The module, others' weights dropped while it is built; None where these are needed."""
        others = {i for name, i in self._index.items() if name not in owned}

        def drop(index: int, parameter: nn.Parameter) -> nn.Parameter | None:
            is_dropped = self._first.get(index) in others and parameter.device.type == "cpu"
            return _placeholder(parameter) if is_dropped else None

        watch = _Placeholders()
        try:
            with seeded(self._seed), _on_registration(drop), watch:
                module = self._called()
        except ModelError:
            return None
        if watch.was_read or _describe(module) != self._description:
            return None
        _drop(module, self.canonical, owned)
        parameters = dict(module.named_parameters())
        needed = (*(parameters[name] for name in owned), *module.buffers())
        return None if any(tensor.is_meta for tensor in needed) else module

    def _build_whole(self, owned: set[str]) -> nn.Module:
        with seeded(self._seed):
            module = self._called()
        description = _describe(module)
        if description != self._description:
            names = sorted(description.items() ^ self._description.items())
            raise ModelError(
                f'"{self.name}": the factory must return the same module each time it is called; '
                f"{names[0][0]} differs from call to call"
            )
        parameters = dict(module.named_parameters())
        for name in sorted(owned):
            if parameters[name].is_meta:
                raise ModelError(
                    f'"{self.name}": the factory leaves {name} on the meta device, without values; '
                    "let it build on the CPU"
                )
        _drop(module, self.canonical, owned)
        return module

    def _called(self) -> nn.Module:
        try:
            returned = self._call()
        except (MemoryError, torch.OutOfMemoryError):  # says nothing of the model
            raise
        except Exception as error:
            message = f'"{self.name}": the factory failed: {type(error).__name__}: {error}'
            raise ModelError(message) from error
        module, self.brought = parts_of(self.name, returned)
        return module


class _Placeholders(TorchDispatchMode):
    """Makes the random draws of weights that are on the meta device, and sees who reads these.

    A draw goes into memory that is dropped at once: the generator is then where a plain call would
    have it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.was_read = False  # by an operation whose result is a value

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],  # torch's signature
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not any(_is_meta(value) for value in tree_iter((args, kwargs))):
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            real_args, real_kwargs = tree_map(
                lambda v: torch.zeros_like(v, device="cpu") if _is_meta(v) else v, (args, kwargs)
            )
            func(*real_args, **real_kwargs)
        try:
            result = func(*args, **kwargs)
        except Exception:
            self.was_read = True  # even if the code goes on without
            raise
        self.was_read |= any(
            not value.is_meta
            if isinstance(value, Tensor)
            else isinstance(value, bool | int | float)
            for value in tree_iter(result)
        )
        return result


def _is_meta(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def dtype_for(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Its dtype in a model of this dtype: whole numbers stay, complex ones stay complex."""
    if tensor.is_complex():
        return torch.complex128 if dtype == torch.float64 else torch.complex64
    return dtype if tensor.is_floating_point() else tensor.dtype


class Caster:
    """Moves and casts modules as `nn.Module.to` does; what they share stays shared."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._known: dict[int, tuple[Tensor, Tensor]] = {}  # by id: a tensor and what it became

    def apply(self, module: nn.Module) -> None:
        """Parameters keep their identity, and the hooks on them."""
        module._apply(self._become)

    def _become(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._known:
            became = tensor.to(self._device, dtype_for(tensor, self._dtype))
            self._known[id(tensor)] = tensor, became
        return self._known[id(tensor)][1]


def seed_from(*parts: object) -> int:
    """A seed that follows from these values alone; small enough for every generator."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:7], "little")


@contextlib.contextmanager
def seeded(seed: int, *, is_on_host: bool = False) -> Iterator[None]:
    """Meanwhile torch, numpy and Python draw from this seed; afterwards from where they were.

    With `is_on_host`, torch's numbers of an accelerator are left alone, which takes less time.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002  # what factories use
    with torch.random.fork_rng(devices=[]) if is_on_host else own_torch_numbers():
        (torch.default_generator.manual_seed if is_on_host else torch.manual_seed)(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def own_torch_numbers() -> AbstractContextManager[None]:
    """Meanwhile torch draws other random numbers, on the accelerator too if it is in use."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    is_used = accelerator is not None and torch.get_device_module(accelerator).is_initialized()
    if accelerator is None or not is_used:
        return torch.random.fork_rng(devices=[])
    used = [torch.accelerator.current_device_index()]
    return torch.random.fork_rng(devices=used, device_type=accelerator.type)


def parts_of(name: str, returned: object) -> tuple[nn.Module, Brought | None]:
    """The module that a factory returned, and the batches and loss beside it, if there are any.

    Raises ModelError for anything else.
    """
    module, *rest = returned if isinstance(returned, tuple) else (returned,)
    if isinstance(module, nn.Module) and not rest:
        return module, None
    if isinstance(module, nn.Module) and len(rest) == 2 and all(map(callable, rest)):
        return module, (rest[0], rest[1])
    kinds = [type(part).__name__ for part in (module, *rest)]
    given = f"a tuple ({', '.join(kinds)})" if isinstance(returned, tuple) else kinds[0]
    raise ModelError(
        f'"{name}": the factory must return a torch.nn.Module, or a tuple (module, batches, loss) '
        f"of a module and two functions; it returned {given}"
    )


def find_factory(name: str) -> Callable[[], object]:
    """The callable of `package.module:factory`. Raises ModelError when there is none.

    Modules of the working directory are found too.
    """
    module_name, _, attribute = name.partition(":")
    if os.getcwd() not in sys.path:  # noqa: PTH109  # as `python -m` does; torchrun may not
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        message = f'"{name}": cannot import {module_name}: {type(error).__name__}: {error}'
        if isinstance(error, ModuleNotFoundError) and error.name == module_name:
            message += "; it is looked for in the working directory and among installed packages"
        raise ModelError(message) from error
    found = getattr(module, attribute, None)
    if not callable(found):
        close = difflib.get_close_matches(attribute, vars(module), n=1)
        hint = f'; did you mean "{close[0]}"?' if close else ""
        raise ModelError(f'"{name}": {module_name} has no callable "{attribute}"{hint}')
    called: Callable[[], object] = found
    return called


def _check_weights(name: str, module: nn.Module) -> None:
    """Refuse a module without anything to train, or without its shapes."""
    for key, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ModelError(
                f'"{name}": {key} is a lazy parameter, whose shape is known only after a forward; '
                "state the input's size, or let the factory run the module once"
            )
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise ModelError(
            f'"{name}": no parameter requires a gradient, so there is nothing to train'
        )


def _describe(module: nn.Module) -> Description:
    named = (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in named}
    return {name: (first, shapes[name]) for name, first in first_names(named).items()}


def _placeholder(parameter: nn.Parameter) -> nn.Parameter:
    if parameter.is_meta:
        return parameter
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def _drop(module: nn.Module, canonical: dict[str, str], owned: set[str]) -> None:
    """Move the parameters that are not owned to the meta device."""
    named = module.named_parameters(remove_duplicate=False)
    others = {id(p): p for name, p in named if canonical[name] not in owned and not p.is_meta}
    _replace(module, {key: _placeholder(p) for key, p in others.items()})


def _replace(module: nn.Module, replacements: dict[int, Tensor]) -> None:
    """Put tensors in the place of others, by these others' ids, wherever a module holds them."""
    for inner in module.modules():
        for name, tensor in own_tensors(inner):
            if id(tensor) in replacements:
                setattr(inner, name, replacements[id(tensor)])


@contextlib.contextmanager
def _on_registration(act: Callable[[int, nn.Parameter], nn.Parameter | None]) -> Iterator[None]:
    """Call `act` with the running number of each parameter registration; it may replace it."""
    num_seen = 0

    def hook(_module: nn.Module, _name: str, parameter: Tensor | None) -> nn.Parameter | None:
        nonlocal num_seen
        if not isinstance(parameter, nn.Parameter) or nn.parameter.is_lazy(parameter):
            return None
        num_seen += 1
        return act(num_seen - 1, parameter)

    handle = register_module_parameter_registration_hook(hook)  # type: ignore[arg-type]  # stub
    try:
        yield
    finally:
        handle.remove()
