"""A part of a model alone: what stands before its layers, some layers, or what follows them.

It is built as a stage of its own, with its optimizer, and fed with made-up messages. The whole and
the split backward are run on the same weights. A split one needs another forward of the linears,
which takes a little longer, so that it is in place only while a split one runs.

    whole    F  B            split    F  I  W

Bytes are cut out of a recording of a stage's allocations:

    whole    |  F  | send |  B  | send            split    |  F  | send |  I  | send |  W  |
             +--------------------------- points: ---------+-----------------------------+

The whole one is run twice: first without gradients, which it then makes.

At each point a few allocations of one odd size are recorded. Times would not do: the recording's
clock and the host's differ by more than the time between two actions.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from engine.model.stage_module import Message, Model, StageModule, gradient_message, message_bytes
from engine.model.task import Loss
from engine.plan.model_costs import NOTHING, StageCosts
from engine.plan.sharded_bytes import ActionBytes
from engine.run.allocations import record
from engine.run.memory import own_changes, storages
from engine.run.optimizer import OptimizerSpec, build_optimizer
from engine.run.recomputation import recompute_layers
from engine.run.rehearsal import made_up
from engine.run.stage import Stage, Tensors

_MICROBATCH = 0
_POINT_BYTES = 41 * 512
_POINT = 2 * [_POINT_BYTES, -_POINT_BYTES]
_POINTS_OF_PART = 14


@dataclass(frozen=True)
class Conditions:
    """How the layers are run: the shape of a microbatch's token ids and a trainer's settings.

    Of a factory's own batches only the first number of the shape counts.

    `autocast` is entered for each forward and must be reentrant. Without an optimizer none is run.
    """

    shape: tuple[int, int]
    device: torch.device
    autocast: AbstractContextManager[object]
    optimizer: OptimizerSpec | None = None
    recompute: bool = False


class Parts:
    """The stages of a partition of a model, to be built one by one."""

    def __init__(self, model: Model, partition: Sequence[range], conditions: Conditions) -> None:
        self._model, self._partition, self._conditions = model, partition, conditions
        self._messages = model.messages(partition, *conditions.shape)
        example = model.task.example(*conditions.shape)
        self._inputs, self._targets = (tensor.to(conditions.device) for tensor in example)

    def build(self, index: int) -> LoneStage:
        """One stage of the partition with its weights. Raises ModelError."""
        module = self._model.build_stage(self._partition, index, self._conditions.device)
        takes = self._messages[index - 1] if index else None
        sends = self._messages[index] if index < len(self._messages) else None
        if self._conditions.recompute:
            recompute_layers(module)
        received = (self._inputs,) if takes is None else made_up(takes, self._conditions.device)
        ends = received, self._targets, self._model.task.loss
        return LoneStage(module, takes, sends, *ends, self._conditions)


class LoneStage:
    """One stage without neighbours, which holds one microbatch at a time.

    Each forward and backward is prepared by making the message that it takes, and followed by
    `send`, which lets go of the message that it has made.
    """

    def __init__(
        self,
        module: StageModule,
        takes: Message | None,
        sends: Message | None,
        received: Tensors,
        targets: Tensor,
        loss: Loss,
        conditions: Conditions,
    ) -> None:
        """`takes`: the message from the stage before, None on the first; `received`: such a one.

        The last stage has the `loss` of its output and the `targets`.
        """
        self.module, self._device = module, conditions.device
        self.takes, self.sends = takes, sends
        self._targets, self._received = targets, received
        returned = None if sends is None else gradient_message(sends)
        self._returned = None if returned is None else made_up(returned, self._device)
        # What comes before the first layer of a factory's own inputs wants no gradient.
        is_quiet = takes is not None and not any(spec.has_gradient for spec in takes)
        receives = takes if is_quiet else None
        self._whole = Stage(module, sends, conditions.autocast, loss=loss, receives=receives)
        before = _replaced_forwards(module)
        self._split = Stage(
            module, sends, conditions.autocast, loss=loss, receives=receives, is_split=True
        )
        self._deferring = {
            linear: forward
            for linear, forward in _replaced_forwards(module).items()
            if linear not in before
        }
        for stage in (self._whole, self._split):
            stage.begin_step(0, targets.numel())
        spec = conditions.optimizer
        self._optimizer = None if spec is None else build_optimizer(spec, self._parameters())
        for group in [] if self._optimizer is None else self._optimizer.param_groups:
            group["lr"] = 0.0
        self._inputs: Tensors = ()
        self._gradients: Tensors | None = None
        self._made: Tensors = ()
        self.use(is_split=False)

    def use(self, *, is_split: bool) -> None:
        """Run the whole or the split backward from the next forward on."""
        self._stage = self._split if is_split else self._whole
        for linear, forward in self._deferring.items():
            if is_split:
                vars(linear)["forward"] = forward
            else:
                vars(linear).pop("forward", None)

    def prepare_forward(self) -> None:
        """Make the message that the forward takes; token ids are there all the time."""
        is_first = self.takes is None
        self._inputs = self._received if is_first else _copies(self._received)

    def forward(self) -> None:
        inputs, self._inputs = self._inputs, ()
        self._made = self._stage.forward(_MICROBATCH, inputs, self._targets)

    def prepare_backward(self) -> None:
        """Make the gradients of the output; the last stage has a loss instead."""
        self._gradients = None if self._returned is None else _copies(self._returned)

    def backward(self) -> None:
        gradients, self._gradients = self._gradients, None
        self._made = self._stage.backward(_MICROBATCH, gradients)

    def backward_input(self) -> None:
        gradients, self._gradients = self._gradients, None
        self._made = self._stage.backward_input(_MICROBATCH, gradients)

    def backward_weight(self) -> None:
        self._stage.backward_weight(_MICROBATCH)

    def send(self) -> None:
        """Let go of what the last forward or backward has made."""
        self._made = ()

    def drop_gradients(self) -> None:
        """Let the next backward make gradients anew."""
        for parameter in self._parameters():
            parameter.grad = None

    def update(self) -> None:
        """Run the optimizer at a rate of 0: it takes as long, and the weights stay."""
        if self._optimizer is not None:
            self._optimizer.step()

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients, after a backward."""
        gradients = [p.grad for p in self._parameters() if p.grad is not None]
        return sum(storages(gradients, self._device).values())

    @property
    def static_bytes(self) -> int:
        """Bytes of parameters, optimizer state and buffers, after an update."""
        owned: list[Tensor] = [*self._parameters(), *self.module.buffers()]
        if self._optimizer is not None:
            for values in self._optimizer.state.values():
                owned += [value for value in values.values() if isinstance(value, Tensor)]
        return sum(storages(owned, self._device).values())

    @property
    def kind(self) -> object:
        """Stages of one kind have modules of one structure and messages of one shape."""
        shapes = tuple((tuple(p.shape), p.dtype) for p in self._parameters())
        return repr(self.module.units), shapes, self.takes, self.sends

    def _parameters(self) -> list[nn.Parameter]:
        return list(self.module.parameters())


