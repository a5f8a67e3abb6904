"""Answers every question about an accelerator: the one module that knows torch's interface to it.

It speaks `torch.accelerator`, `torch.Stream` and `torch.Event`, which are one interface for CUDA,
ROCm and XPU; the few things that it lacks come from the backend's own module. So no other module
names a backend, but for what is one vendor's alone (NVML, the options of NCCL).

    which          kind, count, of_local_rank, make_current, is_accelerator, name_of, uuid_of
    in what order  current_stream, new_stream, wait_for_all, keep_until_done
    when           timed_event, order_event, host_event
    how much       allocated_bytes, reserved_bytes, reset_peaks, peaks_of, used_bytes, free_bytes,
                   empty_cache
    for whom       keeps_history, begin_history, end_history
    by chance      random_state, set_random_state, active_devices
    messages       backend_of

An event is always recorded on the stream that is current, so that a backend's own events and
streams never meet those of the general interface.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

CPU = torch.device("cpu")


def kind() -> str | None:
    """The type of this process's accelerators, such as `cuda` (ROCm too) or `xpu`; None: none."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator is None else accelerator.type


def count() -> int:
    """How many accelerators this process sees on its node."""
    return int(torch.accelerator.device_count())


def is_accelerator(device: torch.device) -> bool:
    """Whether work on it is only issued by the host, and done later."""
    return device.type != "cpu"


def of_local_rank(local_rank: int, wanted: str | None = None) -> torch.device:
    """The rank's own accelerator, or its turn at a shared one; it becomes the current device.

    Raises RuntimeError where there is none of the wanted type; None: of any.
    """
    name, num_devices = kind(), count()
    if name is None or not num_devices or wanted not in (None, name):
        seen = f"{num_devices} of type {name}" if name else "no accelerator"
        raise RuntimeError(f"the device is {wanted or 'any'}, and torch sees {seen} here; use cpu")
    device = torch.device(name, local_rank % num_devices)
    torch.accelerator.set_device_index(device.index)
    return device


def make_current(device: torch.device) -> None:
    """Let the calling thread work on the device; a new one would open the first one's context."""
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)


def name_of(device: torch.device) -> str:
    """The product's name, as its driver tells it."""
    return str(torch.get_device_module(device).get_device_name(device))


def uuid_of(device: torch.device) -> str:
    """An id of the accelerator that is the same in every process."""
    return str(torch.get_device_module(device).get_device_properties(device).uuid)


def current_stream(device: torch.device) -> torch.Stream:
    """The stream on which work of this thread is issued."""
    return torch.accelerator.current_stream(device)


def new_stream(device: torch.device) -> torch.Stream:
    """Another stream: torch lends those of a pool in turn, and after the last the first again."""
    return torch.Stream(device)


def wait_for_all(device: torch.device) -> None:
    """Block the host until the device has done all that was issued.

    `torch.accelerator.synchronize` returns at once in a process that has made no tensor there, even
    where kernels and events were issued.
    """
    torch.get_device_module(device).synchronize(device)


def keep_until_done(tensor: Tensor, stream: torch.Stream) -> None:
    """Let the allocator reuse the tensor's memory only after what the stream does with it now."""
    tensor.record_stream(stream)


def timed_event(device: torch.device) -> torch.Event:
    """An event whose distance from another one can be read, in milliseconds."""
    return torch.Event(device, enable_timing=True)


def order_event(device: torch.device) -> torch.Event:
    """An event that streams wait for."""
    return torch.Event(device)


def host_event(device: torch.device) -> torch.Event:
    """An event that the host waits for, asleep where the backend can: no stream waits for it."""
    own: Any = torch.get_device_module(device).Event
    try:
        event: torch.Event = own(blocking=True)
    except TypeError:  # a backend whose events cannot
        event = own()
    return event


@dataclass(frozen=True)
class Peaks:
    """The most bytes at once, since the last reset.

    `active` is `allocated` and what was freed while a stream still used it; `reserved` is what the
    allocator holds of the device.
    """

    allocated_bytes: int
    active_bytes: int | None  # None where the backend does not tell
    reserved_bytes: int


def allocated_bytes(device: torch.device) -> int:
    """The bytes of tensors now."""
    return int(torch.accelerator.memory_allocated(device))


def reserved_bytes(device: torch.device) -> int:
    """The bytes that the allocator holds of the device now."""
    return int(torch.accelerator.memory_reserved(device))


def reset_peaks(device: torch.device) -> None:
    """Let peaks begin again from now."""
    torch.accelerator.reset_peak_memory_stats(device)


def peaks_of(device: torch.device) -> Peaks:
    """The allocator's peaks since `reset_peaks`."""
    active = torch.accelerator.memory_stats(device).get("active_bytes.all.peak")
    return Peaks(
        int(torch.accelerator.max_memory_allocated(device)),
        None if active is None else int(active),
        int(torch.accelerator.max_memory_reserved(device)),
    )


def free_bytes(device: torch.device) -> int:
    """The bytes of the device that no process uses."""
    return _memory_info(device)[0]


def used_bytes(device: torch.device) -> int:
    """The bytes that all processes use: allocators, contexts, communicators."""
    free, total = _memory_info(device)
    return total - free


def _memory_info(device: torch.device) -> tuple[int, int]:
    """Free and total bytes; torch before 2.10 tells them in the backend's module only."""
    tell: Any = getattr(torch.accelerator, "get_memory_info", None)
    if tell is None:
        tell = torch.get_device_module(device).mem_get_info
    free, total = tell(device)
    return int(free), int(total)


def empty_cache() -> None:
    """Give what the allocator holds unused back to the device, where there is one."""
    if count():
        torch.accelerator.empty_cache()


def keeps_history(device: torch.device) -> bool:
    """Whether the allocator can note what it allocates; other allocators than torch's cannot."""
    module: Any = torch.get_device_module(device)
    tell = getattr(module, "get_allocator_backend", None)
    has_history = hasattr(getattr(module, "memory", None), "_record_memory_history")
    return has_history and (tell is None or tell() == "native")


def begin_history(device: torch.device) -> None:
    """Note every allocation and free from now on."""
    memory: Any = torch.get_device_module(device).memory
    memory._record_memory_history("all", context=None)


def end_history(device: torch.device) -> list[dict[str, object]]:
    """What was noted on this device, oldest first; nothing more is noted. Synchronises it."""
    wait_for_all(device)
    memory: Any = torch.get_device_module(device).memory
    traces = memory._snapshot(device)["device_traces"]
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    memory._record_memory_history(None)
    return list(traces[index])


def random_state(device: torch.device) -> Tensor:
    """Where the device's generator of random numbers is; that of the CPU is torch's own."""
    if not is_accelerator(device):
        return torch.get_rng_state()
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: Tensor, device: torch.device) -> None:
    """Go on drawing random numbers from a state of `random_state`."""
    if is_accelerator(device):
        torch.get_device_module(device).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def active_devices() -> Sequence[torch.device]:
    """The current accelerator if this process has used one; asking does not start it."""
    name = kind()
    if name is None or not torch.get_device_module(name).is_initialized():
        return []
    return [torch.device(name, torch.accelerator.current_device_index())]


def backend_of(device: torch.device) -> str:
    """The backend of torch.distributed for tensors on the device: `nccl`, `xccl`, `gloo`."""
    return str(dist.get_default_backend_for_device(device))
