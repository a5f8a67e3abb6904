"""How the supervisors of a launch's nodes agree on their numbers, and when ranks start and end.

The supervisor at the rendezvous leads; the others are its members, each with one connection to it.
A launch on one machine has a leader alone. Messages are lines of JSON:

    member  ->  {"name": HOST}        it is here
            ->  {"over": CODE}        its ranks of this start have ended
    leader  ->  {"order": "Start", "node": 1, ...}     start ranks, which meet at that store
            ->  {"order": "End"}                       end them: some have failed elsewhere
            ->  {"order": "Leave", "code": 0, ...}     the launch is over

When ranks fail on any node, or a node is lost, all ranks end, and start anew once as many nodes are
here as the launch needs: a node that comes later takes the number of one that was lost. A member
that has lost its leader waits for another at the same place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import socket
import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public

from engine.interfaces import LOOPBACK
from engine.rank_store import serve
from ppbench.config.case import Supervision
from ppbench.run.launch.local import GAVE_UP

STORE_TIMEOUT = timedelta(seconds=300)  # torch's
_TALK_S = 10.0
"""Time for a message to go out; the connection of a machine that is gone is lost as soon."""
_KEEPALIVE = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 10_000}


@dataclass(frozen=True)
class Start:
    """Start the ranks of this node, which find the others through the store at this place."""

    node: int
    num_nodes: int
    host: str
    port: int


@dataclass(frozen=True)
class End:
    """End the ranks of this node."""


@dataclass(frozen=True)
class Leave:
    """The launch is over, with this exit code; `why` says what was wrong, if nothing else does."""

    code: int
    why: str = ""


Order = Start | End | Leave
_ORDERS: dict[str, type[Order]] = {order.__name__: order for order in (Start, End, Leave)}


class Link:
    """A connection that carries lines of JSON."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket, self._data = connection, b""
        connection.settimeout(_TALK_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message; one that cannot be sent is lost with the connection."""
        with contextlib.suppress(OSError):
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the messages that have come; None once the connection is lost."""
        try:
            data = self.socket.recv(1 << 16)
            *lines, self._data = (self._data + data).split(b"\n")
            return [dict(json.loads(line)) for line in lines] if data else None
        except (OSError, ValueError, TypeError):
            return None


@dataclass(eq=False)
class Seat:
    """A node at the leader's."""

    link: Link | None  # None: the leader's own
    name: str = ""  # empty until it has said it
    number: int | None = None  # once it has had part in a start
    code: int | None = None  # of its ranks in this start; None while they are at work


class Leader:
    """The supervisor at the rendezvous, which decides."""

    def __init__(
        self,
        num_nodes: int,
        max_restarts: int,
        address: str = LOOPBACK,
        listener: socket.socket | None = None,
    ) -> None:
        """`address` is where each start's store listens, `listener` takes the other nodes."""
        self.orders: deque[Order] = deque()
        self._patience_s = Supervision.here().patience_s
        self._num_nodes, self._max_restarts = num_nodes, max_restarts
        self._address, self._listener = address, listener
        self._own = Seat(None, platform.node())
        self._seats = [self._own]
        self._at_work: list[Seat] = []  # those with a part in the present start
        self._is_ending, self._is_over, self._num_starts = False, False, 0
        self._store: TCPStore | None = None  # of the present start
        self._until_s = time.monotonic() + self._patience_s
        self._go_on()

    @property
    def sockets(self) -> list[socket.socket]:
        """Those to wait for."""
        links = [seat.link.socket for seat in self._seats if seat.link is not None]
        return links if self._listener is None else [self._listener, *links]

    def hear(self, ready: Collection[int]) -> None:
        """Take what has come in at these descriptors, and look at the clock."""
        for seat in list(self._seats):
            if seat.link is None or seat.link.socket.fileno() not in ready:
                continue
            messages = seat.link.receive()
            for message in messages or []:
                seat.name = str(message.get("name", seat.name))
                seat.code = int(message["over"]) if "over" in message else seat.code
            if messages is None:
                seat.link.socket.close()
                self._seats.remove(seat)
        if self._listener is not None and self._listener.fileno() in ready:
            self._seats.append(Seat(Link(self._listener.accept()[0])))
        self._go_on()

    def report(self, code: int) -> None:
        """Say that this node's ranks have ended: 0 if all have done their work."""
        self._own.code = code
        self._go_on()

    def close(self) -> None:
        for one in self.sockets:
            one.close()
        self._store = None

    def _go_on(self) -> None:
        """Give the orders that follow from what is known now."""
        if self._at_work and not self._is_over:
            codes = [seat.code for seat in self._at_work]
            has_failed = any(codes) or any(seat not in self._seats for seat in self._at_work)
            left = [s for s in self._at_work if s in self._seats and s.code is None]
            if has_failed and not self._is_ending:
                self._is_ending = True
                for seat in left:
                    self._order(seat, End())
            if left:
                return
            self._at_work, self._is_ending = [], False
            self._until_s = time.monotonic() + self._patience_s
            if not has_failed or GAVE_UP in codes:
                self._leave(GAVE_UP if has_failed else 0)
            elif self._num_starts > self._max_restarts:
                self._leave(1, f"the ranks have failed in each of {self._num_starts} starts")
        here = [seat for seat in self._seats if seat.name]
        if self._is_over:
            pass
        elif len(here) >= self._num_nodes:
            self._start(sorted(here, key=lambda seat: seat.number is None)[: self._num_nodes])
        elif time.monotonic() > self._until_s:
            came = f"{len(here)} of {self._num_nodes} nodes came within {self._patience_s:g} s"
            names = ", ".join(seat.name for seat in here)
            self._leave(1, f"{came}: {names}; start the same command on the others too")

    def _start(self, seats: list[Seat]) -> None:
        """Have these nodes start their ranks; those without a number get those that are free."""
        free = sorted(set(range(self._num_nodes)) - {seat.number for seat in seats})
        for seat in sorted(seats, key=lambda seat: seat.name):
            if seat.number is None:
                seat.number = free.pop(0)
        self._store = None  # that of the start before
        self._store = serve(self._address, 0, STORE_TIMEOUT)
        self._num_starts += 1
        self._at_work = seats
        for seat in seats:
            assert seat.number is not None
            seat.code = None
            start = Start(seat.number, self._num_nodes, self._address, self._store.port)
            self._order(seat, start)

    def _leave(self, code: int, why: str = "") -> None:
        self._is_over = True
        for seat in self._seats:
            self._order(seat, Leave(code, why))

    def _order(self, seat: Seat, order: Order) -> None:
        if seat.link is None:
            self.orders.append(order)
        else:
            seat.link.send({"order": type(order).__name__, **dataclasses.asdict(order)})


class Member:
    """The supervisor of another node, which does as its leader says."""

    def __init__(self, host: str, port: int) -> None:
        self.orders: deque[Order] = deque()
        self._patience_s = Supervision.here().patience_s
        self._place = host, port
        self._link: Link | None = None
        self._is_at_work = False
        self._until_s = time.monotonic() + self._patience_s

    @property
    def sockets(self) -> list[socket.socket]:
        return [] if self._link is None else [self._link.socket]

    def hear(self, ready: Collection[int]) -> None:
        if self._link is None:
            if not self._is_at_work:
                self._connect()
        elif self._link.socket.fileno() in ready:
            messages = self._link.receive()
            if messages is None:
                self.close()
                self._until_s = time.monotonic() + self._patience_s
                self.orders.append(End())
            for message in messages or []:
                order = _ORDERS[message.pop("order")](**message)
                self._is_at_work = self._is_at_work or isinstance(order, Start)
                self.orders.append(order)

    def report(self, code: int) -> None:
        self._is_at_work = False
        if self._link is not None:
            self._link.send({"over": code})

    def close(self) -> None:
        if self._link is not None:
            self._link.socket.close()
        self._link = None

    def _connect(self) -> None:
        try:
            self._link = Link(socket.create_connection(self._place, timeout=1.0))
        except OSError as error:  # it is not there yet, or not yet again
            if time.monotonic() > self._until_s:
                (host, port), patience_s = self._place, self._patience_s
                why = f"{host}:{port}: no answer within {patience_s:g} s: {error}; start the same"
                self.orders.append(Leave(1, f"{why} command on that node too"))
        else:
            self._link.send({"name": platform.node()})
