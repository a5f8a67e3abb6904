"""The store through which the ranks find each other, on one address of the machine that has it.

Torch's own listens on every interface, whatever it is given. It takes a socket that listens
already, though (`master_listen_fd`).
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public

from engine.interfaces import LOOPBACK, InterfaceError, keep_to_loopback, listen, place_to_listen

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")


def serve(address: str, port: int, timeout: timedelta) -> TCPStore:
    """A store at this address alone. Raises OSError if something else listens there."""
    listener = listen(address, port)
    return TCPStore(
        address,
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )


def reach(host: str, port: int, timeout: timedelta) -> TCPStore:
    """Another process's store; blocks until it is there."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def store_of_ranks(timeout: timedelta) -> TCPStore:
    """The store that torchrun's environment names; rank 0 serves it, unless the agent does.

    Where all ranks are on this machine, what they open listens on loopback. Raises InterfaceError.
    """
    environ = os.environ
    if missing := [name for name in _VARIABLES if name not in environ]:
        raise InterfaceError(f"{missing[0]}: not set; start the ranks with torchrun, or set it")
    host, port = environ["MASTER_ADDR"], int(environ["MASTER_PORT"])
    # Whether all ranks are known to be on this machine, and whether some are known not to be.
    is_by_torchrun = "LOCAL_WORLD_SIZE" in environ
    is_near = is_by_torchrun and int(environ["LOCAL_WORLD_SIZE"]) >= int(environ["WORLD_SIZE"])
    is_far = is_by_torchrun and not is_near
    if is_near:
        keep_to_loopback(environ)
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return reach(host, port, timeout)
    if is_near:
        host = LOOPBACK  # where rank 0 listens, whatever this machine's name means
    if environ["RANK"] != "0":
        return reach(host, port, timeout)
    place = place_to_listen(host, is_far=is_far)
    try:
        return serve(place.address, port, timeout)
    except OSError as error:
        raise InterfaceError(f"{place.address}:{port}: cannot be listened on: {error}") from error
