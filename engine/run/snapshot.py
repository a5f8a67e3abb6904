"""Checkpoints: a folder that resumes at any world size and that plain transformers can load.

    step-000050/
        config.json, tokenizer files                       for AutoModelForCausalLM, AutoTokenizer
        model.safetensors.index.json                       tensor -> file
        model-00001-of-00002.safetensors ...               one per stage that owns something
        optimizer.safetensors.index.json, optimizer-...    the same for the optimizer's state
        trainer.json                                       the step reached, and what trained it

Every rank writes its stages' files into a folder beside, which is renamed when all are done and on
the disk: a checkpoint exists wholly or not at all. Tensors go by their names in the unsplit model,
so whoever owns a parameter later finds it. What takes a checkpoint up again is in `restoring`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_bytes
from safetensors.torch import save_file
from torch import Tensor

TRAINER = "trainer.json"
KINDS = ("model", "optimizer")
_DIGITS = 6

TensorFiles = dict[str, dict[str, str]]
"""Of each kind: tensor -> file."""


class SnapshotError(RuntimeError):
    """A checkpoint cannot be written or resumed from."""


@dataclass(frozen=True)
class Part:
    """One stage's share of a checkpoint, by name in the unsplit model."""

    stage: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


@dataclass(frozen=True)
class State:
    """The content of `trainer.json`: the run's progress, and what must be the same to go on."""

    step: int
    num_tokens: int
    world_size: int
    optimizer: str
    momentum: float | None  # None but with sgd
    tokenizer: str | None  # `bytes`, or a hash of the tokenizer's vocabulary; None without text


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:0{_DIGITS}d}"


def index_name(kind: str) -> str:
    return f"{kind}.safetensors.index.json"


def latest(root: Path) -> Path | None:
    """The checkpoint of the latest step in a folder of them; None if there is none.

    What a kill has left is no checkpoint: a folder that was being written has another name. One
    that a kill kept from being replaced is brought back. Raises SnapshotError when the folder
    cannot be read.
    """
    for old in root.glob(".step-*.old"):
        with contextlib.suppress(OSError):  # of several ranks one does it
            if not (root / old.name[1:-4]).exists():
                old.rename(root / old.name[1:-4])
    try:
        found = [
            (int(match[1]), path)
            for path in root.iterdir()
            if (match := re.fullmatch(r"step-(\d+)", path.name)) and path.is_dir()
            if any(path.iterdir())
        ]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise SnapshotError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return max(found)[1] if found else None


def save(
    folder: Path,
    parts: Iterable[Part],
    *,
    num_stages: int,
    state: State,
    write_configuration: Callable[[Path], None],
    gather: Callable[[Any], list[Any]],
    is_first_rank: bool,
) -> None:
    """Write a checkpoint. Collective over the ranks of `gather`; blocks until it is on the disk.

    `gather` gives every rank all ranks' objects. An existing folder is replaced. Raises
    SnapshotError on every rank when one of them cannot write; then what was there before is
    untouched.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    written: TensorFiles = {kind: {} for kind in KINDS}
    parts = iter(parts)

    def clear() -> None:
        """Make the folder to write in; what killed runs left beside it goes."""
        for left in aside.parent.glob(".step-*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)

    def write_parts() -> None:
        for part in parts:
            for kind, tensors in (("model", part.model), ("optimizer", part.optimizer)):
                if tensors:
                    name = f"{kind}-{part.stage + 1:05d}-of-{num_stages:05d}.safetensors"
                    own = {key: t.detach().cpu().contiguous() for key, t in tensors.items()}
                    save_file(own, aside / name, metadata={"format": "pt"})
                    _flush(aside / name)
                    written[kind] |= dict.fromkeys(own, name)

    def finish() -> None:
        """Write the indexes of all ranks' files, then put the folder in its place."""
        for kind in KINDS:
            files = {t: f for _, theirs in gathered for t, f in sorted(theirs[kind].items())}
            size = sum((aside / name).stat().st_size for name in set(files.values()))
            index = {"metadata": {"total_size": size}, "weight_map": files}
            (aside / index_name(kind)).write_text(json.dumps(index, indent=1))
        write_configuration(aside)
        (aside / TRAINER).write_text(json.dumps(asdict(state), indent=1))
        for path in (*aside.rglob("*"), aside):
            _flush(path)
        old = folder.with_name(f".{folder.name}.old")  # a kill in between loses neither's files
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.replace(old)
        aside.replace(folder)
        shutil.rmtree(old, ignore_errors=True)
        _flush(folder.parent)

    _raise_first(gather(_attempt(clear) if is_first_rank else None))
    problem = _attempt(write_parts)
    for _ in parts:  # which replicas put together, also where one of them could not write
        pass
    gathered: list[tuple[str | None, TensorFiles]] = gather((problem, written))
    problem = next((problem for problem, _ in gathered if problem), None)
    if is_first_rank and problem is None:
        problem = _attempt(finish)
    if is_first_rank and problem is not None:
        shutil.rmtree(aside, ignore_errors=True)  # a full disk is not left full
    _raise_first(gather(problem))


def check_storable(tensors: Mapping[str, Tensor]) -> None:
    """Raises SnapshotError for a tensor of a dtype that safetensors does not have."""
    of_dtype = {tensor.dtype: name for name, tensor in tensors.items()}
    for dtype, name in of_dtype.items():
        try:
            to_bytes({name: torch.empty(0, dtype=dtype)})
        except Exception as error:
            raise SnapshotError(
                f"{name} is {dtype}, which safetensors cannot store; choose another --dtype, or "
                "leave out --save"
            ) from error


def _attempt(work: Callable[[], None]) -> str | None:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _raise_first(problems: Iterable[str | None]) -> None:
    for problem in problems:
        if problem:
            raise SnapshotError(f"the checkpoint could not be written: {problem}")


def _flush(path: Path) -> None:
    """Flush a file or a folder's names to the disk, before the rename that makes it valid."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
