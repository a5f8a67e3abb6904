"""A device that exists on paper: streams, events, memory and a clock, all known to the nanosecond.

It takes the place of torch's accelerator under `engine.run.device`, so that the real clock,
channels, executor and memory code run on it. Tensors are on `meta`: they have shapes and storages,
and no values. It checks what a real device does not tell:

- Order. Streams, events and the host have vector clocks. A kernel that reads what another stream
  writes, or writes what another reads, must be ordered after it by events, not by luck.
- Lifetime. Memory that is let go of may be used again by its own stream at once: whatever another
  stream still does with it must have been recorded (`record_stream`), or be ordered before.
- Reading. An event is read when it is done, and not after it was recorded again for another.
- Steps. Within `no_synchronisation` nothing waits for the whole device.

Each fault raises `Fault`, and names the stream and the kernel. Kernels, readings of peaks, and
waits for the whole device are in `calls`, in order.
"""

import contextlib
import struct
import types
from dataclasses import dataclass, field

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from engine.run import clock as clocks
from engine.run import device as devices

DEVICE = torch.device("meta")
POOL = 32
RECORD_NS = 500
"""What it takes the host to record an event; the device does so at the end of it."""
SYNCHRONIZE_NS = 500
"""What it takes the host to learn that an event is done."""


class Fault(Exception):
    """The code under test would be wrong on a real device."""


@dataclass(eq=False)
class Stream:
    """A queue of kernels; `seen` holds, by stream, the last of its kernels that this follows."""

    device: object
    name: str
    ready_ns: int = 0
    count: int = 0
    seen: dict = field(default_factory=dict)

    def wait_stream(self, other):
        self._follow(other.ready_ns, other.seen)

    def wait_event(self, event):
        if event.time_ns is not None:
            self._follow(event.time_ns, event.seen)

    def synchronize(self):
        self.device.host_reaches(self.ready_ns, self.seen)

    def __enter__(self):
        self.device.current.append(self)
        return self

    def __exit__(self, *raised):
        assert self.device.current.pop() is self

    def _follow(self, time_ns, seen):
        self.ready_ns = max(self.ready_ns, time_ns)
        join(self.seen, seen)


def join(into, other):
    for name, count in other.items():
        into[name] = max(into.get(name, 0), count)


class Event:
    """A point in a stream; recorded anew, it is another point."""

    def __init__(self, device, name, *, is_timed):
        self.device, self.name = device, name
        self.is_timed = is_timed
        self.time_ns, self.seen = None, {}

    def record(self):
        device, stream = self.device, self.device.stream
        device.now_ns += RECORD_NS
        stream.ready_ns = max(stream.ready_ns, device.now_ns)
        join(stream.seen, device.host_seen)
        self.time_ns, self.seen = stream.ready_ns, dict(stream.seen)

    def query(self):
        return self.time_ns is None or self.time_ns <= self.device.now_ns

    def synchronize(self):
        self.device.now_ns += SYNCHRONIZE_NS
        self.device.host_reaches(self.time_ns or 0, self.seen)

    def elapsed_time(self, other):
        for event in (self, other):
            if not event.is_timed:
                raise Fault(f"{event.name} is read, and does not time")
            if event.time_ns is None or not event.query():
                raise Fault(f"{event.name} is read before it is done")
        first, second = (self.device.on_device(e.time_ns) for e in (self, other))
        return struct.unpack("f", struct.pack("f", (second - first) / 1e6))[0]


@dataclass
class Block:
    """Memory of one storage, by the kernels that have used it."""

    home: Stream
    num_bytes: int
    reference: StorageWeakRef
    recorded: set = field(default_factory=set)
    written: tuple | None = None  # by which kernel of which stream
    used: list = field(default_factory=list)  # kernels that read or write


