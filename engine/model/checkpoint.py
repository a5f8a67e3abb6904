"""The safetensors files of a checkpoint: where they are, their index, and their tensors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from engine.model.stage_module import ModelError

Locate = Callable[[str], Path | None]
"""Finds a file of the checkpoint by name (a folder's, or one that the hub's cache fetches)."""


def locate_in(folder: Path) -> Locate:
    return lambda name: folder / name if (folder / name).is_file() else None


def checkpoint_files(locate: Locate, what: str) -> list[Path]:
    """The safetensors files of a model, each of which opens; empty if there is none.

    `what` names the checkpoint in messages. Raises ModelError for a file that is missing or does
    not open.
    """
    files = [locate("model.safetensors")]
    if files[0] is None:
        index = locate("model.safetensors.index.json")
        if index is None:
            return []
        names = sorted(set(read_index(index).values()))
        files = [locate(name) for name in names]
        if None in files:
            missing = names[files.index(None)]
            raise ModelError(f"{what}: shard {missing} is missing; {index.name} names it")
    there = [file for file in files if file is not None]
    for file in there:
        with open_tensors(file):
            pass
    return there


@contextlib.contextmanager
def open_tensors(file: Path) -> Iterator[safe_open]:
    """A safetensors file. Raises ModelError for one that safetensors refuses to open."""
    try:
        opened = safe_open(file, framework="pt")
    except SafetensorError as error:
        raise ModelError(f"{file}: corrupt: {error}") from error
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror or error}") from error
    with opened:
        yield opened


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{path}: not readable as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: holds no JSON object")
    return content


def read_index(index: Path) -> dict[str, str]:
    """Tensor -> file, of an index of safetensors files. Raises ModelError."""
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
        raise ModelError(
            f"{index}: not a readable index of safetensors files: "
            'expected {"weight_map": {tensor: file}}'
        )
    return files
