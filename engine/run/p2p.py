"""Messages between stages: the only user of torch's point-to-point calls.

A directed stage edge is one channel. Its messages keep order, sending never blocks the rank, and
receives are posted ahead of need into buffers of their own.

    program           channel                          peer
    SEND  --send-->   queued, moves when both ready    RECV
    RECV  --post-->   buffer waits for the message
    F, B  --take-->   blocks until it is there

Two kinds, one interface:
- `HostChannel`: gloo. A thread per channel waits for what is sent, so that it is let go and its end
  stamped when that happens. The rank itself waits for what it receives: to be woken by a thread
  takes longer. So a receive's end is when the rank had the message; one that was there before has
  the end of its send. Shapes that vary and emulated links need the thread for receives too. For
  CUDA ranks that share a device (NCCL refuses them) it copies to and from pinned host memory.
- `NcclChannel`: a communicator and a CUDA stream per channel; the host never waits.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine.model.stage_module import Message, TensorSpec
from engine.plan.action import Action
from engine.plan.lower import Channel as Edge
from engine.run.clock import Clock, HostClock, Mark, Ping

Tensors = tuple[Tensor, ...]
Ranks = tuple[int, ...]


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
        """Queue a message. Never blocks; the tensors are let go once they have been moved."""

    def post(self, action: Action, message: Message) -> None:
        """Make buffers ready for the next message. Never blocks."""

    def take(self) -> Tensors:
        """The oldest posted message. Blocks the host (gloo) or the compute stream (NCCL)."""

    def finish_step(self) -> list[Transfer]:
        """Block until every transfer is over; return and forget them. Raises TransferError."""

    def close(self) -> None:
        """Free threads and buffers; the channel is not used again."""


class Shapes:
    """The shapes of messages that vary, sent over gloo ahead of each: one small message of its own.

    Under a tag of its own, so that a shape is never taken for data.
    """

    def __init__(self, group: dist.ProcessGroup, peer: int, tag: int) -> None:
        self._group, self._peer, self._tag = group, peer, tag

    def send(self, tensors: Tensors) -> _Pending:
        sizes = torch.tensor([n for tensor in tensors for n in tensor.shape], dtype=torch.int64)
        return _pending(sizes, dist.isend(sizes, self._peer, self._group, self._tag))

    def post(self, message: Message) -> _Pending:
        sizes = torch.empty(sum(len(spec.shape) for spec in message), dtype=torch.int64)
        return _pending(sizes, dist.irecv(sizes, self._peer, self._group, self._tag))

    @staticmethod
    def wait(pending: _Pending, message: Message) -> Message:
        """The message with the shapes that have arrived. Blocks until they are there."""
        pending.work.wait()
        sizes = iter(pending.sizes.tolist())
        return tuple(
            TensorSpec(tuple(next(sizes) for _ in spec.shape), spec.dtype) for spec in message
        )


@dataclass
class _Pending:
    """Shapes on their way."""

    sizes: Tensor
    work: dist.Work


def _pending(sizes: Tensor, work: dist.Work | None) -> _Pending:
    assert work is not None  # None only off the group
    return _Pending(sizes, work)


@dataclass
class _Message:
    """A message on its way: what must stay alive until it has been moved."""

    transfer: Transfer | None  # None where transfers are not timed
    tensors: Tensors
    works: list[dist.Work]
    is_incoming: bool
    staged: torch.cuda.Event | None = None  # when the copy to host memory will be complete
    shapes: _Pending | None = None  # sent ahead, or awaited
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


class HostChannel:
    """A channel over gloo, messages told apart by the edge's tag."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        tag: int,
        device: torch.device,
        shapes: Shapes | None,
        delay_ns: int = 0,
    ) -> None:
        """`shapes` are sent and expected ahead of each message; None where they never vary.

        `delay_ns`: each message takes so much longer, on both ends; one at a time.
        """
        self._group, self._peer, self._tag, self._device = group, peer, tag, device
        self._shapes, self._delay_ns = shapes, delay_ns
        self._clock = HostClock()  # gloo moves bytes on the host, whatever the device
        self._is_staged = device.type == "cuda"
        self.is_timed = True
        self._transfers: list[Transfer] = []
        self._pending: SimpleQueue[_Message | threading.Event | None] = SimpleQueue()
        self._arrived: SimpleQueue[_Message | BaseException] = SimpleQueue()
        self._sent: SimpleQueue[_Message] = SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._complete_in_order, daemon=True)
        self._thread.start()

    def send(self, action: Action, tensors: Tensors) -> None:
        self._let_go_of_sent()
        message = _Message(self._begin(action, tensors), (), [], is_incoming=False)
        if self._shapes is not None:
            message.shapes = self._shapes.send(tensors)
        if self._is_staged:
            message.tensors, message.staged = _copy_to_host(tensors)
        else:
            message.tensors = tuple(tensor.contiguous() for tensor in tensors)
            message.works = self._isend(message.tensors)
        self._pending.put(message)

    def post(self, action: Action, message: Message) -> None:
        self._let_go_of_sent()
        coming = _Message(self._begin(action, ()), (), [], is_incoming=True)
        if self._shapes is None:
            self._receive(coming, message)
        else:
            coming.shapes, coming.expected = self._shapes.post(message), message
        if self._shapes is None and not self._delay_ns:
            self._arrived.put(coming)  # the rank waits for it when it takes it
        else:
            self._pending.put(coming)

    def take(self) -> Tensors:
        try:
            arrived = self._next_arrived()
        except Exception as error:
            raise TransferError(f"receive from rank {self._peer}: {error}") from error
        buffers = arrived.tensors
        arrived.let_go()
        return tuple(buffer.to(self._device, non_blocking=True) for buffer in buffers)

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

    def _next_arrived(self) -> _Message:
        arrived = self._arrived.get()
        if isinstance(arrived, BaseException):
            raise arrived
        arrived.wait()
        if arrived.transfer is not None and arrived.transfer.end is None:
            arrived.transfer.end = self._clock.mark()
        return arrived

    def _begin(self, action: Action, tensors: Tensors) -> Transfer | None:
        if not self.is_timed:
            return None
        transfer = Transfer(action, _num_bytes(tensors), self._clock.mark())
        self._transfers.append(transfer)
        return transfer

    def _isend(self, tensors: Tensors) -> list[dist.Work]:
        works = [dist.isend(tensor, self._peer, self._group, self._tag) for tensor in tensors]
        return [work for work in works if work is not None]

    def _receive(self, coming: _Message, message: Message) -> None:
        """Post a buffer for each tensor of the message."""
        coming.tensors = tuple(self._buffer(spec) for spec in message)
        if coming.transfer is not None:
            coming.transfer.num_bytes = _num_bytes(coming.tensors)
        works = [dist.irecv(b, self._peer, self._group, self._tag) for b in coming.tensors]
        coming.works = [work for work in works if work is not None]

    def _buffer(self, spec: TensorSpec) -> Tensor:
        """Host memory; not torch's where another thread asks for it.

        The profiler, which sees one thread only, would count the free without the allocation.
        """
        if self._shapes is None or self._is_staged:
            return torch.empty(spec.shape, dtype=spec.dtype, pin_memory=self._is_staged)
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
        if message.staged is not None:
            message.staged.synchronize()  # blocks this thread; the rank runs on
            if message.transfer is not None:
                message.transfer.start = self._clock.mark()
            message.works = self._isend(message.tensors)
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


