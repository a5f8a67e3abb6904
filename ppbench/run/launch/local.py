"""Starts the workers on this machine, under an agent (agent.py), and reads how they ended.

The agent is run as a subprocess: the controller stays free of torch, and a crash of the agent is
an exit code here. It ends with this process, and its workers with it, even when this one is killed.

    <launch's folder>/exits.jsonl    a line for each worker that the agent did not end itself

The agent writes that line when the worker ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import multiprocessing
import os
import select
import signal
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from engine import device_variables
from engine.model.presets import PRESETS
from ppbench.errors import LaunchError
from ppbench.run.launch import lifetime
from ppbench.run.machine.node_folder import SHARED_MEMORY, VARIABLE

AGENT = "ppbench.run.launch.agent"
AGENT_LOG = "agent.log"
WORKER = "ppbench.run.worker"
_RANK = f"{WORKER}.rank"
PRETRAINED = "engine.model.pretrained"
_LLAMA = "transformers.models.llama.modeling_llama"
_FOR_ANY_MODEL = "torch._dynamo"  # torch imports it for fake tensors and for the first optimizer

STOP_TIMEOUT_S = 15
LOG_LINES = 30


@dataclass(frozen=True)
class Begin:
    """What an agent is told to run: a module with its arguments, in each of so many workers."""

    folder: str  # of the launch
    num_ranks: int
    max_restarts: int
    module: str
    arguments: list[str]
    variables: dict[str, str]  # of the environment


class LocalAgent:
    """An agent, which runs launch after launch; it has imported its modules when the first begins.

    `preloaded` names modules whose import takes long, separated by commas. What goes wrong before
    the first launch is written to `log`.
    """

    def __init__(self, preloaded: str, log: Path) -> None:
        self.preloaded = preloaded
        environ = dict(os.environ)
        device_variables.prepare(environ)
        errors = log.open("ab")
        self._process = subprocess.Popen(
            lifetime.command(AGENT, preloaded),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environ,
            start_new_session=True,  # Ctrl-C reaches the controller alone, which stops the agent
        )
        errors.close()
        self.exit_code: int | None = None  # of the present launch, once it is over

    def begin(self, told: Begin) -> None:
        """Begin a launch; the one before is over."""
        self.exit_code = None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: `poll` says how
            self._process.stdin.write(json.dumps(dataclasses.asdict(told)).encode() + b"\n")
            self._process.stdin.flush()

    def poll(self) -> int | None:
        """Return the exit code of the launch, that of the agent if it has ended, or None."""
        if self.exit_code is None:
            ended = self._process.poll()  # before its answer is read, which may be its last
            assert self._process.stdout is not None
            if select.select([self._process.stdout], [], [], 0)[0]:
                answer = self._process.stdout.readline()
                self.exit_code = int(answer) if answer.endswith(b"\n") else ended
            elif ended is not None:
                self.exit_code = ended
        return self.exit_code

    @property
    def is_free(self) -> bool:
        """Whether it can begin another launch."""
        return self.exit_code == 0 and self._process.poll() is None

    def stop(self) -> None:
        """End it and, through it, every worker. Blocks until they are gone."""
        end_group(self._process, STOP_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


class LocalLaunch:
    """A launch on this machine, from start to end; its logs go to `folder`."""

    def __init__(
        self,
        folder: Path,
        program: Sequence[str],
        *,
        num_ranks: int,
        threads_per_rank: int,
        max_restarts: int,
        preloaded: str,
        node_folder: Path | None = None,
        agent: LocalAgent | None = None,
    ) -> None:
        """Begin it. Raises LaunchError if this machine cannot start any worker.

        `program` is run by each worker: a module's name and its arguments. Workers are forked once
        the modules `preloaded` are imported. `node_folder` is handed down to them. `agent` is one
        that is free and has imported these modules; without it, one is started.
        """
        check_semaphores()
        variables = {"OMP_NUM_THREADS": str(threads_per_rank)}
        if node_folder is not None:
            variables[VARIABLE] = str(node_folder)
        self._folder = folder
        self.agent = LocalAgent(preloaded, folder / AGENT_LOG) if agent is None else agent
        module, *arguments = program
        self.agent.begin(Begin(str(folder), num_ranks, max_restarts, module, arguments, variables))

    def poll(self) -> int | None:
        """Return the launch's exit code, or None while it runs."""
        return self.agent.poll()

    def stop(self) -> None:
        """End the agent and, through it, every worker. Blocks until they are gone."""
        self.agent.stop()

    def num_starts(self) -> int:
        """Return how often the workers have been started."""
        return len(list(self._folder.glob("logs/*/attempt_*")))

    def last_lines(self) -> list[str]:
        """Return the end of the log of the worker that failed first, else of the newest log."""
        cause = first_exit(self._folder)
        start = "*" if cause is None else f"attempt_{cause.attempt}/{cause.rank}"
        for logs in (f"logs/*/{start}/stderr.log", "logs/*/attempt_*/*/stderr.log", AGENT_LOG):
            written = [path for path in self._folder.glob(logs) if path.stat().st_size]
            if written:
                newest = max(written, key=lambda path: path.stat().st_mtime)
                return newest.read_text(errors="replace").splitlines()[-LOG_LINES:]
        return []


