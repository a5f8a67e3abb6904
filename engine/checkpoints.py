"""Checkpoints: a folder that resumes at any world size and that plain transformers can load.

    step-000050/
        config.json, tokenizer files          for AutoModelForCausalLM, AutoTokenizer
        model-00001-of-00002.safetensors ...  whole tensors, a file per rank of the first replica
        model.safetensors.index.json          tensor -> file
        optimizer/shard-00001-... ...         every rank's pieces of the optimizer's state
        trainer.json                          the step reached, what trained it, and all files

torch.distributed.checkpoint writes the files, and reads from them what a rank needs. Tensors go by
their names in the unsplit model, and the optimizer's by element, so it does not matter which rank,
stage or replica had them. The folder is written under another name, which is changed when all of it
is on the disk: a checkpoint exists wholly or not at all.

A rank that fails alone would leave the others waiting, so whatever may fail on one rank fails on
all of them alike. What takes a trainer is collective.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import warnings
from collections import ChainMap
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import hf_storage, metadata, planner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from engine.model.checkpoint import open_tensors, read_json
from engine.model.stage_module import ModelError
from engine.model.tokens import identity_of
from engine.trainer import Trainer

Result = TypeVar("Result")
_STATE, _OPTIMIZER = "trainer.json", "optimizer"


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or resumed from."""


@dataclass(frozen=True)
class Progress:
    """A run's progress: the number of its next step, and the tokens of those before."""

    step: int = 0
    num_tokens: int = 0


def latest(root: Path) -> Path | None:
    """Return the checkpoint of the latest step in a folder of them; None if there is none.

    A folder that was being written when its run was killed has another name. One that a kill kept
    from being replaced is brought back. Raises CheckpointError when the folder cannot be read.
    """
    try:
        for old in root.glob(".step-*.old"):
            with contextlib.suppress(OSError):  # of several ranks one does it
                if not (root / old.name[1:-4]).exists():
                    old.rename(root / old.name[1:-4])
        found = [path for path in root.iterdir() if re.fullmatch(r"step-\d+", path.name)]
        whole = [path for path in found if (path / _STATE).exists()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from error
    return max(whole, key=lambda path: int(path.name[5:]), default=None)


def find(folder: Path) -> Path:
    """Return the checkpoint that a folder is, or the latest in it. Raises CheckpointError."""
    latest(folder.parent)  # brings it back
    found = latest(folder) or folder
    if not (found / _STATE).exists():
        raise CheckpointError(f"{folder}: no checkpoint to resume from: it has no {_STATE}")
    return found


def save(trainer: Trainer, root: Path, progress: Progress) -> Path:
    """Write a checkpoint into a folder of them; returns its own folder.

    Blocks until it is on the disk. An existing folder is replaced. Raises CheckpointError on every
    rank when one of them cannot write; then what was there before is untouched.
    """
    folder = root / f"step-{progress.step:06d}"
    aside, old = (root / f".{folder.name}.{kind}" for kind in ("partial", "old"))
    me, group = trainer.process, _group_of(trainer)
    tensors = _own(trainer)[0] | _gathered(trainer)
    file_of: dict[str, int] = {}
    for number, names in enumerate(trainer.gather(list(tensors)), 1):
        for name in names:
            file_of.setdefault(name, number)  # the first rank that has a tensor writes it
    ours = {n: t.contiguous() for n, t in tensors.items() if file_of[n] == me + 1}

    def clear() -> None:
        for left in root.glob(".step-*.partial"):  # by killed runs
            shutil.rmtree(left, ignore_errors=True)
        aside.mkdir(parents=True)

    def write() -> None:
        writer = hf_storage.HuggingFaceStorageWriter(str(aside), file_of)
        write_tensors(ours, storage_writer=writer, **group)
        where = str(aside / _OPTIMIZER)
        writer = hf_storage.HuggingFaceStorageWriter(where, save_distributed=True)
        write_tensors(_pieces(trainer), storage_writer=writer, **group)

    def finish() -> None:
        trainer.model.write_configuration(aside)
        if trainer.tokenizer is not None:
            trainer.tokenizer.save_pretrained(aside)
        state = {**asdict(progress), **_trained_with(trainer), "files": _files_in(aside)}
        (aside / _STATE).write_text(json.dumps(state, indent=1))
        for path in (*aside.rglob("*"), aside):
            _flush(path)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)  # `latest` brings it back after a kill in between
        aside.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
        _flush(root)

    try:
        _together(trainer, clear if me == 0 else lambda: None)
        _together(trainer, write)
        _together(trainer, finish if me == 0 else lambda: None)
    except CheckpointError as error:
        if me == 0:
            shutil.rmtree(aside, ignore_errors=True)  # a full disk is not left full
        raise CheckpointError(f"the checkpoint could not be written: {error}") from error
    return folder


