"""The costs of a model's layers, from which a planner makes the costs of stages.

A model is what stands before its layers (embeddings), its layers, and what follows them (final
norm, head and loss). All costs are of one microbatch of a given size. A stage costs the sum of its
layers and, for each of its actions, what a runtime adds to one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LayerCosts:
    """Costs of one layer for one microbatch: times in nanoseconds, memory in bytes.

    `error` is the relative standard error of each of its times. A whole backward need not take as
    long as its halves. `held_after_forward` is what stays from its forward on, its input included;
    `held_after_input` what the input-gradient half leaves, which is more where a layer is
    recomputed; `transient_bytes` what it allocates at its highest besides the more of both.
    `static_bytes` are parameters, gradients, optimizer state and buffers. `message_bytes` is its
    output, sent where a stage ends with it.
    """

    forward_ns: float
    backward_ns: float
    input_ns: float
    weight_ns: float
    error: float = 0.0
    held_after_forward: int = 0
    held_after_input: int = 0
    transient_bytes: int = 0
    static_bytes: int = 0
    message_bytes: int = 0
    optimizer_ns: float = 0.0

    @property
    def quickest_ns(self) -> float:
        """A forward and a backward, whole or in halves, whichever is quicker."""
        return self.forward_ns + min(self.backward_ns, self.input_ns + self.weight_ns)


NOTHING = LayerCosts(0, 0, 0, 0)


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage, as those of a layer; its times are whole nanoseconds."""

    forward_ns: int
    backward_ns: int
    input_ns: int
    weight_ns: int
    held_after_forward: int
    held_after_input: int
    transient_bytes: int
    static_bytes: int
    message_bytes: int
    optimizer_ns: int

    @property
    def quickest_ns(self) -> int:
        """A forward and a backward, whole or in halves, whichever is quicker."""
        return self.forward_ns + min(self.backward_ns, self.input_ns + self.weight_ns)


@dataclass(frozen=True)
class ModelCosts:
    """Costs of a model for one size of microbatch, with layers recomputed or not."""

    before: LayerCosts
    layers: tuple[LayerCosts, ...]
    after: LayerCosts
    action_ns: float = 0.0  # what a runtime adds to each action

    def of_stage(self, layers: range, *, is_first: bool, is_last: bool) -> StageCosts:
        """The costs of a stage that owns some contiguous layers."""
        owned = [self.layers[layer] for layer in layers]
        owned = [self.before] * is_first + owned + [self.after] * is_last
        return StageCosts(
            forward_ns=round(self.action_ns + sum(layer.forward_ns for layer in owned)),
            backward_ns=round(self.action_ns + sum(layer.backward_ns for layer in owned)),
            input_ns=round(self.action_ns + sum(layer.input_ns for layer in owned)),
            weight_ns=round(self.action_ns + sum(layer.weight_ns for layer in owned)),
            held_after_forward=sum(layer.held_after_forward for layer in owned),
            held_after_input=sum(layer.held_after_input for layer in owned),
            transient_bytes=max((layer.transient_bytes for layer in owned), default=0),
            static_bytes=sum(layer.static_bytes for layer in owned),
            message_bytes=owned[-1].message_bytes if owned else 0,
            optimizer_ns=round(sum(layer.optimizer_ns for layer in owned)),
        )

    def with_each(self, changed: Callable[[LayerCosts], LayerCosts]) -> ModelCosts:
        """The costs with every layer changed, and what stands before and after them."""
        before, *layers, after = map(changed, (self.before, *self.layers, self.after))
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
