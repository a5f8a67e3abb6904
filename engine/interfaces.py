"""Chooses the address of this machine to listen on: one, and never all of them.

Torch's store obeys whoever reaches it, and what is read from it is unpickled; gloo and NCCL know
no passwords either. So they listen on the interface that was given, by the address at which the
ranks meet or by name (`GLOO_SOCKET_IFNAME`), and on one machine on loopback. Pure standard library.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass

LOOPBACK = "127.0.0.1"
GIVEN = "GLOO_SOCKET_IFNAME"
"""Names the interface, or several with commas between; the first is where stores listen."""


class InterfaceError(RuntimeError):
    """No address to listen on; the message says what to set."""


@dataclass(frozen=True)
class Interface:
    """An interface of this machine by one of its addresses; IPv6 in a scope ends in `%scope`."""

    name: str
    address: str


def interfaces() -> list[Interface]:
    """All of them, each as often as it has addresses. Raises InterfaceError."""
    library = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    first = ctypes.POINTER(_Entry)()
    if library.getifaddrs(ctypes.byref(first)) != 0:
        problem = os.strerror(ctypes.get_errno())
        raise InterfaceError(f"this machine's interfaces cannot be listed: {problem}")
    found, entry = [], first
    try:
        while entry:
            address = _address_of(entry.contents.address) if entry.contents.address else None
            if address is not None:
                found.append(Interface(entry.contents.name.decode(), address))
            entry = entry.contents.next
    finally:
        library.freeifaddrs(first)
    return found


class _Entry(ctypes.Structure):
    """The beginning of `struct ifaddrs`."""


_Entry._fields_ = [
    ("next", ctypes.POINTER(_Entry)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _address_of(sockaddr: int) -> str | None:
    """None for a family that is not IP."""
    head = ctypes.string_at(sockaddr, 2)
    family = head[1] if sys.platform == "darwin" else struct.unpack("=H", head)[0]
    if family == socket.AF_INET:
        return socket.inet_ntop(socket.AF_INET, ctypes.string_at(sockaddr + 4, 4))
    if family == socket.AF_INET6:
        text = socket.inet_ntop(socket.AF_INET6, ctypes.string_at(sockaddr + 8, 16))
        (scope,) = struct.unpack("=I", ctypes.string_at(sockaddr + 24, 4))
        return f"{text}%{socket.if_indextoname(scope)}" if scope else text
    return None


def is_loopback(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    mapped = getattr(ip, "ipv4_mapped", None)
    return bool((mapped or ip).is_loopback)


def given_interface() -> Interface | None:
    """The interface that the user names, at its IPv4 address if it has one.

    Raises InterfaceError if there is no such interface here.
    """
    name = os.environ.get(GIVEN, "").partition(",")[0].strip()
    if not name:
        return None
    known = interfaces()
    found = [one for one in known if one.name == name]
    if not found:
        names = ", ".join(dict.fromkeys(one.name for one in known))
        raise InterfaceError(f"{GIVEN}: no interface {name!r} with an address here; known: {names}")
    return min(found, key=lambda one: ":" in one.address)


def interface_at(address: str) -> Interface | None:
    """The interface that has an address; None if it is none of this machine's."""
    known = interfaces()
    for one in known:
        if one.address == address:
            return one
    if is_loopback(address):  # all of 127.0.0.0/8 is, whichever is listed
        return next(
            (Interface(one.name, address) for one in known if is_loopback(one.address)), None
        )
    return None


def resolve(host: str) -> list[str]:
    """A host's addresses, IPv4 first. Raises InterfaceError."""
    try:
        found = socket.getaddrinfo(host, None, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError) as error:
        raise InterfaceError(f"{host}: has no address that is known here: {error}") from error
    addresses = dict.fromkeys(_text_of(sockaddr) for *_, sockaddr in found)
    return sorted(addresses, key=lambda address: ":" in address)


def _text_of(sockaddr: tuple[object, ...]) -> str:
    """The address with its scope, as interfaces have it."""
    address, scope = str(sockaddr[0]), sockaddr[3] if len(sockaddr) == 4 else 0
    if isinstance(scope, int) and scope and "%" not in address:
        return f"{address}%{socket.if_indextoname(scope)}"
    return address


def refuse_unspecified(host: str) -> None:
    """Raises InterfaceError for a host that is no address of any interface, such as 0.0.0.0."""
    for address in resolve(host):
        if ipaddress.ip_address(address.partition("%")[0]).is_unspecified:
            raise InterfaceError(
                f"{host}: means every interface; expected an address of one of them"
            )


def is_this_machine(host: str) -> bool:
    """Whether a host is this machine: by one of its addresses, or by its own name."""
    if host in (socket.gethostname(), socket.getfqdn()):
        return True
    return any(interface_at(address) is not None for address in resolve(host))


def place_to_listen(host: str, *, is_far: bool) -> Interface:
    """Where this machine listens for who comes to `host`, which is one of its own names.

    `is_far`: some come from other machines, which cannot reach loopback. Raises InterfaceError.
    """
    refuse_unspecified(host)
    places = [place for address in resolve(host) if (place := interface_at(address)) is not None]
    given = given_interface()
    if is_far and not _is_meant_as_loopback(host):
        places = [place for place in places if not is_loopback(place.address)]
    if not places and given is not None:
        return given
    if not places:
        raise InterfaceError(
            f"{host}: is {', '.join(resolve(host))} here, where other machines do not come; give "
            f"an address that they reach in place of the name, or name the interface: {GIVEN}=eth0"
        )
    return next((place for place in places if given and place.name == given.name), places[0])


def _is_meant_as_loopback(host: str) -> bool:
    """Whether the user wrote that all machines are this one: namespaces, or several supervisors."""
    try:
        return is_loopback(host)
    except ValueError:
        return host == "localhost"


def place_towards(host: str) -> Interface:
    """The interface through which this machine reaches a host; the given one if there is one.

    Raises InterfaceError.
    """
    given = given_interface()
    if given is not None:
        return given
    for address in resolve(host):
        place = interface_at(_source_towards(address) or address)
        if place is not None:
            return place
    raise InterfaceError(
        f"{host}: there is no way to it from here; expected a host that is reached"
    )


def _source_towards(address: str) -> str | None:
    """The address that this machine would send from; nothing is sent."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    (*_, sockaddr), *_ = socket.getaddrinfo(address, 1, family, socket.SOCK_DGRAM)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(sockaddr)
        except OSError:
            return None
        return _text_of(probe.getsockname())


def listen(address: str, port: int) -> socket.socket:
    """A socket that accepts connections to this address alone; port 0: a free one.

    Raises OSError.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    (*_, sockaddr), *_ = socket.getaddrinfo(address, port, family, socket.SOCK_STREAM)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(sockaddr)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def keep_to(interface: str, environ: MutableMapping[str, str]) -> None:
    """Have gloo, NCCL and tensorpipe listen on an interface, where the user names no other."""
    environ.setdefault(GIVEN, interface)
    environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")
    environ.setdefault("TP_SOCKET_IFNAME", interface)


def keep_to_loopback(environ: MutableMapping[str, str]) -> None:
    """The same for ranks that are all on this machine."""
    place = interface_at(LOOPBACK)
    if place is not None:
        keep_to(place.name, environ)
