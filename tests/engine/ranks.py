"""A pool of real processes with a real process group, kept for the whole test session.

Importing torch and transformers costs seconds per process; a case costs milliseconds. So they are
imported once, by the server of `warm_processes`, and the ranks are its forks.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from typing import Any

Function = Callable[..., Any]
PATIENCE_S = 120


def warm_processes() -> ForkServerContext:
    """Starts processes that have what takes long imported (conftest), and share nothing else."""
    return multiprocessing.get_context("forkserver")


class Ranks:
    def __init__(self, num_ranks: int) -> None:
        context = warm_processes()
        port = _free_port()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_ranks, port, theirs))
            process.daemon = True
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, world_size: int, function: Function, *arguments: Any) -> list[Any]:
        """Call `function(fabric, is_member, *arguments)` on all ranks; the members' results."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((function, rank < world_size, arguments))
        deadline = time.monotonic() + PATIENCE_S
        answers = [self._answer(pipe, deadline) for pipe in self._pipes]
        for rank, (failure, _) in enumerate(answers):  # what one fails of, others may wait for
            assert failure is None, f"rank {rank} failed:\n{failure}"
        for rank, (_, results) in enumerate(answers):
            assert results, f"rank {rank} did not answer: the pipeline hangs"
        return [results[0] for _, results in answers[:world_size]]

    def _answer(self, pipe: Connection, deadline: float) -> tuple[str | None, list[Any]]:
        """The failure, or the result as the only one; nothing of a rank that hangs."""
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            return None, []
        failure, result = pipe.recv()
        return failure, [result]

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _serve(rank: int, num_ranks: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(num_ranks)
    )
    import torch
    import torch.distributed as dist

    from engine.run.clock import HostClock
    from engine.run.p2p.fabric import Fabric

    gc.freeze()  # before each step in which memory is measured, garbage is collected
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    fabric = Fabric(torch.device("cpu"), HostClock(), is_device_shared=False)
    while (task := pipe.recv()) is not None:
        function, is_member, arguments = task
        try:
            pipe.send((None, function(fabric, is_member, *arguments)))
        except Exception:
            pipe.send((traceback.format_exc(), None))
    dist.destroy_process_group()
