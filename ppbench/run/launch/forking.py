"""Whether workers may be forked from this process: not once it has used an accelerator.

A fork has its parent's memory but not its connection to the device, and every call there fails with
an obscure error. What is imported for the workers uses no device, but an installed package may: one
that registers itself with torch, or that is imported with transformers. So a child is forked and
asked; and CUDA's driver is asked as well, which other packages than torch may have started.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import torch

FORK, SPAWN = "fork", "spawn"
"""Torch's names of two ways to start workers; the second imports everything anew in each."""

_MAPS = Path("/proc/self/maps")
_DRIVER = "libcuda.so"
_STARTED = 0  # CUDA_SUCCESS: a call before cuInit fails


def start_method() -> str:
    """Return how workers must be started so that they can use the machine's accelerators."""
    return SPAWN if has_started_driver() or not is_child_sound() else FORK


def is_child_sound() -> bool:
    """Whether a fork of this process could use an accelerator, as a child says of itself."""
    pid = os.fork()
    if pid == 0:
        os._exit(is_in_bad_fork())
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) == 0


def is_in_bad_fork() -> bool:
    """Whether this process is a fork of one in which torch had started a device."""
    modules = (getattr(torch, kind, None) for kind in ("cuda", "xpu"))
    known = (getattr(module, "_is_in_bad_fork", None) for module in modules)
    return any(ask is not None and ask() for ask in known)


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
