"""What is trained on: sequences cut from tokens, the endless order of them, and their padding.

Sequences are map-style data sets, not iterable ones: any sequence can be had by its row, so any
step can be drawn without the steps before it, and every rank draws the same. torch's samplers do
not serve for that: theirs is one epoch, drawn from a random state that must be carried along.

    sequence number  0 1 2 3 4 5 6 7 …     steps take consecutive numbers
    epoch            0 0 0 1 1 1 2 2 …     divmod(number, num_sequences)
    row              1 0 2 2 1 0 0 2 …     the epoch's own permutation
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from engine.model.tokens import Array, DataError, Tokens

IGNORED = -100
"""Target of a padding position: what torch's cross entropy leaves out."""

PADDING = 0


class Sequences(Dataset[Array]):
    """Token sequences by row, each one token longer than the input that it makes."""

    num_sequences: int | None  # None: as many as one asks for

    def __getitem__(self, row: int) -> Array:
        raise NotImplementedError


class PackedSequences(Sequences):
    """Windows over the stream, blind to documents; the last of one is the first of the next.

    So every token but the stream's first is a target once per epoch; what does not fill a last
    window is left out.

        tokens     a b c d e f g h i
        window 0   a b c d e             inputs a b c d, targets b c d e
        window 1           e f g h i     inputs e f g h, targets f g h i
    """

    def __init__(self, tokens: Tokens, seq_len: int, source: str) -> None:
        """Raises DataError when the stream does not fill one window."""
        if len(tokens) <= seq_len:
            raise DataError(
                f'data source "{source}" has {len(tokens)} tokens; '
                f"a sequence needs {seq_len + 1}: set a smaller seq_len, or give more data"
            )
        self.num_sequences = (len(tokens) - 1) // seq_len
        self._tokens = tokens
        self._seq_len = seq_len

    def __getitem__(self, row: int) -> Array:
        start = row * self._seq_len
        return self._tokens.read(start, start + self._seq_len + 1)


class DocumentSequences(Sequences):
    """One document each, cut to `max_seq_len + 1` tokens; those without a successor left out."""

    def __init__(self, tokens: Tokens, max_seq_len: int, source: str) -> None:
        """Raises DataError when no document has two tokens."""
        starts, stops = tokens.documents()
        is_usable = stops - starts >= 2
        if not is_usable.any():
            raise DataError(
                f'data source "{source}" has no document of at least 2 tokens; give more data'
            )
        self._tokens = tokens
        self._starts = starts[is_usable]
        self._stops = np.minimum(stops[is_usable], self._starts + max_seq_len + 1)
        self.num_sequences = len(self._starts)

    def __getitem__(self, row: int) -> Array:
        return self._tokens.read(int(self._starts[row]), int(self._stops[row]))


class SyntheticSequences(Sequences):
    """Uniform random tokens; row `r` depends on (seed, r) alone.

    Inputs are `shortest` to `longest` tokens long, each length as likely.
    """

    def __init__(self, vocab_size: int, seed: int, shortest: int, longest: int) -> None:
        self.num_sequences = None
        self._vocab_size = vocab_size
        self._seed = seed
        self._lengths = (shortest, longest + 1)

    def __getitem__(self, row: int) -> Array:
        generator = np.random.default_rng((self._seed, row))
        length = generator.integers(*self._lengths)
        return generator.integers(self._vocab_size, size=length + 1)


class Order:
    """Which row each of the endlessly many sequence numbers stands for."""

    def __init__(self, num_sequences: int | None, seed: int, *, shuffle: bool) -> None:
        self._num_sequences = num_sequences
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def row(self, number: int) -> int:
        if self._num_sequences is None:
            return number
        epoch, position = divmod(number, self._num_sequences)
        if not self._shuffle:
            return position
        if epoch != self._epoch:  # kept: it may be long, and numbers mostly come in order
            generator = np.random.default_rng((self._seed, epoch))
            self._permutation = generator.permutation(self._num_sequences)
            self._epoch = epoch
        return int(self._permutation[position])


Shapes = tuple[tuple[int, ...], ...]
"""The shape of each microbatch's tensor."""


@dataclass(frozen=True)
class WholeBatch:
    """A step's batch in two tensors: its microbatches, flattened, end to end.

    A worker process sends two file descriptors and the loader pins two blocks, however many
    microbatches there are.
    """

    inputs: Tensor
    targets: Tensor
    input_shapes: Shapes
    target_shapes: Shapes
    num_tokens: int  # targets that count

    def pin_memory(self) -> WholeBatch:
        """Called by torch's loader."""
        return replace(self, inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())

    def split(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Inputs and targets per microbatch, as views."""
        return _views(self.inputs, self.input_shapes), _views(self.targets, self.target_shapes)


def _views(flat: Tensor, shapes: Shapes) -> tuple[Tensor, ...]:
    parts = flat.split([math.prod(shape) for shape in shapes])
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def collate(sequences: Sequence[Array], microbatch_size: int) -> WholeBatch:
    """Cut a step's sequences into microbatches, each padded to its own longest sequence."""
    blocks = []  # inputs and targets of each microbatch, `[2, sequence, token]`
    for start in range(0, len(sequences), microbatch_size):
        own = sequences[start : start + microbatch_size]
        block = np.full((2, len(own), max(map(len, own)) - 1), PADDING, dtype=np.int64)
        block[1] = IGNORED
        for row, sequence in enumerate(own):
            block[0, row, : len(sequence) - 1] = sequence[:-1]
            block[1, row, : len(sequence) - 1] = sequence[1:]
        blocks.append(block)
    inputs, targets = np.concatenate([block.reshape(2, -1) for block in blocks], axis=1)
    shapes = tuple((block.shape[1], block.shape[2]) for block in blocks)
    num_tokens = sum(len(sequence) - 1 for sequence in sequences)
    flat = torch.from_numpy(inputs), torch.from_numpy(targets)
    return WholeBatch(*flat, shapes, shapes, num_tokens)
