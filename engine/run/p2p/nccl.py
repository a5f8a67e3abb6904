"""Messages over NCCL: a communicator and a stream per channel; the host never waits.

Other vendors' backends with torch's interface (RCCL, which torch calls NCCL, and XCCL) go the same
way.
"""

from __future__ import annotations

import functools
from collections import deque

import torch
import torch.distributed as dist

from engine.model.stage_module import Message
from engine.plan.action import Action
from engine.run import device as devices
from engine.run.clock import Clock, Mark
from engine.run.events import EventPool
from engine.run.p2p.channel import Transfer, num_bytes_of
from engine.run.p2p.shapes import Pending, Shapes
from engine.run.stage import Tensors

NCCL = "nccl"
MOST_CTAS = 4
"""Blocks of threads that an edge's kernel may occupy: an open receive spins on as many SMs until
its message comes, and takes them from computing."""


def options_of(backend: str, *, is_edge: bool) -> object | None:
    """The options of a communicator; None where the backend has none that matter here.

    Its stream is one of high priority: those come from a pool of their own, so that no edge's
    stream is NCCL's, and its kernels start before queued computations.
    """
    if backend != NCCL:
        return None
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if is_edge:
        options.config.min_ctas, options.config.max_ctas = 1, MOST_CTAS
    return options


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
        stream: torch.Stream,
    ) -> None:
        """`stream` is no other edge's while the channel is open."""
        self._group, self._peer, self._device, self._clock = group, peer, device, clock
        self._shapes, self._stream = shapes, stream
        self.is_timed = True
        self._transfers: list[Transfer] = []
        self._arrivals = EventPool(functools.partial(devices.order_event, device))
        self._posted: dict[Action, tuple[Tensors, torch.Event]] = {}
        self._awaited: deque[tuple[Action, Pending]] = deque()
        self._announced: list[Pending] = []

    def send(self, action: Action, tensors: Tensors) -> None:
        if self._shapes is not None:
            self._announced.append(self._shapes.send(action, tensors))
        tensors = tuple(tensor.contiguous() for tensor in tensors)
        self._stream.wait_stream(devices.current_stream(self._device))
        with self._stream:
            start = self._clock.mark() if self.is_timed else None
            for tensor in tensors:
                self._hold_stream(dist.isend(tensor, self._peer, self._group))
                devices.keep_until_done(tensor, self._stream)
            self._record(action, tensors, start)

    def post(self, action: Action, message: Message) -> None:
        if self._shapes is None:
            self._posted[action] = self._receive(action, message)
        else:
            self._awaited.append((action, self._shapes.post(action, message)))

    def take(self, action: Action) -> Tensors:
        while action not in self._posted:  # its shape is awaited, perhaps behind others
            awaited, shapes = self._awaited.popleft()
            self._posted[awaited] = self._receive(awaited, shapes.wait())
        buffers, arrival = self._posted.pop(action)
        compute = devices.current_stream(self._device)
        compute.wait_event(arrival)
        self._arrivals.give_back(arrival)  # the stream waits for what it was when it was asked
        for buffer in buffers:
            devices.keep_until_done(buffer, compute)
        return buffers

    def finish_step(self) -> list[Transfer]:
        # The host may issue the next step long before this one is done. Its receives, which wait
        # for no computation, would spin beside the optimizer and the sums over ranks of this one.
        self._stream.wait_stream(devices.current_stream(self._device))
        for shapes in self._announced:
            shapes.wait()
        self._announced.clear()
        finished, self._transfers = self._transfers, []
        return finished

    def close(self) -> None:
        self._stream.synchronize()

    def _receive(self, action: Action, message: Message) -> tuple[Tensors, torch.Event]:
        with self._stream:
            buffers = tuple(
                torch.empty(spec.shape, dtype=spec.dtype, device=self._device) for spec in message
            )
            start = self._clock.mark() if self.is_timed else None
            for buffer in buffers:
                self._hold_stream(dist.irecv(buffer, self._peer, self._group))
            self._record(action, buffers, start)
            arrival = self._arrivals.take()
            arrival.record()
        return buffers, arrival

    def _record(self, action: Action, tensors: Tensors, start: Mark | None) -> None:
        """Write down what the current stream does since `start`, where transfers are timed."""
        if start is not None:
            end = self._clock.mark()
            self._transfers.append(Transfer(action, num_bytes_of(tensors), start, end))

    @staticmethod
    def _hold_stream(work: dist.Work | None) -> None:
        """Make the channel's stream, not the host, wait for NCCL's."""
        assert work is not None
        work.wait()