def end_group(leader: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Have a process end its workers and itself, unless it is over. Blocks until it is.

    `leader` has a session of its own, and its workers end when it is killed.
    """
    if leader.poll() is not None:
        return
    leader.send_signal(signal.SIGTERM)
    try:
        leader.wait(timeout_s)
    except BaseException as error:  # it takes too long, or the user interrupts once more
        os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise


def check_semaphores() -> None:
    """Raise LaunchError where no semaphore can be made; torch's agent needs one per worker."""
    try:
        multiprocessing.Lock()
    except OSError as error:
        raise LaunchError(
            f"{SHARED_MEMORY}: no semaphore can be made there: {error.strerror}; torch starts no "
            "workers without one; mount a writable tmpfs there"
        ) from error


def preloaded_for(models: Iterable[str]) -> str:
    """Return the modules that all workers with these models need, to be imported once for them.

    A user's own module is left to each worker: its import may have side effects.
    """
    names, modules = set(models), [_RANK, _FOR_ANY_MODEL]
    if not all(":" in name for name in names):
        modules.append(PRETRAINED)
    if not names.isdisjoint(PRESETS):
        modules.append(_LLAMA)
    return ",".join(modules)


EXITS = "exits.jsonl"
MOST_WORDS = 2_000
"""Bytes read from the end of a worker's log, for the cause of its death."""


@dataclass(frozen=True)
class Exit:
    """How a worker ended."""

    attempt: int  # how often the workers had been restarted
    rank: int
    pid: int
    exitcode: int  # the negative number of the signal, if one ended it
    at: float  # seconds since the epoch
    at_ns: int = 0  # the same moment on the machine's monotonic clock; 0 where it is not known

    def __str__(self) -> str:
        how = f"ended with exit code {self.exitcode}"
        if self.exitcode < 0:
            how = f"was ended by {signal_name(-self.exitcode)}"
        return f"rank {self.rank} (pid {self.pid}) {how}"


def signal_name(number: int) -> str:
    """Return a signal's name such as `SIGKILL`; a real-time signal has no name of its own."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def note_exit(folder: Path, ended: Exit) -> None:
    """Append a line by a single write: it is whole unless the agent was killed meanwhile."""
    with (folder / EXITS).open("a") as file:
        file.write(json.dumps(dataclasses.asdict(ended)) + "\n")


def read_exits(folder: Path) -> list[Exit]:
    """Return the workers that failed, in the order in which the agent saw them end."""
    return [ended for ended in read_ends(folder) if ended.exitcode != 0]


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
    """Return the end of a worker's standard error; empty if there is no such log."""
    for path in folder.glob(f"logs/*/attempt_{ended.attempt}/{ended.rank}/stderr.log"):
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(-min(path.stat().st_size, MOST_WORDS), os.SEEK_END)
            return file.read().decode(errors="replace").strip()
    return ""


def first_exit(folder: Path) -> Exit | None:
    """Return the failure that ended the newest start of the workers, as far as the agent knows."""
    exits = read_exits(folder)
    newest = max((ended.attempt for ended in exits), default=0)
    return min((e for e in exits if e.attempt == newest), key=lambda ended: ended.at, default=None)
