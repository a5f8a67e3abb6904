"""Shapes that vary, sent ahead of a message by channels that must know them to post a buffer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from engine.model.stage_module import Message
from engine.plan.action import Action
from engine.run.p2p.channel import sized
from engine.run.stage import Tensors


class Shapes:
    """The shapes of messages that vary, sent over gloo ahead of each: one small message of its own.

    Under tags of its own, so that a shape is never taken for data.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, tags: range) -> None:
        """`tags`: one for each microbatch."""
        self._group, self._peer, self._tags = group, peer, tags

    def send(self, action: Action, tensors: Tensors) -> Pending:
        sizes = torch.tensor([n for tensor in tensors for n in tensor.shape], dtype=torch.int64)
        tag = self._tags[action.microbatch]
        return Pending(sizes, dist.isend(sizes, self._peer, self._group, tag), ())

    def post(self, action: Action, message: Message) -> Pending:
        sizes = torch.empty(sum(len(spec.shape) for spec in message), dtype=torch.int64)
        tag = self._tags[action.microbatch]
        return Pending(sizes, dist.irecv(sizes, self._peer, self._group, tag), message)


@dataclass
class Pending:
    """Shapes on their way."""

    sizes: Tensor
    work: dist.Work | None  # None only off the group
    message: Message  # whose shapes they are: known to the receiver but for its sizes

    def wait(self) -> Message:
        """The message with the shapes that have arrived. Blocks until they have moved."""
        assert self.work is not None
        self.work.wait()
        return sized(self.message, self.sizes.tolist())
