"""Processes as the kernel lists them: which live, what they have started, where they listen."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import re
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

LISTEN = "0A"


def wait_until(
    is_true: Callable[[], object],
    what: str | Callable[[], object] = "",
    patience_s: float = 120.0,
    every_s: float = 0.02,
) -> None:
    """What it waits for may be told by a function, which is called only if it never comes."""
    until = time.monotonic() + patience_s
    while not is_true():
        late = time.monotonic() >= until
        assert not late, f"never came to be: {what() if callable(what) else what}"
        time.sleep(every_s)


def _fields_of(pid: int | str) -> list[str]:
    """State, parent and so on; none once the process is gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


def is_alive(pid: int) -> bool:
    """Whether a process is alive; a zombie, which only waits for its parent, is not."""
    return _fields_of(pid)[:1] not in ([], ["Z"], ["X"])


def children() -> dict[int, set[int]]:
    """The processes that each process has started."""
    found: dict[int, set[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        if fields := _fields_of(folder.name):
            found.setdefault(int(fields[1]), set()).add(int(folder.name))
    return found


def descendants(pid: int) -> set[int]:
    """The process and all that it has started, and these, and so on."""
    started, found, new = children(), {pid}, {pid}
    while new:
        new = set().union(*(started.get(one, set()) for one in new)) - found
        found |= new
    return found


def naming(word: str) -> list[str]:
    """The command lines that have this word."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended
            line = path.read_bytes().decode(errors="replace")
            found += [line] if word in line else []
    return found


def free_port() -> int:
    """A port that is free, as is the next, and that the system gives to nobody who asks for any."""
    while True:
        port = random.randrange(10_000, 30_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as held:
            for one in (port, port + 1):
                held.enter_context(socket.create_server(("127.0.0.1", one)))
            return port


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


def listened(
    processes: Sequence[subprocess.Popen[bytes]], what: Callable[[], object], patience_s: float
) -> list[set[str]]:
    """The addresses that each process and its descendants ever listened on, until they end."""
    seen: list[set[str]] = [set() for _ in processes]

    def have_ended() -> bool:
        alive = [process.poll() is None for process in processes]
        for addresses, process, lives in zip(seen, processes, alive, strict=True):
            addresses.update(listening(process.pid) if lives else ())
        return not any(alive)

    wait_until(have_ended, what, patience_s, every_s=0.25)
    return seen


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
