"""The batch of any step: deterministic, the same whoever asks, however the step is split.

Each rank draws the whole batch by itself, so the first stage (inputs) and the last (targets) agree
without sending anything. Dealing each rank only its part, as data-parallel samplers do, would make
the batch depend on the number of ranks.

Without a tokenizer text is read as bytes, one token per byte: nothing to download, and every
preset's vocabulary holds it.

    source ─► tokens ─► sequences ─► order of steps ─► loader ─► microbatches
              tokens.py └───────── sequences.py ─────┘ here
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from engine.model.sequences import (
    IGNORED,
    DocumentSequences,
    Order,
    PackedSequences,
    Sequences,
    SyntheticSequences,
    WholeBatch,
    collate,
)
from engine.model.tokens import DataError, load_tokenizer, open_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = [
    "IGNORED",
    "VARIABLE",
    "DataError",
    "DataSpec",
    "Loader",
    "StepBatch",
    "TextLoader",
    "load_tokenizer",
]

VARIABLE: Final = "variable"
BYTE_VOCABULARY = 256


@dataclass(frozen=True)
class DataSpec:
    """Where tokens come from and in which shape.

    `source` is one of those of `tokens.open_tokens`, or "synthetic": random tokens. A step has
    `num_microbatches` microbatches of `microbatch_size` sequences. With a number for `seq_len` all
    sequences have that length and documents are packed end to end; when it is "variable", a
    sequence is a document, and a microbatch is padded to its own longest.
    """

    source: str = "stdlib"
    seq_len: int | Literal["variable"] = 128
    microbatch_size: int = 1
    num_microbatches: int = 4
    seed: int = 0
    tokenizer: str = "auto"  # "bytes", a hub id or folder; "auto": the model's own, else bytes
    text_column: str = "text"
    max_seq_len: int = 2048  # of variable length: longer documents are cut
    shuffle: bool = True
    num_workers: int = 0  # loader processes

    @property
    def is_variable(self) -> bool:
        return self.seq_len == VARIABLE

    @property
    def longest(self) -> int:
        """Tokens of the longest input sequence that can occur."""
        return self.max_seq_len if self.seq_len == VARIABLE else self.seq_len

    @property
    def sequences_per_step(self) -> int:
        return self.num_microbatches * self.microbatch_size


@dataclass(frozen=True)
class StepBatch:
    """Inputs and targets per microbatch: token ids and their successors `[sequence, token]`, int64.

    Those of a factory are what it makes of them (`task`).
    """

    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]  # IGNORED where the input is padding
    num_tokens: int  # targets that count, over the whole step

    def to(self, device: torch.device | str) -> StepBatch:
        """On `device`; from pinned memory the host does not wait for the copies."""
        inputs, targets = (
            tuple(tensor.to(device, non_blocking=True) for tensor in tensors)
            for tensors in (self.inputs, self.targets)
        )
        return StepBatch(inputs, targets, self.num_tokens)


class Loader:
    """Draws the batch of any step; steps in order come from a loader of torch that works ahead."""

    def __init__(
        self,
        rows: Dataset[Any],
        rows_from: Callable[[int], Iterator[list[int]]],
        collate: Callable[[Any], WholeBatch],
        num_workers: int,
        *,
        pin_memory: bool = False,
    ) -> None:
        """`rows_from(step)` has the rows of each step from that one on, `collate` makes a batch."""
        self._rows, self._rows_from, self._collate = rows, rows_from, collate
        self._num_workers, self._pin_memory = num_workers, pin_memory
        self._batches: Iterator[WholeBatch] | None = None
        self._next_step = 0

    def step(self, step: int) -> StepBatch:
        """The batch of one step, on the CPU.

        Blocks until it is read. The step after the last one drawn is what the loader has at hand;
        any other starts the loader, and its processes, anew.
        """
        if self._batches is None or step != self._next_step:
            self.close()
            loader: DataLoader[WholeBatch] = DataLoader(
                self._rows,
                batch_sampler=self._rows_from(step),
                num_workers=self._num_workers,
                collate_fn=self._collate,
                pin_memory=self._pin_memory,
                # Its own, because starting the loader draws a number: from torch's it would change
                # what a resumed run draws next, such as dropout.
                generator=torch.Generator(),
            )
            try:
                self._batches = iter(loader)
            except OSError as error:
                raise DataError(
                    f"num_workers = {self._num_workers}: the loader's processes cannot be "
                    f"started: {error.strerror}; they share memory under /dev/shm: make room "
                    "there, or set num_workers = 0"
                ) from error
        batch = next(self._batches)
        self._next_step = step + 1
        inputs, targets = batch.split()
        return StepBatch(inputs, targets, batch.num_tokens)

    def close(self) -> None:
        """End the loader's processes. Another `step` would start them again."""
        self._batches = None


