"""Two nodes on one machine: namespaces of network, host name and shared memory, joined by a cable.

node-a 10.77.0.1 ---- veth ---- 10.77.0.2 node-b
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import warm

ADDRESSES = {"node-a": "10.77.0.1", "node-b": "10.77.0.2"}
SETUP = """
hostname "$1"; mount -t tmpfs shm /dev/shm; mount --bind "$2" /etc/hosts; shift 2; exec "$@"
"""


def reason_against_nodes() -> str | None:
    """Why no such nodes can be made here; None where they can."""
    if sys.platform != "linux":
        return "needs network namespaces"
    try:
        with tempfile.NamedTemporaryFile() as hosts, two_nodes(Path(hosts.name)):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"needs network namespaces, and so root and iproute2: {error}"


class Node:
    """One of the two nodes."""

    def __init__(self, name: str, namespace: str, hosts: Path) -> None:
        self.name, self._namespace, self._hosts = name, namespace, hosts

    def start(
        self, command: Sequence[str], folder: Path, log: Path, **environment: str
    ) -> subprocess.Popen[bytes]:
        """Run a command there; what it prints is added to a file."""
        unshare = ["ip", "netns", "exec", self._namespace, "unshare", "--uts", "--mount"]
        setup = ["sh", "-ec", SETUP, "sh", self.name, str(self._hosts)]
        with log.open("ab") as file:
            return subprocess.Popen(
                warm.inside([*unshare, *setup], command),
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def use_hosts(self, hosts: Path) -> None:
        """Give processes that start on the node from now on these names of addresses."""
        self._hosts = hosts

    def set_link(self, state: str) -> None:
        """Cut its cable, or join it again: `down` or `up`."""
        _run("ip", "-n", self._namespace, "link", "set", "eth0", state)

    def kill(self) -> None:
        """All that runs there, at once, as when the power fails."""
        found = _run("ip", "netns", "pids", self._namespace)
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def two_nodes(hosts: Path) -> Iterator[tuple[Node, Node]]:
    """Yield two nodes; `hosts` is a file to be written that maps names to their addresses."""
    names = {name: f"ppbench-{os.getpid()}-{name}" for name in ADDRESSES}
    nodes = tuple(Node(name, namespace, hosts) for name, namespace in names.items())
    lines = [f"{address} {name}" for name, address in ADDRESSES.items()]
    hosts.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
    try:
        for namespace in names.values():
            _run("ip", "netns", "add", namespace)
        first, second = names.values()
        ends = ["eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second]
        _run("ip", "link", "add", *ends)
        for name, namespace in names.items():
            _run("ip", "-n", namespace, "address", "add", f"{ADDRESSES[name]}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _run("ip", "-n", namespace, "link", "set", device, "up")
        assert len(nodes) == 2
        yield nodes
    finally:
        for node, namespace in zip(nodes, names.values(), strict=True):
            with contextlib.suppress(subprocess.CalledProcessError):
                node.kill()
                _run("ip", "netns", "delete", namespace)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True)


_AGAINST = reason_against_nodes()
needs_nodes = pytest.mark.skipif(_AGAINST is not None, reason=_AGAINST or "")