def resume(trainer: Trainer, folder: Path) -> Progress:
    """Go on from a checkpoint, of whatever world size; returns how far it had come.

    Blocks. Raises CheckpointError on every rank alike when the checkpoint does not open or is of
    another model, optimizer or tokenizer; then nothing has changed.
    """
    (tensors, parameters), group = _own(trainer), _group_of(trainer)
    readers = [hf_storage.HuggingFaceStorageReader(str(folder / kind)) for kind in ("", _OPTIMIZER)]
    described = {name: _described(t.shape, t.dtype) for name, t in tensors.items()}
    expected: ChainMap[str, str] = ChainMap(*trainer.gather(described))  # of all ranks

    def check() -> tuple[dict[str, Any], list[str]]:
        state = read_json(folder / _STATE)
        for what, ours in _trained_with(trainer).items():
            if None not in (state[what], ours) and state[what] != ours:
                was = f"was trained with {what} {state[what]} and cannot go on with {ours}"
                raise CheckpointError(f"{folder}: {was}")
        for file in state["files"]:
            with open_tensors(folder / file):
                pass
        if others := set(_files_in(folder)).difference(state["files"]):
            raise CheckpointError(f"{folder}: {min(others)} was not saved with it; remove it")
        model, optimizer = (reader.read_metadata().state_dict_metadata for reader in readers)
        saved = {
            name: _described(tensor.size, tensor.properties.dtype)
            for name, tensor in model.items()
            if isinstance(tensor, metadata.TensorStorageMetadata)
        }
        for name in sorted(saved.keys() | expected.keys()):
            there, ours = (some.get(name, "not there") for some in (saved, expected))
            if there != ours:
                raise CheckpointError(f"{folder}: {name} is {there}, in the model {ours}")
        trainer.model.check_configuration(folder)
        return state, list(optimizer)

    def read() -> None:
        with contextlib.nullcontext() if trainer.shards is None else trainer.shards.written_whole():
            read_tensors(tensors, storage_reader=readers[0], **group)
        if trainer.optimizer is not None:
            trainer.optimizer.state.clear()
            count_device = None if trainer.optimizer.defaults["fused"] else "cpu"
            for key in saved:
                name, _, entry = key.rpartition("/")
                for piece in trainer.pieces_of(parameters[name]) if name in parameters else ():
                    zeros = torch.zeros_like(piece.own, memory_format=torch.contiguous_format)
                    if entry == "step":
                        zeros = torch.zeros((), device=count_device or piece.own.device)
                    trainer.optimizer.state[piece.own][entry] = zeros
        read_tensors(_pieces(trainer), storage_reader=readers[1], **group)  # into these zeros

    state, saved = _together(trainer, check)
    _together(trainer, read)
    return Progress(state["step"], state["num_tokens"])


def _trained_with(trainer: Trainer) -> dict[str, str | None]:
    """Return what must be the same to go on: the kind of optimizer, and the tokenizer of a text."""
    spec, tokenizer = trainer.config.optimizer, None
    if trainer.config.data.source != "synthetic":
        tokenizer = "bytes" if trainer.tokenizer is None else identity_of(trainer.tokenizer)
    has_momentum = spec.name == "sgd" and spec.momentum
    optimizer = f"{spec.name} with momentum" if has_momentum else spec.name
    return {"optimizer": optimizer, "tokenizer": tokenizer}


