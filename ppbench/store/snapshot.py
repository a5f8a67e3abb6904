"""The files of a table at one moment, also while compaction replaces some of them.

    results/runs/<run_id>.parquet            a run's own file, until it is compacted
    results/runs/compacted/<name>.parquet    many runs

Every existing file counts, and a run that is in two of them is read from the first. Compaction
renames the new file into place, changes the token, and only then removes the files that it
replaces. So when the token is the same before and after the folders are listed, no file was removed
before its replacement was visible.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from ppbench.errors import StoreError
from ppbench.files import whole_file

COMPACTED = "compacted"
LOCKS = "locks"
_TOKEN = "compacted"  # noqa: S105  # no secret: it identifies a moment
_MOST_TRIES = 1000
T = TypeVar("T")


class VanishedFileError(Exception):
    """A file vanished after the folder was listed."""


@dataclass(frozen=True)
class Listed:
    """The files of a table: of one run each, oldest first, and of many runs."""

    single: tuple[Path, ...]
    compacted: tuple[Path, ...]


def files_of(folder: Path, name: str) -> Listed:
    """List the files of a table but for unfinished ones (dot files), within `read_consistently`.

    Raises StoreError for a folder that cannot be listed.
    """
    single: list[Path] = []
    compacted: list[Path] = []
    for place, files in ((folder / name, single), (folder / name / COMPACTED, compacted)):
        try:
            names = [name for name in os.listdir(place) if name.endswith(".parquet")]  # noqa: PTH208  # fast
        except FileNotFoundError:
            continue
        except OSError as error:
            raise StoreError(f"{place}: cannot be read: {error.strerror}") from error
        files += [place / name for name in sorted(names) if not name.startswith(".")]
    return Listed(tuple(single), tuple(compacted))


def read_consistently(folder: Path, look: Callable[[], T]) -> T:
    """Call `look` until no file was replaced during the call, and return its result.

    Raises StoreError after `_MOST_TRIES` attempts.
    """
    for _ in range(_MOST_TRIES):
        before = _token(folder)
        try:
            found = look()
        except VanishedFileError:
            continue
        if _token(folder) == before:
            return found
    raise StoreError(f"{folder}: its files change faster than they can be read; try again later")


def change_token(folder: Path) -> None:
    """Change the token: after a file has replaced others, before these are removed."""
    with whole_file(_token_file(folder)) as file:
        file.write(secrets.token_hex(16).encode())


def _token(folder: Path) -> bytes:
    try:
        return _token_file(folder).read_bytes()
    except OSError:
        return b""


def _token_file(folder: Path) -> Path:
    return folder / LOCKS / _TOKEN
