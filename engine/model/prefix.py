"""Keys and values of what comes before a slice of a sequence, and the gradients that come back.

A stage runs the slices of a microbatch one after the other, and each attends to the keys and values
of those before it. A layer has one buffer for them, and each slice sees it up to its own end. The
graph of a slice ends there, so that each has a backward of its own; what a later slice's backward
finds for the keys and values of an earlier one waits for that one's.

    forward     slice 0 -> keys [0, a)    slice 1 -> keys [a, b), sees [0, b)
    backward    slice 1 -> gradients of [a, b) go on, those of [0, a) wait    slice 0 takes them

So forwards come in the order of slices, and backwards in the reverse one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin


class Prefix:
    """Keys and values of one microbatch in the layers of one stage."""

    def __init__(self, num_layers: int, seq_len: int) -> None:
        """`num_layers` are those of the whole model, `seq_len` the tokens of the whole sequence."""
        self._kept = [_Kept(seq_len) for _ in range(num_layers)]

    def seen_by(self, begin: int) -> Cache:
        """The cache for the slice that begins at this token."""
        return Cache(layers=[_SliceLayer(kept, begin) for kept in self._kept])

    def written(self) -> list[int]:
        """The layers that have kept keys and values."""
        return [index for index, kept in enumerate(self._kept) if kept.tensors]


class _Kept:
    """Keys and values of one layer, `[batch, heads, seq, width]`, and gradients that wait."""

    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len
        self.tensors: list[Tensor] = []
        self.gradients: list[Tensor] = []


class _SliceLayer(CacheLayerMixin):
    """A layer's cache as one slice sees it."""

    is_compileable = False
    is_sliding = False

    def __init__(self, kept: _Kept, begin: int) -> None:
        super().__init__()
        self._kept, self._begin = kept, begin

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make room for the whole sequence."""
        if not self._kept.tensors:
            self._kept.tensors = [
                x.new_empty((*x.shape[:-2], self._kept.seq_len, x.shape[-1]))
                for x in (key_states.detach(), value_states.detach())
            ]

    def update(
        self,
        key_states: Tensor,
        value_states: Tensor,
        *_args: Any,
        **_kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Write the slice's keys and values; return all up to its end."""
        self.lazy_initialization(key_states, value_states)
        keys, values = _Write.apply(key_states, value_states, self._kept, self._begin)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The tokens that the slice attends to, and the first of them."""
        return self._begin + query_length, 0

    def get_seq_length(self) -> int:
        """The tokens before the slice."""
        return self._begin

    def get_max_length(self) -> int:
        """The tokens of the whole sequence."""
        return self._kept.seq_len

    get_max_cache_shape = get_max_length  # its name in older releases


class _Write(torch.autograd.Function):
    """Writes keys and values of a slice; its outputs are all up to the slice's end."""

    @staticmethod
    def forward(ctx: Any, keys: Tensor, values: Tensor, kept: _Kept, begin: int) -> Any:
        ctx.kept, ctx.begin = kept, begin
        end = begin + keys.shape[-2]
        seen = []
        for own, buffer in zip((keys, values), kept.tensors, strict=True):
            # By `data`, whose version is its own: what later slices write is after this one's end.
            buffer.data[..., begin:end, :] = own
            seen.append(buffer.data[..., :end, :])
        return tuple(seen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        kept, begin = ctx.kept, ctx.begin
        waiting = kept.gradients or [None] * len(gradients)
        own, kept.gradients = [], []
        for gradient, later in zip(gradients, waiting, strict=True):
            whole = gradient if later is None else gradient + later
            own.append(whole[..., begin:, :])
            if begin:
                kept.gradients.append(whole[..., :begin, :])
        return (*own, None, None)
