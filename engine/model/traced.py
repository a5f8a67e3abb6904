"""Any module, cut at named submodules: torch exports it, and the exported graph is cut.

`torch.export` runs the author's code once, under fake tensors, for one microbatch shape, and writes
down every operation. What it would leave out in silence (a custom backward, a hook on a gradient, a
counter in an attribute, numbers drawn by Python) is refused here, with the line of the code.

Not `torch.distributed.pipelining.pipeline`, which cuts the same graph: it loses the second use of a
submodule and makes every buffer persistent.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import has_side_effect
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils._pytree import tree_unflatten

from engine.model.chain import Chain, Piece
from engine.model.factory import Factory
from engine.model.stage_module import ModelError
from engine.model.task import Task
from engine.model.traced_pieces import (
    Marks,
    TracedPiece,
    cut_graph,
    place_of,
    real_tensors,
    refusal,
)


@torch.library.custom_op("ppbench_engine::cut", mutates_args=())
def _cut() -> None:
    """Does nothing, and leaves a node in the graph."""


@torch.library.custom_op("ppbench_engine::assigned", mutates_args=())
def _assigned(value: Tensor, number: int) -> None:
    """Does nothing, and leaves a node in the graph."""


_cut.register_fake(lambda: None)
_assigned.register_fake(lambda value, number: None)
_CUT = torch.ops.ppbench_engine.cut.default
_ASSIGNED = torch.ops.ppbench_engine.assigned.default
has_side_effect(_CUT)
has_side_effect(_ASSIGNED)


def traced(
    factory: Factory,
    split_points: tuple[str, ...],
    dtype: torch.dtype,
    shape: tuple[int, int],
    task: Task,
) -> Chain:
    """A chain of the pieces before and from the first call of each split point on.

    `shape` is that of a microbatch's token ids, `[batch, seq]`; the traced pieces take no other.
    Raises ModelError for an unknown split point or a module that cannot be traced exactly.
    """
    names = [name for name, _ in factory.skeleton.named_modules(remove_duplicate=False) if name]
    for point in split_points:
        if point not in names:
            raise refusal(
                f'split point "{point}" is no submodule of {factory.name}; '
                f"it has {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
            )
    for name, module in factory.skeleton.named_modules():
        if module._backward_hooks or module._backward_pre_hooks:
            raise ModelError(
                f'submodule "{name}" has a backward hook, which a traced module would not call; '
                "remove the hook, or use an nn.Sequential without split",
                "model.split",
            )
    factory.cast_skeleton(dtype)
    example, _ = task.example(*shape)
    with factory.fake:
        assigned: list[str] = []
        called: list[str] = []
        ids = factory.fake.from_tensor(example)
        program = _exported(factory, split_points, ids, assigned, called)
        pieces = cut_graph(
            program,
            Marks(_CUT, _ASSIGNED, assigned),
            factory.canonical | factory.canonical_buffers,
            {
                **dict(factory.skeleton.named_parameters(remove_duplicate=False)),
                **dict(factory.skeleton.named_buffers(remove_duplicate=False)),
            },
            _output(factory.name, program, shape, task),
        )
    if len(pieces) != len(split_points) + 1:
        raise refusal(
            f'"{factory.name}": a split point lies within a block (no_grad, autocast, ...) of '
            "forward, which cannot be cut; choose a submodule that is called outside of it"
        )
    begun = [
        replace(piece, entrance=name) for piece, name in zip(pieces, ["", *called], strict=True)
    ]
    return Chain(factory, begun, _realise, dtype, shape, task)


def _exported(
    factory: Factory,
    split_points: tuple[str, ...],
    ids: Tensor,
    assigned: list[str],
    called: list[str],
) -> ExportedProgram:
    """The graph of one forward, with a node where each split point is first called.

    The names of the buffers that forward assigns to are added to `assigned`, the split points, in
    the order in which they are called, to `called`.
    """
    skeleton = factory.skeleton
    handles = [_mark(skeleton, point, called) for point in split_points]
    try:
        with (
            _as_exporting(factory.fake),
            _nothing_is_lost(skeleton),
            _noting_assignments(skeleton, assigned),
        ):
            program = torch.export.export(skeleton, (ids,), strict=False)
    except Exception as error:
        raise _untraceable(factory.name, error) from error
    finally:
        for handle in handles:
            handle.remove()
    if uncalled := set(split_points).difference(called):
        raise refusal(
            f'"{factory.name}": forward does not call the split point "{min(uncalled)}"; '
            "a cut is made where a submodule is first called, as in self.NAME(x)"
        )
    return program


def _mark(skeleton: nn.Module, point: str, called: list[str]) -> Any:
    """Leave a cut before the first call of a submodule, and before its hooks."""

    def hook(_module: nn.Module, _inputs: object) -> None:
        if point not in called:
            called.append(point)
            _CUT()

    return skeleton.get_submodule(point).register_forward_pre_hook(hook, prepend=True)


@contextlib.contextmanager
def _noting_assignments(skeleton: nn.Module, assigned: list[str]) -> Iterator[None]:
    """Meanwhile `self.buffer = value` leaves a node in the graph, in whichever submodule.

    Export sees those of the module itself only.
    """
    paths = {id(module): path for path, module in skeleton.named_modules()}
    before = {id(module): dict(module._buffers) for module in skeleton.modules()}

    def hook(module: nn.Module, name: str, value: Tensor | None) -> None:
        if id(module) not in paths:
            return
        if value is None or module._buffers.get(name) is None:
            raise _loss(f"forward makes or drops a buffer, {name}", "register it when it is built")
        path = paths[id(module)]
        assigned.append(f"{path}.{name}" if path else name)
        _ASSIGNED(value, len(assigned) - 1)

    handle = register_module_buffer_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()
        for module in skeleton.modules():
            module._buffers.update(before[id(module)])


@contextlib.contextmanager
def _as_exporting(fake: FakeTensorMode) -> Iterator[None]:
    """Meanwhile torch.export works in this mode, to which every tensor of the module belongs."""
    before = fake.shape_env, fake.static_shapes
    fake.shape_env, fake.static_shapes = ShapeEnv(tracked_fakes=[]), False
    try:
        with tracing(TracingContext(fake)):
            yield
    finally:
        fake.shape_env, fake.static_shapes = before


@contextlib.contextmanager
def _nothing_is_lost(skeleton: nn.Module) -> Iterator[None]:
    """Refuse code that runs once, while it is traced, and never again."""
    changed: list[str] = []
    states: list[dict[str, str]] = []
    drawn: list[object] = []

    def begin(_module: nn.Module, _inputs: object) -> None:
        states.append(_attributes(skeleton))
        drawn.append(_draws())

    def end(_module: nn.Module, _inputs: object, _output: object) -> None:
        now = _attributes(skeleton)
        changed.extend(name for name, value in states[-1].items() if now.get(name) != value)
        changed.extend(name for name in now if name not in states[-1])
        if _draws() != drawn[-1]:
            raise _loss("forward draws random numbers by Python or NumPy", "draw them by torch")

    handles = [
        skeleton.register_forward_pre_hook(begin, prepend=True),
        skeleton.register_forward_hook(end),
    ]
    try:
        with _refusing_calls():
            yield
    finally:
        for handle in handles:
            handle.remove()
    if changed:
        raise _loss(
            f"forward changes self.{changed[0]}, which the traced module would not do again",
            "keep it in a buffer, or leave it as it is",
        )


def _loss(what: str, remedy: str) -> ModelError:
    return ModelError(f"{what}; {remedy}", "model.split")


def _draws() -> object:
    numpy = sys.modules.get("numpy")
    return random.getstate(), None if numpy is None else str(numpy.random.get_state())


def _attributes(skeleton: nn.Module) -> dict[str, str]:
    """The attributes of all its modules that are plain values, by path."""
    return {
        f"{path}.{name}" if path else name: _plain(value)
        for path, module in skeleton.named_modules()
        for name, value in vars(module).items()
        if name not in _OF_TORCH
    }


_OF_TORCH = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def _plain(value: object, depth: int = 3) -> str:
    """A text that differs where the value does; of other objects their type."""
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, dict) and depth:
        return str({repr(key): _plain(item, depth - 1) for key, item in value.items()})
    if isinstance(value, list | tuple | set | frozenset) and depth:
        return str([_plain(item, depth - 1) for item in value])
    return type(value).__name__


@contextlib.contextmanager
def _refusing_calls() -> Iterator[None]:
    """Meanwhile what export leaves out of its graph raises an error."""
    function = "uses an autograd.Function, whose backward is its own"
    hook = "registers a hook on a tensor", "remove the hook"
    seed = "sets the random seed", "set it before training"
    left_out: tuple[tuple[Any, str, str, str], ...] = (
        (torch.autograd.Function, "apply", function, "write it with torch's own operations"),
        (Tensor, "register_hook", *hook),
        (Tensor, "register_post_accumulate_grad_hook", *hook),
        (torch, "manual_seed", *seed),
        (torch.random, "manual_seed", *seed),
    )

    def refuse(what: str, remedy: str, *_arguments: object, **_options: object) -> object:
        raise _loss(f"forward {what}, which tracing leaves out", remedy)

    with contextlib.ExitStack() as stack:
        for owner, name, what, remedy in left_out:
            stack.callback(setattr, owner, name, owner.__dict__[name])
            setattr(owner, name, functools.partial(refuse, what, remedy))
        yield


def _untraceable(name: str, error: Exception) -> ModelError:
    """What is wrong, on one line, and the line of the author's code."""
    if isinstance(error, ModelError) and error.key != "model.split":
        return error
    where = _authors_line(error)
    text = " ".join(str(error).split("\n\n", 1)[0].split())
    what = text if isinstance(error, ModelError) else f"{type(error).__name__}: {text}"
    if "data-dependent" in what or "DataDependent" in what:
        what += "; control flow may not depend on the values of tensors: use torch.where"
    return ModelError(f'"{name}" cannot be traced: {where}{what}', "model.split")


