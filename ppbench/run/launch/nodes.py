"""torchrun, but listening on one interface of each machine only.

    python -m ppbench.run.launch.nodes [TORCHRUN OPTIONS]

Torchrun's stores listen on every interface, and obey anyone who reaches them. Here, the machine
that the rendezvous endpoint names listens on that address alone, and each of the others on the
address from which it reaches that one; so do gloo and NCCL. `GLOO_SOCKET_IFNAME` chooses another
interface.

    endpoint's machine   its agents' store   <--   agents of all machines
    first machine        the ranks' store    <--   ranks of all machines
"""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import sys
from datetime import timedelta
from typing import Any, NoReturn

from torch.distributed import run
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    dynamic_rendezvous,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

from engine import device_variables
from engine.interfaces import (
    Interface,
    InterfaceError,
    is_this_machine,
    keep_to,
    listen,
    place_to_listen,
    place_towards,
    refuse_unspecified,
)
from engine.rank_store import reach, serve
from ppbench.errors import StoreError, first_line
from ppbench.run.machine.node_folder import VARIABLE, make_node_folder

BACKEND = "c10d"
DEFAULT_PORT = 29400
_ADDRESS = "ppbench/address-of-ranks"
_STORE_TIMEOUT = timedelta(seconds=300)  # torch's, for the ranks'


def create(params: RendezvousParameters) -> RendezvousHandler:
    """Make the handler that torchrun asks for; end the process where no address can be chosen."""
    try:
        host, port = parse_rendezvous_endpoint(params.endpoint, DEFAULT_PORT)
        store, place = _open_store(host, port, params)
    except (RuntimeError, ValueError) as error:  # also torch's, of a store that is not reached
        _refuse(f"--rdzv-endpoint {params.endpoint}: {first_line(error)}")
    print(f"{platform.node()}: listens on {place.address} ({place.name}) alone", file=sys.stderr)
    keep_to(place.name, os.environ)
    backend = C10dRendezvousBackend(store, params.run_id)
    handler: Any = create_handler(store, backend, params)
    # Torch calls it where agents share a store.
    handler._create_tcp_store_server = lambda _, port: serve(place.address, port, _STORE_TIMEOUT)
    next_rendezvous = handler.next_rendezvous

    def rendezvous_on_interface() -> RendezvousInfo:
        """Block until all nodes are here. The store's keys are those of this round.

        Torch would publish the first machine's name, which may be loopback there, or another
        interface.
        """
        met = next_rendezvous()
        if met.rank == 0:
            info = met.bootstrap_store_info
            if info is not None and handler.use_agent_store:
                port = info.master_port
            else:  # one that is free
                with listen(place.address, 0) as listener:
                    port = int(listener.getsockname()[1])
            met.store.set(_ADDRESS, f"{port} {place.address}")
        port_text, _, address = met.store.get(_ADDRESS).decode().partition(" ")
        where = RendezvousStoreInfo(address, int(port_text))
        return RendezvousInfo(met.store, met.rank, met.world_size, where)

    handler.next_rendezvous = rendezvous_on_interface
    checked: RendezvousHandler = handler
    return checked


def _open_store(host: str, port: int, params: RendezvousParameters) -> tuple[Any, Interface]:
    """Return the agents' store, and the interface on which this machine listens."""
    timeout = timedelta(seconds=params.get_as_int("read_timeout", 60) or 60)
    refuse_unspecified(host)
    is_host = params.get_as_bool("is_host")
    if is_host is None:
        is_host = is_this_machine(host)
    if not is_host:
        return reach(host, port, timeout), place_towards(host)
    place = place_to_listen(host, is_far=params.max_nodes > 1)
    try:
        return serve(place.address, port, timeout), place
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise InterfaceError(
                f"{place.address}:{port}: cannot be listened on: {error}"
            ) from error
    return reach(place.address, port, timeout), place  # another agent of this machine serves it


def _refuse_static(_params: RendezvousParameters) -> NoReturn:
    """Refuse torch's static rendezvous, whose store listens on every interface."""
    _refuse(
        "--rdzv-backend static: its store listens on every interface; expected c10d: add "
        "--standalone for one machine, or --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
    )


def _refuse(problem: str) -> NoReturn:
    print(f"error: {problem}", file=sys.stderr, flush=True)
    sys.exit(2)


def main() -> None:
    device_variables.prepare(os.environ)  # the ranks inherit them
    registry = rendezvous_handler_registry._registry  # which lets nothing be registered twice
    registry[BACKEND], registry["static"] = create, _refuse_static
    # Torch notes the function on the stack with each event of a rendezvous. Its own way reads the
    # source of all of them: seconds, while the machines wait for each other.
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    try:
        folder = make_node_folder()
    except StoreError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(error.exit_code)
    os.environ[VARIABLE] = str(folder)
    try:
        run.main()
    finally:
        with contextlib.suppress(OSError):  # what the ranks left is read by the next sweep
            folder.parent.rmdir()


if __name__ == "__main__":
    main()
