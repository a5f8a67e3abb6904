"""Calls a function on several ranks, each a new process with a fabric of its own.

Spawned, not forked: a process that has used CUDA cannot be forked. Answers are pickled whole: torch
would otherwise share each tensor's memory, which ends with the process that made it.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from engine.run import device as devices
from engine.run.clock import clock_for
from engine.run.heap import keep_freed_memory
from engine.run.p2p.fabric import Fabric

PATIENCE_S = 300.0
ENDED = "ended without an answer"


class RankError(RuntimeError):
    """A rank that failed, or gave no answer."""


def on_ranks(
    num_ranks: int, device_type: str, function: Callable[..., Any], *arguments: Any, is_shared: bool
) -> list[Any]:
    """The results of `function(fabric, *arguments)` on each rank.

    `is_shared`: all use the first GPU, else each its own. The function must be one of a module.
    Raises RankError with the words of the first rank that failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="ppbench-ranks-") as folder:
        pipes: list[Connection] = []
        processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            place = (rank, num_ranks, f"{folder}/meeting", device_type, is_shared)
            process = context.Process(
                target=_rank_main, args=(place, function, arguments, theirs), daemon=True
            )
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _answers(pipes)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _answers(pipes: list[Connection]) -> list[Any]:
    """Every rank's result; the first failure ends it, since others may wait for that rank."""
    results: dict[int, Any] = {}
    deadline = time.monotonic() + PATIENCE_S
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(pipes)) if rank not in results]
            raise RankError(f"ranks {missing} gave no answer in {PATIENCE_S:.0f} s: they hang")
        for rank in [rank for rank, pipe in enumerate(pipes) if pipe in ready]:
            try:
                answer = pickle.loads(pipes[rank].recv_bytes())  # noqa: S301  # of our own process
            except EOFError:
                raise RankError(f"rank {rank} {ENDED}") from None
            failure, results[rank] = answer
            if failure is not None:
                raise RankError(f"rank {rank}: {failure}")
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    place: tuple[int, int, str, str, bool],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
    pipe: Connection,
) -> None:
    answer: tuple[str | None, Any]
    try:
        answer = None, _called(place, function, arguments)
    except BaseException:
        answer = traceback.format_exc(), None
    pipe.send_bytes(pickle.dumps(answer))
    pipe.poll(None)  # until it is killed: others may still need this rank's memory and store


def _called(
    place: tuple[int, int, str, str, bool], function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    rank, num_ranks, meeting, device_type, is_shared = place
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_RANK": str(rank)}
    os.environ["NCCL_HOSTID"] = f"rank-{rank}"  # NCCL refuses two ranks of a host on one GPU
    torch.set_num_threads(1)
    keep_freed_memory()  # as every rank of a sweep does
    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, 0 if is_shared else rank % devices.count())
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=num_ranks)
    fabric = Fabric(device, clock_for(device), is_shared)
    return function(fabric, *arguments)
