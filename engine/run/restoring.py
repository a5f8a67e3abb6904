"""Going on from a checkpoint: is it whole, is it of this model, and then its tensors.

1 `check`        before any rank works: every file there, readable, and as its checksum says
2 `check_names`  with all ranks: the checkpoint has the model's tensors and no others
3 `restore`      each rank reads its own tensors, all compared before the first is taken

A checkpoint without checksums, as older versions wrote them, gets all of these checks but that of
the checksums.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from engine.model.checkpoint import read_index, read_json, shown, tensors_of
from engine.model.checksums import CHECKSUMS, check_file, read_checksums
from engine.model.stage_module import ModelError
from engine.run.optimizer import OPTIMIZERS, OptimizerSpec
from engine.run.shards import Piece
from engine.run.snapshot import (
    KINDS,
    TRAINER,
    SnapshotError,
    State,
    index_name,
    newest_first,
    step_of,
)

_LARGEST = 2**63 - 1
_MOST_BYTES = 2**26


@dataclass(frozen=True)
class Checked:
    """A checkpoint that was found whole."""

    state: State
    has_checksums: bool  # or was read as far as it can be without them


@dataclass(frozen=True)
class Target:
    """The tensors and parameters that a rank restores, by name in the unsplit model."""

    model: Mapping[str, Tensor]
    parameters: Mapping[str, nn.Parameter]


Choose = Callable[[list[str]], list[str]]
"""Which of a checkpoint's files this rank compares with their checksums."""


def none(_names: list[str]) -> list[str]:
    return []


def share_of(index: int, count: int) -> Choose:
    """Every `count`-th file, for one of as many ranks that see the same files."""
    return lambda names: names[index::count]


def read_for(folder: Path, target: Target) -> Choose:
    """The files that a rank will read, whichever machine it is on, and all that are small."""

    def choose(names: list[str]) -> list[str]:
        wanted = {
            file
            for kind in KINDS
            for tensor, file in read_index(folder / index_name(kind)).items()
            if tensor in target.model or tensor.rpartition("/")[0] in target.parameters
        }
        return [name for name in names if name in wanted or not name.endswith(".safetensors")]

    return choose


def check(folder: Path, choose: Choose = list) -> Checked:
    """Whether a checkpoint is whole: that its files are there, belong together and are undamaged.

    Where there are checksums, every byte of the chosen files is read. Raises SnapshotError naming
    the file.
    """
    with _refused():
        state = read_state(folder)
        checksums = read_checksums(folder)
        files = _files_of(folder)
        if checksums is not None:
            _check_listed({TRAINER, *map(index_name, KINDS), *files}, checksums, folder)
            for name in choose(sorted(checksums)):
                check_file(folder, name, checksums[name])
        for name, indexed in files.items():
            _check_tensors(folder / name, indexed)
    if step_of(folder) not in (None, state.step):
        raise SnapshotError(
            f"{folder / TRAINER}: says step {state.step}, the folder's name another: "
            "is it of another checkpoint?"
        )
    return Checked(state, checksums is not None)


@contextmanager
def _refused() -> Iterator[None]:
    """Raise what is wrong with a file as a SnapshotError."""
    try:
        yield
    except ModelError as error:
        raise SnapshotError(str(error)) from error
    except OSError as error:
        raise SnapshotError(f"{error.filename}: cannot be read: {error.strerror}") from error


def newest_whole(damaged: Path) -> Path | None:
    """The newest whole checkpoint in the same folder but this one; None if there is none.

    Reads each of them until one is whole.
    """
    for folder in newest_first(damaged.parent):
        if folder.resolve() != damaged.resolve():
            with contextlib.suppress(SnapshotError):
                check(folder)
                return folder
    return None


