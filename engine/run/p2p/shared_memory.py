"""Messages between the CPU ranks of one host, through memory that both have mapped.

    sender                        shared memory                    receiver
    send  --copies into-->        [slot][slot][slot]...            post  notes what is expected
          --the slot's number-->  pipe               --read by-->  take  copies out, frees the slot

A slot has a header, then the tensors. The header says when the message was sent, for which
microbatch, and in which shapes, whether they vary or not. There is a slot for each microbatch. Only
a rank that needs nothing back comes further than a step ahead, in an evaluation: there it waits for
a slot. The first free one is used, so that only as much memory is touched
as messages have waited at once. A message ahead of the one that is taken is copied out with it.

Each copy is made by the rank that wants it, so that no thread takes a core from a rank that
computes. The pipe keeps the order, wakes a rank that waits, and ends when its sender has died.
Neither has a name: the sender opens the receiver's through /proc, and nothing is left behind.

For emulation an edge may be delayed. Its messages then arrive one at a time, each so much later
than both ends were ready and the one before it was there; the receiver sleeps until then.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import select
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from engine.model.stage_module import Message, TensorSpec, gradient_message
from engine.plan.action import Action
from engine.plan.messages import Edge
from engine.run.clock import HostClock
from engine.run.host import Gather, path_of
from engine.run.p2p.channel import Transfer, TransferError, num_bytes_of, sized
from engine.run.stage import Tensors

_ALIGNMENT = 64
_PATIENCE_MINUTES = 30  # as torch's process groups
_NUM_LOOKS = 64  # for a message, before sleeping
_NUMBER_BYTES = 4  # of a slot's number in the pipe
_WAIT_MS = 1  # between two looks for a free slot
_now_ns = HostClock().mark


def open_channels(
    edges: Iterable[Edge],
    owners: Sequence[int],
    me: int,
    messages: Sequence[Message],
    num_microbatches: int,
    gather: Gather,
    delays_ns: Mapping[Edge, int],
) -> dict[Edge, MemoryChannel]:
    """This process's end of each edge that it has one of. Collective over the owners.

    `owners[stage]` is the process that owns a stage, and `messages[stage]` what the stage sends to
    the next, at its longest. Raises TransferError.
    """
    inboxes: dict[Edge, tuple[int, int, int]] = {}  # memory, and the pipe's two ends
    for edge in edges:
        if owners[edge.target] == me:
            reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            make_room(writes, num_microbatches)
            inboxes[edge] = os.memfd_create("engine"), reads, writes
    ours = {edge: (path_of(memory), path_of(end)) for edge, (memory, _, end) in inboxes.items()}
    paths = {edge: pair for theirs in gather(ours) for edge, pair in theirs.items()}
    outboxes = {
        edge: (os.open(memory, os.O_RDWR), os.open(pipe, os.O_WRONLY))
        for edge, (memory, pipe) in paths.items()
        if owners[edge.source] == me
    }
    gather(None)  # every inbox has its sender, whose end of the pipe is the last one from here on
    for _, _, writes in inboxes.values():
        os.close(writes)
    has_own_core = len(set(owners)) <= len(os.sched_getaffinity(0))
    channels = {}
    for edge, (memory, pipe, *_) in {**inboxes, **outboxes}.items():
        peer = owners[edge.source if edge in inboxes else edge.target]
        is_forward, delay_ns = edge.source < edge.target, delays_ns.get(edge, 0)
        message = messages[edge.source] if is_forward else gradient_message(messages[edge.target])
        channels[edge] = MemoryChannel(memory, pipe, peer, num_microbatches, message, delay_ns)
        channels[edge].num_looks = _NUM_LOOKS if has_own_core else 1
    return channels


def make_room(pipe: int, num_slots: int) -> None:
    """Have a pipe hold every slot's number. Raises TransferError where the system forbids it."""
    needed = num_slots * _NUMBER_BYTES
    try:
        if needed > fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ):
            fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, needed)
    except (OSError, OverflowError) as error:
        raise TransferError(
            f"{num_slots} microbatches: their messages need a pipe of {needed} bytes, which this "
            "system refuses; give fewer microbatches, or raise /proc/sys/fs/pipe-max-size"
        ) from error


