"""Any module, cut before named submodules by torch's own `pipeline()`.

    ids -> [ operations before split point 0 ] -- values used later --> [ ... ] -> ... -> logits

Torch exports the module: it runs the author's code once, under fake tensors, for one microbatch
shape, and writes down every operation. What is no operation on tensors is missing from a traced
module: a custom backward, hooks on gradients, counters in attributes, random numbers of Python. A
tensor that one piece writes to and another sees under another name is changed for the first alone.
The comparison with the author's module (`engine.exactness`) refuses what then trains differently.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.pipelining import pipe_split, pipeline
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.fx.node import map_arg
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.utils._pytree import tree_map

from engine.model.chain import INPUT, OUTPUT, Chain, ChainPiece
from engine.model.factory import Factory
from engine.model.stage_module import ModelError
from engine.model.task import Task

_OF_THE_TRACE = torch.ops.aten._assert_tensor_metadata.default  # it does not hold elsewhere


class TracedPiece(nn.Module):
    """The operations between two cuts, on parameters and buffers that have the author's names."""

    def __init__(
        self,
        graph: Graph,
        attributes: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        transient: frozenset[str],
        shape: tuple[int, ...] | None,
    ) -> None:
        """The graph takes the inputs, then the tensors; `attributes` are what else it refers to.

        No checkpoint has the `transient` ones. `shape`: what the first input must
        have, for it is built into the operations; None: not checked.
        """
        super().__init__()
        code = GraphModule(dict(attributes), copy.deepcopy(graph))
        self.__dict__["_traced_code"] = code  # no submodule, so that every name is the author's
        self._traced_from = graph, attributes, tuple(tensors), transient, shape
        self._traced_tensors: list[tuple[nn.Module, str]] = []  # the owner of each, and its name
        for name, tensor in tensors.items():
            owner: nn.Module = self  # the modules on the way to a dotted name are empty ones
            *path, attribute = name.split(".")
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            if isinstance(tensor, nn.Parameter):
                owner.register_parameter(attribute, tensor)
            else:
                owner.register_buffer(attribute, tensor, persistent=name not in transient)
            self._traced_tensors.append((owner, attribute))

    def forward(self, *inputs: Tensor) -> Any:
        shape = self._traced_from[-1]
        if shape is not None and inputs[0].shape != shape:
            raise ModelError(
                f"the module was traced for microbatches of {list(shape)}, "
                f"and is given {list(inputs[0].shape)}; trace it for that shape",
                "model.split",
            )
        tensors = [getattr(owner, attribute) for owner, attribute in self._traced_tensors]
        return self.__dict__["_traced_code"](*inputs, *tensors)

    def on(self, built: nn.Module) -> TracedPiece:
        """The same operations on a built module's tensors. Raises ModelError for a lost value."""
        graph, attributes, names, transient, shape = self._traced_from
        values = {name: _value_of(name, held, built) for name, held in attributes.items()}
        real = dict(_named_tensors(built))
        return TracedPiece(graph, values, {name: real[name] for name in names}, transient, shape)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> TracedPiece:  # torch's signature
        """Move and cast the piece like any module; constants, and what is made, are only moved."""
        super()._apply(fn, recurse)
        device = fn(torch.empty(0)).device
        for module in self.__dict__["_traced_code"].to(device).modules():
            if isinstance(module, GraphModule):
                for node in module.graph.nodes:
                    node.args, node.kwargs = tree_map(
                        lambda value: device if isinstance(value, torch.device) else value,
                        (node.args, node.kwargs),
                    )
                module.recompile()
        return self


