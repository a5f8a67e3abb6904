"""Messages between the CPU ranks of one host, through memory that both have mapped.

    sender                        shared memory                    receiver
    send  --copies into-->        [slot][slot][slot]...            post  notes what is expected
          --header-->             pipe               --read by-->  take  copies out, frees the slot

A header says which slot, when the message was sent, for which microbatch, and its shapes. A message
ahead of the one that is taken is copied out with it, and waits in the receiver's own memory.

No thread and no socket: each copy is made by the rank that wants it, so that nothing takes a core
from a rank that computes. The pipe keeps the order, wakes a rank that waits, and ends when its
sender has died. Neither has a name: the sender opens the receiver's through /proc, so nothing is
left behind however a rank ends. Shapes travel with each message, whether they vary or not.

The slots are one per microbatch: more messages than that are never on their way. The first free
one is used, so that only as much memory is touched as messages have waited at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import select
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.model.stage_module import Message, TensorSpec, gradient_message
from engine.plan.action import Action
from engine.plan.messages import Edge
from engine.run.clock import HostClock
from engine.run.p2p.channel import Tensors, Transfer, TransferError, num_bytes_of, sized

Gather = Callable[[Any], list[Any]]
"""Every rank's object, in order of rank, on all of them. Blocks until all are here."""

_NAMESPACES = ("net", "pid", "time")
_ALIGNMENT = 64
_PATIENCE_MS = 30 * 60 * 1000  # as torch's process groups
_NUM_LOOKS = 64  # for a message, before sleeping
_HEAD = 3  # numbers of a header before its shapes: slot, when it was sent, microbatch
_PAGE = mmap.PAGESIZE


def can_share_memory(gather: Gather) -> bool:
    """Whether all ranks see each other's memory and read the same clock. Collective.

    Tried out, and not between network namespaces: those stand for hosts.
    """
    mine: _Offer | None = None
    memory = -1
    try:
        place = tuple(str(Path(f"/proc/self/ns/{name}").readlink()) for name in _NAMESPACES)
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        memory, token = os.memfd_create("engine"), os.urandom(16)
        os.write(memory, token)
        mine = _Offer((boot, *place), _path_of(memory), token)
    except (OSError, AttributeError):  # not Linux, or not allowed
        pass
    try:
        sees_all = mine is not None
        for theirs in gather(mine):
            try:
                sees_all &= (
                    mine is not None
                    and theirs is not None
                    and mine.place == theirs.place
                    and Path(theirs.path).read_bytes() == theirs.token
                )
            except OSError:
                sees_all = False
        return all(gather(sees_all))
    finally:
        if memory >= 0:
            os.close(memory)


class _Offer(NamedTuple):
    """Where a rank is, where some memory of its own lies, and what is read there."""

    place: tuple[str, ...]
    path: str
    token: bytes


def _path_of(descriptor: int) -> str:
    return f"/proc/{os.getpid()}/fd/{descriptor}"


def open_channels(
    edges: Iterable[Edge],
    ranks: Sequence[int],
    me: int,
    messages: Sequence[Message],
    num_microbatches: int,
    gather: Gather,
) -> dict[Edge, MemoryChannel]:
    """This rank's end of each edge that it has one of. Collective over `ranks`.

    `messages[stage]` is what a stage sends to the next, at its longest.
    """
    crossing = [edge for edge in edges if ranks[edge.source] != ranks[edge.target]]
    inboxes = {}
    for edge in crossing:
        if ranks[edge.target] == me:
            is_forward = edge.source < edge.target
            message = (
                messages[edge.source] if is_forward else gradient_message(messages[edge.target])
            )
            inboxes[edge] = _Inbox(num_microbatches, message)
    addresses = {
        edge: address
        for theirs in gather({edge: inbox.address for edge, inbox in inboxes.items()})
        for edge, address in theirs.items()
    }
    is_spinning = len(set(ranks)) <= len(os.sched_getaffinity(0))
    channels = {}
    for edge in crossing:
        if ranks[edge.source] == me:
            address = addresses[edge]
            memory = os.open(address.memory, os.O_RDWR)
            slots = _Slots(memory, address.num_slots, address.slot_bytes)
            os.close(memory)
            pipe = os.open(address.pipe, os.O_WRONLY | os.O_NONBLOCK)
            channels[edge] = MemoryChannel(slots, pipe, ranks[edge.target])
    gather(None)  # every inbox has its sender
    for edge, inbox in inboxes.items():
        channels[edge] = inbox.open(ranks[edge.source], is_spinning=is_spinning)
    return channels


