"""Checkpoints: a folder that resumes at any world size and that plain transformers can load.

    step-000050/
        config.json, tokenizer files                       for AutoModelForCausalLM, AutoTokenizer
        model.safetensors.index.json                       tensor -> file
        model-00001-of-00002.safetensors ...               one per stage that owns something
        optimizer.safetensors.index.json, optimizer-...    the same for the optimizer's state
        trainer.json                                       the step reached

Every rank writes its stages' files into a folder beside, which is renamed when all are done: a
checkpoint exists wholly or not at all. Tensors go by their names in the unsplit model, so whoever
owns a parameter later finds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.model.checkpoint import checkpoint_files, locate_in
from engine.model.stage_module import ModelError

TRAINER = "trainer.json"
_DIGITS = 6


class SnapshotError(RuntimeError):
    """A checkpoint cannot be written or resumed from."""


@dataclass(frozen=True)
class Part:
    """One stage's share of a checkpoint, by name in the unsplit model."""

    stage: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]


def folder_of(root: Path, step: int) -> Path:
    return root / f"step-{step:0{_DIGITS}d}"


def latest(root: Path) -> Path | None:
    """The checkpoint of the latest step in a folder of them; None if there is none."""
    for old in root.glob(".step-*.old"):  # left by a kill while it was being replaced
        with contextlib.suppress(OSError):
            if not (root / old.name[1:-4]).exists():
                old.rename(root / old.name[1:-4])
    found = [path.parent for path in root.glob(f"step-*/{TRAINER}")]
    numbered = [path for path in found if re.fullmatch(r"step-\d+", path.name)]
    return max(numbered, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def save(
    folder: Path,
    parts: Iterable[Part],
    *,
    num_stages: int,
    state: Mapping[str, object],
    write_configuration: Callable[[Path], None],
    gather: Callable[[Any], list[Any]],
    is_first_rank: bool,
) -> None:
    """Write a checkpoint. Collective over the ranks of `gather`; blocks until it is there.

    `gather` gives every rank all ranks' objects. `state` is stored as JSON. An existing folder is
    replaced. Raises SnapshotError on every rank when one of them cannot write.
    """
    aside = folder.with_name(f".{folder.name}.partial")
    problems = gather(_attempt(lambda: _clear(aside)) if is_first_rank else None)
    _raise_first(problems)
    written: dict[str, dict[str, str]] = {"model": {}, "optimizer": {}}
    problem = _attempt(lambda: _write_parts(aside, parts, num_stages, written))
    gathered = gather((problem, written))
    _raise_first(problem for problem, _ in gathered)
    if is_first_rank:
        problem = _attempt(
            lambda: _finish(aside, folder, [w for _, w in gathered], state, write_configuration)
        )
    _raise_first(gather(problem))


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


def _clear(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_parts(
    aside: Path, parts: Iterable[Part], num_stages: int, written: dict[str, dict[str, str]]
) -> None:
    for part in parts:
        for kind, tensors in (("model", part.model), ("optimizer", part.optimizer)):
            if tensors:
                name = f"{kind}-{part.stage + 1:05d}-of-{num_stages:05d}.safetensors"
                own = {key: t.detach().cpu().contiguous() for key, t in tensors.items()}
                save_file(own, aside / name, metadata={"format": "pt"})
                written[kind] |= dict.fromkeys(own, name)


def _finish(
    aside: Path,
    folder: Path,
    written: list[dict[str, dict[str, str]]],
    state: Mapping[str, object],
    write_configuration: Callable[[Path], None],
) -> None:
    for kind in ("model", "optimizer"):
        files = {key: name for one in written for key, name in sorted(one[kind].items())}
        size = sum((aside / name).stat().st_size for name in set(files.values()))
        index = {"metadata": {"total_size": size}, "weight_map": files}
        path = aside / f"{kind}.safetensors.index.json"
        path.write_text(json.dumps(index, indent=1))
    write_configuration(aside)
    (aside / TRAINER).write_text(json.dumps(dict(state), indent=1))
    for path in aside.iterdir():
        _flush(path)
    _swap(aside, folder)


def _flush(path: Path) -> None:
    """To the disk, before the rename that makes it count."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _swap(new: Path, folder: Path) -> None:
    """Put `new` where `folder` is; a kill in between loses neither's files."""
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.replace(old)
    new.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def read_state(folder: Path) -> dict[str, Any]:
    """What was given as `state`. Raises SnapshotError."""
    try:
        state: dict[str, Any] = json.loads((folder / TRAINER).read_text())
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{folder}: no checkpoint to resume from: {error}") from error
    return state


def load_model(folder: Path, own: Mapping[str, Tensor]) -> None:
    """Fill tensors, by name in the unsplit model, from a checkpoint; others are not read."""
    with torch.no_grad():
        found = _read(folder, "model", lambda name: name in own)
        for name, tensor in own.items():
            if name not in found:
                raise SnapshotError(f"{folder}: has no tensor {name}")
            if found[name].shape != tensor.shape:
                raise SnapshotError(
                    f"{folder}: {name} has shape {list(found[name].shape)}, "
                    f"the model {list(tensor.shape)}"
                )
            tensor.copy_(found[name])


def load_optimizer(
    folder: Path, optimizer: torch.optim.Optimizer, own: Mapping[str, nn.Parameter]
) -> None:
    """Set the optimizer's state of these parameters. Raises SnapshotError if there is none."""
    if not (folder / "optimizer.safetensors.index.json").is_file():
        raise SnapshotError(f"{folder}: has no optimizer.safetensors.index.json")
    found = _read(folder, "optimizer", lambda name: name.rpartition("/")[0] in own)
    for key, tensor in found.items():
        name, _, entry = key.rpartition("/")
        parameter = own[name]
        optimizer.state[parameter][entry] = tensor.to(parameter.device)


def optimizer_tensors(
    optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """The optimizer's state as `parameter/entry`."""
    if optimizer is None:
        return {}
    return {
        f"{name}/{entry}": value
        for name, parameter in parameters.items()
        for entry, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def _read(folder: Path, kind: str, wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    try:
        files = checkpoint_files(locate_in(folder), str(folder), kind)
    except ModelError as error:
        raise SnapshotError(str(error)) from error
    tensors: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names = [name for name in opened.keys() if wanted(name)]  # noqa: SIM118  # no mapping
            tensors |= {name: opened.get_tensor(name) for name in names}
    return tensors
