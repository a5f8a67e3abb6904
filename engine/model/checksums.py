"""Checksums of a checkpoint's files, in a file beside them that coreutils reads as well.

    $ sha256sum -c checkpoint.sha256
    model-00001-of-00002.safetensors: OK
    ...

The last line is a comment, which `sha256sum` skips: the checksum of the lines above, so that a
damaged list is told from damaged files. Standard library only.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from engine.model.stage_module import ModelError

CHECKSUMS = "checkpoint.sha256"
_LINE = re.compile(r"([0-9a-f]{64})  ([^\n]+)")
_LAST_LINE = re.compile(r"# ([0-9a-f]{64}) of the lines above")
_MOST_BYTES = 2**24  # a list of a hundred thousand files has fewer


def digest_of(file: Path) -> str:
    """The SHA-256 of a file, read piece by piece. Raises ModelError if it cannot be read."""
    try:
        seen = file.stat()
        return _digest(file, (seen.st_ino, seen.st_size, seen.st_mtime_ns))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error


@functools.lru_cache(maxsize=4096)
def _digest(file: Path, _identity: tuple[int, int, int]) -> str:
    """Kept while the file is the same: a model's files may be those that are resumed from."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def write_checksums(folder: Path, digests: Mapping[str, str]) -> None:
    """`digests`: name within the folder -> SHA-256."""
    lines = "".join(f"{digests[name]}  {name}\n" for name in sorted(digests))
    last = f"# {hashlib.sha256(lines.encode()).hexdigest()} of the lines above\n"
    (folder / CHECKSUMS).write_text(lines + last)


def read_checksums(folder: Path) -> dict[str, str] | None:
    """Name -> SHA-256; None where none were written. Raises ModelError for a damaged list."""
    path = folder / CHECKSUMS
    try:
        if not path.is_file():
            if path.exists() or path.is_symlink():
                raise ModelError(f"{path}: not a regular file; {_WITHOUT}")
            return None
        with path.open("rb") as opened:
            text = opened.read(_MOST_BYTES).decode()
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ModelError(f"{path}: corrupt: not UTF-8; {_WITHOUT}") from None
    *lines, last = text.splitlines(keepends=True) or [""]
    matches = [_LINE.fullmatch(line.removesuffix("\n")) for line in lines]
    of_lines = _LAST_LINE.fullmatch(last.removesuffix("\n"))
    actual = hashlib.sha256("".join(lines).encode()).hexdigest()
    if of_lines is None or of_lines[1] != actual or not last.endswith("\n"):
        raise ModelError(f"{path}: corrupt: its lines are not those that were written; {_WITHOUT}")
    return {match[2]: match[1] for match in matches if match is not None}


_WITHOUT = "restore it, or delete it to go on without checking the other files"


def check_file(folder: Path, name: str, expected: str) -> None:
    """Compare one file with its checksum. Raises ModelError naming the file."""
    file = folder / name
    if not file.is_file():
        raise ModelError(f"{file}: is missing; {CHECKSUMS} lists it")
    actual = digest_of(file)
    if actual != expected:
        raise ModelError(
            f"{file}: corrupt, or changed since it was saved: its SHA-256 is {actual[:12]}…, "
            f"{CHECKSUMS} says {expected[:12]}…"
        )
