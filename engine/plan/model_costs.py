"""The costs of a model's layers, from which a planner makes the costs of stages.

A model is what stands before its layers (embeddings), its layers, and what follows them (final
norm, head and loss). All costs are of one microbatch of a given size. A stage costs the sum of its
layers and, for each of its actions, what a runtime adds to one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from engine.plan.action import Op

COMPUTING = Op.F, Op.B, Op.I, Op.W


class StageBytes(NamedTuple):
    """These bytes are what the actions of a stage change on its rank, for `engine.plan.memory`.

    The first three are by action, each op of `COMPUTING` twice: its first action, and later ones.
    """

    rise: tuple[int, ...]  # at its highest, above its start
    net: tuple[int, ...]  # at its end, above its start
    sent: tuple[int, ...]  # of what it leaves, what goes once the message is sent
    input_bytes: int  # of the message that a forward takes
    given_bytes: int  # and a backward

    def without_gradients(self) -> StageBytes:
        """The same where gradients are counted elsewhere: the first action is as later ones."""
        rise, net = (tuple(n for n in one[1::2] for _ in range(2)) for one in (self.rise, self.net))
        return self._replace(rise=rise, net=net)


@dataclass(frozen=True)
class StageCosts:
    """Costs of a stage for one microbatch: times in nanoseconds, memory in bytes.

    They are measured of a layer alone, or of what stands before or after the layers. Those of a
    stage of several follow from these, its `layers`, of which alone `error` and what is transient
    are known.

    `error` is the relative standard error of each of its times. A whole backward need not take as
    long as its halves. `held_after_forward` is what stays from its forward on, its input included;
    `held_after_input` what the input-gradient half leaves, which is more where a layer is
    recomputed. `transient_bytes` is what an action has at its highest above the former, messages
    and what is recomputed included; `weight_transient_bytes` that of a W above the latter;
    `first_transient_bytes` that of the first whole backward, which makes the gradients.
    `gradient_bytes` are the gradients, `static_bytes` parameters, optimizer state and buffers.
    `message_bytes` is its output, sent where a stage ends with it; `input_bytes` the message that
    a stage takes.
    """

    forward_ns: float
    backward_ns: float
    input_ns: float
    weight_ns: float
    error: float = 0.0
    held_after_forward: int = 0
    held_after_input: int = 0
    transient_bytes: int = 0
    first_transient_bytes: int = 0
    weight_transient_bytes: int = 0
    gradient_bytes: int = 0
    static_bytes: int = 0
    message_bytes: int = 0
    optimizer_ns: float = 0.0
    input_bytes: int = 0
    layers: tuple[StageCosts, ...] = ()

    @property
    def quickest_ns(self) -> float:
        """A forward and a backward, whole or in halves, whichever is quicker."""
        return self.forward_ns + min(self.backward_ns, self.input_ns + self.weight_ns)

    @cached_property
    def memory(self) -> StageBytes:
        """Its actions change the bytes of a rank so, layer by layer: F forwards, others backwards.

        A message is there when it is taken, and a layer's transient bytes count it: those of the
        last layer what is given back to its stage, which goes when the whole backward is over.
        """
        taken, given = self.input_bytes, self.message_bytes
        rises, nets = [], []
        for op, is_later in itertools.product(COMPUTING, (False, True)):
            level = -taken if op is Op.F else 0
            highest, is_given = level, op in (Op.B, Op.I)
            for nth, layer in enumerate(self.layers if op is Op.F else self.layers[::-1]):
                held, left = layer.held_after_forward, layer.held_after_input
                own = layer.weight_transient_bytes if op is Op.W else layer.transient_bytes
                made = 0
                if op in (Op.B, Op.W) and not is_later:
                    made = layer.gradient_bytes
                    own = max(own, made if op is Op.W else layer.first_transient_bytes)
                if op is Op.F:
                    own += held
                elif op is Op.I or (op is Op.B and nth == 0):
                    own -= given  # a half keeps it for the other, among what it leaves
                highest = max(highest, level + own)
                level += {Op.F: held, Op.B: -held, Op.I: left - held, Op.W: -left}[op] + made
            level += given if op is Op.F else taken if is_given else 0
            rises.append(max(highest, level))
            nets.append(level - (given if is_given else 0))
        sent = (given, given, taken, taken, taken, taken, 0, 0)
        return StageBytes(tuple(rises), tuple(nets), sent, taken, given)


NOTHING = StageCosts(0, 0, 0, 0)


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model for one size of microbatch, with layers recomputed or not."""

    before: StageCosts
    layers: tuple[StageCosts, ...]
    after: StageCosts
    action_ns: float = 0.0  # what a runtime adds to each action

    @property
    def parts(self) -> tuple[StageCosts, ...]:
        """What stands before the layers, each layer, and what follows them."""
        return self.before, *self.layers, self.after

    def of_stage(self, layers: range, *, is_first: bool, is_last: bool) -> StageCosts:
        """The costs of a stage that owns some contiguous layers."""
        owned = [self.layers[layer] for layer in layers]
        owned = [self.before] * is_first + owned + [self.after] * is_last
        source = self.layers[layers.start - 1] if layers.start else self.before
        return StageCosts(  # times are whole nanoseconds
            forward_ns=round(self.action_ns + sum(layer.forward_ns for layer in owned)),
            backward_ns=round(self.action_ns + sum(layer.backward_ns for layer in owned)),
            input_ns=round(self.action_ns + sum(layer.input_ns for layer in owned)),
            weight_ns=round(self.action_ns + sum(layer.weight_ns for layer in owned)),
            held_after_forward=sum(layer.held_after_forward for layer in owned),
            held_after_input=sum(layer.held_after_input for layer in owned),
            gradient_bytes=sum(layer.gradient_bytes for layer in owned),
            static_bytes=sum(layer.static_bytes for layer in owned),
            input_bytes=0 if is_first else source.message_bytes,
            message_bytes=0 if is_last or not owned else owned[-1].message_bytes,
            optimizer_ns=round(sum(layer.optimizer_ns for layer in owned)),
            layers=tuple(owned),
        )

    def with_each(self, changed: Callable[[StageCosts], StageCosts]) -> ModelCosts:
        """The costs with every layer changed, and what stands before and after them."""
        before, *layers, after = map(changed, self.parts)
        return replace(self, before=before, layers=tuple(layers), after=after)

    def of_stages(self, partition: Sequence[range]) -> list[StageCosts]:
        """The costs of all stages, in order."""
        last = len(partition) - 1
        return [
            self.of_stage(layers, is_first=stage == 0, is_last=stage == last)
            for stage, layers in enumerate(partition)
        ]


@dataclass(frozen=True)
class LinkCosts:
    """A link between two ranks: a message takes `latency_ns` plus its bytes over `bytes_per_s`."""

    latency_ns: float = 0.0
    bytes_per_s: float = float("inf")
    error: float = 0.0  # relative standard error of both