def _authors_line(error: Exception) -> str:
    """The innermost line that is of neither torch nor Python nor this package."""
    others = [Path(module.__file__ or "").parent for module in (torch, contextlib)]
    others.append(Path(__file__).parent)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_file() and not any(path.is_relative_to(other) for other in others):
            return f"{frame.filename}, line {frame.lineno}: "
    return ""


def _output(name: str, program: ExportedProgram, shape: tuple[int, int], task: Task) -> Node:
    """The logits among what forward returns: all that there is, or the item "logits"."""
    (output,) = [node for node in program.graph.nodes if node.op == "output"]
    spec = program.call_spec.out_spec
    assert spec is not None
    leaves = list(output.args[0])
    result = leaves[0]
    if len(leaves) > 1:
        returned = tree_unflatten(leaves, spec)
        is_dict = isinstance(returned, dict)
        result = returned.get("logits") if is_dict else getattr(returned, "logits", None)
    if not isinstance(result, Node):
        kind = getattr(spec.type, "__name__", "value")
        raise _loss(
            f'"{name}": forward returns a {kind} of {len(leaves)} values, of which none is named',
            'return the logits alone, or a dict with "logits"',
        )
    value = result.meta.get("val")
    if problem := task.problem_of(value, *shape):
        raise ModelError(f'"{name}": forward {problem} (at {place_of(result)})', "model.split")
    return result


def _realise(built: nn.Module, owned: list[Piece]) -> list[Piece]:
    """The traced pieces with the built module's parameters and buffers in place of fake ones."""
    pieces = []
    for piece in owned:
        assert isinstance(piece.module, TracedPiece)
        module = piece.module.with_tensors(real_tensors(piece.module, built))
        pieces.append(replace(piece, module=module))
    return pieces
