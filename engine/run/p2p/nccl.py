"""Messages over NCCL: a communicator and a CUDA stream per channel; the host never waits."""

from __future__ import annotations

from collections import deque

import torch
import torch.distributed as dist

from engine.model.stage_module import Message
from engine.plan.action import Action
from engine.run.clock import Clock, Mark
from engine.run.p2p.channel import Tensors, Transfer, num_bytes_of
from engine.run.p2p.shapes import Pending, Shapes


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
        self._posted: dict[Action, tuple[Tensors, torch.cuda.Event]] = {}
        self._awaited: deque[tuple[Action, Pending, Message]] = deque()
        self._announced: list[Pending] = []

    def send(self, action: Action, tensors: Tensors) -> None:
        if self._shapes is not None:
            self._announced.append(self._shapes.send(action, tensors))
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
            self._posted[action] = self._receive(action, message)
        else:
            self._awaited.append((action, self._shapes.post(action, message), message))

    def take(self, action: Action) -> Tensors:
        while action not in self._posted:  # its shape is awaited, perhaps behind others
            awaited, pending, message = self._awaited.popleft()
            self._posted[awaited] = self._receive(awaited, Shapes.wait(pending, message))
        buffers, arrival = self._posted.pop(action)
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
            self._transfers.append(Transfer(action, num_bytes_of(tensors), start, end))

    @staticmethod
    def _hold_stream(work: dist.Work | None) -> None:
        """Make the channel's stream, not the host, wait for NCCL's."""
        assert work is not None
        work.wait()
