"""The files of a checkpoint: where they are and whether they are whole, before a tensor is read.

A safetensors file begins with the length of its header and the header, JSON that says where each
tensor lies; so a file that was cut short is found out by its size. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from engine.model.stage_module import ModelError

Locate = Callable[[str], Path | None]
"""Finds a file of the checkpoint by name (a folder's, or one that the hub's cache fetches)."""


def locate_in(folder: Path) -> Locate:
    return lambda name: folder / name if (folder / name).is_file() else None


def checkpoint_files(locate: Locate, what: str, kind: str = "model") -> list[Path]:
    """The safetensors files of a checkpoint, each found whole; empty if there is none.

    `what` names the checkpoint in messages; `kind` begins the files' names. Raises ModelError
    naming the file that is missing or damaged.
    """
    single = locate(f"{kind}.safetensors")
    if single is not None:
        tensors_of(single)
        return [single]
    index = locate(f"{kind}.safetensors.index.json")
    if index is None:
        return []
    tensor_files = _read_index(index)
    files = []
    for name in sorted(set(tensor_files.values())):
        file = locate(name)
        if file is None:
            raise ModelError(f"{what}: shard {name} is missing; {index.name} names it")
        lacking = {t for t, f in tensor_files.items() if f == name} - tensors_of(file)
        if lacking:
            raise ModelError(f"{file}: has no tensor {min(lacking)}, though {index.name} says so")
        files.append(file)
    return files


def _read_index(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text())["weight_map"]
        return {str(tensor): str(file) for tensor, file in files.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        raise ModelError(f"{index}: not a readable index of safetensors files: {error}") from None


def tensors_of(file: Path) -> set[str]:
    """The names of the tensors in a safetensors file. Raises ModelError if it is not whole."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            if not 0 < header_bytes <= size - 8:
                raise ModelError(f"{file}: corrupt: {size} bytes cannot hold its header")
            header = json.loads(opened.read(header_bytes))
        header.pop("__metadata__", None)
        ends = [int(entry["data_offsets"][1]) for entry in header.values()]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{file}: corrupt: its header is not that of safetensors") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{file}: corrupt: {size:,} bytes, its header says {expected:,}")
    return set(header)