def _own(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, nn.Parameter]]:
    """A rank's parameters and buffers, and its parameters, by name in the unsplit model."""
    tensors: dict[str, Tensor] = {}
    parameters: dict[str, nn.Parameter] = {}
    for stage, module in trainer.modules.items():
        names = trainer.shared.unsplit_names(stage)
        tensors |= {names.get(n, n): t for n, t in module.own_state().items()}
        parameters |= {names.get(n, n): p for n, p in module.own_parameters().items()}
    return tensors, parameters


def _gathered(trainer: Trainer) -> dict[str, Tensor]:
    """A rank's parameters, where replicas keep parts of them: put together, on the host."""
    if trainer.shards is None or not trainer.shards.sharded.parameters:
        return {}
    names = {parameter: name for name, parameter in _own(trainer)[1].items()}
    gathered: dict[str, Tensor] = {}
    for stage in trainer.modules:  # one is whole at a time
        whole = trainer.shards.gathered([stage], lambda piece: piece)
        gathered |= {names[p]: t.cpu() for p, t in whole.items() if t is not None}
    return gathered


class _Piece(Tensor):
    """Some elements of a larger flat tensor, as torch.distributed.checkpoint asks about them."""

    place: planner.TensorWriteData

    def __create_write_items__(self, name: str, _: object) -> list[planner.WriteItem]:
        index = metadata.MetadataIndex(name, self.place.chunk.offsets)
        return [planner.WriteItem(index, planner.WriteItemType.SHARD, tensor_data=self.place)]

    def __create_chunk_list__(self) -> list[metadata.ChunkStorageMetadata]:
        return [self.place.chunk]

    def __get_tensor_shard__(self, _: metadata.MetadataIndex) -> Tensor:
        return self.as_subclass(Tensor)

    def size(self) -> torch.Size:  # type: ignore[override]  # compared with what was saved
        return self.place.size


def _pieces(trainer: Trainer) -> dict[str, Tensor]:
    """Return what the optimizer knows of what it trains here, as `parameter/entry`: views of it."""
    pieces: dict[str, Tensor] = {}
    held = {} if trainer.optimizer is None else trainer.optimizer.state
    for name, parameter in _own(trainer)[1].items():
        for piece in trainer.pieces_of(parameter):
            for entry, value in held.get(piece.own, {}).items():
                if isinstance(value, Tensor):
                    flat = value.flatten().as_subclass(_Piece)
                    first, size = (0, 1) if entry == "step" else (piece.first, parameter.numel())
                    chunk = metadata.ChunkStorageMetadata(torch.Size([first]), flat.shape)
                    kind = metadata.TensorProperties(flat.dtype)
                    flat.place = planner.TensorWriteData(chunk, kind, torch.Size([size]))
                    pieces[f"{name}/{entry}"] = flat
    return pieces


def _group_of(trainer: Trainer) -> dict[str, Any]:
    """For torch: the ranks that save or load together; one process needs no group."""
    is_alone = len(trainer.everyone) == 1
    group = None if is_alone else trainer.fabric.host_group_of(trainer.everyone)
    return {"process_group": group, "no_dist": is_alone}


def _together(trainer: Trainer, work: Callable[[], Result]) -> Result:
    """Do what may fail on one rank: then it fails on every rank alike."""
    me, result = trainer.process, None
    problem: str | None = None
    cause: BaseException | None = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's, that one process is alone
            result = work()
    except (CheckpointError, ModelError) as error:
        problem = str(error)
    except CheckpointException as error:  # torch's, as on every rank
        rank, (cause, _) = min(error.failures.items())
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        problem = f"rank {rank}: {type(cause).__name__}: {cause}"
    except Exception as error:  # the others wait for this rank, whatever it is
        problem, cause = (
            f"rank {me}: {type(error).__name__}: {error}",
            error,
        )
    for found in trainer.gather(problem):
        if found is not None:
            raise CheckpointError(found.partition("\n")[0]) from cause
    return cast(Result, result)


def _described(shape: torch.Size, dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))


def _flush(path: Path) -> None:
    """Flush a file or a folder's names to the disk, before the rename that makes it valid."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
