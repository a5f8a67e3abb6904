"""Files as they are written out: the same bytes for the same content."""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, cast

from ppbench.errors import UsageError
from ppbench.files import whole_file

GZIPPED = ".gz"
_LEVEL = 6


def check_suffix(path: Path, expected: Sequence[str], hint: str = "") -> str:
    """Which of the `expected` suffixes the name ends in.

    Raises UsageError when it is none of them, and when it is all that there is of the name.
    """
    if path.name in expected:
        raise UsageError(f"{path}: a suffix alone; write a name before it")
    for suffix in expected:
        if path.name.endswith(suffix):
            return suffix
    *others, last = expected
    names = f"{', '.join(others)} or {last}" if others else last
    raise UsageError(f"{path}: what to write is told by the name; it must end in {names}{hint}")


def write_file(path: Path, pieces: Iterable[str | bytes]) -> None:
    """Write the pieces one after the other, gzipped if the name ends so. Raises StoreError."""
    with whole_file(path, "-o") as file:
        _write(file, pieces, is_gzipped=path.name.endswith(GZIPPED))


def _write(file: IO[bytes], pieces: Iterable[str | bytes], *, is_gzipped: bool) -> None:
    if not is_gzipped:
        _copy(file, pieces)
        return
    # A gzip file holds its name and time unless it is told others.
    with gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) as zipped:
        _copy(cast("IO[bytes]", zipped), pieces)


def _copy(file: IO[bytes], pieces: Iterable[str | bytes]) -> None:
    for piece in pieces:
        file.write(piece.encode() if isinstance(piece, str) else piece)
