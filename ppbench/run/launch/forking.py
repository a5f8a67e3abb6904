"""Whether workers may be forked from this process: not once it has used an accelerator.

A fork has its parent's memory but not its connection to the device, and every call there fails with
an obscure error. What is imported for the workers uses no device, but an installed package may: one
that registers itself with torch, or that is imported with transformers. Torch is asked, and CUDA's
driver, which other packages may have started.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

_MAPS = Path("/proc/self/maps")
_DRIVER = "libcuda.so"
_STARTED = 0  # CUDA_SUCCESS: a call before cuInit fails


def may_fork() -> bool:
    """Whether a fork could use an accelerator; else workers import everything anew."""
    kinds = (torch.cuda, torch.xpu)
    return not (any(kind.is_initialized() for kind in kinds) or has_started_driver())


def has_started_driver(
    maps: Path = _MAPS, load: Callable[[str], ctypes.CDLL] = ctypes.CDLL
) -> bool:
    """Whether CUDA's driver is at work in this process, whoever has started it.

    It is asked only where it is loaded already: asking would load it.
    """
    try:
        is_loaded = _DRIVER in maps.read_text()
    except OSError:
        return False
    if not is_loaded:
        return False
    count = ctypes.c_int()
    return bool(load(f"{_DRIVER}.1").cuDeviceGetCount(ctypes.byref(count)) == _STARTED)
