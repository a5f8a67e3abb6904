"""Going on from a checkpoint: a rank reads its own tensors, all compared before one is taken.

1 `read_state`      how far the saved run had come, and what must be the same to go on
2 `check_settings`  optimizer and tokenizer are those that trained
3 `read`            this rank's tensors are there, and have its shapes and dtypes
4 `check_names`     the checkpoint has the tensors of the whole model and no others
5 `Saved.put`       only now anything changes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from engine.model.checkpoint import open_tensors, read_index, read_json
from engine.model.stage_module import ModelError
from engine.run.optimizer import OptimizerSpec
from engine.run.shards import Piece
from engine.run.snapshot import TRAINER, SnapshotError, State, index_name


@dataclass(frozen=True)
class Target:
    """The tensors and parameters that a rank restores, by name in the unsplit model."""

    model: Mapping[str, Tensor]
    parameters: Mapping[str, nn.Parameter]


def read_state(folder: Path) -> State:
    """Read `trainer.json`. Raises SnapshotError."""
    path = folder / TRAINER
    if not path.exists():
        raise SnapshotError(f"{folder}: no checkpoint to resume from: it has no {TRAINER}")
    try:
        return State(**read_json(path))
    except ModelError as error:
        raise SnapshotError(str(error)) from error
    except TypeError as error:
        raise SnapshotError(f"{path}: holds no state of a trainer: {error}") from error


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
            f"{folder}: was trained with another tokenizer ({str(state.tokenizer)[:12]}, "
            f"now {str(tokenizer)[:12]}); its own files are in the checkpoint"
        )


def check_names(folder: Path, model: set[str]) -> None:
    """Compare the names in a checkpoint with those of the whole model. Raises SnapshotError."""
    saved = set(_index(folder, "model"))
    if missing := model - saved:
        raise SnapshotError(f"{folder}: has no tensor {min(missing)}: it is of another model")
    if superfluous := saved - model:
        raise SnapshotError(
            f"{folder}: has a tensor {min(superfluous)} that the model does not have: "
            "it is of another model"
        )


def _index(folder: Path, kind: str) -> dict[str, str]:
    try:
        return read_index(folder / index_name(kind))
    except ModelError as error:
        raise SnapshotError(str(error)) from error


@dataclass(frozen=True)
class Saved:
    """A rank's tensors out of a checkpoint, each as its target asks."""

    model: Mapping[str, Tensor]
    moments: Mapping[str, Mapping[str, Tensor]]  # parameter -> the optimizer's state of it

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


def read(folder: Path, target: Target, spec: OptimizerSpec) -> Saved:
    """Read a rank's tensors and compare them with its own. Raises SnapshotError.

    A parameter without any state of the optimizer was never trained.
    """
    model = _read(folder, "model", lambda name: name in target.model)
    for name, tensor in target.model.items():
        if name not in model:
            raise SnapshotError(f"{folder}: has no tensor {name}: it is of another model")
        _check_same(f"{folder}: {name}", model[name], tensor)
    trained = {name: p for name, p in target.parameters.items() if p.requires_grad}
    moments: dict[str, dict[str, Tensor]] = {name: {} for name in target.parameters}
    state = _read(folder, "optimizer", lambda key: key.rpartition("/")[0] in trained)
    for key, tensor in state.items():
        name, _, entry = key.rpartition("/")
        moments[name][entry] = tensor
        if entry != "step":
            what = f"{folder}: the optimizer's state of {name}: {entry}"
            _check_same(what, tensor, trained[name])
    expected = entries_of(spec)
    for name, entries in moments.items():
        if entries and entries.keys() != expected:
            raise SnapshotError(
                f"{folder}: the optimizer's state of {name} is {', '.join(sorted(entries))}; the "
                f"optimizer as it is set keeps {', '.join(sorted(expected)) or 'nothing'}"
            )
    return Saved(model, moments)


def _read(folder: Path, kind: str, is_wanted: Callable[[str], bool]) -> dict[str, Tensor]:
    """The tensors wanted; the files without any of them are not opened."""
    names: dict[str, list[str]] = {}
    for tensor, file in _index(folder, kind).items():
        if is_wanted(tensor):
            names.setdefault(file, []).append(tensor)
    tensors: dict[str, Tensor] = {}
    for file, wanted in names.items():
        try:
            with open_tensors(folder / file) as opened:
                tensors |= {name: opened.get_tensor(name) for name in wanted}
        except ModelError as error:
            raise SnapshotError(str(error)) from error
        except SafetensorError as error:
            raise SnapshotError(f"{folder / file}: is not as its index says: {error}") from error
    return tensors


def _check_same(what: str, saved: Tensor, ours: Tensor) -> None:
    if saved.shape != ours.shape:
        raise SnapshotError(f"{what} has shape {list(saved.shape)}, the model {list(ours.shape)}")
    if saved.dtype != ours.dtype:
        model, theirs = (str(dtype).removeprefix("torch.") for dtype in (ours.dtype, saved.dtype))
        raise SnapshotError(f"{what} has dtype {theirs}, the model {model}; resume with {theirs}")


def entries_of(spec: OptimizerSpec) -> frozenset[str]:
    """Return the optimizer's state of a parameter, by torch's names."""
    if spec.name == "adamw":
        return frozenset({"step", "exp_avg", "exp_avg_sq"})
    return frozenset({"momentum_buffer"} if spec.momentum else ())