def _num_numbers(message: Message) -> int:
    """Return the number of integers in the header of such a message."""
    return _HEAD + sum(len(spec.shape) for spec in message)


def _room_of(spec: TensorSpec) -> int:
    return _rounded(math.prod(spec.shape) * spec.dtype.itemsize, _ALIGNMENT)


def _rounded(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


class _Address(NamedTuple):
    """The address by which another process opens an inbox."""

    memory: str
    pipe: str
    num_slots: int
    slot_bytes: int


class _Inbox:
    """The receiver's memory and pipe, until its sender has opened both."""

    def __init__(self, num_slots: int, message: Message) -> None:
        slot_bytes = sum(_room_of(spec) for spec in message)
        self._memory = os.memfd_create("engine")
        self._reads, self._writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        make_room(self._writes, num_slots, 8 * _num_numbers(message))
        paths = _path_of(self._memory), _path_of(self._writes)
        self.address = _Address(*paths, num_slots, slot_bytes)
        self._slots = _Slots(self._memory, num_slots, slot_bytes)

    def open(self, sender: int, *, is_spinning: bool) -> MemoryChannel:
        """The receiving end; no other process can open the inbox any more."""
        os.close(self._memory)
        os.close(self._writes)  # the sender's is the last one: the pipe ends with it
        return MemoryChannel(self._slots, self._reads, sender, is_spinning=is_spinning)


def make_room(pipe: int, num_headers: int, header_bytes: int) -> None:
    """Have a pipe hold a header for every slot. Raises TransferError where the system forbids it.

    A page holds whole headers only: the system does not split a write between two.
    """
    needed = _PAGE * -(-num_headers // max(1, _PAGE // header_bytes))
    if needed <= fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ):
        return
    with contextlib.suppress(OSError, OverflowError):
        if fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, needed) >= needed:
            return
    raise TransferError(
        f"{num_headers} microbatches: their headers need a pipe of {needed} bytes, which this "
        "system refuses; give fewer microbatches, or raise /proc/sys/fs/pipe-max-size"
    )


class _Slots:
    """Mapped memory: a byte per slot that tells whether it is taken, then the slots."""

    def __init__(self, memory: int, num_slots: int, slot_bytes: int) -> None:
        self._num_slots, self._slot_bytes = num_slots, slot_bytes
        self._first = _rounded(num_slots, _ALIGNMENT)
        size = self._first + num_slots * slot_bytes
        os.ftruncate(memory, size)
        self._map = mmap.mmap(memory, size)

    def take_free(self) -> int:
        slot = self._map.find(b"\0", 0, self._num_slots)
        assert slot >= 0, "more messages are on their way than a step has microbatches"
        self._map[slot] = 1
        return slot

    def free(self, slot: int) -> None:
        self._map[slot] = 0

    def views(self, slot: int, message: Message) -> list[Tensor]:
        """The slot as tensors of these shapes."""
        at = self._first + slot * self._slot_bytes
        views = []
        for spec in message:
            if count := math.prod(spec.shape):
                flat = torch.frombuffer(self._map, dtype=spec.dtype, count=count, offset=at)
                views.append(flat.view(spec.shape))
            else:  # which frombuffer refuses
                views.append(torch.empty(spec.shape, dtype=spec.dtype))
            at += _room_of(spec)
        return views


