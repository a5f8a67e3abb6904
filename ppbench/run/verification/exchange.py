"""The files in one folder by which the ranks and the author's process communicate.

    request.json     rank 0: the model, and the ways to run it that may be tried
    trial.json       author: the first of these in which the module runs, or why none does
    rankR-PHASE.pt   rank R: its weights `before`, and its tensors after the steps `0` and `1`
    training.json    rank 0: all of them are there; the batches' names, losses and order
    batches.pt       rank 0: the token ids and targets of both steps
    verdict.json     author: the largest difference, or the mistake

Files are used, not pipes: a user's module may print anything, and weights are large.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine import device_variables
from ppbench.run.launch.lifetime import command

NUM_STEPS = 2
FOLDER = "verification"  # of a launch's folder
BEFORE = "before"
REQUEST, TRIAL, TRAINING, VERDICT = "request.json", "trial.json", "training.json", "verdict.json"
BATCHES = "batches.pt"
LOG = "author.log"
_POLL_S = 0.02
_RANKS_OWN = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RANK", "LOCAL_RANK", "WORLD_SIZE")
"""Variables that the author's process does not inherit: it is not a rank, and the ranks wait while
it uses all cores."""


class VerificationError(RuntimeError):
    """The ranks train differently from the author's module, or the two cannot be compared."""


class NoRoomError(VerificationError):
    """There was too little memory or disk for a comparison; the training may be right."""


@dataclass(frozen=True)
class Way:
    """A way to run the model: its dtype, its device and the shape of a microbatch."""

    dtype: str
    device: str
    batch: int
    seq_len: int


@dataclass(frozen=True)
class Request:
    """The author's model, and the ways in which it may be run, the preferred first."""

    model: str
    weights: str
    trust_remote_code: bool
    seed: int
    split_points: tuple[str, ...]
    ways: tuple[Way, ...]
    ids: list[list[int]]  # to try them with, `[batch, seq]`, of the largest shape
    targets: list[list[int]]
    search_path: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Training:
    """The ranks' training, besides the tensors that each has written."""

    world_size: int
    losses: list[float]  # of both steps
    norms: list[float | None]
    forwards: dict[int, list[int]]  # stage -> its microbatches in the order of their forwards
    optimizer: str
    learning_rate: float
    weight_decay: float
    momentum: float
    clip_norm: float
    seed: int


@dataclass(frozen=True)
class Verdict:
    """The result of the comparison; `error` is empty if nothing is wrong."""

    error: str
    difference: float
    num_gradients: int
    notes: list[str]


def part_file(folder: Path, rank: int, phase: str) -> Path:
    return folder / f"rank{rank}-{phase}.pt"


def write(path: Path, content: dict[str, Any]) -> None:
    """Write a file so that a reader never sees part of it."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content))
    part.replace(path)


def wait_for(path: Path, check: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """Return the content of a file once it exists; meanwhile call `check`, which may raise."""
    while not path.exists():
        check()
        time.sleep(_POLL_S)
    content: dict[str, Any] = json.loads(path.read_text())
    return content


class AuthorProcess:
    """The author's process, from rank 0's side."""

    def __init__(self, folder: Path, request: Request) -> None:
        self._folder = folder
        write(folder / REQUEST, dataclasses.asdict(request))
        environ = {name: value for name, value in os.environ.items() if name not in _RANKS_OWN}
        device_variables.prepare(environ)
        with (folder / LOG).open("wb") as log:
            self._process = subprocess.Popen(
                command("ppbench.run.verification.author", str(folder)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environ,
            )

    def wait_for(self, name: str) -> dict[str, Any]:
        """Wait for a file and return its content.

        Raises VerificationError when the process has ended without writing the file, and
        NoRoomError when the system killed it, as it does when memory runs out.
        """
        path = self._folder / name

        def check() -> None:
            code = self._process.poll()
            if code is None or path.exists():
                return
            if code == -signal.SIGKILL:
                raise NoRoomError(
                    "the process of the unsplit module was killed, probably because memory ran out"
                )
            ended = f"was ended by signal {-code}" if code < 0 else f"exited with code {code}"
            lines = (self._folder / LOG).read_text(errors="replace").strip().splitlines()
            last = f": {lines[-1][:300]}" if lines else ""
            raise VerificationError(
                f"verification: the process of the unsplit module {ended}{last}"
            )

        return wait_for(path, check)

    def stop(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