def traced(
    factory: Factory,
    split_points: tuple[str, ...],
    dtype: torch.dtype,
    shape: tuple[int, int],
    task: Task,
) -> Chain:
    """A chain of the pieces before and from each split point on.

    `shape` is that of a microbatch's token ids, `[batch, seq]`; the traced pieces take no other,
    and stay in the mode, of `train()` or `eval()`, that the factory's skeleton is in.
    Raises ModelError for an unknown split point or a module that torch cannot export.
    """
    factory.cast_skeleton(dtype)
    skeleton = factory.skeleton
    modules = dict(skeleton.named_modules(remove_duplicate=False))
    for point in split_points:
        if point not in modules or not point:
            names = list(modules)[1:]
            raise _refusal(
                f'split point "{point}" is no submodule of {factory.name}; '
                f"it has {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}"
            )
    inputs = factory.fake.from_tensor(task.example(*shape)[0])
    called: list[str] = []

    def cut(point: str, *_: object) -> None:
        if point not in called:
            called.append(point)
            pipe_split()

    def checked(module: Any) -> Any:
        if uncalled := set(split_points).difference(called):
            raise _refusal(
                f'"{factory.name}": forward does not call the split point "{min(uncalled)}"; '
                "a cut is made where a submodule is first called, as in self.NAME(x)"
            )
        return _without_blocks(module)

    hooks = [
        modules[point].register_forward_pre_hook(functools.partial(cut, point), prepend=True)
        for point in split_points
    ]
    hooks.append(skeleton.register_forward_hook(lambda _module, _ids, given: _logits(given)))
    hooks.append(
        register_module_buffer_registration_hook(_written_in_place)  # type: ignore[arg-type]  # stub
    )
    try:
        with factory.fake, _as_exporting(factory.fake), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's own code
            split: Any = pipeline(skeleton, (inputs,), split_policy=checked).split_gm
    except Exception as error:
        raise _untraceable(factory.name, error) from error
    finally:
        for hook in hooks:
            hook.remove()
    calls = {int(n.target.rpartition("_")[2]): n for n in split.graph.find_nodes(op="call_module")}
    if sorted(calls) != list(range(len(split_points) + 1)):
        raise _refusal(
            f'"{factory.name}": nothing is computed between two split points, or before the first; '
            "leave one out"
        )
    known = factory.canonical | factory.canonical_buffers
    fakes = dict(_named_tensors(skeleton))
    transient = frozenset(fakes) - skeleton.state_dict().keys()
    values = {split.graph.output_node().args[0][0]: OUTPUT}
    values[split.graph.find_nodes(op="placeholder")[0]] = INPUT
    unused = dict.fromkeys(known[name] for name in fakes if name not in transient)
    pieces = []
    for index, entrance in reversed([*enumerate(["", *called])]):
        call = calls[index]
        graph, attributes, names = _flat(split.get_submodule(call.target), known, len(call.args))
        for name in names:
            unused.pop(name, None)
        if not index:  # it has what no piece uses
            names += unused
            with graph.inserting_before(graph.output_node()):
                for number in range(len(unused)):
                    graph.placeholder(f"unused_{number}")
        tensors = {name: fakes[name] for name in names}
        takes = tuple(values.get(node, node.name) for node in call.args)
        fixed = tuple(inputs.shape) if takes[:1] == (INPUT,) else None
        module = TracedPiece(graph, attributes, tensors, transient, fixed)
        parts = {node.args[1]: node for node in call.users if node.target is operator.getitem}
        results: Any = graph.output_node().args[0]
        is_one = isinstance(results, Node)
        given = [call] if is_one else [parts.get(place, call) for place in range(len(results))]
        gives = tuple(values.get(node, node.name) for node in given)
        pieces.append(ChainPiece(module, "", takes, gives, entrance=entrance))
    return Chain(factory, pieces[::-1], _realise, dtype, shape, task)


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _realise(built: nn.Module, owned: list[ChainPiece]) -> list[ChainPiece]:
    """The pieces with the built module's parameters and buffers in place of fake ones."""
    return [
        replace(p, module=p.module.on(built)) for p in owned if isinstance(p.module, TracedPiece)
    ]


def _flat(
    piece: nn.Module, known: Mapping[str, str], num_inputs: int
) -> tuple[Graph, dict[str, Any], list[str]]:
    """One graph of a piece and its submodules, what it refers to, and the tensors that it takes.

    `known`: names of the author's parameters and buffers -> those that they go by.
    """
    graph, attributes, references = Graph(), dict[str, Any](), dict[str, Node]()

    def inline(part: Any, prefix: str, inputs: Iterable[Any]) -> Any:
        values: dict[Node, Any] = {}
        incoming = iter(inputs)
        for node in part.graph.nodes:
            args, kwargs = map_arg((node.args, node.kwargs), values.__getitem__)
            if node.op == "placeholder":
                values[node] = next(incoming)
            elif node.op == "get_attr":
                name = re.sub(
                    "@[0-9]+", "", prefix + node.target
                )  # calls of one module are counted
                name = known.get(name, name)
                if name not in references and name in known:
                    references[name] = graph.placeholder(f"tensor_{len(references)}")
                elif name not in references:
                    references[name] = graph.get_attr(name)
                    attributes[name] = functools.reduce(getattr, node.target.split("."), part)
                values[node] = references[name]
            elif node.op == "call_module":
                values[node] = inline(
                    part.get_submodule(node.target), f"{prefix}{node.target}.", args
                )
            elif node.op == "output":
                return args[0]
            elif node.target is operator.getitem and not isinstance(args[0], Node):
                values[node] = args[0][args[1]]
            elif node.target is not _OF_THE_TRACE:
                is_view = node.target is torch.ops.aten.view.default  # as fake tensors are laid out
                target = torch.ops.aten.reshape.default if is_view else node.target
                values[node] = graph.call_function(target, args, kwargs)
        raise AssertionError("a graph ends with its output")

    graph.output(inline(piece, "", [graph.placeholder(f"input_{n}") for n in range(num_inputs)]))
    return graph, attributes, [name for name in references if name in known]


