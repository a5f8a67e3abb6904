"""What the ranks and the author's process tell each other: files in one folder.

    request.json     rank 0: the model, and the ways to run it that may be tried
    trial.json       author: the first of these in which the module runs, or why none does
    rankR-PHASE.pt   rank R: its weights `before`, and what it has after the steps `0` and `1`
    training.json    rank 0: all of them are there; the batches' names, losses and order
    batches.pt       rank 0: the token ids and targets of both steps
    verdict.json     author: what differs most, or what is wrong

Files rather than pipes: a user's module prints what it likes, and weights are large.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NUM_STEPS = 2
BEFORE = "before"
REQUEST, TRIAL, TRAINING, VERDICT = "request.json", "trial.json", "training.json", "verdict.json"
BATCHES = "batches.pt"
LOG = "author.log"
_POLL_S = 0.02


class VerificationError(RuntimeError):
    """What the ranks train differs from the author's module, or the two cannot be compared."""


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
    """How the ranks have trained, beside the tensors that each has written."""

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
    """What the comparison found; `error` is empty where nothing is wrong."""

    error: str
    difference: float
    num_gradients: int
    notes: list[str]


def part_file(folder: Path, rank: int, phase: str) -> Path:
    return folder / f"rank{rank}-{phase}.pt"


def write(path: Path, content: dict[str, Any]) -> None:
    """A reader never meets half of it."""
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(content))
    aside.replace(path)


def wait_for(path: Path, check: Callable[[], None]) -> dict[str, Any]:
    """The content of a file, once it is there; meanwhile `check` is called, which may raise."""
    while not path.exists():
        check()
        time.sleep(_POLL_S)
    content: dict[str, Any] = json.loads(path.read_text())
    return content
