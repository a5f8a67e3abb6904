"""The addresses on which a process and its descendants listen, as the kernel lists them."""

from __future__ import annotations

import ipaddress
import re
import struct
from pathlib import Path

LISTEN = "0A"


def descendants(pid: int) -> set[int]:
    """The process and all that it has started, and these, and so on."""
    children: dict[int, set[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        children.setdefault(int(fields[1]), set()).add(int(stat.parent.name))
    found, new = {pid}, {pid}
    while new:
        new = set().union(*(children.get(one, set()) for one in new)) - found
        found |= new
    return found


def listening(pid: int) -> set[str]:
    """Addresses that the process and its descendants accept TCP connections on.

    They are all in one network namespace, which need not be this one.
    """
    owned = {inode for one in descendants(pid) for inode in _sockets_of(one)}
    found: set[str] = set()
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]
        except OSError:  # it has ended
            return found
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in owned:
                found.add(_address(fields[1]))
    return found


def is_loopback(address: str) -> bool:
    one = ipaddress.ip_address(address)
    mapped = getattr(one, "ipv4_mapped", None)
    return (mapped or one).is_loopback


def _address(text: str) -> str:
    """`0100007F:1F90` is four bytes per word, each in the machine's order."""
    packed = bytes.fromhex(text.partition(":")[0])
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return str(ipaddress.ip_address(struct.pack(f">{len(words)}I", *words)))


def _sockets_of(pid: int) -> set[str]:
    found = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            match = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
            if match:
                found.add(match[1])
    except OSError:  # it has ended, or closed the file
        pass
    return found
