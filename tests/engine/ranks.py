"""A pool of real processes with a real process group, kept for the whole test session.

Importing torch and transformers costs seconds per process; a case costs milliseconds. So they are
imported once, by the server of `warm_processes`, and the ranks are its forks.

A rank that fails amid a collective leaves the others waiting for it, and an answer that comes late
would be taken for that of the next call: after a failure the pool is made anew.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import tempfile
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from typing import Any

Function = Callable[..., Any]
PATIENCE_S = 120
GRACE_S = 10
"""How long ranks may take to answer once another has failed."""


def warm_processes() -> ForkServerContext:
    """Starts processes that have what takes long imported (conftest), and share nothing else."""
    return multiprocessing.get_context("forkserver")


class Alone:
    """A call in a process of its own, which is over when its result is there."""

    def __init__(self, function: Function, *arguments: Any) -> None:
        context = warm_processes()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_answer, args=(theirs, function, arguments))
        self._process.start()
        theirs.close()

    def result(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "no answer"
        failure, result = _received(self._pipe)
        self._process.join(GRACE_S)
        assert failure is None, failure
        return result


def in_a_process(function: Function, *arguments: Any) -> Any:
    return Alone(function, *arguments).result()


def _answer(pipe: Connection, function: Function, arguments: tuple[Any, ...]) -> None:
    """Send a call's result, or why it failed.

    Pickled whole: torch would share the memory of each tensor, and a file of it would stay open.
    """
    try:
        answer = pickle.dumps((None, function(*arguments)))
    except Exception:
        answer = pickle.dumps((traceback.format_exc(), None))
    pipe.send_bytes(answer)


class Ranks:
    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._start()

    def _start(self) -> None:
        context = warm_processes()
        self._folder = tempfile.TemporaryDirectory(prefix="ppbench-ranks-")
        meeting = f"{self._folder.name}/meeting"
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(self._num_ranks):
            ours, theirs = context.Pipe()
            arguments = (rank, self._num_ranks, meeting, theirs)
            process = context.Process(target=_serve, args=arguments)
            process.daemon = True
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, world_size: int, function: Function, *arguments: Any) -> list[Any]:
        """Call `function(fabric, is_member, *arguments)` on all ranks; the members' results."""
        for rank, pipe in enumerate(self._pipes):
            pipe.send((function, rank < world_size, arguments))
        answers = self._answers()
        failures = [f"rank {r} failed:\n{words}" for r, (words, _) in answers.items() if words]
        missing = sorted(set(range(self._num_ranks)) - answers.keys())
        if missing:
            failures.append(f"ranks {missing} did not answer: the pipeline hangs")
        if failures:
            self._restart()
        assert not failures, "\n".join(failures)
        return [answers[rank][1] for rank in range(world_size)]

    def _answers(self) -> dict[int, tuple[str | None, Any]]:
        """The answers by rank; once a rank has failed, of those that do not wait for it."""
        answers: dict[int, tuple[str | None, Any]] = {}
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        has_failed = False
        while waiting:
            ready = wait(list(waiting), GRACE_S if has_failed else PATIENCE_S)
            if not ready:
                break
            for pipe in (pipe for pipe in list(waiting) if pipe in ready):
                rank = waiting.pop(pipe)
                answers[rank] = _received(pipe)
                has_failed |= answers[rank][0] is not None
        return answers

    def _restart(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)
        self._start()

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)


def _received(pipe: Connection) -> tuple[str | None, Any]:
    try:
        answer: tuple[str | None, Any] = pickle.loads(pipe.recv_bytes())
    except (EOFError, ConnectionError):
        return "it has died", None
    return answer


def seed_without_stacks() -> None:
    """Let `torch.manual_seed` keep no stack for each kind of device that is never used.

    Building a small model seeds once for each of its modules, and writing out those stacks would
    take a fifth of the processor time of a test. They are read only when such a device fails.
    """
    import torch

    without_stacks = types.SimpleNamespace(**vars(traceback) | {"format_stack": list})
    for devices in (torch.cuda, torch.xpu, torch.mtia):
        if not devices.is_available():
            devices.traceback = without_stacks  # type: ignore[attr-defined]


def _serve(rank: int, num_ranks: int, meeting: str, pipe: Connection) -> None:
    """Meet the others in a file: a port that was free may be another's by then."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks))
    import torch
    import torch.distributed as dist

    from engine.run.clock import HostClock
    from engine.run.p2p.fabric import Fabric

    gc.freeze()  # before each step in which memory is measured, garbage is collected
    torch.set_num_threads(1)
    seed_without_stacks()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    fabric = Fabric(torch.device("cpu"), HostClock(), is_device_shared=False)
    while (task := pipe.recv()) is not None:
        function, is_member, arguments = task
        _answer(pipe, function, (fabric, is_member, *arguments))
    dist.destroy_process_group()
