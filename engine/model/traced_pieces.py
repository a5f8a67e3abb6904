"""An exported graph cut into pieces, each a module with the parameters and buffers that it uses.

    ids -> [ nodes before cut 0 ] -- values used later --> [ nodes up to cut 1 ] -- ... --> logits

The graph is flat and written in the order in which the author's code ran. A piece keeps that order,
writes in place what the author's code writes in place, and looks its tensors up by their names in
the author's module at each call. What cannot be kept when pieces run in processes of their own (one
tensor written by one piece and seen by another) is refused, with the line of the author's code.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Graph, GraphModule, Node
from torch.utils._pytree import tree_leaves, tree_map

from engine.model.chain import INPUT, OUTPUT, Piece
from engine.model.stage_module import ModelError

_UNSEEN = {torch.ops.aten._assert_tensor_metadata.default}  # of the traced run, not of the model
_STATISTICS = {"running_mean", "running_var"}  # written in training, though no schema says so


def refusal(message: str) -> ModelError:
    """The error for a module that cannot be cut where its split points are."""
    return ModelError(message, "model.split_points")


@dataclass(frozen=True)
class Slot:
    """A parameter, buffer or constant of a piece."""

    kind: InputKind
    name: str  # in the author's module
    is_persistent: bool = True


@dataclass(frozen=True)
class Marks:
    """The nodes that say something of the author's code, beside those that compute."""

    cut: torch._ops.OpOverload  # here a piece ends
    assignment: torch._ops.OpOverload  # (value, number): a buffer becomes another tensor
    assigned: Sequence[str]  # by number, the name of the buffer


class TracedPiece(nn.Module):
    """The nodes between two cuts. Its parameters and buffers have the author's names."""

    def __init__(
        self,
        code: GraphModule,
        slots: Sequence[Slot],
        tensors: Mapping[Slot, Tensor],
        assigned: Sequence[Slot],
        shape: tuple[int, ...] | None,
    ) -> None:
        """`code` takes the tensors of the slots in order, then the inputs.

        It returns the outputs, then what the `assigned` buffers become.
        `shape`: what the first input must have, for it is built into the nodes; None: not checked.
        """
        super().__init__()
        self.__dict__["_traced_code"] = code  # no submodule, so that every name is the author's
        self._traced_slots, self._traced_shape = tuple(slots), shape
        self._traced_assigned = tuple(assigned)
        self._traced_constants = {
            s: tensors[s] for s in slots if s.kind is InputKind.CONSTANT_TENSOR
        }
        self._traced_device = torch.device("cpu")
        for slot in slots:
            if slot.kind is InputKind.CONSTANT_TENSOR:
                continue
            module: nn.Module = self  # the modules on the way to a dotted name are empty ones
            *path, attribute = slot.name.split(".")
            for name in path:
                if name not in module._modules:
                    module.add_module(name, nn.Module())
                module = module.get_submodule(name)
            tensor = tensors[slot]
            if isinstance(tensor, nn.Parameter):
                module.register_parameter(attribute, tensor)
            else:
                module.register_buffer(attribute, tensor, persistent=slot.is_persistent)

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The parameters, buffers and constants that the nodes use."""
        return self._traced_slots

    @property
    def constants(self) -> Mapping[Slot, Tensor]:
        """Tensors that are neither parameters nor buffers of the author's module."""
        return self._traced_constants

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        if self._traced_shape is not None and inputs[0].shape != self._traced_shape:
            raise ModelError(
                f"the module was traced for microbatches of {list(self._traced_shape)}, "
                f"and is given {list(inputs[0].shape)}; trace it for that shape",
                "model.split",
            )
        tensors = [self._tensor(slot) for slot in self._traced_slots]
        outputs: tuple[Tensor, ...] = self.__dict__["_traced_code"](*tensors, *inputs)
        num_outputs = len(outputs) - len(self._traced_assigned)
        for slot, value in zip(self._traced_assigned, outputs[num_outputs:], strict=True):
            module, attribute = self._place(slot)
            module._buffers[attribute] = value.detach()
        return outputs[:num_outputs]

    def with_tensors(self, tensors: Mapping[Slot, Tensor]) -> TracedPiece:
        """The same nodes on other tensors."""
        code = copy.deepcopy(self.__dict__["_traced_code"])
        assigned, shape = self._traced_assigned, self._traced_shape
        return TracedPiece(code, self._traced_slots, tensors, assigned, shape)

    def _tensor(self, slot: Slot) -> Tensor:
        if slot.kind is InputKind.CONSTANT_TENSOR:
            return self._traced_constants[slot]
        module, attribute = self._place(slot)
        own = module._parameters if slot.kind is InputKind.PARAMETER else module._buffers
        tensor = own[attribute]
        assert tensor is not None
        return tensor

    def _place(self, slot: Slot) -> tuple[nn.Module, str]:
        parent, _, attribute = slot.name.rpartition(".")
        return self.get_submodule(parent), attribute

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> TracedPiece:  # torch's signature
        """Move and cast the piece like any module, except that constants keep their dtype."""
        device = fn(torch.empty(0, device=self._traced_device)).device
        super()._apply(fn, recurse)
        self._traced_constants = {s: t.to(device) for s, t in self._traced_constants.items()}
        if device == self._traced_device:
            return self
        self._traced_device = device

        def moved(argument: object) -> object:
            return device if isinstance(argument, torch.device) else argument

        for module in self.__dict__["_traced_code"].modules():  # nodes make their tensors there
            if isinstance(module, GraphModule):
                for node in module.graph.nodes:
                    node.args = tree_map(moved, node.args)
                    node.kwargs = tree_map(moved, node.kwargs)
                module.recompile()
        return self


