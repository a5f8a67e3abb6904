"""Starts the workers on this machine, under an agent (agent.py), and reads how they ended.

The agent is run as a subprocess: the controller stays free of torch, and a crash of the agent is
an exit code here. It ends with this process, and its workers with it, even when this one is killed.

    <launch's folder>/exits.jsonl    a line for each worker that ended of itself

The agent writes that line as it happens. Workers that the agent ends because another one has failed
are not in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine.model.presets import PRESETS
from ppbench.errors import LaunchError
from ppbench.run.launch import lifetime
from ppbench.run.machine.private_folder import SHARED_MEMORY

AGENT = "ppbench.run.launch.agent"
WORKER = "ppbench.run.worker"
PRETRAINED = "engine.model.pretrained"
_LLAMA = "transformers.models.llama.modeling_llama"
_FOR_ANY_MODEL = "torch._dynamo"  # torch imports it for fake tensors and for the first optimizer

STOP_TIMEOUT_S = 15
LOG_LINES = 30


class LocalLaunch:
    """The agent and its workers, from start to end; their logs go to `folder`."""

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
        """Start the agent. Raises LaunchError if this machine cannot start any worker.

        `program` is what each worker runs: a module's name and its arguments. `preloaded` names
        modules whose import takes long, separated by commas; workers are forked once these are
        imported.
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
        """Return the agent's exit code, or None while it runs."""
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
        """Return how often the workers have been started."""
        return len(list(self._folder.glob("logs/*/attempt_*")))

    def worker_exit_code(self) -> int | None:
        """Return the exit code of the worker that failed first, in the newest start that failed."""
        cause = first_exit(self._folder)
        return None if cause is None else cause.exitcode

    def last_lines(self) -> list[str]:
        """Return the end of the log of the worker that failed first, else of the newest log."""
        cause = first_exit(self._folder)
        start = "*" if cause is None else f"attempt_{cause.attempt}/{cause.rank}"
        for found in (f"logs/*/{start}/stderr.log", "logs/*/attempt_*/*/stderr.log", "agent.log"):
            written = [path for path in self._folder.glob(found) if path.stat().st_size]
            if written:
                newest = max(written, key=lambda path: path.stat().st_mtime)
                return newest.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return []


def check_semaphores() -> None:
    """Raise LaunchError where no semaphore can be made; torch's agent needs one per worker."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        raise LaunchError(
            f"{SHARED_MEMORY}: no semaphore can be made there: {error.strerror}; torch starts no "
            "workers without: mount a tmpfs there that can be written to"
        ) from error


def preloaded_for(models: Iterable[str]) -> str:
    """Return the modules that workers with these models import, loaded once for all of them.

    What a user's own module imports is left to each worker: its import may have side effects.
    """
    names, modules = set(models), [WORKER, _FOR_ANY_MODEL]
    if not all(":" in name for name in names):
        modules.append(PRETRAINED)
    if not names.isdisjoint(PRESETS):
        modules.append(_LLAMA)
    return ",".join(modules)


def _environment(threads_per_rank: int) -> dict[str, str]:
    """Allow a hardware queue for the CUDA stream of each channel.

    With fewer queues than streams (the default is 8), a receive that waits could block the
    computation that its peer waits for.
    """
    return {
        "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        **os.environ,
        "OMP_NUM_THREADS": str(threads_per_rank),
    }


def local_command(
    folder: Path, program: Sequence[str], num_ranks: int, max_restarts: int, preloaded: str
) -> list[str]:
    """Return the command that starts the workers, as a child of this process."""
    numbers = (str(num_ranks), str(max_restarts))
    return lifetime.command(AGENT, str(folder), *numbers, preloaded, *program)


EXITS = "exits.jsonl"
MOST_WORDS = 2_000
"""Bytes of a worker's log that may tell why it died."""


@dataclass(frozen=True)
class Exit:
    """How a worker ended."""

    attempt: int  # how often the workers had been restarted
    rank: int
    pid: int
    exitcode: int  # of a signal, its negative number
    at: float  # seconds since the epoch
    at_ns: int = 0  # the same moment on the machine's monotonic clock; 0 where it is not known

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}) {self.how}"

    @property
    def how(self) -> str:
        """Say how it ended, such as `was ended by SIGKILL`."""
        if self.exitcode >= 0:
            return f"ended with exit code {self.exitcode}"
        return f"was ended by {signal_name(-self.exitcode)}"


def signal_name(number: int) -> str:
    """Return a signal's name such as `SIGKILL`; a real-time signal has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def note_exit(folder: Path, ended: Exit) -> None:
    """Append a line by one write: it is whole unless the agent was killed meanwhile."""
    with (folder / EXITS).open("a") as file:
        file.write(json.dumps(dataclasses.asdict(ended)) + "\n")


def read_exits(folder: Path) -> list[Exit]:
    """Return the workers that failed, in the order in which the agent saw them end."""
    return [one for one in read_ends(folder) if one.exitcode != 0]


def read_ends(folder: Path) -> list[Exit]:
    """Return all workers that ended, also with exit code 0, in the order seen by the agent."""
    try:
        lines = (folder / EXITS).read_text().splitlines()
    except FileNotFoundError:
        return []
    exits = []
    for line in lines:
        with contextlib.suppress(ValueError):  # cut short by a kill
            exits.append(Exit(**json.loads(line)))
    return exits


def last_words(folder: Path, ended: Exit) -> str:
    """Return the end of what a worker wrote to standard error; empty if there is no such log."""
    for path in folder.glob(f"logs/*/attempt_{ended.attempt}/{ended.rank}/stderr.log"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(-min(path.stat().st_size, MOST_WORDS), os.SEEK_END)
            return file.read().decode(errors="replace").strip()
    return ""


def first_exit(folder: Path) -> Exit | None:
    """Return the failure that ended the newest start of the workers, as far as the agent knows."""
    exits = read_exits(folder)
    newest = max((one.attempt for one in exits), default=0)
    return min((one for one in exits if one.attempt == newest), key=lambda e: e.at, default=None)