class TextLoader(Loader):
    """Draws the batches of a text, or of random tokens.

    Step `k` is made of sequences `k·B … k·B+B-1` of an endless order: epoch after epoch over the
    data, each shuffled by (seed, epoch). B is the number of sequences per step.
    """

    def __init__(
        self,
        spec: DataSpec,
        vocab_size: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        pin_memory: bool = False,
    ) -> None:
        """`vocab_size` is the model's. Without a tokenizer, text is bytes.

        Raises DataError: an impossible setting, a source that is unknown, unreadable or too short,
        a missing column, `datasets` not installed, or more kinds of tokens than the vocabulary has.
        Raises MemoryError when a step has no room.
        """
        if not isinstance(spec.seq_len, int) and spec.seq_len != VARIABLE:
            raise DataError(f'seq_len = "{spec.seq_len}"; expected a number or "{VARIABLE}"')
        length = "max_seq_len" if spec.is_variable else "seq_len"
        least = {length: 1, "microbatch_size": 1, "num_microbatches": 1}
        for name, minimum in {**least, "seed": 0, "num_workers": 0}.items():
            if getattr(spec, name) < minimum:
                raise DataError(f"{name} = {getattr(spec, name)}; expected at least {minimum}")
        if not spec.is_variable:
            # MemoryError at once, rather than after minutes of reading sequences one by one.
            # Nothing is touched, so nothing is really allocated.
            np.empty((spec.sequences_per_step, spec.longest + 1), np.int64)
        sequences: Sequences
        if spec.source == "synthetic":
            shortest = min(2, spec.longest) if spec.is_variable else spec.longest
            sequences = SyntheticSequences(vocab_size, spec.seed, shortest, spec.longest)
        else:
            if tokenizer is None or spec.source == "stdlib":
                if vocab_size < BYTE_VOCABULARY:
                    raise DataError(f"byte-level text needs a vocabulary of 256, got {vocab_size}")
            else:
                needed = max(tokenizer.get_vocab().values()) + 1  # ids may have gaps
                if vocab_size < needed:
                    raise DataError(
                        f'the tokenizer "{tokenizer.name_or_path}" needs a vocabulary of {needed}, '
                        f"the model's has {vocab_size}; choose a tokenizer that fits the model"
                    )
            tokens = open_tokens(spec.source, tokenizer, spec.text_column)
            kind = DocumentSequences if spec.is_variable else PackedSequences
            sequences = kind(tokens, spec.longest, spec.source)
        order = Order(sequences.num_sequences, spec.seed, shuffle=spec.shuffle)
        size = spec.sequences_per_step

        def rows_from(first_step: int) -> Iterator[list[int]]:
            """The rows of the sequences of each step, without end."""
            for step in itertools.count(first_step):
                yield [order.row(number) for number in range(step * size, (step + 1) * size)]

        into_microbatches = functools.partial(collate, microbatch_size=spec.microbatch_size)
        super().__init__(
            sequences, rows_from, into_microbatches, spec.num_workers, pin_memory=pin_memory
        )