def cut_graph(
    program: ExportedProgram,
    marks: Marks,
    canonical: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    output: Node,
) -> list[Piece]:
    """The pieces of an exported program between its cuts, on fake tensors.

    `canonical`: names of parameters to the ones they go by; `tensors`: parameters and buffers by
    name; `output`: the value that the last piece gives. Raises ModelError for what cannot be cut.
    """
    flow = _Flow(program, marks, canonical, output)
    for index in range(flow.num_pieces - 1):  # no message carries numbers, lists, sparse tensors
        for node in flow.crossing(index):
            value = node.meta.get("val")
            if not _is_strided(value):
                is_tensor = isinstance(value, Tensor)
                kind = "a sparse tensor" if is_tensor else f"a {type(value).__name__}"
                raise refusal(
                    f"{place_of(node)}: gives {kind} that is used after a split point; only dense "
                    "tensors pass from piece to piece: move the split point, or make it a tensor"
                )
    _check_writes(flow)
    for node in flow.nodes:  # a message is contiguous: strides of a received tensor do not count
        source = node.args[0] if node.args else None
        is_counting = "as_strided" in str(node.target) and isinstance(source, Node)
        if is_counting and flow.made_in(source) < flow.piece_of[node]:  # type: ignore[arg-type]  # a Node
            raise refusal(
                f"{place_of(node)}: as_strided on a tensor that passes a split point; "
                "call it before the split point"
            )
    names = {flow.ids: INPUT}
    return [_piece(flow, program, tensors, names, index) for index in range(flow.num_pieces)]