class ScriptedDevice:
    """The device, its host's clock, and what was called."""

    def __init__(self):
        self.now_ns = 10**9
        self.offset_ns, self.drift = 123_456_789, 0.0  # of the device's own clock on the host's
        self.calls, self.kernels = [], []
        self.default = Stream(self, "compute")
        self.current = [self.default]
        self.streams = [self.default]
        self.pool, self.num_drawn = [], 0
        self.host_seen, self.num_events = {}, 0
        self.blocks, self.pending = {}, []
        self.allocated = self.active = self.reserved = self.outside_bytes = 0
        self.peaks = {}
        self.is_in_step = False
        self.history = None
        self.reset_peaks()

    @property
    def stream(self):
        return self.current[-1]

    def note(self, call):
        self.calls.append(call)

    def on_device(self, host_ns):
        return host_ns + self.offset_ns + round(host_ns * self.drift)

    def host_reaches(self, time_ns, seen):
        self.now_ns = max(self.now_ns, time_ns)
        join(self.host_seen, seen)
        self.settle()

    @contextlib.contextmanager
    def no_synchronisation(self):
        """Within a step nothing may wait for the whole device."""
        self.is_in_step = True
        try:
            yield
        finally:
            self.is_in_step = False

    # ---- kernels

    def launch(self, name, duration_ns, reads=(), writes=(), not_before_ns=0):
        """Queue a kernel on the current stream; returns when it begins and ends."""
        self.settle()
        stream = self.stream
        join(stream.seen, self.host_seen)
        stream.count += 1
        stream.seen[stream.name] = stream.count
        start_ns = max(self.now_ns, stream.ready_ns)
        stream.ready_ns = max(start_ns, not_before_ns) + duration_ns
        for tensor in reads:
            self._use(name, tensor, is_write=False)
        for tensor in writes:
            self._use(name, tensor, is_write=True)
        self.note(f"{name} on {stream.name}")
        self.kernels.append((name, stream.name, start_ns, stream.ready_ns))
        return start_ns, stream.ready_ns

    def host_reads(self, name, tensor):
        """The host's own use of memory that a copy has written."""
        block = self.blocks.get(tensor.untyped_storage()._cdata)
        if block is not None and block.written is not None:
            writer, count = block.written
            if self.host_seen.get(writer, 0) < count:
                raise Fault(f"{name}: the host reads what {writer} is still writing")

    def _use(self, name, tensor, *, is_write):
        block, stream = self._block_of(tensor), self.stream
        before = block.used if is_write else [block.written] if block.written else []
        for other, count in before:
            if stream.seen.get(other, 0) < count:
                raise Fault(f"{name} on {stream.name} does not wait for what {other} does before")
        mark = stream.name, stream.count
        block.used.append(mark)
        if is_write:
            block.written = mark

    # ---- memory

    def _block_of(self, tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in self.blocks:
            self._allocate(storage, is_counted=tensor.device == DEVICE)
        return self.blocks[storage._cdata]

    def _allocate(self, storage, *, is_counted=True):
        num_bytes = -(-storage.nbytes() // 512) * 512 if is_counted else 0
        self.blocks[storage._cdata] = Block(self.stream, num_bytes, StorageWeakRef(storage))
        self.allocated += num_bytes
        self.active += num_bytes
        self.reserved = max(self.reserved, self.active)
        self._trace("alloc", storage._cdata, num_bytes)
        self._raise_peaks()

    def settle(self):
        """Free what nobody holds any more, and what streams are done with."""
        for address, block in list(self.blocks.items()):
            if block.reference.expired():
                del self.blocks[address]
                self._free(address, block)
        for until_ns, address, num_bytes in [p for p in self.pending if p[0] <= self.now_ns]:
            self.pending.remove((until_ns, address, num_bytes))
            self.active -= num_bytes
            self._trace("free_completed", address, num_bytes)

    def _free(self, address, block):
        seen = {block.home.name: block.home.count}
        for stream in (block.home, *block.recorded):
            join(seen, stream.seen)
        for other, count in block.used:
            if block.num_bytes and seen.get(other, 0) < count:
                raise Fault(f"memory of {block.home.name} is free while {other} uses it")
        self.allocated -= block.num_bytes
        self._trace("free_requested", address, block.num_bytes)
        until_ns = max((s.ready_ns for s in block.recorded), default=0)
        self.pending.append((until_ns, address, block.num_bytes))

    def _trace(self, action, address, num_bytes):
        if self.history is not None and num_bytes:
            entry = {"action": action, "addr": address, "size": num_bytes}
            self.history.append({**entry, "time_us": self.now_ns // 1000})

    def _raise_peaks(self):
        now = {"allocated": self.allocated, "active": self.active, "reserved": self.reserved}
        self.peaks = {name: max(self.peaks.get(name, 0), value) for name, value in now.items()}

    def reset_peaks(self):
        self.settle()
        self.peaks = {}
        self._raise_peaks()

    # ---- what torch.accelerator and the device's own module answer

    def synchronize(self, device=None):
        self.note("host waits for the device")
        if self.is_in_step:
            raise Fault("the whole device is waited for within a step")
        for stream in self.streams:
            self.host_reaches(stream.ready_ns, stream.seen)

    def keep_until_done(self, tensor, stream):
        self._block_of(tensor).recorded.add(stream)

    def begin_history(self, device):
        self.history = []

    def end_history(self, device):
        self.synchronize()
        trace, self.history = self.history, None
        return trace

    def draw_stream(self, device):
        """As torch's pool does: after the last the first again."""
        if len(self.pool) < POOL:
            self.pool.append(Stream(self, f"stream {len(self.pool)}"))
            self.streams.append(self.pool[-1])
        stream = self.pool[self.num_drawn % POOL]
        self.num_drawn += 1
        return stream

    def new_stream(self, name):
        """A stream outside the pool, such as NCCL's own of high priority."""
        self.streams.append(Stream(self, name))
        return self.streams[-1]

    def make_event(self, device=None, *, enable_timing=False):
        self.num_events += 1
        name = f"event {self.num_events}"
        return Event(self, name, is_timed=enable_timing)

    def accelerator(self):
        return types.SimpleNamespace(
            device_count=lambda: 1,
            current_stream=lambda device=None: self.stream,
            memory_allocated=lambda device: (self.settle(), self.allocated)[1],
            memory_reserved=lambda device: self.reserved,
            max_memory_allocated=lambda device: self._peak("allocated"),
            max_memory_reserved=lambda device: self._peak("reserved"),
            memory_stats=lambda device: {"active_bytes.all.peak": self._peak("active")},
            reset_peak_memory_stats=lambda device: (self.note("peaks reset"), self.reset_peaks()),
            get_memory_info=lambda device: (2**40 - self.reserved - self.outside_bytes, 2**40),
        )

    def _peak(self, name):
        self.note(f"peak {name} read")
        return self.peaks[name]


class Torch:
    """torch as `engine.run.device` sees it."""

    def __init__(self, device):
        self.accelerator, self.Stream = device.accelerator(), device.draw_stream
        self.Event = device.make_event
        self._own = types.SimpleNamespace(
            Event=lambda blocking: device.make_event(),
            synchronize=device.synchronize,
        )

    def get_device_module(self, device):
        return self._own


class Tensors(TorchDispatchMode):
    """Gives tensors of the device memory, and makes copies kernels of the current stream."""

    def __init__(self, device, copy_ns):
        super().__init__()
        self._device, self._copy_ns = device, copy_ns

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name == "copy_" and DEVICE in (args[0].device, args[1].device):
            self._device.launch("copy", self._copy_ns, reads=args[1:2], writes=args[:1])
            return args[0]
        is_to_host = name == "_to_copy" and args[0].device == DEVICE
        if is_to_host:
            result = torch.empty(args[0].shape, dtype=args[0].dtype)
        else:
            result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor) and (is_to_host or result.device == DEVICE):
            self._device._block_of(result)
            if name == "_to_copy":
                self._device.launch("copy", self._copy_ns, reads=args[:1], writes=[result])
                if not kwargs.get("non_blocking"):
                    self._device.stream.synchronize()
        return result


@contextlib.contextmanager
def scripted(monkeypatch, copy_ns=40_000):
    """Meanwhile `engine.run` works on a scripted device."""
    device = ScriptedDevice()
    monkeypatch.setattr(devices, "torch", Torch(device))
    monkeypatch.setattr(devices, "keep_until_done", device.keep_until_done)
    monkeypatch.setattr(clocks, "time", types.SimpleNamespace(monotonic_ns=lambda: device.now_ns))
    monkeypatch.setattr(devices, "keeps_history", lambda device_: True)
    monkeypatch.setattr(devices, "begin_history", device.begin_history)
    monkeypatch.setattr(devices, "end_history", device.end_history)
    with Tensors(device, copy_ns):
        yield device


class Link:
    """A communicator of two ranks, with a peer that is ready for its messages at set times."""

    def __init__(self, device, name, ready_ns, move_ns):
        self.stream = device.new_stream(name)
        self._device, self._name, self._move_ns = device, name, move_ns
        self._ready = iter(ready_ns)

    def send(self, tensor):
        return self._move(f"send on {self._name}", reads=[tensor])

    def receive(self, tensor):
        return self._move(f"receive on {self._name}", writes=[tensor])

    def _move(self, name, **tensors):
        """As NCCL: its own stream waits for the current one, and `wait` makes that wait for it."""
        device = self._device
        self.stream.wait_stream(device.stream)
        with self.stream:
            device.launch(name, self._move_ns, not_before_ns=next(self._ready), **tensors)
        return Work(self.stream)


class Work:
    """An operation of a link that has been issued."""

    def __init__(self, stream):
        self._stream = stream

    def wait(self):
        device = self._stream.device
        device.stream.wait_stream(self._stream)
