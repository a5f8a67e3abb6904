"""The command that starts a sweep on one of several nodes, the same on each.

    torchrun on every node --rendezvous--> one launch: its agents restart all workers together

Whoever starts it, a person, a Slurm job or a pod, has no controller: rank 0 plans and reports.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from ppbench.config.sweep import Sweep
from ppbench.errors import LaunchError, UsageError

WORKER = "ppbench.run.worker"
NODES = "ppbench.run.launch.nodes"
"""Torchrun, but that it listens on one interface."""

STOP_TIMEOUT_S = 35
"""Torchrun gives its workers 30 seconds to end."""


@dataclass(frozen=True)
class Nodes:
    """How many there are, and the ranks on each."""

    num_nodes: int
    ranks_per_node: int
    max_restarts: int


def nodes_for(sweep: Sweep, num_nodes: int) -> Nodes:
    """As many ranks on each node as the largest case asks for; restarts for every run to fail."""
    largest = max(case.world_size for case, _ in sweep.cases)
    tries = sum(2 + measure.retry for _, measure in sweep.cases)
    return Nodes(num_nodes, -(-largest // num_nodes), tries)


@dataclass(frozen=True)
class Meeting:
    """Where the nodes meet: a port of one of them, and what tells this start from others."""

    host: str
    port: int
    name: str

    def of_launch(self, launch: int) -> tuple[str, str]:
        """Endpoint and id. Each launch has a port of its own: the last one's may still be open."""
        return f"{self.host}:{self.port + launch}", f"{self.name}-{launch}"


def torchrun_command(
    nodes: Nodes, endpoint: str, rendezvous_id: str, program: Sequence[str]
) -> list[str]:
    """Run on each node, it runs one launch; `program` are a module and its arguments.

    Agents that meet by `c10d` restart their workers together, whichever node one fails on; by
    `static` they would not. A node that takes the place of a lost one can meet the others only if
    they do not share the agents' store, whose address torch tells in the first round alone.
    """
    return [
        "env",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        sys.executable,
        "-m",
        NODES,
        f"--nnodes={nodes.num_nodes}",
        f"--nproc-per-node={nodes.ranks_per_node}",
        f"--max-restarts={nodes.max_restarts}",
        "--monitor-interval=0.1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={rendezvous_id}",
        "-m",
        *program,
    ]


@dataclass(frozen=True)
class Launches:
    """What one node starts, one launch after the other."""

    num_launches: int
    nodes: Nodes
    program: tuple[str, ...]  # a module and its arguments

    def commands(self, meeting: Meeting) -> list[list[str]]:
        return [
            torchrun_command(self.nodes, *meeting.of_launch(launch), self.program)
            for launch in range(self.num_launches)
        ]

    def run(self, meeting: Meeting) -> None:
        """Blocks until all are over. Raises LaunchError at the first that does not do its work.

        Whatever is raised meanwhile, as by Ctrl-C, ends torchrun and its workers first.
        """
        for number, command in enumerate(self.commands(meeting), start=1):
            print(f"launch {number} of {self.num_launches}: {shlex.join(command)}", flush=True)
            # In a session of its own: Ctrl-C reaches this process alone, which ends torchrun.
            torchrun = subprocess.Popen(command, start_new_session=True)
            try:
                exit_code = torchrun.wait()
            finally:
                _stop(torchrun)
            if exit_code != 0:
                raise LaunchError(f"torchrun ended with exit code {exit_code}")


def _stop(torchrun: subprocess.Popen[bytes]) -> None:
    """Have it end its workers and itself, unless it is over. Blocks until it is."""
    if torchrun.poll() is not None:
        return
    torchrun.send_signal(signal.SIGTERM)
    try:
        torchrun.wait(STOP_TIMEOUT_S)
    except BaseException as error:  # too long, or for whoever stops it once more
        os.killpg(torchrun.pid, signal.SIGKILL)  # its workers die with it
        torchrun.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def launches_of(sweep: Sweep, num_nodes: int, program: Sequence[str]) -> Launches:
    num = max(measure.launches for _, measure in sweep.cases)
    return Launches(num, nodes_for(sweep, num_nodes), tuple(program))


def meeting_of(sweep: Sweep) -> Meeting:
    """As the sweep file has it. Raises UsageError if it does not, and there are several nodes."""
    place = sweep.torchrun
    if not place.rendezvous and place.nodes > 1:
        raise UsageError(
            f"{sweep.file}: launch.torchrun.rendezvous: not set, and {place.nodes} nodes must meet "
            "somewhere; add --set launch.torchrun.rendezvous=HOST:PORT, HOST being one of them"
        )
    host, _, port = (place.rendezvous or "127.0.0.1:29400").rpartition(":")
    return Meeting(host, int(port), sweep.name)