class _Flow:
    """The piece that each node of the graph is in, and what it reads and writes."""

    def __init__(
        self,
        program: ExportedProgram,
        marks: Marks,
        canonical: Mapping[str, str],
        output: Node,
    ) -> None:
        specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        nodes = list(program.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        self.slots = {
            node: _slot_of(specs[node.name], canonical)
            for node in placeholders
            if specs[node.name].kind is not InputKind.USER_INPUT
        }
        (self.ids,) = [node for node in placeholders if node not in self.slots]
        self.nodes = [n for n in nodes if n.op in ("call_function", "get_attr")]
        self.output = _merge_in_place(self.nodes, output)
        self.piece_of = self._assign(marks)
        self.assigned = self._find_assigned(marks, canonical)
        unseen = {marks.cut, marks.assignment, *_UNSEEN}
        self.nodes = [n for n in self.nodes if n.target not in unseen]
        self.used_by = self._find_uses()
        self._crossing: dict[int, list[Node]] = {}
        self.written = [set[int]() for _ in range(self.num_pieces)]
        self.writers: dict[int, Node] = {}
        for node in self.nodes:
            for storage in written_storages(node):
                self.written[self.piece_of[node]].add(storage)
                self.writers.setdefault(storage, node)

    def _assign(self, marks: Marks) -> dict[Node, int]:
        """The piece of each node; parts of a tuple, and code as a value, stay with their users."""
        piece_of: dict[Node, int] = {}
        index = 0
        for node in self.nodes:
            index += node.target is marks.cut
            is_part = node.target is operator.getitem and isinstance(node.args[0], Node)
            piece_of[node] = piece_of[node.args[0]] if is_part else index
        self.num_pieces = index + 1
        return piece_of

    def _find_assigned(
        self, marks: Marks, canonical: Mapping[str, str]
    ) -> dict[Slot, tuple[int, Node]]:
        """The buffers that become another tensor: in which piece, and what they are in the end.

        What export writes of those of the module itself, as a copy at the end, is taken out.
        """
        by_name = {slot.name: slot for slot in self.slots.values()}
        assigned: dict[Slot, tuple[int, Node]] = {}
        for node in self.nodes:
            if node.target is marks.assignment:
                value, number = node.args
                assert isinstance(value, Node)
                name = marks.assigned[int(str(number))]
                assigned[by_name[canonical.get(name, name)]] = (self.piece_of[node], value)
        while self.nodes and self.nodes[-1].target is torch.ops.aten.copy_.default:
            target, value = self.nodes[-1].args[:2]
            slot = self.slots.get(target) if isinstance(target, Node) else None
            if slot is None or slot not in assigned or assigned[slot][1] is not value:
                break
            self.nodes.pop()
        return assigned

    def _find_uses(self) -> dict[Node, set[int]]:
        """The pieces in which each value is used; what the module returns is used in the last."""
        used_by: dict[Node, set[int]] = {self.output: {self.num_pieces - 1}}
        for node in self.nodes:
            for source in node.all_input_nodes:
                used_by.setdefault(source, set()).add(self.piece_of[node])
        for buffer, slot in self.slots.items():
            if slot in self.assigned:
                piece, value = self.assigned[slot]
                for node in (buffer, value):
                    used_by.setdefault(node, set()).add(piece)
        return used_by

    def made_in(self, node: Node) -> int:
        """The piece that makes a value; -1 for the ids."""
        return self.piece_of.get(node, -1)

    def crossing(self, piece: int) -> list[Node]:
        """The values made in or before this piece and used after it."""
        if piece not in self._crossing:
            values = [self.ids, *(node for node in self.nodes if node.op != "get_attr")]
            self._crossing[piece] = [
                node
                for node in values
                if self.made_in(node) <= piece < max(self.used_by.get(node, {-1}))
            ]
        return self._crossing[piece]


def _slot_of(spec: InputSpec, canonical: Mapping[str, str]) -> Slot:
    name = spec.target or spec.arg.name
    if spec.kind is InputKind.PARAMETER:
        return Slot(spec.kind, canonical.get(name, name))
    if spec.kind not in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR):
        raise refusal(f'forward uses "{name}", which is neither tensor nor module')
    return Slot(spec.kind, canonical.get(name, name), spec.persistent is not False)


def _merge_in_place(nodes: list[Node], output: Node) -> Node:
    """Let what an in-place operation returns be the tensor that it has written to.

    Returns the node of the output.
    """
    for node in nodes:
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and _returns_first(target):
            source = node.args[0]
            assert isinstance(source, Node)
            node.replace_all_uses_with(source)
            output = source if output is node else output
    return output


def _returns_first(operation: torch._ops.OpOverload) -> bool:
    schema = operation._schema
    if len(schema.returns) != 1 or not schema.arguments:
        return False
    first, returned = schema.arguments[0].alias_info, schema.returns[0].alias_info
    return bool(first and first.is_write and returned and returned.is_write)