def read_state(folder: Path) -> State:
    """Read `trainer.json`. Raises SnapshotError naming what is wrong in it."""
    path = folder / TRAINER
    try:
        if not path.exists():
            raise SnapshotError(f"{folder}: no checkpoint to resume from: it has no {TRAINER}")
        content = read_json(path, _MOST_BYTES)
    except OSError as error:
        raise SnapshotError(f"{path}: cannot be read: {error.strerror}") from error
    except ModelError as error:
        raise SnapshotError(str(error)) from error
    if not isinstance(content, dict):
        raise SnapshotError(f"{path}: holds no JSON object but {_kind(content)}")
    _check_state(path, content)
    stateless = content.get("stateless")
    return State(
        content["step"],
        content["num_tokens"],
        content["world_size"],
        content["optimizer"],
        content.get("momentum"),
        content.get("tokenizer"),
        None if stateless is None else tuple(stateless),
    )


def _check_state(path: Path, content: Mapping[str, Any]) -> None:
    counts = {"step": 0, "num_tokens": 0, "world_size": 1}
    for name, least in counts.items():
        value = content.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _LARGEST:
            _refuse(path, name, content, f"a whole number of at least {least}")
    if content.get("optimizer") not in OPTIMIZERS:
        _refuse(path, "optimizer", content, f"one of {', '.join(OPTIMIZERS)}")
    momentum = content.get("momentum")
    if momentum is not None and not _is_number(momentum):
        _refuse(path, "momentum", content, "a number of at least 0")
    if not isinstance(content.get("tokenizer"), str | None):
        _refuse(path, "tokenizer", content, "text")
    names = content.get("stateless")
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if names is not None and not is_list:
        _refuse(path, "stateless", content, "a list of names")


def _is_number(value: object) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 <= value <= _LARGEST
        and math.isfinite(value)
    )


def _refuse(path: Path, name: str, content: Mapping[str, Any], expected: str) -> NoReturn:
    found = _kind(content[name]) if name in content else "nothing"
    raise SnapshotError(f"{path}: {name} is {found}; expected {expected}")


def _kind(value: object) -> str:
    """A JSON value in words: itself where it is short."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, str):
        return f'"{shown(value)}"'
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _LARGEST:
        return "a number of more than 64 bits"
    return json.dumps(value)


def _files_of(folder: Path) -> dict[str, set[str]]:
    """Name of each safetensors file -> the tensors that an index says it has."""
    files: dict[str, set[str]] = {}
    for kind in KINDS:
        path = folder / index_name(kind)
        if not path.exists():
            raise SnapshotError(f"{folder}: has no {path.name}; it is not whole")
        for tensor, name in read_index(path).items():
            if not name.startswith(f"{kind}-") or "/" in name or "\0" in name:
                raise SnapshotError(
                    f"{path}: {shown(tensor)} is said to be in {shown(name)}, which is no file of "
                    "this checkpoint"
                )
            files.setdefault(name, set()).add(tensor)
    return files


def _check_listed(files: Iterable[str], checksums: Mapping[str, str], folder: Path) -> None:
    for name in sorted(files):
        if name not in checksums:
            raise SnapshotError(f"{folder / name}: {CHECKSUMS} does not list it")


def _check_tensors(file: Path, indexed: set[str]) -> None:
    """Check that a file is readable and has exactly the tensors that its index names."""
    if not file.is_file():
        raise SnapshotError(f"{file}: is missing; the index names it")
    held = tensors_of(file)
    with _opened(file):
        pass
    if lacking := indexed - held:
        raise SnapshotError(
            f"{file}: has no tensor {shown(min(lacking))}, though the index says so"
        )
    if others := held - indexed:
        raise SnapshotError(
            f"{file}: has a tensor {shown(min(others))} that the index does not name"
        )


@contextmanager
def _opened(file: Path) -> Iterator[safe_open]:
    """A safetensors file. Raises SnapshotError for one that safetensors itself refuses."""
    try:
        with safe_open(file, framework="pt") as opened:
            yield opened
    except SafetensorError as error:
        raise SnapshotError(f"{file}: corrupt: {shown(str(error))}") from error
    except OSError as error:
        raise SnapshotError(f"{file}: cannot be read: {error.strerror or error}") from error


def check_names(folder: Path, model: set[str], parameters: set[str]) -> None:
    """Compare the names in a checkpoint with those of the whole model. Raises SnapshotError."""
    with _refused():
        saved = set(read_index(folder / index_name("model")))
        moments = set(read_index(folder / index_name("optimizer")))
    if missing := model - saved:
        raise SnapshotError(
            f"{folder}: has no tensor {_first(missing)}: it is of another model, or damaged"
        )
    if superfluous := saved - model:
        raise SnapshotError(
            f"{folder}: has a tensor {_first(superfluous)} that the model does not have: "
            "it is of another model"
        )
    owners = {name.rpartition("/")[0] for name in moments}
    if strangers := owners - parameters:
        raise SnapshotError(
            f"{folder}: its optimizer has state of {_first(strangers)}, which is no parameter of "
            "the model"
        )


def _first(names: set[str]) -> str:
    more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
    return f"{shown(min(names))}{more}"


@dataclass(frozen=True)
class Saved:
    """A rank's tensors out of a checkpoint, each as its target asks."""

    model: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]  # parameter -> the optimizer's state of it
    updates: Mapping[str, int]  # file -> the most updates of a parameter in it, where counted

    def put(
        self,
        target: Target,
        optimizer: torch.optim.Optimizer | None,
        pieces_of: Callable[[nn.Parameter], Iterable[Piece]],
    ) -> None:
        """`pieces_of` says what of a parameter the optimizer trains."""
        with torch.no_grad():
            for name, tensor in target.model.items():
                tensor.copy_(self.model[name])
        if optimizer is None:
            return
        for name, parameter in target.parameters.items():
            for piece in pieces_of(parameter):
                optimizer.state.pop(piece.own, None)
                if moments := self.moments[name]:
                    optimizer.state[piece.own] = {
                        entry: tensor.to(parameter.device) if entry == "step" else piece.of(tensor)
                        for entry, tensor in moments.items()
                    }


