"""Shapes that vary, sent ahead of a message by channels that must know them to post a buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.model.stage_module import Message, TensorSpec
from engine.run.p2p.channel import Tensors


class Shapes:
    """The shapes of messages that vary, sent over gloo ahead of each: one small message of its own.

    Under a tag of its own, so that a shape is never taken for data.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int) -> None:
        self._group, self._peer, self._tag = group, peer, tag

    def send(self, tensors: Tensors) -> Pending:
        sizes = torch.tensor([n for tensor in tensors for n in tensor.shape], dtype=torch.int64)
        return _pending(sizes, dist.isend(sizes, self._peer, self._group, self._tag))

    def post(self, message: Message) -> Pending:
        sizes = torch.empty(sum(len(spec.shape) for spec in message), dtype=torch.int64)
        return _pending(sizes, dist.irecv(sizes, self._peer, self._group, self._tag))

    @staticmethod
    def wait(pending: Pending, message: Message) -> Message:
        """The message with the shapes that have arrived. Blocks until they are there."""
        pending.work.wait()
        sizes = iter(pending.sizes.tolist())
        return tuple(
            TensorSpec(tuple(next(sizes) for _ in spec.shape), spec.dtype) for spec in message
        )


@dataclass
class Pending:
    """Shapes on their way."""

    sizes: Tensor
    work: dist.Work


def _pending(sizes: Tensor, work: dist.Work | None) -> Pending:
    assert work is not None  # None only off the group
    return Pending(sizes, work)