def written_storages(node: Node) -> set[int]:
    """The memory that a node writes to; of a block (`no_grad`), what any node in it does."""
    target = node.target
    if target is torch.ops.aten.detach_.default:
        return set()
    if isinstance(target, torch._ops.OpOverload):
        written: list[object] = []
        for place, argument in enumerate(target._schema.arguments):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or argument.name in _STATISTICS:
                is_by_name = place >= len(node.args)
                written.append(node.kwargs.get(argument.name) if is_by_name else node.args[place])
        return {s for n in tree_leaves(written) if isinstance(n, Node) for s in storages(n)}
    return {s for block in _blocks_of(node) for n in block.graph.nodes for s in written_storages(n)}


def _blocks_of(node: Node) -> list[GraphModule]:
    """The code that a node runs as a block."""
    sources = (n for n in node.all_input_nodes if n.op == "get_attr")
    root = node.graph.owning_module
    found = [root.get_submodule(str(n.target)) for n in sources] if root is not None else []
    return [module for module in found if isinstance(module, GraphModule)]


def storages(node: Node) -> set[int]:
    """The memory in which a node's value lies."""
    values = tree_leaves(node.meta.get("val"))
    return {v.untyped_storage()._cdata for v in values if _is_strided(v)}


def _is_strided(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


_TORCHS = str(Path(torch.__file__).parent)


def place_of(node: Node) -> str:
    """Return the place in the author's code that a node comes from: file, line and submodule."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in reversed(lines) if line.startswith("File ")]
    line = next((line for line in files if _TORCHS not in line), files[0] if files else "")
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = stack[-1][0] if stack else ""
    where = line.replace("File ", "", 1) or str(node.target)
    return f"{where} (submodule {path})" if path else where


def _check_writes(flow: _Flow) -> None:
    """Refuse a tensor that one piece writes to and another sees by another name or of its own."""
    for storage, writer in flow.writers.items():
        writing = [i for i, written in enumerate(flow.written) if storage in written]
        # A parameter, buffer or constant that is written to belongs to one piece alone.
        names = [s.name for node, s in flow.slots.items() if storage in storages(node)]
        users = (pieces for node, pieces in flow.used_by.items() if storage in storages(node))
        holders = set(writing).union(*users)
        if names and len(holders) > 1:
            _refuse_state(writer, names[0], holders)
        for index in range(writing[-1]):
            same = [n for n in flow.crossing(index) if storage in storages(n)]
            if len(same) > 1:
                raise refusal(
                    f"{place_of(writer)}: writes in place to memory of which several tensors "
                    "(views of each other) pass a split point; write out of place there, or "
                    "clone() one of them"
                )
    for buffer, slot in flow.slots.items():  # one that becomes another tensor is of one piece
        if slot in flow.assigned and len(flow.used_by[buffer]) > 1:
            _refuse_state(flow.assigned[slot][1], slot.name, flow.used_by[buffer])


def _refuse_state(writer: Node, name: str, holders: set[int]) -> None:
    raise refusal(
        f"{place_of(writer)}: changes {name} in forward, which pieces "
        f"{', '.join(str(piece) for piece in sorted(holders))} of the traced module use; "
        "only one piece may: move the split points"
    )


def _piece(
    flow: _Flow,
    program: ExportedProgram,
    tensors: Mapping[str, Tensor],
    names: dict[Node, str],
    index: int,
) -> Piece:
    """Make the next of the pieces; they are made in order.

    `names` has the name by which each value goes by then; new ones are added.
    """
    graph, copies = Graph(), dict[Node, Node]()

    def add_call(node: Node, operation: torch._ops.OpOverload) -> None:
        copies[node] = graph.call_function(operation, (copies[node],))

    # Its tensors, each once; the first piece has those that nothing uses.
    by_slot: dict[Slot, Node] = {}
    for node, slot in flow.slots.items():
        if index in flow.used_by.get(node, {0} if slot.is_persistent else set()):
            if slot not in by_slot:
                by_slot[slot] = graph.placeholder(f"slot_{len(by_slot)}")
            copies[node] = by_slot[slot]
    # What it takes from pieces before, and a copy of what it then writes to.
    taken = [n for n in flow.crossing(index - 1) if index in flow.used_by[n]]
    takes = tuple(names[node] for node in taken)
    for place, node in enumerate(taken):
        copies[node] = graph.placeholder(f"input_{place}")
    renewed: set[Node] = set()
    for node in taken:
        if node.meta["val"].is_complex():
            add_call(node, torch.ops.aten.view_as_complex.default)
        if storages(node) & flow.written[index]:
            add_call(node, torch.ops.aten.clone.default)
            renewed.add(node)
    for node in flow.nodes:
        is_block = node.op == "get_attr" and index in flow.used_by.get(node, ())
        if is_block or (node.op != "get_attr" and flow.piece_of[node] == index):
            is_written = not flow.writers.keys().isdisjoint(storages(node))
            # Some operations lay their result out otherwise than under fake tensors, for which
            # export leaves out `contiguous()`. So what counts on a layout may copy, unless the copy
            # would miss a write.
            made = graph.node_copy(node, lambda source: copies[source])
            if not is_written and node.target is torch.ops.aten.view.default:
                made.target = torch.ops.aten.reshape.default
            if not is_written and node.target is torch.ops.aten.view_as_complex.default:
                with graph.inserting_before(made):
                    source = made.args[0]
                    made.args = (graph.call_function(torch.ops.aten.contiguous.default, (source,)),)
            copies[node] = made
    # What is used after it, complex tensors as pairs of reals.
    results: list[Node] = []
    gives: list[str] = []
    for node in flow.crossing(index):
        if flow.made_in(node) == index or node in renewed:
            names[node] = f"{node.name} after piece {index}"
            if node.meta["val"].is_complex():
                add_call(node, torch.ops.aten.resolve_conj.default)
                add_call(node, torch.ops.aten.view_as_real.default)
            results.append(copies[node])
            gives.append(names[node])
    if index == flow.num_pieces - 1:
        results.append(copies[flow.output])
        gives.append(OUTPUT)
    assigned = [slot for slot, (piece, _) in flow.assigned.items() if piece == index]
    graph.output((*results, *(copies[flow.assigned[slot][1]] for slot in assigned)))
    code = GraphModule(program.graph_module, graph)
    for part in code.modules():  # every node refers to the fake tensors of the traced run
        if isinstance(part, GraphModule):
            for node in part.graph.nodes:
                node.meta.clear()
            part.recompile()
    shape = tuple(flow.ids.meta["val"].shape) if takes[:1] == (INPUT,) else None
    fakes: dict[Slot, Tensor] = {}
    for slot in by_slot:
        is_constant = slot.kind is InputKind.CONSTANT_TENSOR
        fake = program.constants[slot.name] if is_constant else tensors[slot.name]
        assert isinstance(fake, Tensor)
        fakes[slot] = fake
    return Piece(TracedPiece(code, list(by_slot), fakes, assigned, shape), "", takes, tuple(gives))


def real_tensors(piece: TracedPiece, built: nn.Module) -> dict[Slot, Tensor]:
    """A built module's tensors for a piece. Raises ModelError for a constant that has no value."""
    parameters = dict(built.named_parameters(remove_duplicate=False))
    buffers = dict(built.named_buffers(remove_duplicate=False))
    tensors: dict[Slot, Tensor] = {}
    for slot in piece.slots:
        if slot.kind is InputKind.PARAMETER:
            tensors[slot] = parameters[slot.name]
        elif slot.kind is InputKind.BUFFER:
            tensors[slot] = buffers[slot.name]
        else:
            # The attribute of that name, or the value with which the traced run has made it.
            attribute: object = built
            for name in slot.name.split("."):
                attribute = getattr(attribute, name, None)
            traced = piece.constants[slot]
            value = traced.constant if isinstance(traced, FakeTensor) else traced
            if isinstance(attribute, Tensor):
                value = attribute.detach()
            if value is None:
                raise refusal(
                    f'forward uses a tensor, "{slot.name}" in the trace, that is neither a '
                    "parameter nor a buffer nor an attribute of its module; register it as a buffer"
                )
            tensors[slot] = value
    return tensors
