"""Ranks in time namespaces of their own: one machine, real processes, clocks that truly differ."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import subprocess
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ranks import PATIENCE_S, _free_port, warm_processes

CLONE_NEWTIME = 0x80
OFFSETS = Path("/proc/self/timens_offsets")


def reason_against_namespaces() -> str | None:
    """Why no time namespace can be made here; None where it can."""
    command = ["unshare", "--time", "--monotonic", "5", "--fork", "true"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "needs Linux with the command unshare"
    return None if done.returncode == 0 else f"needs a time namespace: {done.stderr.strip()}"


def run_apart(offsets_s: Sequence[int], function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """`function(fabric, *arguments)` on as many ranks, each with its clock set ahead; results.

    The ranks are forks of one process, which sets them apart.
    """
    context = warm_processes()
    ours, theirs = context.Pipe()
    parent = context.Process(target=_run_forks, args=(theirs, offsets_s, function, arguments))
    parent.start()
    theirs.close()
    try:
        return [_answer(ours) for _ in offsets_s]
    finally:
        parent.terminate()
        parent.join()


def monotonic_offset_ns() -> int:
    """How far this process's namespace is ahead of the machine's first one."""
    seconds, nanoseconds = OFFSETS.read_text().split()[1:3]
    return int(seconds) * 1_000_000_000 + int(nanoseconds)


def _answer(pipe: Connection) -> Any:
    assert pipe.poll(PATIENCE_S), "a rank did not answer: the exchange hangs"
    failure, result = pipe.recv()
    assert failure is None, failure
    return result


def _run_forks(
    pipe: Connection, offsets_s: Sequence[int], function: Callable[..., Any], arguments: Any
) -> None:
    context, port, answers = multiprocessing.get_context("fork"), _free_port(), []
    # Forks live in the namespace made last; those that keep this process's go first.
    for rank, offset_s in sorted(enumerate(offsets_s), key=lambda one: one[1] != 0):
        if offset_s != 0:
            _make_namespace(offset_s)
        ours, theirs = context.Pipe()
        job = (theirs, rank, len(offsets_s), port, function, arguments)
        context.Process(target=_serve_once, args=job, daemon=True).start()
        answers.append((rank, ours))
    for _, answer in sorted(answers, key=lambda one: one[0]):
        pipe.send(answer.recv())


def _make_namespace(offset_s: int) -> None:
    """Make a time namespace for all processes that this one forks from now on."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWTIME) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    OFFSETS.write_text(f"monotonic {offset_s} 0\n")


def _serve_once(
    pipe: Connection, rank: int, num_ranks: int, port: int, function: Callable[..., Any], given: Any
) -> None:
    import torch
    import torch.distributed as dist

    from engine.run.clock import HostClock
    from engine.run.p2p.fabric import Fabric

    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(num_ranks)
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
        fabric = Fabric(torch.device("cpu"), HostClock(), is_device_shared=False)
        result = function(fabric, *given)
        dist.barrier()  # no rank leaves while another may still talk to it
        pipe.send((None, result))
    except Exception:
        pipe.send((f"rank {rank} failed:\n{traceback.format_exc()}", None))