class MemoryChannel:
    """One end of an edge. It times the sender's copy, and when the receiver had the message."""

    came_ns = 0  # when the latest message that was taken had come
    num_looks = 1  # for a message before the rank sleeps: more where it has a core for itself

    def __init__(
        self, memory: int, pipe: int, peer: int, num_slots: int, message: Message, delay_ns: int
    ) -> None:
        """Map the memory, with slots for such a message, and use this rank's end of the pipe."""
        self._pipe, self._peer, self._delay_ns = pipe, peer, delay_ns
        num_sizes = sum(len(spec.shape) for spec in message)
        self._header = struct.Struct(f"{2 + num_sizes}q")  # when it was sent, microbatch, sizes
        self._header_bytes = _rounded(self._header.size)
        self._slot_bytes = self._header_bytes + sum(map(_room_of, message))
        # A byte for each slot tells whether it is taken; the slots follow.
        self._num_slots, self._first = num_slots, _rounded(num_slots)
        size = self._first + num_slots * self._slot_bytes
        os.ftruncate(memory, size)
        self._map = mmap.mmap(memory, size)
        os.close(memory)
        self.is_timed = True
        self._transfers: list[Transfer] = []
        self._posted: deque[tuple[Action, Message, int]] = deque()  # and since when
        self._waiting: dict[Action, Tensors] = {}  # came before the message that was taken
        self._last_ns = 0  # when the last message of a delayed edge was there
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)

    def send(self, action: Action, tensors: Tensors) -> None:
        start_ns = _now_ns()
        while (slot := self._map.find(b"\0", 0, self._num_slots)) < 0:
            if self._poll.poll(_WAIT_MS):  # nobody reads from the pipe
                raise TransferError(f"send to rank {self._peer}: it is gone")
        message = tuple(TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in tensors)
        if self._header_bytes + sum(map(_room_of, message)) > self._slot_bytes:
            raise TransferError(f"{action}: more than the longest microbatch sends; none may")
        self._map[slot], at = 1, self._first + slot * self._slot_bytes
        for view, tensor in zip(self._views(at, message), tensors, strict=True):
            view.copy_(tensor)
        sizes = [size for tensor in tensors for size in tensor.shape]
        sent_ns = _now_ns()
        self._header.pack_into(self._map, at, sent_ns, action.microbatch, *sizes)
        try:
            os.write(self._pipe, slot.to_bytes(_NUMBER_BYTES))
        except BrokenPipeError as error:
            raise TransferError(f"send to rank {self._peer}: it is gone") from error
        self._note(action, tensors, start_ns, self._arrival_of(sent_ns))

    def post(self, action: Action, message: Message) -> None:
        self._posted.append((action, message, _now_ns()))

    def take(self, action: Action) -> Tensors:
        if self._waiting and (tensors := self._waiting.pop(action, None)) is not None:
            return tensors
        began_ns = _now_ns()
        while (posted := self._posted.popleft())[0] != action:
            self._waiting[posted[0]] = self._receive(*posted, began_ns)
        return self._receive(*posted, began_ns)

    def _receive(self, action: Action, message: Message, posted_ns: int, began_ns: int) -> Tensors:
        """Copy the next message out, and free its slot. Blocks until it is there."""
        number = self._read()
        if not number:
            raise TransferError(f"receive from rank {self._peer}: it is gone")
        slot = int.from_bytes(number)
        at = self._first + slot * self._slot_bytes
        sent_ns, microbatch, *sizes = self._header.unpack_from(self._map, at)
        if microbatch != action.microbatch:
            raise TransferError(
                f"receive from rank {self._peer}: microbatch {microbatch} came where "
                f"{action} was posted; the ranks run different programs"
            )
        tensors = tuple(v.clone() for v in self._views(at, sized(message, sizes)))
        self._map[slot] = 0
        end_ns = self._arrival_of(max(posted_ns, sent_ns))
        if end_ns > began_ns:  # the rank has waited for it, or has yet to
            if self._delay_ns:
                time.sleep(max(0, end_ns - _now_ns()) / 1e9)
            end_ns = _now_ns()
        self.came_ns = end_ns
        self._note(action, tensors, posted_ns, end_ns)
        return tensors

    def finish_step(self) -> list[Transfer]:
        finished, self._transfers = self._transfers, []
        return finished

    def close(self) -> None:
        os.close(self._pipe)

    def _arrival_of(self, ready_ns: int) -> int:
        """When a message is there that could move from `ready_ns` on."""
        if self._delay_ns:
            self._last_ns = ready_ns = max(ready_ns, self._last_ns) + self._delay_ns
        return ready_ns

    def _note(self, action: Action, tensors: Tensors, start_ns: int, end_ns: int) -> None:
        if self.is_timed:
            self._transfers.append(Transfer(action, num_bytes_of(tensors), start_ns, end_ns))

    def _read(self) -> bytes:
        """The number of the next message's slot; nothing where the sender is gone."""
        for _ in range(self.num_looks):
            with contextlib.suppress(BlockingIOError):
                return os.read(self._pipe, _NUMBER_BYTES)
        if not self._poll.poll(60_000 * _PATIENCE_MINUTES):
            waited = f"nothing in {_PATIENCE_MINUTES} minutes"
            raise TransferError(f"receive from rank {self._peer}: {waited}")
        return os.read(self._pipe, _NUMBER_BYTES)

    def _views(self, at: int, message: Message) -> list[Tensor]:
        """The slot that begins at a place, as tensors of these shapes."""
        at, views = at + self._header_bytes, []
        for spec in message:
            if count := math.prod(spec.shape):
                flat = torch.frombuffer(self._map, dtype=spec.dtype, count=count, offset=at)
                views.append(flat.view(spec.shape))
            else:  # which frombuffer refuses
                views.append(torch.empty(spec.shape, dtype=spec.dtype))
            at += _room_of(spec)
        return views


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _room_of(spec: TensorSpec) -> int:
    return _rounded(math.prod(spec.shape) * spec.dtype.itemsize)
