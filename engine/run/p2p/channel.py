"""The interface of a channel: a directed stage edge, seen from one of its ends.

Messages travel in the order in which they are sent, and are posted in the same order, which
`engine.plan.lower` proves. Sending never waits for the peer, and receives are posted ahead of need.

    program           channel                          peer
    SEND  --send-->   queued, moves when both ready    RECV
    RECV  --post-->   buffer waits for the message
    F, B  --take-->   blocks until it is there

A message is taken for the action that needs it, in whatever order a rank comes to its actions. One
that came earlier on the channel waits in this rank's memory until its own action takes it.

Three kinds: `MemoryChannel` between CPU ranks of one host, `GlooChannel` between hosts or for CUDA
ranks that share a device, `NcclChannel` between devices.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from engine.model.stage_module import Message, TensorSpec
from engine.plan.action import Action
from engine.run.clock import Mark
from engine.run.stage import Tensors


class TransferError(RuntimeError):
    """A message was lost: the peer died, or the transport failed."""


@dataclass
class Transfer:
    """One end of one message."""

    action: Action
    num_bytes: int
    start: Mark
    end: Mark | None = None


class Channel(Protocol):
    """One end, sending or receiving, of a directed stage edge."""

    is_timed: bool  # whether transfers are timed; set between steps

    def send(self, action: Action, tensors: Tensors) -> None:
        """Queue a message; the tensors are let go once they are moved.

        Waits for the peer only where that has not taken the messages of an earlier step.
        """

    def post(self, action: Action, message: Message) -> None:
        """Make buffers ready for the next message. Never blocks."""

    def take(self, action: Action) -> Tensors:
        """Return the message that was posted as this RECV.

        Blocks the host, or with NCCL the compute stream, until it is there.
        """

    def finish_step(self) -> list[Transfer]:
        """Return the timed transfers of the step, and forget them. Raises TransferError.

        Blocks until those through the host are over. Those of a device's streams are issued, and
        the transfers of the next step come after the computations that are issued by now.
        """

    def close(self) -> None:
        """Free threads and buffers; the channel is not used again."""


def sized(message: Message, sizes: Iterable[int]) -> Message:
    """Return the message with these sizes for its tensors' dimensions, one after the other."""
    left = iter(sizes)
    return tuple(TensorSpec(tuple(next(left) for _ in s.shape), s.dtype) for s in message)


def num_bytes_of(tensors: Tensors) -> int:
    """Return the size of all tensors."""
    return sum(tensor.nbytes for tensor in tensors)
