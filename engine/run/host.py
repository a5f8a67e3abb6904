"""Which ranks share a machine: its clock, and each other's memory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACES = Path("/proc/self/ns")

Gather = Callable[[Any], list[Any]]
"""Every rank's object, in order of rank, on all of them. Blocks until all are here."""


def host_identity(*namespaces: str) -> str | None:
    """Names the kernel since it booted, and this process's namespaces of these kinds.

    None where the system does not tell. A host's name would not do: containers of one kernel have
    their own. Virtual machines restored from one snapshot cannot be told apart by it.
    """
    try:
        own = (str((_NAMESPACES / kind).readlink()) for kind in namespaces)
        return " ".join((_BOOT_ID.read_text().strip(), *own))
    except OSError:
        return None


def clock_identity() -> str | None:
    """Names this process's monotonic clock, which time namespaces may shift; None: not known."""
    return host_identity("time")


def is_same(first: str | None, other: str | None) -> bool:
    """Whether two identities name one thing; what is not told is taken for another."""
    return first is not None and first == other


class _Offer(NamedTuple):
    """Where a rank is, where some memory of its own lies, and what is read there."""

    place: str | None
    path: str
    token: bytes


def can_share_memory(gather: Gather) -> bool:
    """Whether all ranks see each other's memory and read the same clock. Collective.

    Tried out, and not between network namespaces: those stand for hosts.
    """
    offer: _Offer | None = None
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError, AttributeError):  # not Linux, or not allowed
            memory, token = os.memfd_create("engine"), os.urandom(16)
            stack.callback(os.close, memory)
            os.write(memory, token)
            offer = _Offer(host_identity("net", "pid", "time"), path_of(memory), token)

        def sees(theirs: _Offer | None) -> bool:
            if offer is None or theirs is None or not is_same(offer.place, theirs.place):
                return False
            with contextlib.suppress(OSError):
                return Path(theirs.path).read_bytes() == theirs.token
            return False

        return all(gather(all(map(sees, gather(offer)))))


def path_of(descriptor: int) -> str:
    """Where other processes of this rank's user open what it has open."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"
