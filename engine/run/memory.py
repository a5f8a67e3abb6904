"""How much memory a step takes on this rank, by three readings.

CUDA: the caching allocator's own peaks. CPU: torch has no such counter, so one extra, untimed
step runs under the profiler and its allocation events are added up, on top of what was alive
before; messages whose shapes vary are left out, since other threads make room for them. Both:
the process's high-water mark.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class MemoryPeaks:
    """Bytes at the worst moment of a step; None where the device or system does not tell."""

    peak_bytes: int  # allocated to tensors
    reserved_bytes: int | None  # held by the caching allocator (CUDA)
    process_peak_bytes: int | None  # resident set of the process (Linux)


def measure_peaks(
    device: torch.device, step: Callable[[], object], persistent: Iterable[Tensor]
) -> MemoryPeaks:
    """Run `step` once and report its peaks.

    `persistent` are the tensors alive before and after it (parameters, buffers, optimizer state);
    gradients must not be alive when it starts.
    """
    gc.collect()  # a tensor that dies during the step would count as freed by it
    if device.type == "cuda":
        return _cuda_peaks(device, step)
    alive_bytes = total_bytes(persistent)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    peak_bytes = alive_bytes + _highest_sum(_allocation_events(profiler))
    return MemoryPeaks(peak_bytes, None, process_peak_bytes())


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the tensors' storages, each storage counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def _cuda_peaks(device: torch.device, step: Callable[[], object]) -> MemoryPeaks:
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return MemoryPeaks(
        torch.cuda.max_memory_allocated(device),
        torch.cuda.max_memory_reserved(device),
        process_peak_bytes(),
    )


def _allocation_events(profiler: profile) -> list[int]:
    """Signed sizes of the CPU allocations and frees of the profiled region, in time order.

    Read from the raw results: the public event list folds them into the operators around them.
    """
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    events = [
        (event.start_ns(), int(event.nbytes()))  # type: ignore[attr-defined]  # stub lags
        for event in results.events()
        if event.name() == "[memory]" and event.device_type() == DeviceType.CPU
    ]
    return [num_bytes for _, num_bytes in sorted(events, key=lambda event: event[0])]


def _highest_sum(changes: Iterable[int]) -> int:
    return max(itertools.accumulate(changes, initial=0))


def process_peak_bytes() -> int | None:
    """The process's resident high-water mark since the last reset; None where unknown."""
    try:
        match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    except OSError:
        return None
    return int(match[1]) * 1024 if match else None


def reset_process_peak() -> None:
    """Make the high-water mark start again from now, where Linux allows it."""
    with contextlib.suppress(OSError):
        _CLEAR_REFS.write_text("5")
