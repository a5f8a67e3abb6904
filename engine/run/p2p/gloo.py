"""Messages over gloo: between hosts, with emulated links, and for ranks that share a device.

A thread per channel waits for what is sent, so that it is let go and its end stamped when that
happens. The rank itself waits for what it receives: to be woken by a thread takes longer. So a
receive's end is when the rank had the message; one that was there before has the end of its send.
Shapes that vary and emulated links need the thread for receives too.

Ranks that share a device (NCCL refuses them) go through pinned host memory. The copies run on a
stream of the edge beside the computations, and are part of the transfers' spans:

    SEND   [copy to the host | sent]       the thread sleeps until the copy is there
    RECV   [received | copy to the device]
"""

from __future__ import annotations

import functools
import math
import threading
import time
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine.model.stage_module import Message, TensorSpec
from engine.plan.action import Action
from engine.run import device as devices
from engine.run.clock import Clock, HostClock
from engine.run.events import EventPool
from engine.run.p2p.channel import Tensors, Transfer, TransferError, num_bytes_of
from engine.run.p2p.shapes import Pending, Shapes


@dataclass
class _Message:
    """A message on its way: what must stay alive until it has been moved."""

    action: Action
    transfer: Transfer | None  # None where transfers are not timed
    tensors: Tensors
    works: list[dist.Work]
    is_incoming: bool
    staged: torch.Event | None = None  # when the copy to host memory will be complete
    shapes: Pending | None = None  # sent ahead, or awaited
    expected: Message = ()  # what is received, shapes to be told

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


class Staging:
    """Copies an edge's messages between the device and pinned host memory, on a stream of its own.

    The computations go on beside them; the marks are taken on that stream.
    """

    def __init__(self, device: torch.device, clock: Clock, stream: torch.Stream) -> None:
        self.device, self._clock, self._stream = device, clock, stream
        self.copies = EventPool(functools.partial(devices.host_event, device))
        self._arrivals = EventPool(functools.partial(devices.order_event, device))

    def to_host(self, message: _Message, tensors: Tensors) -> None:
        """Begin to copy tensors into a message; its span begins with the copy."""
        self._stream.wait_stream(devices.current_stream(self.device))
        with self._stream:
            if message.transfer is not None:
                message.transfer.start = self._clock.mark()
            message.tensors = tuple(self._copy(tensor) for tensor in tensors)
            message.staged = self.copies.take()
            message.staged.record()

    def to_device(self, buffers: Tensors, transfer: Transfer | None) -> Tensors:
        """Begin to copy a message, for which computations then wait; its span ends with the copy.

        Never blocks.
        """
        compute = devices.current_stream(self.device)
        with self._stream:
            tensors = tuple(buffer.to(self.device, non_blocking=True) for buffer in buffers)
            if transfer is not None:
                transfer.end = self._clock.mark()
            arrival = self._arrivals.take()
            arrival.record()
        compute.wait_event(arrival)
        self._arrivals.give_back(arrival)
        for tensor in tensors:
            devices.keep_until_done(tensor, compute)
        return tensors

    def _copy(self, tensor: Tensor) -> Tensor:
        staged = devices.pinned_empty(tensor.shape, tensor.dtype)
        staged.copy_(tensor, non_blocking=True)
        devices.keep_until_done(tensor, self._stream)
        return staged


class GlooChannel:
    """A channel over gloo; each edge and microbatch has a tag, so that no message is mistaken."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        tags: range,
        shapes: Shapes | None,
        delay_ns: int = 0,
        staging: Staging | None = None,
    ) -> None:
        """`tags`: one for each microbatch. `staging`: of a device, None on the CPU.

        `shapes` are sent and expected ahead of each message; None where they never vary.

        `delay_ns`: each message takes so much longer, on both ends; one at a time.
        """
        self._group, self._peer, self._tags = group, peer, tags
        self._shapes, self._delay_ns = shapes, delay_ns
        self._clock = HostClock()  # gloo moves bytes on the host, whatever the device
        self._staging = staging
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
        message = _Message(action, self._begin(action, tensors), (), [], is_incoming=False)
        if self._shapes is not None:
            message.shapes = self._shapes.send(action, tensors)
        if self._staging is not None:
            self._staging.to_host(message, tensors)
        else:
            message.tensors = tuple(tensor.contiguous() for tensor in tensors)
            message.works = self._isend(message)
        self._pending.put(message)

    def post(self, action: Action, message: Message) -> None:
        self._let_go_of_sent()
        coming = _Message(action, self._begin(action, ()), (), [], is_incoming=True)
        if self._shapes is None:
            self._receive(coming, message)
        else:
            coming.shapes, coming.expected = self._shapes.post(action, message), message
        if self._shapes is None and not self._delay_ns:
            self._arrived.put(coming)  # the rank waits for it when it takes it
        else:
            self._pending.put(coming)

    def take(self, action: Action) -> Tensors:
        try:
            arrived = self._arrived_for(action)
        except Exception as error:
            raise TransferError(f"receive from rank {self._peer}: {error}") from error
        buffers = arrived.tensors
        arrived.let_go()
        if self._staging is None:
            return buffers
        return self._staging.to_device(buffers, arrived.transfer)

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

    def _isend(self, message: _Message) -> list[dist.Work]:
        tag = self._tags[message.action.microbatch]
        works = [dist.isend(tensor, self._peer, self._group, tag) for tensor in message.tensors]
        return [work for work in works if work is not None]

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
        if self._staging is not None:
            return devices.pinned_empty(spec.shape, spec.dtype)
        if self._shapes is None:
            return torch.empty(spec.shape, dtype=spec.dtype)
        num_bytes = math.prod(spec.shape) * spec.dtype.itemsize
        return torch.from_numpy(np.empty(num_bytes, np.uint8)).view(spec.dtype).view(spec.shape)

    def _let_go_of_sent(self) -> None:
        while not self._sent.empty():
            sent = self._sent.get()
            if self._staging is not None and sent.staged is not None:
                self._staging.copies.give_back(sent.staged)
            sent.let_go()

    def _complete_in_order(self) -> None:
        """The channel's thread: wait for each message in turn."""
        if self._staging is not None:
            devices.make_current(self._staging.device)
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
        if message.staged is not None:
            message.staged.synchronize()  # blocks this thread; the rank runs on
            message.works = self._isend(message)
        if message.shapes is not None and message.is_incoming:
            self._receive(message, Shapes.wait(message.shapes, message.expected))
        message.wait()
        if message.shapes is not None and not message.is_incoming:
            message.shapes.work.wait()
        if self._delay_ns:
            time.sleep(self._delay_ns / 1e9)
        if message.transfer is not None:
            message.transfer.end = self._clock.mark()
        (self._arrived if message.is_incoming else self._sent).put(message)
