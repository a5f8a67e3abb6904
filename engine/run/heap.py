"""The C library's heap, where tensors of the CPU lie.

glibc gives a large block back to the system as soon as it is free, and the next microbatch is given
other pages for it, which the system must first find and clear. Ranks therefore keep what they free.
The settings are those of mallopt(3); other C libraries are left alone.
"""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """Keep what this process frees from now on for its next allocations."""
    if (libc := _glibc()) is not None:
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def give_back_freed_memory() -> None:
    """Let the system have what is free now."""
    if (libc := _glibc()) is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    libc = ctypes.CDLL(None)
    return libc if hasattr(libc, "gnu_get_libc_version") else None
