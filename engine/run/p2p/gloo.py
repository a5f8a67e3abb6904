"""Messages over gloo: between hosts, and for ranks that share a device.

A thread per channel waits for what is sent, so that it is let go and its end stamped when that
happens. The rank itself waits for what it receives: to be woken by a thread takes longer. So a
receive's end is when the rank had the message; one that was there before has the end of its send.
Where shapes vary, the thread waits for them, posts the buffers and waits for these.

Ranks that share a device (NCCL refuses them) go through host memory. The rank waits for what it
sends to be computed, and copies it; what it receives it copies to the device when it takes it. The
copies are part of the transfers' spans.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine.model.stage_module import Message, TensorSpec
from engine.plan.action import Action
from engine.run import device as devices
from engine.run.clock import HostClock
from engine.run.p2p.channel import Transfer, TransferError, num_bytes_of
from engine.run.p2p.shapes import Pending, Shapes
from engine.run.stage import Tensors


@dataclass
class _Message:
    """A message on its way: what must stay alive until it has been moved."""

    action: Action
    transfer: Transfer | None  # None where transfers are not timed
    tensors: Tensors
    works: list[dist.Work]
    is_incoming: bool
    shapes: Pending | None = None  # sent ahead, or awaited

    def wait(self) -> None:
        """Block until it has been moved. Asked twice, gloo would wait for one more message."""
        for work in self.works:
            work.wait()
        self.works = []

    def let_go(self) -> None:
        """Drop the buffers on the calling thread.

        That must be the rank's own: the profiler counts frees only on the thread that it was
        started on, and only that thread allocates, so it is early enough for the peak.
        """
        self.tensors, self.works, self.shapes = (), [], None


class GlooChannel:
    """A channel over gloo; each edge and microbatch has a tag, so that no message is mistaken."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        tags: range,
        shapes: Shapes | None,
        device: torch.device,
    ) -> None:
        """`tags`: one for each microbatch. `device`: of the stages at both ends.

        `shapes` are sent and expected ahead of each message; None where they never vary.
        """
        self._group, self._peer, self._tags = group, peer, tags
        self._shapes, self._device = shapes, device
        self._is_accelerator = devices.is_accelerator(device)
        self._clock = HostClock()  # gloo moves bytes on the host, whatever the device
        self.is_timed = True
        self._transfers: list[Transfer] = []
        self._pending: SimpleQueue[_Message | threading.Event | None] = SimpleQueue()
        self._arrived: SimpleQueue[_Message | BaseException] = SimpleQueue()
        self._waiting: dict[Action, _Message] = {}  # stood before the message that was taken
        self._sent: SimpleQueue[_Message] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._complete_in_order, daemon=True)
        self._thread.start()

    def send(self, action: Action, tensors: Tensors) -> None:
        self._let_go_of_sent()
        if self._is_accelerator:  # else the wait would count as the transfer's
            devices.current_stream(self._device).synchronize()
        message = _Message(action, self._begin(action, tensors), (), [], is_incoming=False)
        if self._shapes is not None:
            message.shapes = self._shapes.send(action, tensors)
        message.tensors = tuple(tensor.cpu().contiguous() for tensor in tensors)
        tag = self._tags[action.microbatch]
        works = [dist.isend(tensor, self._peer, self._group, tag) for tensor in message.tensors]
        message.works = [work for work in works if work is not None]
        self._pending.put(message)

    def post(self, action: Action, message: Message) -> None:
        self._let_go_of_sent()
        coming = _Message(action, self._begin(action, ()), (), [], is_incoming=True)
        if self._shapes is None:
            self._receive(coming, message)
            self._arrived.put(coming)  # the rank waits for it when it takes it
        else:
            coming.shapes = self._shapes.post(action, message)
            self._pending.put(coming)

    def take(self, action: Action) -> Tensors:
        try:
            arrived = self._arrived_for(action)
        except Exception as error:
            raise TransferError(f"receive from rank {self._peer}: {error}") from error
        tensors = arrived.tensors
        arrived.let_go()
        if self._is_accelerator:
            tensors = tuple(tensor.to(self._device) for tensor in tensors)
            if arrived.transfer is not None:
                arrived.transfer.end = self._clock.mark()
        return tensors

    def finish_step(self) -> list[Transfer]:
        is_idle = threading.Event()
        self._pending.put(is_idle)
        is_idle.wait()
        self._let_go_of_sent()
        if self._error is not None:
            raise TransferError(f"transfer with rank {self._peer}: {self._error}")
        finished, self._transfers = self._transfers, []
        return finished

    def close(self) -> None:
        self._pending.put(None)
        self._thread.join()

    def _arrived_for(self, action: Action) -> _Message:
        """The message of a RECV. Others that stood before it on the channel are kept for theirs."""
        while action not in self._waiting:
            arrived = self._arrived.get()
            if isinstance(arrived, BaseException):
                raise arrived
            self._waiting[arrived.action] = arrived
        arrived = self._waiting.pop(action)
        arrived.wait()
        if arrived.transfer is not None and arrived.transfer.end is None:
            arrived.transfer.end = self._clock.mark()
        return arrived

    def _begin(self, action: Action, tensors: Tensors) -> Transfer | None:
        if not self.is_timed:
            return None
        transfer = Transfer(action, num_bytes_of(tensors), self._clock.mark())
        self._transfers.append(transfer)
        return transfer

    def _receive(self, coming: _Message, message: Message) -> None:
        """Post a buffer for each tensor of the message."""
        coming.tensors = tuple(self._buffer(spec) for spec in message)
        if coming.transfer is not None:
            coming.transfer.num_bytes = num_bytes_of(coming.tensors)
        tag = self._tags[coming.action.microbatch]
        works = [dist.irecv(b, self._peer, self._group, tag) for b in coming.tensors]
        coming.works = [work for work in works if work is not None]

    def _buffer(self, spec: TensorSpec) -> Tensor:
        """Host memory; not torch's where another thread asks for it.

        The profiler, which sees one thread only, would count the free without the allocation.
        """
        if self._shapes is None:
            return torch.empty(spec.shape, dtype=spec.dtype)
        num_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        return torch.from_numpy(np.empty(num_bytes, np.uint8)).view(spec.dtype).view(spec.shape)

    def _let_go_of_sent(self) -> None:
        while not self._sent.empty():
            self._sent.get().let_go()

    def _complete_in_order(self) -> None:
        """The channel's thread: wait for each message in turn."""
        while (item := self._pending.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
                continue
            try:
                self._complete(item)
            except Exception as error:  # handed to the rank's own thread
                self._error = error
                self._arrived.put(error)

    def _complete(self, message: _Message) -> None:
        shapes = () if message.shapes is None else message.shapes.wait()
        if message.is_incoming:
            self._receive(message, shapes)
        message.wait()
        if message.transfer is not None:
            message.transfer.end = self._clock.mark()
        (self._arrived if message.is_incoming else self._sent).put(message)