def _replaced_forwards(module: nn.Module) -> dict[nn.Module, object]:
    """The modules whose forward is not their class's own, with that forward."""
    return {inner: vars(inner)["forward"] for inner in module.modules() if "forward" in vars(inner)}


def _copies(tensors: Tensors) -> Tensors:
    return tuple(tensor.clone() for tensor in tensors)


def measure_bytes(parts: Sequence[LoneStage], device: torch.device) -> list[StageCosts]:
    """The bytes of parts that have run a whole and a split microbatch before, and an update.

    Raises RuntimeError where the device's allocator keeps no history.
    """

    def walk() -> None:
        """Run each part's microbatches, with a point before each action and message."""
        for part in parts:
            part.drop_gradients()
            for is_split in (False, False, True):
                part.use(is_split=is_split)
                _mark(device)
                part.prepare_forward()
                part.forward()
                _mark(device)
                part.send()
                _mark(device)
                part.prepare_backward()
                (part.backward_input if is_split else part.backward)()
                _mark(device)
                part.send()
            _mark(device)
            part.backward_weight()
            _mark(device)

    _, recording = record(device, walk)
    sizes = [change.num_bytes for change in own_changes(recording.changes or ())]
    between: list[list[int]] = [[]]  # before the first point, between each two, after the last
    at = 0
    while at < len(sizes):
        if sizes[at : at + len(_POINT)] == _POINT:
            between.append([])
            at += len(_POINT)
        else:
            between[-1].append(sizes[at])
            at += 1
    segments = [ActionBytes(max(itertools.accumulate(b, initial=0)), sum(b)) for b in between]
    if len(segments) != _POINTS_OF_PART * len(parts) + 1:
        raise RuntimeError(
            f"{device}: the bytes of layers cannot be measured, since their allocations were not "
            "recorded completely; use the native allocator (unset PYTORCH_CUDA_ALLOC_CONF) and run "
            "no other profiler"
        )
    sizes_of_parts = []
    for start, part in zip(range(1, len(segments), _POINTS_OF_PART), parts, strict=True):
        whole = segments[start : start + _POINTS_OF_PART - 1]
        first_forward, first_sent, first_backward, _, forward, sent, backward, _, *halves = whole
        split_forward, split_sent, split_input, input_sent, weight = halves
        of_whole = forward.net_bytes + sent.net_bytes
        of_first = first_forward.net_bytes + first_sent.net_bytes + first_backward.rise_bytes
        of_split = split_forward.net_bytes + split_sent.net_bytes
        held = max(0, of_whole, of_split)
        highest = (
            forward.rise_bytes,
            split_forward.rise_bytes,
            of_whole + backward.rise_bytes,
            of_split + split_input.rise_bytes,
        )
        of_part = replace(
            NOTHING,
            held_after_forward=held,
            held_after_input=max(0, of_split + split_input.net_bytes + input_sent.net_bytes),
            transient_bytes=max(0, *highest, held) - held,
            first_transient_bytes=max(0, of_first - held),
            weight_transient_bytes=weight.rise_bytes,
            gradient_bytes=part.gradient_bytes,
            static_bytes=part.static_bytes,
            message_bytes=0 if part.sends is None else message_bytes(part.sends),
        )
        sizes_of_parts.append(of_part)
    return sizes_of_parts


def _mark(device: torch.device) -> None:
    for _ in range(len(_POINT) // 2):
        torch.empty(_POINT_BYTES, dtype=torch.uint8, device=device)
