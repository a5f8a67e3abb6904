"""Messages between stages: the only user of torch's point-to-point calls.

A directed stage edge is one channel. Its messages keep order, sending never blocks the rank, and
receives are posted ahead of need into buffers of their own.

    program           channel                          peer
    SEND  --send-->   queued, moves when both ready    RECV
    RECV  --post-->   buffer waits for the message
    F, B  --take-->   blocks until it is there

Two kinds, one interface:
- `HostChannel`: gloo. A thread per channel waits for each transfer, so that its end is stamped when
  it happens, not when the rank next looks. For CUDA ranks that share a device (NCCL refuses them)
  it also copies to and from pinned host memory.
- `NcclChannel`: a communicator and a CUDA stream per channel; the host never waits.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from engine.plan.action import Action
from engine.plan.lower import Channel as Edge
from engine.run.clock import Clock, HostClock, Mark


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

    def send(self, action: Action, tensor: Tensor) -> None:
        """Queue a message. Never blocks; `tensor` is let go once it has been moved."""

    def post(self, action: Action, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Make a buffer ready for the next message. Never blocks."""

    def take(self) -> Tensor:
        """The oldest posted message. Blocks the host (gloo) or the compute stream (NCCL)."""

    def finish_step(self) -> list[Transfer]:
        """Block until every transfer is over; return and forget them. Raises TransferError."""

    def close(self) -> None:
        """Free threads and buffers; the channel is not used again."""


@dataclass
class _Message:
    """A message on its way: what must stay alive until it has been moved."""

    transfer: Transfer
    tensor: Tensor | None
    work: dist.Work | None
    is_incoming: bool
    staged: torch.cuda.Event | None = None  # when the copy to host memory will be complete

    def let_go(self) -> None:
        """Drop the buffer on the calling thread.

        That must be the rank's own: the profiler counts frees only on the thread that it was
        started on, and only that thread allocates, so it is early enough for the peak.
        """
        self.tensor = self.work = None


