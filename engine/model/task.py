"""What a model is trained on: its batches, and the loss of what it makes of them.

    NextToken      token ids of a text, and the cross entropy of each token's successor
    FactoryTask    what a factory returns beside its module: `module, batches, loss`

    batches(step, size)      inputs and targets of a step, `[size, ...]` each; cut into microbatches
    loss(output, targets)    a number: the mean over one microbatch

A step's loss is the mean of its microbatches' losses, which are of one size. Every rank calls
`batches` with the same numbers and must get the same values, since nothing of them is sent.
"""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

from engine.model.data import IGNORED, DataSpec, Loader, TextLoader
from engine.model.factory import Caster, Factory, dtype_for, seed_from, seeded
from engine.model.sequences import WholeBatch
from engine.model.stage_module import ModelError, TensorSpec, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Loss = Callable[[Tensor, Tensor, int], Tensor]
"""A microbatch's share of the step's loss, of its output, its targets and those of all the step."""


class Task(Protocol):
    """What a model is trained on."""

    vocab_size: int | None  # None: it is not trained on text

    def example(self, size: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of some microbatch of `size` sequences, always the same, on the CPU.

        `seq_len` is the length of a text's sequences.
        """

    def loss(self, output: Tensor, targets: Tensor, num_targets: int) -> Tensor:
        """A microbatch's share of the step's mean loss, in at least float32.

        `num_targets` are the targets that count over the whole step.
        """

    def num_counted(self, targets: Tensor) -> int:
        """How many targets count: what is not padding."""

    def problem_of(self, output: object, size: int, seq_len: int) -> str:
        """Why the loss cannot be that of this output of a microbatch; empty if it can."""

    def data(
        self, spec: DataSpec, tokenizer: PreTrainedTokenizerBase | None, *, pin_memory: bool = False
    ) -> Loader:
        """The loader of the batch of any step. Raises DataError."""


class NextToken:
    """Predicts the next token of a text."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size: int | None = vocab_size
        self._vocab_size = vocab_size

    def example(self, size: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Token ids, which are the targets, too."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self._vocab_size, (size, seq_len), generator=generator)
        return ids, ids

    def loss(self, logits: Tensor, targets: Tensor, num_targets: int) -> Tensor:
        """`logits` `[batch, seq, vocab]`, `targets` `[batch, seq]`."""
        total = cross_entropy(
            _widened(logits).flatten(0, 1),
            targets.flatten(),
            reduction="sum",
            ignore_index=IGNORED,
        )
        return total / num_targets

    def num_counted(self, targets: Tensor) -> int:
        return int((targets != IGNORED).sum())

    def problem_of(self, output: object, size: int, seq_len: int) -> str:
        given = type(output).__name__
        if isinstance(output, Tensor):
            if output.dim() == 3 and output.shape[:2] == (size, seq_len):
                return ""
            given = f"tensor {list(output.shape)}"
        expected = f"logits [{size}, {seq_len}, vocabulary] for ids {[size, seq_len]}"
        return f"returns a {given}; expected {expected}"

    def data(
        self, spec: DataSpec, tokenizer: PreTrainedTokenizerBase | None, *, pin_memory: bool = False
    ) -> Loader:
        return TextLoader(spec, self._vocab_size, tokenizer, pin_memory=pin_memory)


class FactoryTask:
    """Trains a factory's module on the factory's own batches, by its own loss."""

    vocab_size: int | None = None

    def __init__(
        self,
        name: str,
        batches: Callable[[int, int], tuple[Tensor, Tensor]],
        loss: Callable[[Tensor, Tensor], Tensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`name` is for messages; `dtype` the model's. Raises ModelError for unusable batches.

        Of a loss that is a module, a copy is moved to `device`; its tensors have at least float32.
        """
        self._name, self._batches, self._loss = name, batches, loss
        self._dtype, self._device = dtype, device
        self._wide = torch.promote_types(dtype, torch.float32)
        self._examples: dict[int, tuple[Tensor, Tensor]] = {}
        if isinstance(loss, nn.Module):
            if any(True for _ in loss.parameters()):
                raise self._error(
                    "the loss has parameters, which no stage would train; move them into the module"
                )
            self._loss = copy.deepcopy(loss)  # it may be one for all models
            Caster(device, self._wide).apply(self._loss)
        self.example(1, 0)

    def example(self, size: int, _seq_len: int) -> tuple[Tensor, Tensor]:
        """The first microbatch. Raises ModelError unless it is the same when it is made again."""
        if size not in self._examples:
            first, again = (self.drawn(0, size, seed=0) for _ in range(2))
            if not all(torch.equal(x, y) for x, y in zip(first, again, strict=True)):
                raise self._error(
                    f"batches(0, {size}) returns other values when it is called again, but each "
                    "rank calls it and must get the same; make them of its arguments alone (random "
                    "numbers of torch, NumPy and Python are seeded before each call)"
                )
            self._examples[size] = first
        return self._examples[size]

    def drawn(self, step: int, size: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets of a step; floating-point numbers in the model's dtype.

        Targets have at least float32. Raises ModelError for all but two tensors of `size` rows.
        """
        called = f"batches({step}, {size})"
        try:
            with seeded(seed_from(seed, step), is_on_host=True):
                drawn = self._batches(step, size)
        except Exception as error:
            what = f"{type(error).__name__}: {first_line(error)}"
            raise self._error(f"{called} failed: {what}") from error
        is_pair = isinstance(drawn, tuple | list) and len(drawn) == 2
        if not is_pair or not all(isinstance(tensor, Tensor) for tensor in drawn):
            raise self._error(
                f"{called} returned a {type(drawn).__name__}; expected inputs and targets, two "
                "tensors"
            )
        inputs, targets = (tensor.detach() for tensor in drawn)
        if not all(tensor.dim() and len(tensor) == size for tensor in (inputs, targets)):
            shapes = f"{list(inputs.shape)} and targets of shape {list(targets.shape)}"
            raise self._error(
                f"{called} returned inputs of shape {shapes}; expected {size} in the first "
                "dimension of both"
            )
        return (
            inputs.to("cpu", dtype_for(inputs, self._dtype)),
            targets.to("cpu", dtype_for(targets, self._wide)),
        )

    def loss(self, output: Tensor, targets: Tensor, num_targets: int) -> Tensor:
        """Raises ModelError for a loss that is no number, or does not depend on the output."""
        loss = self._loss(_widened(output), targets)
        if not isinstance(loss, Tensor) or loss.dim():
            kind = type(loss).__name__
            shape = f" of shape {list(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise self._error(
                f"the loss is a {kind}{shape}; expected a tensor of one number, the mean over a "
                "microbatch"
            )
        if output.requires_grad and not loss.requires_grad:
            raise self._error(
                "no gradient comes from the loss, so nothing would be trained; compute it from the "
                "output, without detaching"
            )
        return loss * (self.num_counted(targets) / num_targets)

    def check_loss(self, output: TensorSpec, size: int) -> None:
        """Compute the loss once, of an output of zeros. Raises ModelError where that fails."""
        targets = self.example(size, 0)[1].to(self._device)
        zeros = torch.zeros(output.shape, dtype=output.dtype, device=self._device)
        zeros.requires_grad_(output.dtype.is_floating_point or output.dtype.is_complex)
        try:
            with seeded(0, is_on_host=True):
                self.loss(zeros, targets, self.num_counted(targets))
        except ModelError:
            raise
        except Exception as error:
            shapes = f"{list(output.shape)} and targets of shape {list(targets.shape)}"
            what = f"{type(error).__name__}: {first_line(error)}"
            raise self._error(f"the loss fails for an output of shape {shapes}: {what}") from error

    def num_counted(self, targets: Tensor) -> int:
        return targets.numel()

    def problem_of(self, output: object, _size: int, _seq_len: int) -> str:
        is_tensor = isinstance(output, Tensor)
        return "" if is_tensor else f"returns a {type(output).__name__}; expected one tensor"

    def data(
        self,
        spec: DataSpec,
        _tokenizer: PreTrainedTokenizerBase | None,
        *,
        pin_memory: bool = False,
    ) -> Loader:
        def rows(step: int) -> Iterator[list[int]]:
            return ([number] for number in itertools.count(step))

        steps = _Steps(self, spec)
        return Loader(steps, rows, operator.itemgetter(0), spec.num_workers, pin_memory=pin_memory)

    def _error(self, message: str) -> ModelError:
        return ModelError(f'"{self._name}": {message}')


class _Steps(Dataset[WholeBatch]):
    """The batches of a factory by the number of their step."""

    def __init__(self, task: FactoryTask, spec: DataSpec) -> None:
        self._task, self._spec = task, spec

    def __getitem__(self, step: int) -> WholeBatch:
        spec = self._spec
        both = self._task.drawn(step, spec.sequences_per_step, seed=spec.seed)
        input_shapes, target_shapes = (
            ((spec.microbatch_size, *one.shape[1:]),) * spec.num_microbatches for one in both
        )
        inputs, targets = (one.flatten() for one in both)
        return WholeBatch(inputs, targets, input_shapes, target_shapes, targets.numel())


def task_of(factory: Factory, dtype: torch.dtype, device: torch.device) -> Task:
    """What a factory's module is trained on. Raises ModelError where nothing says so."""
    if (task := factory_task(factory, dtype, device)) is not None:
        return task
    modules = factory.skeleton.modules()
    embedding = next((m for m in modules if isinstance(m, nn.Embedding)), None)
    if embedding is None:
        raise ModelError(
            f'"{factory.name}": has no nn.Embedding, so its vocabulary is not known; for a module '
            "that is not trained on text, return module, batches and loss"
        )
    return NextToken(embedding.num_embeddings)


def factory_task(factory: Factory, dtype: torch.dtype, device: torch.device) -> FactoryTask | None:
    """The factory's own batches and loss, if it brings any. Raises ModelError."""
    if factory.brought is None:
        return None
    return FactoryTask(factory.name, *factory.brought, dtype, device)


def _widened(tensor: Tensor) -> Tensor:
    """In at least float32, where it is a floating-point tensor."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
