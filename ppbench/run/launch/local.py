"""Starts the workers on this machine, under an agent (agent.py).

The agent is run as a subprocess: the controller stays free of torch, and a crash of the agent is
an exit code here. It ends with this process, and its workers with it, even when this one is killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from engine.model.presets import PRESETS
from ppbench.errors import LaunchError
from ppbench.run import lifetime
from ppbench.run.launch.exits import first_exit
from ppbench.run.private_folder import SHARED_MEMORY

AGENT = "ppbench.run.launch.agent"
WORKER = "ppbench.run.worker"
PRETRAINED = "engine.model.pretrained"
_LLAMA = "transformers.models.llama.modeling_llama"
_FOR_ANY_MODEL = "torch._dynamo"  # torch imports it for fake tensors and for the first optimizer

STOP_TIMEOUT_S = 15
LOG_LINES = 30


class LocalLaunch:
    """The agent and its workers, from start to end. Their logs go to `folder`."""

    def __init__(
        self,
        folder: Path,
        program: Sequence[str],
        *,
        num_ranks: int,
        threads_per_rank: int,
        max_restarts: int,
        preloaded: str,
    ) -> None:
        """`program` is what each worker runs: a module's name and its arguments.

        `preloaded` names modules that import what takes long, with commas between; workers are
        forked when they have. Raises LaunchError if this machine lets none be started.
        """
        check_semaphores()
        self._folder = folder
        self._log = (folder / "agent.log").open("wb")
        self._agent = subprocess.Popen(
            local_command(folder, program, num_ranks, max_restarts, preloaded),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=_environment(threads_per_rank),
            start_new_session=True,  # Ctrl-C reaches the controller alone, which stops the agent
        )

    def poll(self) -> int | None:
        """The agent's exit code, or None while it runs."""
        return self._agent.poll()

    def stop(self) -> None:
        """End the agent and, through it, every worker. Blocks until they are gone."""
        if self._agent.poll() is None:
            self._agent.send_signal(signal.SIGTERM)
            try:
                self._agent.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                os.killpg(self._agent.pid, signal.SIGKILL)
                self._agent.wait()
        self._log.close()

    def num_starts(self) -> int:
        """How often the workers have been started."""
        return len(list(self._folder.glob("logs/*/attempt_*")))

    def worker_exit_code(self) -> int | None:
        """The exit code of the worker that failed first, in the newest start that failed."""
        cause = first_exit(self._folder)
        return None if cause is None else cause.exitcode

    def last_lines(self) -> list[str]:
        """The end of the log that tells most: of the worker that failed first, else the newest."""
        cause = first_exit(self._folder)
        start = "*" if cause is None else f"attempt_{cause.attempt}/{cause.rank}"
        for found in (f"logs/*/{start}/stderr.log", "logs/*/attempt_*/*/stderr.log", "agent.log"):
            written = [path for path in self._folder.glob(found) if path.stat().st_size]
            if written:
                newest = max(written, key=lambda path: path.stat().st_mtime)
                return newest.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return []


def check_semaphores() -> None:
    """Torch's agent needs one per worker; Linux keeps them in shared memory. Raises LaunchError."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        raise LaunchError(
            f"{SHARED_MEMORY}: no semaphore can be made there: {error.strerror}; torch starts no "
            "workers without: mount a tmpfs there that can be written to"
        ) from error


def preloaded_for(models: Iterable[str]) -> str:
    """What workers that open these models import, for all of them at once.

    What a user's own module imports is left to each worker: it may do anything at that.
    """
    names, modules = set(models), [WORKER, _FOR_ANY_MODEL]
    if not all(":" in name for name in names):
        modules.append(PRETRAINED)
    if not names.isdisjoint(PRESETS):
        modules.append(_LLAMA)
    return ",".join(modules)


def _environment(threads_per_rank: int) -> dict[str, str]:
    """Each channel has a CUDA stream of its own.

    With fewer hardware queues than streams (the default is 8), a receive that waits could stand in
    front of the compute that its peer waits for.
    """
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        **os.environ,
        "OMP_NUM_THREADS": str(threads_per_rank),
    }


def local_command(
    folder: Path, program: Sequence[str], num_ranks: int, max_restarts: int, preloaded: str
) -> list[str]:
    """The command that starts the workers, as a child of this process."""
    numbers = (str(num_ranks), str(max_restarts))
    return lifetime.command(AGENT, str(folder), *numbers, preloaded, *program)
