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


class OneInterface(RendezvousHandler):
    """Torch's handler with another address for the ranks' store.

    Torch would publish the first machine's name, which may be loopback there, or another interface.
    """

    def __init__(self, handler: RendezvousHandler, place: Interface) -> None:
        self._handler, self._place = handler, place
        theirs: Any = handler
        theirs._create_tcp_store_server = self._serve  # torch calls it where agents share a store

    def _serve(self, _host: str, port: int) -> object:
        return serve(self._place.address, port, _STORE_TIMEOUT)

    def next_rendezvous(self) -> RendezvousInfo:
        """Block until all nodes are here. The store's keys are those of this round."""
        met = self._handler.next_rendezvous()
        if met.rank == 0:
            info = met.bootstrap_store_info
            if info is not None and self.use_agent_store:
                port = info.master_port
            else:  # one that is free
                with listen(self._place.address, 0) as listener:
                    port = int(listener.getsockname()[1])
            met.store.set(_ADDRESS, f"{port} {self._place.address}")
        port_text, _, address = met.store.get(_ADDRESS).decode().partition(" ")
        where = RendezvousStoreInfo(address, int(port_text))
        return RendezvousInfo(met.store, met.rank, met.world_size, where)

    @property
    def use_agent_store(self) -> bool:
        return self._handler.use_agent_store

    def get_backend(self) -> str:
        return BACKEND

    def get_run_id(self) -> str:
        return self._handler.get_run_id()

    def is_closed(self) -> bool:
        return self._handler.is_closed()

    def set_closed(self) -> None:
        closes: Any = self._handler.set_closed  # which torch has not typed
        closes()

    def num_nodes_waiting(self) -> int:
        return self._handler.num_nodes_waiting()

    def shutdown(self) -> bool:
        return self._handler.shutdown()


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
    return OneInterface(create_handler(store, backend, params), place)


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


def _caller(depth: int = 2) -> str:
    """Name a function of the stack, which torch notes with each event of a rendezvous.

    Its own way reads the source of all of them: seconds, while the machines wait for each other.
    """
    return sys._getframe(depth).f_code.co_name


def main() -> None:
    device_variables.prepare(os.environ)  # the ranks inherit them
    registry = rendezvous_handler_registry._registry  # which lets nothing be registered twice
    registry[BACKEND], registry["static"] = create, _refuse_static
    dynamic_rendezvous.get_method_name = _caller
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
