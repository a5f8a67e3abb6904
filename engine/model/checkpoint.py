"""The files of a checkpoint: where they are and whether they are whole, before a tensor is read.

A safetensors file begins with the length of its header and the header, JSON that says where each
tensor lies; so a file that was cut short is found out by its size. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.model.stage_module import ModelError

Locate = Callable[[str], Path | None]
"""Finds a file of the checkpoint by name (a folder's, or one that the hub's cache fetches)."""


MOST_JSON_BYTES = 100_000_000
"""What safetensors allows its headers; larger is no index and no header of any model."""
_BAD_HEADER = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    OverflowError,
    RecursionError,
)


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
    tensor_files = read_index(index)
    files = []
    for name in sorted(set(tensor_files.values())):
        file = locate(name)
        if file is None:
            raise ModelError(f"{what}: shard {shown(name)} is missing; {index.name} names it")
        lacking = {t for t, f in tensor_files.items() if f == name} - tensors_of(file)
        if lacking:
            raise ModelError(
                f"{file}: has no tensor {shown(min(lacking))}, though {index.name} says so"
            )
        files.append(file)
    return files


def shown(name: str) -> str:
    """A name out of a file, fit for a message of one line."""
    text = name if name.isprintable() else ascii(name)[1:-1]
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}…"


LONGEST_SHOWN = 200


def read_json(path: Path, most_bytes: int = MOST_JSON_BYTES) -> Any:
    """What a JSON file holds. Raises ModelError naming the file, for a name that occurs twice too.

    Only a regular file is read: a pipe in its place would block.
    """
    try:
        if not path.is_file():
            raise ModelError(f"{path}: is missing, or not a regular file")
        with path.open("rb") as opened:
            content = opened.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ModelError(f"{path}: larger than {most_bytes:,} bytes")
        return json.loads(content.decode(), object_pairs_hook=_unique)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except RecursionError:
        raise ModelError(f"{path}: not readable as JSON: nested too deeply") from None
    except ValueError as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{path}: not readable as JSON: {shown(str(error))}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f'"{shown(twice)}" occurs twice')
    return values


def read_index(index: Path) -> dict[str, str]:
    """Tensor -> file, of an index of safetensors files. Raises ModelError."""
    content = read_json(index)
    files = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
        raise ModelError(
            f"{index}: not a readable index of safetensors files: "
            'expected {"weight_map": {tensor: file}}'
        )
    return files


def tensors_of(file: Path) -> set[str]:
    """The names of the tensors in a safetensors file. Raises ModelError if it is not whole."""
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            header_bytes = int.from_bytes(opened.read(8), "little")
            if not 0 < header_bytes <= min(size - 8, MOST_JSON_BYTES):
                raise ModelError(f"{file}: corrupt: {size} bytes cannot hold its header")
            header = json.loads(opened.read(header_bytes))
        header.pop("__metadata__", None)
        ends = [int(entry["data_offsets"][1]) for entry in header.values()]
    except _BAD_HEADER as error:
        if isinstance(error, ModelError):
            raise
        raise ModelError(f"{file}: corrupt: its header is not that of safetensors") from None
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    expected = 8 + header_bytes + max(ends, default=0)
    if size != expected:
        raise ModelError(f"{file}: corrupt: {size:,} bytes, its header says {expected:,}")
    return set(header)
