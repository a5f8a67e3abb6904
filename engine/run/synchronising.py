"""Finds the lines of code that make a stage wait for its device: `.item()`, `bool()`, `nonzero`.

On a GPU such a line holds the host up until all that it has issued is done: launch gaps follow, and
it hangs where a receive is open (`engine.plan.synchronisation`). Here the stage runs on the CPU,
where nothing has to be waited for, and everything that reads a value is noted with the module that
runs and its line of code. Not on the meta device, which would refuse such reads by itself: there is
no autocast for it, products of experts have no kernels there, and transformers leaves out checks of
values where it takes a tensor for one without.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from engine.model.stage_module import Message, Model, Partition, StageModule, gradient_message
from engine.run.stage import Stage, Tensors

_CPU = torch.device("cpu")
_TORCH = f"{Path(torch.__file__).parent}/"
_MADE_HERE = (__file__, traceback.__file__)
_ATEN = torch.ops.aten
_OPERATIONS = {
    _ATEN._local_scalar_dense.default: "item, bool, int or float",
    _ATEN.nonzero.default: "nonzero",
    _ATEN.nonzero_numpy.default: "nonzero",
    _ATEN.masked_select.default: "masked_select",
    _ATEN._unique2.default: "unique",
    _ATEN.unique_dim.default: "unique",
    _ATEN.unique_consecutive.default: "unique",
    _ATEN.repeat_interleave.Tensor: "repeat_interleave by a tensor",
    _ATEN.bincount.default: "bincount",
    _ATEN.equal.default: "equal",
}
"""Operations that need a value, or the size of a result that depends on values."""
_INDEXING = (
    _ATEN.index.Tensor,
    _ATEN.index_put.default,
    _ATEN.index_put_.default,
    _ATEN._unsafe_index.Tensor,
)
_METHODS: dict[Callable[..., Any], str] = {
    Tensor.tolist: "tolist",
    Tensor.numpy: "numpy",
    Tensor.__array__: "numpy",
    Tensor.cpu: "cpu",
}
"""Methods that copy to the host; on the CPU no operation shows them."""
_MAKERS: tuple[Callable[..., Any], ...] = (torch.tensor, torch.as_tensor, Tensor.new_tensor)


class SynchronisationError(RuntimeError):
    """A line of code that waits for the device."""


@dataclass(frozen=True)
class Synchronisation:
    """A line of code that waits for the device, by what it does."""

    module: str  # the name of the module that runs in its root, and its class; empty outside any
    line: str  # file:number: code
    does: str

    def __str__(self) -> str:
        module = f"{self.module}: " if self.module else ""
        return f"{module}{self.line}: waits for the device ({self.does})"


class SynchronisationWatch:
    """Notes each line that would make the host wait for a device, once, in order."""

    def __init__(self, root: nn.Module | None = None) -> None:
        """`root`: the module within which others are named."""
        self._names = {} if root is None else {id(m): name for name, m in root.named_modules()}
        self.is_paused = False
        self._running: list[str] = []
        self._found: dict[str, Synchronisation] = {}

    @property
    def found(self) -> list[Synchronisation]:
        return list(self._found.values())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note meanwhile what this thread runs. Hooks of other modes stay in place."""
        with ExitStack() as stack:
            for hook in (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ):
                stack.callback(hook.remove)
            stack.enter_context(_Methods(self))
            stack.enter_context(_Operations(self))
            yield

    def check(self) -> None:
        """Raise SynchronisationError with the first line that was noted."""
        if self._found:
            raise SynchronisationError(str(self.found[0]))

    def paused(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function that reads values on the CPU only."""
        self.is_paused = True
        try:
            return func(*args, **kwargs)
        finally:
            self.is_paused = False

    def note(self, does: str) -> None:
        """Note the line that is running."""
        line = _line()
        running = self._running[-1] if self._running else ""
        self._found.setdefault(line, Synchronisation(running, line, does))

    def _enter(self, module: nn.Module, _inputs: object) -> None:
        name = self._names.get(id(module), "")
        self._running.append(f"{name} ({type(module).__name__})" if name else type(module).__name__)

    def _leave(self, _module: nn.Module, _inputs: object, _outputs: object) -> None:
        if self._running:
            self._running.pop()


class _Operations(TorchDispatchMode):
    """Sees what reaches torch's kernels, in the backward too."""

    def __init__(self, watch: SynchronisationWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        does = None if self._watch.is_paused else _OPERATIONS.get(func)
        if func is _ATEN.repeat_interleave.Tensor and (kwargs or {}).get("output_size") is not None:
            does = None
        if does is None and func in _INDEXING and _has_mask(*args):
            does = "indexing with a mask"
        if does is not None:
            self._watch.note(does)
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    """Sees what is called in Python."""

    def __init__(self, watch: SynchronisationWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        does = _METHODS.get(func)
        if func in _MAKERS and kwargs.get("device") is not None and _is_of_host(args):
            does = "a copy of values of the host"
        if func is Tensor.to and "cpu" in map(str, (*args[1:], kwargs.get("device"))):
            does = "to the host" if isinstance(_target(args, kwargs), str) else None
        if does is not None:
            self._watch.note(does)
        if func is one_hot and _num_classes(*args, **kwargs) >= 0:
            return self._watch.paused(func, *args, **kwargs)
        return func(*args, **kwargs)


def _num_classes(_tensor: Tensor, num_classes: int = -1) -> int:
    return num_classes


def _target(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """The device of `Tensor.to`: text where it is named, which `x.device` would not be."""
    return kwargs.get("device") or args[1]


def _is_of_host(args: tuple[Any, ...]) -> bool:
    return not any(isinstance(one, Tensor) for one in args)


def _has_mask(_tensor: Tensor, indices: Sequence[Tensor | None], *values: Any) -> bool:
    """Whether a mask chooses elements, of which the host has to know how many there are.

    One value written to all of them needs no number.
    """
    if values and isinstance(values[0], Tensor) and values[0].numel() == 1:
        return False
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _line() -> str:
    """The innermost line of code that is neither torch's nor this file's."""
    for frame in reversed(traceback.extract_stack()):
        if frame.filename not in _MADE_HERE and not frame.filename.startswith(_TORCH):
            path = frame.filename.rpartition("site-packages/")[2]
            path = path if not path.startswith("/") else Path(path).name
            return f"{path}:{frame.lineno}: {frame.line}"
    return "unknown line"


def synchronisations_of(
    model: Model, partition: Partition, shape: tuple[int, int]
) -> list[Synchronisation]:
    """The lines at which a model's stages wait for their device: F, B, I, W and the loss.

    Every stage is built on the CPU. `shape` is that of a microbatch's token ids.
    """
    messages = model.messages(partition, *shape)
    ends = [None, *messages], [*messages, None]
    found: dict[str, Synchronisation] = {}
    for index, (takes, sends) in enumerate(zip(*ends, strict=True)):
        module = model.build_stage(partition, index, _CPU)
        for one in _of_stage(module, takes, sends, shape, model.vocab_size):
            found.setdefault(one.line, one)
    return list(found.values())


def _of_stage(
    module: StageModule,
    takes: Message | None,
    sends: Message | None,
    shape: tuple[int, int],
    vocab_size: int,
) -> list[Synchronisation]:
    """A whole backward first, then one in two halves, which replaces the forward of linears.

    Each forward and backward is done twice: the first ones may look at more.
    """
    watch = SynchronisationWatch(module)
    for is_split in (False, True):
        stage = Stage(module, sends, nullcontext(), receives=takes, is_split=is_split)
        stage.begin_step(shape[0] * shape[1])
        for microbatch in range(2):
            ids = torch.randint(vocab_size, shape)
            inputs = (ids,) if takes is None else _made_up(takes)
            gradients = None if sends is None else _made_up(gradient_message(sends))
            with watch.watching():
                stage.forward(microbatch, inputs, ids)
                if is_split:
                    stage.backward_input(microbatch, gradients)
                    stage.backward_weight(microbatch)
                else:
                    stage.backward(microbatch, gradients)
    return watch.found


def _made_up(message: Message) -> Tensors:
    return tuple(
        torch.rand(spec.shape).to(spec.dtype)
        if spec.dtype.is_floating_point
        else torch.zeros(spec.shape, dtype=spec.dtype)
        for spec in message
    )