class MemoryChannel:
    """One end of a directed edge.

    The times of its transfers are those of the sender's copy and, for a receive, when the message
    was there.
    """

    def __init__(self, slots: _Slots, pipe: int, peer: int, *, is_spinning: bool = False) -> None:
        """Use `pipe`, this rank's end of the channel's pipe.

        `is_spinning`: it has a core for itself, and looks for a message a while before it sleeps.
        """
        self._slots, self._pipe, self._peer = slots, pipe, peer
        self._num_looks = _NUM_LOOKS if is_spinning else 1
        self._clock = HostClock()
        self.is_timed = True
        self._transfers: list[Transfer] = []
        self._posted: deque[tuple[Action, Message, int]] = deque()  # and since when
        self._waiting: dict[Action, Tensors] = {}  # came before the message that was taken
        self._poll = select.poll()
        self._poll.register(pipe, select.POLLIN)

    def send(self, action: Action, tensors: Tensors) -> None:
        start_ns = self._now_ns()
        slot = self._slots.take_free()
        message = tuple(TensorSpec(tuple(t.shape), t.dtype) for t in tensors)
        for view, tensor in zip(self._slots.views(slot, message), tensors, strict=True):
            view.copy_(tensor)
        sizes = [size for tensor in tensors for size in tensor.shape]
        end_ns = self._now_ns()
        try:
            header = (slot, end_ns, action.microbatch, *sizes)
            os.write(self._pipe, struct.pack(f"{len(header)}q", *header))
        except BrokenPipeError as error:
            raise TransferError(f"send to rank {self._peer}: it is gone") from error
        self._note(action, tensors, start_ns, end_ns)

    def post(self, action: Action, message: Message) -> None:
        self._posted.append((action, message, self._now_ns()))

    def take(self, action: Action) -> Tensors:
        if self._waiting and (tensors := self._waiting.pop(action, None)) is not None:
            return tensors
        began_ns = self._now_ns()
        while (posted := self._posted.popleft())[0] != action:
            self._waiting[posted[0]] = self._receive(*posted, began_ns)
        return self._receive(*posted, began_ns)

    def _receive(self, action: Action, message: Message, posted_ns: int, began_ns: int) -> Tensors:
        """Copy the next message out, and free its slot. Blocks until it is there."""
        num_numbers = _num_numbers(message)
        header = self._read(8 * num_numbers)
        if not header:
            raise TransferError(f"receive from rank {self._peer}: it is gone")
        slot, sent_ns, microbatch, *sizes = struct.unpack(f"{num_numbers}q", header)
        if microbatch != action.microbatch:
            raise TransferError(
                f"receive from rank {self._peer}: microbatch {microbatch} came where "
                f"{action} was posted; the ranks run different programs"
            )
        message = sized(message, iter(sizes))
        tensors = tuple(view.clone() for view in self._slots.views(slot, message))
        self._slots.free(slot)
        is_late = sent_ns > began_ns
        end_ns = self._now_ns() if is_late else max(posted_ns, sent_ns)
        self._note(action, tensors, posted_ns, end_ns)
        return tensors

    def finish_step(self) -> list[Transfer]:
        finished, self._transfers = self._transfers, []
        return finished

    def close(self) -> None:
        os.close(self._pipe)

    def _now_ns(self) -> int:
        return self._clock.mark() if self.is_timed else 0

    def _note(self, action: Action, tensors: Tensors, start_ns: int, end_ns: int) -> None:
        if self.is_timed:
            self._transfers.append(Transfer(action, num_bytes_of(tensors), start_ns, end_ns))

    def _read(self, num_bytes: int) -> bytes:
        """What was written at once, which no other write comes between; nothing at the end."""
        for _ in range(self._num_looks):
            with contextlib.suppress(BlockingIOError):
                return os.read(self._pipe, num_bytes)
        if not self._poll.poll(_PATIENCE_MS):
            words = f"nothing came in {_PATIENCE_MS // 60_000} minutes"
            raise TransferError(f"receive from rank {self._peer}: {words}")
        return os.read(self._pipe, num_bytes)