def _num_bytes(tensors: Tensors) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _copy_to_host(tensors: Tensors) -> tuple[Tensors, torch.cuda.Event]:
    """Start a copy to pinned memory on the current stream; the event tells when it is there."""
    copies = []
    for tensor in tensors:
        staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copies.append(staged.copy_(tensor, non_blocking=True))
    ready = torch.cuda.Event()
    ready.record()
    return tuple(copies), ready


class NcclChannel:
    """A channel with its own communicator and stream; ordering is by stream events alone.

    Where shapes vary, they travel over gloo: the host has to know a shape before it can post a
    buffer. It then waits for the shape when the message is taken, not for the message.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        peer: int,
        device: torch.device,
        clock: Clock,
        shapes: Shapes | None,
    ) -> None:
        self._group, self._peer, self._device, self._clock = group, peer, device, clock
        self._shapes = shapes
        self._stream = torch.cuda.Stream(device)
        self.is_timed = True
        self._transfers: list[Transfer] = []
        self._posted: deque[tuple[Tensors, torch.cuda.Event]] = deque()
        self._awaited: deque[tuple[Action, _Pending, Message]] = deque()
        self._announced: list[_Pending] = []

    def send(self, action: Action, tensors: Tensors) -> None:
        if self._shapes is not None:
            self._announced.append(self._shapes.send(tensors))
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            start = self._clock.mark() if self.is_timed else None
            for tensor in tensors:
                self._hold_stream(dist.isend(tensor, self._peer, self._group))
                tensor.record_stream(self._stream)  # the allocator reuses it after the send
            self._record(action, tensors, start)

    def post(self, action: Action, message: Message) -> None:
        if self._shapes is None:
            self._posted.append(self._receive(action, message))
        else:
            self._awaited.append((action, self._shapes.post(message), message))

    def take(self) -> Tensors:
        if self._awaited:
            action, pending, message = self._awaited.popleft()
            self._posted.append(self._receive(action, Shapes.wait(pending, message)))
        buffers, arrival = self._posted.popleft()
        compute = torch.cuda.current_stream(self._device)
        compute.wait_event(arrival)
        for buffer in buffers:
            buffer.record_stream(compute)
        return buffers

    def finish_step(self) -> list[Transfer]:
        self._stream.synchronize()
        for pending in self._announced:
            pending.work.wait()
        self._announced.clear()
        finished, self._transfers = self._transfers, []
        return finished

    def close(self) -> None:
        self._stream.synchronize()

    def _receive(self, action: Action, message: Message) -> tuple[Tensors, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            buffers = tuple(
                torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in message
            )
            start = self._clock.mark() if self.is_timed else None
            for buffer in buffers:
                self._hold_stream(dist.irecv(buffer, self._peer, self._group))
            self._record(action, buffers, start)
            arrival = torch.cuda.Event()
            arrival.record()
        return buffers, arrival

    def _record(self, action: Action, tensors: Tensors, start: Mark | None) -> None:
        """Write down what the current stream does since `start`, where transfers are timed."""
        if start is not None:
            end = self._clock.mark()
            self._transfers.append(Transfer(action, _num_bytes(tensors), start, end))

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
        self._sum_groups: dict[Ranks, dist.ProcessGroup] = {}
        self._host_groups: dict[Ranks, dist.ProcessGroup] = {}

    @property
    def transport(self) -> str:
        if self._uses_nccl:
            return "nccl"
        return "gloo" if self.device.type == "cpu" else "gloo via host memory"

    def connect(self, edges: list[Edge], ranks: tuple[int, ...], shared: Iterable[Ranks]) -> None:
        """Make the communicators that are missing. Collective; blocks until they exist.

        `ranks[stage]` owns a stage; each of `shared` are ranks that share a weight.
        """
        if self._uses_nccl:
            for edge in edges:
                self._connect_edge(edge, ranks[edge.source], ranks[edge.target])
        everyone = tuple(sorted(set(ranks)))
        if everyone not in self._host_groups:
            self._host_groups[everyone] = dist.new_group(list(everyone), backend="gloo")
        for some in sorted({everyone, *shared}):
            self._connect_sum(some)

    def _connect_sum(self, ranks: Ranks) -> None:
        if ranks not in self._sum_groups:
            backend = "nccl" if self._uses_nccl else "gloo"
            self._sum_groups[ranks] = dist.new_group(list(ranks), backend=backend)
            if dist.get_rank() in ranks:  # as for edges: ready before anything is timed
                self.sum_over(torch.zeros(1, device=self.device), ranks)

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

    def open_channels(
        self,
        edges: list[Edge],
        ranks: tuple[int, ...],
        *,
        with_shapes: bool,
        delays_ns: Mapping[Edge, int] | None = None,
    ) -> dict[Edge, Channel]:
        """This rank's end of each edge that it has one of; all must have been connected.

        `with_shapes`: each message's shapes travel ahead of it. `delays_ns`: by how much longer
        the messages of an edge shall take, for emulation over gloo.
        """
        me = dist.get_rank() if dist.is_initialized() else 0
        channels: dict[Edge, Channel] = {}
        for tag, edge in enumerate(edges):
            source, target = ranks[edge.source], ranks[edge.target]
            if me in (source, target):
                peer = target if me == source else source
                assert self._host_group is not None
                shapes = Shapes(self._host_group, peer, len(edges) + tag) if with_shapes else None
                group = self._nccl_groups.get((edge, source, target))
                delay_ns = (delays_ns or {}).get(edge, 0)
                channels[edge] = self._open(group, peer, tag, shapes, delay_ns)
        return channels

    def _open(
        self,
        group: dist.ProcessGroup | None,
        peer: int,
        tag: int,
        shapes: Shapes | None,
        delay_ns: int,
    ) -> Channel:
        if group is not None:
            return NcclChannel(group, peer, self.device, self.clock, shapes)
        assert self._host_group is not None
        return HostChannel(self._host_group, peer, tag, self.device, shapes, delay_ns)

    def group_of(self, ranks: Ranks) -> dist.ProcessGroup:
        """The communicator of ranks that have been connected, for the tensors of its device."""
        return self._sum_groups[ranks]

    def sum_over(self, tensor: Tensor, ranks: Ranks) -> None:
        """Add the ranks' tensors in place. Blocks until all are here; equal bit for bit."""
        dist.all_reduce(tensor, group=self._sum_groups[ranks])

    def gather_objects(self, ours: Any, ranks: Ranks) -> list[Any]:
        """Every rank's object, in order of rank, on all of them. Blocks until all are here."""
        theirs: list[Any] = [None] * len(ranks)
        dist.all_gather_object(theirs, ours, group=self._host_groups[ranks])
        return theirs

    def exchange_pings(self, peers: Ranks, count: int, ranks: Ranks) -> list[Ping]:
        """The first of the ranks and each of the peers in turn: `count` round trips one by one.

        Over gloo, where nothing is timed. Blocks until this rank's are over. Returns the pings that
        it answered: none where it is no peer.
        """
        group, first, me = self._host_groups[ranks], ranks[0], dist.get_rank()
        if me in peers:
            return _answer_pings(first, count, group)
        if me == first:
            for peer in peers:
                _ping(peer, count, group)
        return []


def _ping(peer: int, count: int, group: dist.ProcessGroup) -> None:
    """Ask `count` times, then tell the peer when each ping was sent and was back."""
    clock, number, times = HostClock(), torch.zeros(1), []
    for _ in range(count):
        sent_ns = clock.mark()
        dist.send(number, peer, group)
        dist.recv(number, peer, group)
        times.append((sent_ns, clock.mark()))
    dist.send(torch.tensor(times, dtype=torch.int64), peer, group)


def _answer_pings(asker: int, count: int, group: dist.ProcessGroup) -> list[Ping]:
    clock, number, times = HostClock(), torch.zeros(1), []
    for _ in range(count):
        dist.recv(number, asker, group)
        received_ns, answered_ns = clock.mark(), clock.mark()
        dist.send(number, asker, group)
        times.append((received_ns, answered_ns))
    theirs = torch.zeros(count, 2, dtype=torch.int64)
    dist.recv(theirs, asker, group)
    return [
        Ping(sent_ns, *ours, returned_ns)
        for (sent_ns, returned_ns), ours in zip(theirs.tolist(), times, strict=True)
    ]