def _without_blocks(module: Any) -> Any:
    """Put the operations of blocks such as `no_grad` where they are called.

    Export makes modules of them, which torch's cut loses.
    """
    graph = module.graph
    for node in [n for n in graph.nodes if n.target in _BLOCKS]:
        place = next(i for i, arg in enumerate(node.args) if isinstance(arg, Node))
        named = node.args[place]
        block = _without_blocks(module.get_submodule(named.target))
        if any(part.target is torch.ops.pippy._pipe_split.default for part in block.graph.nodes):
            raise _refusal(
                "a split point lies within a block (no_grad, autocast, ...) of forward, which "
                "cannot be cut; choose a submodule that is called outside of it"
            )
        inputs = zip(block.graph.find_nodes(op="placeholder"), node.args[place + 1 :], strict=True)
        with graph.inserting_before(node):
            entered = graph.call_function(_enter, node.args[:place])
            outputs: Any = graph.graph_copy(block.graph, dict(inputs))
            left = graph.call_function(_leave, (entered,))
        inner = [
            n for n in block.graph.nodes if n.op == "call_function"
        ]  # torch goes by their meta
        entered.meta, left.meta = dict(inner[0].meta), dict(inner[-1].meta)
        for part in list(node.users):
            part.replace_all_uses_with(outputs[part.args[1]])
            graph.erase_node(part)
        graph.erase_node(node)
        graph.erase_node(named)
    return module


_BLOCKS = (
    torch.ops.higher_order.wrap_with_set_grad_enabled,
    torch.ops.higher_order.wrap_with_autocast,
)


def _enter(*how: Any) -> AbstractContextManager[Any]:
    context = torch.set_grad_enabled(*how) if len(how) == 1 else torch.autocast(*how)
    context.__enter__()
    return context


def _leave(context: AbstractContextManager[Any]) -> None:
    context.__exit__(None, None, None)


def _written_in_place(module: nn.Module, name: str, value: Tensor | None) -> Tensor | None:
    """Let `self.buffer = value` write to the buffer; the trace would leave out another tensor."""
    buffer = module._buffers.get(name)
    if buffer is None or value is None or value is buffer:
        return None
    return buffer.copy_(value.detach())


def _value_of(name: str, held: Any, built: nn.Module) -> Any:
    """The value of a constant: the attribute of that name, or what forward has made it of."""
    if not isinstance(held, Tensor):
        return held
    attribute: Any = built
    for part in name.split("."):
        attribute = getattr(attribute, part, None)
    value = held.constant if isinstance(held, FakeTensor) else held
    if isinstance(attribute, Tensor):
        value = attribute.detach()
    if value is None:
        raise _refusal(
            f'forward uses a tensor, "{name}" in the trace, that is neither a parameter nor a '
            "buffer nor an attribute of its module; register it as a buffer"
        )
    return value


def _logits(given: Any) -> Tensor:
    """The logits among what forward returns; a tuple begins with them."""
    named = given.get("logits") if isinstance(given, dict) else getattr(given, "logits", given)
    logits = named[0] if isinstance(named, tuple | list) and named else named
    if not isinstance(logits, Tensor):
        raise ModelError(
            f"forward returns a {type(given).__name__} without logits; return them alone, first in "
            'a tuple, or in a dict as "logits"',
            "model.split",
        )
    return logits


@contextlib.contextmanager
def _as_exporting(fake: FakeTensorMode) -> Iterator[None]:
    """Meanwhile torch.export works in this mode, to which every tensor of the module belongs.

    The mode stays one where torch copies a weight that several pieces use: a second mode would free
    the weak references of the first, and Python would crash.
    """
    before = fake.shape_env, fake.static_shapes
    fake.shape_env, fake.static_shapes = ShapeEnv(tracked_fakes=[]), False
    fake.__dict__["__deepcopy__"] = lambda _memo: fake
    try:
        with tracing(TracingContext(fake)):
            yield
    finally:
        fake.shape_env, fake.static_shapes = before
        del fake.__dict__["__deepcopy__"]


def _refusal(message: str) -> ModelError:
    """The error for a module that cannot be cut where its split points are."""
    return ModelError(message, "model.split_points")


def _untraceable(name: str, error: Exception) -> ModelError:
    """What torch's exporter says, on one line, and the line of the author's code."""
    error = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(error, ModelError):
        return error
    where = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        others = (
            Path(torch.__file__).parent,
            Path(contextlib.__file__).parent,
            Path(__file__).parent,
        )
        if path.is_file() and not any(path.is_relative_to(other) for other in others):
            where = f"{frame.filename}, line {frame.lineno}: "
    what = f"{type(error).__name__}: {' '.join(str(error).split(chr(10) * 2, 1)[0].split())}"
    if "data-dependent" in what or "DataDependent" in what:
        what += "; control flow may not depend on the values of tensors: use torch.where"
    return ModelError(f'"{name}" cannot be traced: {where}{what}', "model.split")
