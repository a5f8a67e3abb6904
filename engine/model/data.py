"""Microbatches: deterministic, the same whoever asks, however the step is split.

Text is read as bytes, one token per byte: no tokenizer to download, and every preset's vocabulary
holds it. Each rank can draw any step by itself, so the first stage (inputs) and the last
(targets) agree without sending anything.
"""

from __future__ import annotations

import functools
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BYTE_VOCABULARY = 256


class DataError(ValueError):
    """The data source cannot be read or is too short."""


@dataclass(frozen=True)
class DataSpec:
    """Where tokens come from and in which shape.

    `source` is `stdlib`, `synthetic` or `text:PATH`. A step has `num_microbatches` microbatches of
    `microbatch_size` sequences of `seq_len` tokens.
    """

    source: str = "stdlib"
    seq_len: int = 128
    microbatch_size: int = 1
    num_microbatches: int = 4
    seed: int = 0

    @property
    def tokens_per_step(self) -> int:
        return self.num_microbatches * self.microbatch_size * self.seq_len


@dataclass(frozen=True)
class StepBatch:
    """Token ids and their successors, each `[microbatch, sequence, token]`, int64 on the CPU."""

    inputs: Tensor
    targets: Tensor


class Data:
    """Draws the batch of any step."""

    def __init__(self, spec: DataSpec, vocab_size: int) -> None:
        """Raises DataError when the source is unknown, unreadable or shorter than a sequence."""
        self._spec = spec
        self._vocab_size = vocab_size
        self._tokens = None if spec.source == "synthetic" else _read_tokens(spec.source)
        if self._tokens is not None:
            if len(self._tokens) <= spec.seq_len:
                raise DataError(
                    f'data source "{spec.source}" has {len(self._tokens)} tokens; '
                    f"a sequence needs {spec.seq_len + 1}"
                )
            if vocab_size < BYTE_VOCABULARY:
                raise DataError(f"byte-level text needs a vocabulary of 256, got {vocab_size}")

    def step(self, step: int) -> StepBatch:
        """The batch of one step; sequences start at positions drawn from (seed, step)."""
        spec = self._spec
        generator = np.random.default_rng((spec.seed, step))
        shape = (spec.num_microbatches, spec.microbatch_size)
        if self._tokens is None:
            windows = generator.integers(self._vocab_size, size=(*shape, spec.seq_len + 1))
        else:
            starts = generator.integers(len(self._tokens) - spec.seq_len, size=shape)
            windows = self._tokens[starts[..., None] + np.arange(spec.seq_len + 1)]
        tokens = torch.from_numpy(windows.astype(np.int64))
        return StepBatch(tokens[..., :-1].contiguous(), tokens[..., 1:].contiguous())


@functools.cache
def _read_tokens(source: str) -> npt.NDArray[np.uint8]:
    if source == "stdlib":
        return np.frombuffer(_stdlib_text(), dtype=np.uint8)
    kind, _, path = source.partition(":")
    if kind != "text" or not path:
        raise DataError(
            f'unknown data source "{source}"; expected "stdlib", "synthetic" or "text:PATH"'
        )
    try:
        return np.frombuffer(Path(path).read_bytes(), dtype=np.uint8)
    except OSError as error:
        raise DataError(f'data source "{source}": {error.strerror}') from error


def _stdlib_text() -> bytes:
    """The sources of the standard library's top-level modules, in order of name."""
    folder = Path(sysconfig.get_path("stdlib"))
    return b"\n".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