def read(folder: Path, target: Target, spec: OptimizerSpec, state: State) -> Saved:
    """Read a rank's tensors and compare them with its own. Raises SnapshotError."""
    saved = _read(folder, "model", lambda name: name in target.model)
    for name, tensor in target.model.items():
        if name not in saved:
            raise SnapshotError(f"{folder}: has no tensor {shown(name)}: of another model?")
        _check_same(f"{folder}: {shown(name)}", saved[name], tensor.shape, tensor.dtype)
    moments = _moments(folder, target.parameters, spec, state)
    return Saved(saved, moments, _updates(folder, moments))


def _updates(folder: Path, moments: Mapping[str, Mapping[str, Tensor]]) -> dict[str, int]:
    with _refused():
        files = read_index(folder / index_name("optimizer"))
    updates: dict[str, int] = {}
    for name, entries in moments.items():
        if "step" in entries:
            file = files[f"{name}/step"]
            updates[file] = max(updates.get(file, 0), int(entries["step"]))
    return updates


def _read(folder: Path, kind: str, is_wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors wanted; the files without any of them are not opened."""
    with _refused():
        index = read_index(folder / index_name(kind))
    names: dict[str, list[str]] = {}
    for tensor, file in index.items():
        if is_wanted(tensor):
            names.setdefault(file, []).append(tensor)
    tensors: dict[str, Tensor] = {}
    for file, wanted in names.items():
        with _opened(folder / file) as opened:
            tensors |= {name: opened.get_tensor(name) for name in wanted}
    return tensors


def _check_same(what: str, found: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    if found.shape != shape:
        raise SnapshotError(f"{what} has shape {list(found.shape)}, the model {list(shape)}")
    if found.dtype != dtype:
        ours, theirs = (str(kind).removeprefix("torch.") for kind in (dtype, found.dtype))
        raise SnapshotError(f"{what} has dtype {theirs}, the model {ours}; resume with {theirs}")


def _moments(
    folder: Path, parameters: Mapping[str, nn.Parameter], spec: OptimizerSpec, state: State
) -> dict[str, dict[str, Tensor]]:
    """Parameter -> its optimizer's state: all of it, or none for one that was never trained."""
    saved = _read(folder, "optimizer", lambda name: name.rpartition("/")[0] in parameters)
    moments: dict[str, dict[str, Tensor]] = {name: {} for name in parameters}
    for key, tensor in saved.items():
        name, _, entry = key.rpartition("/")
        if parameters[name].requires_grad:
            moments[name][entry] = tensor
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            _check_moments(folder, name, parameter, moments[name], entries_of(spec), state)
    return moments


def _check_moments(
    folder: Path,
    name: str,
    parameter: nn.Parameter,
    moments: Mapping[str, Tensor],
    expected: frozenset[str],
    state: State,
) -> None:
    if not moments and not _must_have_moments(name, state):
        return
    what = f"{folder}: the optimizer's state of {shown(name)}"
    if missing := expected - moments.keys():
        raise SnapshotError(
            f"{what} lacks {min(missing)}: the checkpoint is damaged, or that parameter was never "
            "trained; freeze it (requires_grad_(False)) if it is not to be"
        )
    if superfluous := moments.keys() - expected:
        kept = ", ".join(sorted(expected)) or "nothing"
        raise SnapshotError(
            f"{what} has {shown(min(superfluous))}; the optimizer as it is set keeps {kept}"
        )
    for entry, tensor in moments.items():
        if entry == "step":
            _check_updates(f"{what}: step", tensor)
        else:
            _check_same(f"{what}: {entry}", tensor, parameter.shape, parameter.dtype)


def _must_have_moments(name: str, state: State) -> bool:
    """Whether a trained parameter must have optimizer state: the checkpoint notes who has none."""
    return state.step > 0 if state.stateless is None else name not in state.stateless


def _check_updates(what: str, found: Tensor) -> None:
    _check_same(what, found, torch.Size([]), torch.float32)
    updates = float(found)
    if not (updates > 0 and updates.is_integer()):
        raise SnapshotError(f"{what} is {updates}; expected a whole number of at least 1")


def entries_of(spec: OptimizerSpec) -> frozenset[str]:
    """Return the optimizer's state of a parameter, by torch's names."""
    if spec.name == "adamw":
        return frozenset({"step", "exp_avg", "exp_avg_sq"})
    return frozenset({"momentum_buffer"} if spec.momentum else ())


def check_settings(folder: Path, state: State, spec: OptimizerSpec, tokenizer: str | None) -> None:
    """Compare the run that saved with the one that goes on. Raises SnapshotError."""
    if state.optimizer != spec.name:
        raise SnapshotError(
            f"{folder}: was trained with {state.optimizer} and cannot go on with {spec.name}"
        )
    if state.momentum is not None and bool(state.momentum) != bool(spec.momentum):
        raise SnapshotError(
            f"{folder}: was trained with momentum {state.momentum} and cannot go on with "
            f"{spec.momentum}"
        )
    if None not in (state.tokenizer, tokenizer) and state.tokenizer != tokenizer:
        raise SnapshotError(
            f"{folder}: was trained with another tokenizer ({_tokenizer_text(state.tokenizer)}, "
            f"now {_tokenizer_text(tokenizer)}); its own files are in the checkpoint"
        )


def _tokenizer_text(tokenizer: str | None) -> str:
    return f"{shown(str(tokenizer))[:12]}"


def check_updates(folder: Path, state: State, parts: Iterable[Mapping[str, int]]) -> None:
    """Compare the step reached with the optimizer's counts, where no checksum ties the two.

    `parts`: of each rank, `updates` of what it read. A parameter may have been left out of some
    steps; not all of a file. The optimizer counts in float32, so to 2**24.
    """
    updates: dict[str, int] = {}
    for part in parts:
        for file, most in part.items():
            updates[file] = max(updates.get(file, 0), most)
    for file, most in sorted(updates.items()):
        if most != state.step < 2**24:
            raise SnapshotError(
                f"{folder / file}: is of step {most}, {TRAINER} says step {state.step}: files of "
                "two checkpoints"
            )
