"""What every kind of model offers: its layers' sizes, the messages between stages, the stages.

Three kinds are cut differently (`causal_lm`, `chain`, and `traced`, a chain whose pieces torch
has cut) and run alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from engine.model.task import Task

Partition = Sequence[range]
"""The layers of each stage, in order."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, cut to a readable length."""
    return str(error).strip().partition("\n")[0].rstrip()[:300]


class ModelError(ValueError):
    """The model cannot be had, or not as asked. `key` is the setting at fault."""

    def __init__(self, message: str, key: str = "model.preset") -> None:
        super().__init__(message)
        self.key = key

    def __reduce__(self) -> tuple[type[ModelError], tuple[str, str]]:
        """Keep the key when the error is sent to other ranks."""
        return type(self), (str(self), self.key)


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a message between neighbouring stages."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool = True  # False: the loss does not depend on it, and zeros come back


Message = tuple[TensorSpec, ...]


def message_bytes(message: Message) -> int:
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in message)


def gradient_message(message: Message) -> Message:
    """Return the message that comes back: a gradient for each floating-point tensor."""
    return tuple(spec for spec in message if spec.dtype.is_floating_point)


@dataclass(frozen=True)
class SharedWeight:
    """One weight that several stages own: its name on each of them."""

    name: str  # in the unsplit model
    owners: tuple[tuple[int, str], ...]  # (stage, name there), at least two stages


class StageModule(nn.Module):
    """One stage.

    Takes a microbatch's inputs on the first stage, such as token ids `[batch, seq]`, else the
    tensors of a message; returns the tensors of the next message, on the last stage the model's
    output, such as logits `[batch, seq, vocab]`.
    """

    def __init__(self, layers: range, *, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.layers = layers
        self.is_first, self.is_last = is_first, is_last
        self.cache: Any = None  # keys and values before a slice, which the next run sees
        self._writes_to_inputs = False if self.is_empty else None  # None: not yet known

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the stage, on clones where it writes to its inputs: whose these are must not see it.

        The first forward runs on clones in any case, to find out.
        """
        if self._writes_to_inputs is False:
            return self.run(*inputs)
        own = tuple(x.clone() for x in inputs)
        versions = [x._version for x in own]
        outputs = self.run(*own)
        if self._writes_to_inputs is None:
            self._writes_to_inputs = versions != [x._version for x in own]
        return outputs

    def run(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Compute the stage's outputs."""
        raise NotImplementedError

    def prefix(self, seq_len: int) -> Any:
        """Return a new `engine.model.prefix.Prefix` for a microbatch that comes in slices."""
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        """Whether it only passes on what it gets."""
        return not (self.layers or self.is_first or self.is_last)

    @property
    def entrance(self) -> str | None:
        """The submodule of the unsplit module that it begins with.

        Empty: the module itself; None: it begins with no submodule.
        """
        return "" if self.is_first else None

    @property
    def units(self) -> list[nn.Module]:
        """The owned layers: recomputed one by one."""
        raise NotImplementedError

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by the name they have in the unsplit model, a shared one once."""
        raise NotImplementedError

    def own_state(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers: what a checkpoint holds of this stage."""
        raise NotImplementedError


class Model(Protocol):
    """A model before it is split. Holds no weights."""

    num_parameters: int
    num_layers: int
    part_sizes: tuple[int, ...]  # parameters of what is before the layers, of each, of what follows
    task: Task
    max_positions: int | None  # None: no limit known

    def __hash__(self) -> int:
        """Models are told apart by identity."""

    def shared_weights(self, partition: Partition) -> list[SharedWeight]:
        """The weights that several stages own under this partition."""

    def messages(self, partition: Partition, batch: int, seq_len: int) -> list[Message]:
        """Return what each stage but the last sends for one microbatch."""

    def output(self, batch: int, seq_len: int) -> TensorSpec:
        """Return the shape and dtype of what the last stage makes of one microbatch."""

    def write_configuration(self, folder: Path) -> None:
        """Beside saved tensors: what `AutoModelForCausalLM.from_pretrained` needs; else nothing."""

    def check_configuration(self, folder: Path) -> None:
        """Compare the model with the configuration beside saved tensors. Raises ModelError."""

    def build_stage(self, partition: Partition, stage: int, device: torch.device) -> StageModule:
        """One stage with its weights on `device`, and nothing of the others anywhere."""
