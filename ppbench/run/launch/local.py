"""Starts launches on this machine, through a supervisor (supervisor.py), and reads how they end.

The supervisor is a process of its own: the controller stays free of torch, and a crash of the
supervisor is an exit code here. It ends with this process, and its ranks with it, even when this
one is killed.

    <launch's folder>/supervisor.log                  what the supervisor itself prints
                      logs/start-<n>/rank-<rank>.err  standard error of a rank; .out its output
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self

from engine import device_variables
from engine.model.presets import PRESETS
from ppbench.run.machine.node_folder import read_events

SUPERVISOR = "ppbench.run.launch.supervisor"
LOG = "supervisor.log"
WORKER = "ppbench.run.worker"
_RANK = f"{WORKER}.rank"
PRETRAINED = "engine.model.pretrained"
_LLAMA = "transformers.models.llama.modeling_llama"
_FOR_ANY_MODEL = "torch._dynamo"  # torch imports it for fake tensors and for the first optimizer

STOP_TIMEOUT_S = 35.0
"""A supervisor gives killed ranks 30 seconds to be gone."""
LOG_LINES = 30
GAVE_UP = 78
"""Exit code of a rank, and then of its launch, that would fail the same way if started again."""


@dataclass(frozen=True)
class Begin:
    """What a supervisor is told to run: a module with its arguments, in each of so many ranks."""

    folder: str  # of the launch; empty: ranks have no logs of their own
    node_folder: str
    num_ranks: int
    max_restarts: int
    module: str
    arguments: list[str]
    variables: dict[str, str]  # of the environment


class Supervisor:
    """The controller's end of a supervisor, which runs launch after launch inside a `with` block.

    A launch that needs other modules than the one before, or comes after one that failed, has a new
    process.
    """

    def __init__(self, variables: Mapping[str, str] = MappingProxyType({})) -> None:
        """`variables` are those of every launch's environment."""
        self.variables = variables
        self._process: subprocess.Popen[bytes] | None = None
        self._preloaded = ""
        self._told: Begin | None = None
        self.exit_code: int | None = None  # of the present launch, once it is over

    def begin(self, told: Begin, preloaded: str = "") -> None:
        """Begin a launch; the one before is over.

        `preloaded` names modules whose import takes long, separated by commas. What goes wrong
        before they are imported is written to the launch's `supervisor.log`.
        """
        has_ended = self._process is not None and self._process.poll() is not None
        if has_ended or self.exit_code != 0 or preloaded != self._preloaded:
            self.stop()
        self._told, self._preloaded, self.exit_code = told, preloaded, None
        if self._process is None:
            environ = dict(os.environ)
            device_variables.prepare(environ)
            with (Path(told.folder) / LOG).open("ab") as errors:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", SUPERVISOR, "serve", str(os.getpid()), preloaded],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    env=environ,
                    start_new_session=True,  # Ctrl-C reaches the controller alone, which stops it
                )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: `poll` says how
            self._process.stdin.write(json.dumps(dataclasses.asdict(told)).encode() + b"\n")
            self._process.stdin.flush()

    def poll(self) -> int | None:
        """Return the launch's exit code, that of the supervisor if it has ended, or None."""
        if self.exit_code is None and self._process is not None:
            ended = self._process.poll()  # before its answer is read, which may be its last
            assert self._process.stdout is not None
            if select.select([self._process.stdout], [], [], 0)[0]:
                answer = self._process.stdout.readline()
                self.exit_code = int(answer) if answer.endswith(b"\n") else ended
            elif ended is not None:
                self.exit_code = ended
        return self.exit_code

    def num_starts(self) -> int:
        """Return how often the ranks of the launch have been started."""
        assert self._told is not None
        return read_events(Path(self._told.node_folder)).num_starts

    def last_lines(self) -> list[str]:
        """Return the end of the log of the rank that failed first, else of the newest log."""
        assert self._told is not None
        folder = Path(self._told.folder)
        cause = read_events(Path(self._told.node_folder)).first_failure()
        logs = [Path(cause.log)] if cause is not None else []
        with contextlib.suppress(OSError):
            newest = sorted(folder.glob("logs/*/*.err"), key=lambda path: -path.stat().st_mtime_ns)
            for log in (*logs, *newest, folder / LOG):
                if lines := log.read_text(errors="replace").splitlines():
                    return lines[-LOG_LINES:]
        return []

    def stop(self) -> None:
        """End it and, through it, every rank. Blocks until they are gone."""
        if self._process is None:
            return
        end_group(self._process, STOP_TIMEOUT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()


def end_group(leader: subprocess.Popen[bytes], timeout_s: float) -> None:
    """Have a process end its ranks and itself, unless it is over. Blocks until it is.

    `leader` has a session of its own, and its ranks end when it is killed.
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


def preloaded_for(models: Iterable[str]) -> str:
    """Return the modules that all ranks with these models need, to be imported once for them.

    A user's own module is left to each rank: its import may have side effects.
    """
    names, modules = set(models), [_RANK, _FOR_ANY_MODEL]
    if not all(":" in name for name in names):
        modules.append(PRETRAINED)
    if not names.isdisjoint(PRESETS):
        modules.append(_LLAMA)
    return ",".join(modules)
