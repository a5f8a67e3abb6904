"""Any module, cut at named submodules by torch's own tracer; the pieces make a chain.

`torch.distributed.pipelining.pipeline` exports the whole module once, under fake tensors, for one
microbatch shape. Its pieces keep the parameters' full names; its schedules and stages are not used.
"""

from __future__ import annotations

import copy
import operator

import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline
from torch.fx import GraphModule, Node

from engine.model.chain import INPUT, OUTPUT, Chain, Piece
from engine.model.factory import Factory
from engine.model.stage_module import ModelError


def traced(
    factory: Factory,
    split_points: tuple[str, ...],
    dtype: torch.dtype,
    shape: tuple[int, int],
    device: torch.device,
) -> Chain:
    """A chain of the pieces before and from each split point on.

    `shape` is that of a microbatch's token ids, `[batch, seq]`; the traced pieces take no other.
    Raises ModelError for an unknown split point or a module that cannot be traced.
    """
    _check_points(factory, split_points)
    factory.cast_skeleton(dtype)
    with factory.fake, torch.device(device.type):
        ids = torch.zeros(shape, dtype=torch.int64)
        points = dict.fromkeys(split_points, SplitPoint.BEGINNING)
        try:
            pipe = pipeline(factory.skeleton, (ids,), split_spec=points)
        except Exception as error:
            message = f'"{factory.name}" cannot be traced: {type(error).__name__}: {error}'
            raise ModelError(message, "model.split") from error
    return Chain(factory, _pieces(pipe.split_gm), _realise, dtype)


def _check_points(factory: Factory, split_points: tuple[str, ...]) -> None:
    names = [name for name, _ in factory.skeleton.named_modules() if name]
    for point in split_points:
        if point not in names:
            raise ModelError(
                f'split point "{point}" is no submodule of {factory.name}; '
                f"it has {', '.join(names[:12])}{', ...' if len(names) > 12 else ''}",
                "model.split_points",
            )


def _pieces(graph_module: GraphModule) -> list[Piece]:
    """A piece per call in the split graph; values are named by their nodes."""
    nodes = list(graph_module.graph.nodes)
    (placeholder,) = [node for node in nodes if node.op == "placeholder"]
    (output,) = [node for node in nodes if node.op == "output"]
    (final,) = output.args[0] if isinstance(output.args[0], tuple) else (output.args[0],)
    names = {node: node.name for node in nodes} | {placeholder: INPUT, final: OUTPUT}
    return [
        Piece(
            graph_module.get_submodule(str(call.target)),
            "",
            tuple(names[argument] for argument in call.args),
            _given_names(call, names),
        )
        for call in nodes
        if call.op == "call_module"
    ]


def _given_names(call: Node, names: dict[Node, str]) -> tuple[str, ...]:
    """A piece with several results is followed by a `getitem` for each."""
    items = [user for user in call.users if user.target is operator.getitem]
    if not items:
        return (names[call],)
    by_place = {int(str(user.args[1])): names[user] for user in items}
    return tuple(by_place[place] for place in sorted(by_place))


def _realise(built: nn.Module, owned: list[Piece]) -> list[Piece]:
    """The traced pieces with the built module's parameters and buffers in place of fake ones."""
    real = dict(built.named_parameters(remove_duplicate=False))
    buffers = dict(built.named_buffers(remove_duplicate=False))
    pieces = []
    for piece in owned:
        fake = [*piece.module.parameters(), *piece.module.buffers()]
        module = copy.deepcopy(piece.module, {id(tensor): tensor for tensor in fake})
        _replace_tensors(module, real, buffers)
        pieces.append(Piece(module, piece.prefix, piece.takes, piece.gives))
    return pieces


def _replace_tensors(
    module: nn.Module, parameters: dict[str, nn.Parameter], buffers: dict[str, torch.Tensor]
) -> None:
    for name, _ in list(module.named_parameters(remove_duplicate=False)):
        parent, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(parent), attribute, parameters[name])
    for name, _ in list(module.named_buffers(remove_duplicate=False)):
        parent, _, attribute = name.rpartition(".")
        if name not in buffers:
            raise ModelError(
                f'tracing made a constant of "{name}"; register it as a buffer', "model.split"
            )
        setattr(module.get_submodule(parent), attribute, buffers[name])