class HostChannel:
    """A channel over gloo, messages told apart by the edge's tag."""

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int, device: torch.device) -> None:
        self._group, self._peer, self._tag, self._device = group, peer, tag, device
        self._clock = HostClock()  # gloo moves bytes on the host, whatever the device
        self._is_staged = device.type == "cuda"
        self._transfers: list[Transfer] = []
        self._pending: SimpleQueue[_Message | threading.Event | None] = SimpleQueue()
        self._arrived: SimpleQueue[_Message | BaseException] = SimpleQueue()
        self._sent: SimpleQueue[_Message] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._complete_in_order, daemon=True)
        self._thread.start()

    def send(self, action: Action, tensor: Tensor) -> None:
        self._let_go_of_sent()
        transfer = self._begin(action, tensor)
        if self._is_staged:
            copy, staged = _copy_to_host(tensor)
            message = _Message(transfer, copy, None, is_incoming=False, staged=staged)
        else:
            tensor = tensor.contiguous()
            work = dist.isend(tensor, self._peer, self._group, self._tag)
            message = _Message(transfer, tensor, work, is_incoming=False)
        self._pending.put(message)

    def post(self, action: Action, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._let_go_of_sent()
        buffer = torch.empty(shape, dtype=dtype, pin_memory=self._is_staged)
        transfer = self._begin(action, buffer)
        work = dist.irecv(buffer, self._peer, self._group, self._tag)
        self._pending.put(_Message(transfer, buffer, work, is_incoming=True))

    def take(self) -> Tensor:
        arrived = self._arrived.get()
        if isinstance(arrived, BaseException):
            raise TransferError(f"receive from rank {self._peer}: {arrived}") from arrived
        buffer = arrived.tensor
        assert buffer is not None
        arrived.let_go()
        return buffer.to(self._device, non_blocking=True)

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

    def _begin(self, action: Action, tensor: Tensor) -> Transfer:
        transfer = Transfer(action, tensor.nbytes, self._clock.mark())
        self._transfers.append(transfer)
        return transfer

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
        if message.staged is not None:
            assert message.tensor is not None
            message.staged.synchronize()  # blocks this thread; the rank runs on
            message.transfer.start = self._clock.mark()
            message.work = dist.isend(message.tensor, self._peer, self._group, self._tag)
        assert message.work is not None
        message.work.wait()
        message.transfer.end = self._clock.mark()
        (self._arrived if message.is_incoming else self._sent).put(message)


def _copy_to_host(tensor: Tensor) -> tuple[Tensor, torch.cuda.Event]:
    """Start a copy to pinned memory on the current stream; the event tells when it is there."""
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    staged.copy_(tensor, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return staged, ready


class NcclChannel:
    """A channel with its own communicator and stream; ordering is by stream events alone."""

    def __init__(
        self, group: dist.ProcessGroup, peer: int, device: torch.device, clock: Clock
    ) -> None:
        self._group, self._peer, self._device, self._clock = group, peer, device, clock
        self._stream = torch.cuda.Stream(device)
        self._transfers: list[Transfer] = []
        self._arrived: deque[tuple[Tensor, torch.cuda.Event]] = deque()

    def send(self, action: Action, tensor: Tensor) -> None:
        tensor = tensor.contiguous()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            transfer = Transfer(action, tensor.nbytes, self._clock.mark())
            self._hold_stream(dist.isend(tensor, self._peer, self._group))
            transfer.end = self._clock.mark()
        tensor.record_stream(self._stream)  # the allocator reuses it only after the send
        self._transfers.append(transfer)

    def post(self, action: Action, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        with torch.cuda.stream(self._stream):
            buffer = torch.empty(shape, dtype=dtype, device=self._device)
            transfer = Transfer(action, buffer.nbytes, self._clock.mark())
            self._hold_stream(dist.irecv(buffer, self._peer, self._group))
            transfer.end = self._clock.mark()
            arrival = torch.cuda.Event()
            arrival.record()
        self._transfers.append(transfer)
        self._arrived.append((buffer, arrival))

    def take(self) -> Tensor:
        buffer, arrival = self._arrived.popleft()
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(arrival)
        buffer.record_stream(compute)
        return buffer

    def finish_step(self) -> list[Transfer]:
        self._stream.synchronize()
        finished, self._transfers = self._transfers, []
        return finished

    def close(self) -> None:
        self._stream.synchronize()

    @staticmethod
    def _hold_stream(work: dist.Work | None) -> None:
        """Make the channel's stream, not the host, wait for NCCL's."""
        assert work is not None
        work.wait()


class Fabric:
    """Opens channels between ranks of the default process group.

    Made once per process and used for case after case: communicators are expensive, so they are
    kept. The constructor and `connect` are collective: every rank of the default group calls them,
    in the same order, whether it takes part in the case or not.
    """

    def __init__(self, device: torch.device, clock: Clock, is_device_shared: bool) -> None:
        self.device, self.clock = device, clock
        self._uses_nccl = device.type == "cuda" and not is_device_shared
        self._host_group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self._nccl_groups: dict[tuple[Edge, int, int], dist.ProcessGroup] = {}
        self._pair_groups: dict[tuple[int, int], dist.ProcessGroup] = {}

    @property
    def transport(self) -> str:
        if self._uses_nccl:
            return "nccl"
        return "gloo" if self.device.type == "cpu" else "gloo via host memory"

    def connect(
        self, edges: list[Edge], ranks: tuple[int, ...], tied: tuple[int, int] | None
    ) -> None:
        """Make the communicators that are missing. Collective; blocks until they exist.

        `ranks[stage]` owns a stage; `tied` are the two ranks that share a weight, if any.
        """
        if self._uses_nccl:
            for edge in edges:
                self._connect_edge(edge, ranks[edge.source], ranks[edge.target])
        if tied is not None and tied not in self._pair_groups:
            backend = "nccl" if self._uses_nccl else "gloo"
            self._pair_groups[tied] = dist.new_group(list(tied), backend=backend)
            if dist.get_rank() in tied:  # as for edges: ready before anything is timed
                self.sum_over_pair(torch.zeros(1, device=self.device), tied)

    def _connect_edge(self, edge: Edge, source: int, target: int) -> None:
        """One communicator, and one number through it, so that it is ready before any timing.

        NCCL builds it at first use and blocks the host until both ends are there: inside a step,
        with ends used in different orders, that could hang.
        """
        key = (edge, source, target)
        if key in self._nccl_groups:
            return
        group = self._nccl_groups[key] = dist.new_group([source, target], backend="nccl")
        number = torch.zeros(1, device=self.device)
        if dist.get_rank() == source:
            dist.send(number, target, group)
        elif dist.get_rank() == target:
            dist.recv(number, source, group)
        torch.cuda.synchronize(self.device)

    def open_channels(self, edges: list[Edge], ranks: tuple[int, ...]) -> dict[Edge, Channel]:
        """This rank's end of each edge that it has one of; all must have been connected."""
        me = dist.get_rank() if dist.is_initialized() else 0
        channels: dict[Edge, Channel] = {}
        for tag, edge in enumerate(edges):
            source, target = ranks[edge.source], ranks[edge.target]
            if me in (source, target):
                peer = target if me == source else source
                channels[edge] = self._open(
                    self._nccl_groups.get((edge, source, target)), peer, tag
                )
        return channels

    def _open(self, group: dist.ProcessGroup | None, peer: int, tag: int) -> Channel:
        if group is not None:
            return NcclChannel(group, peer, self.device, self.clock)
        assert self._host_group is not None
        return HostChannel(self._host_group, peer, tag, self.device)

    def sum_over_pair(self, tensor: Tensor, pair: tuple[int, int]) -> None:
        """Add the two ranks' tensors in place. Blocks until both are here; equal bit for bit."""
        dist.all_reduce(tensor, group=self._pair_groups[pair])
