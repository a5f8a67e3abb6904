"""The files of a local source of text: a file, a folder or a pattern, in an order that is fixed.

    text:book.txt       the file
    text:books          every file in the folder and those below it, hidden ones left out
    text:books/*.md     every file that matches; ** stands for any number of folders
    json:rows           of a folder, the files whose names end in .json or .jsonl
    parquet:rows        likewise .parquet

Files come in the order of their paths, whatever order the file system has them in: every rank and
every machine reads the same text.
"""

from __future__ import annotations

import errno
import glob
import os
from pathlib import Path
from typing import NoReturn

MOST_FILES = 100_000
LOCAL_KINDS = ("text", "json", "parquet")
_ENDINGS = {"json": (".json", ".jsonl"), "parquet": (".parquet",)}
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


def local_files(source: str) -> list[Path]:
    """The files of a source, in order of path; empty if none matches or the source is not local.

    Raises OSError for a folder that cannot be read or has too many files. The root is no folder of
    texts.
    """
    kind, _, name = source.partition(":")
    if kind not in LOCAL_KINDS or not name:
        return []
    path = Path(name)
    try:
        if path.is_file():
            return [path]
        is_folder = path.is_dir() and path.resolve() != Path(path.resolve().anchor)
        # `Path.glob` has another meaning of a final ** in every version of Python.
        names = [] if is_folder else glob.glob(name, recursive=True)  # noqa: PTH207
        files = sorted(match for match in map(Path, names) if match.is_file())
    # A name that is too long or has a null byte; a pattern of a thousand folders.
    except (OSError, ValueError, RecursionError):
        return []
    return _files_below(path, kind) if is_folder else files


def why_no_file(source: str) -> str:
    """Say what a local source without files lacks: it itself, or files of its kind in a folder."""
    kind, _, name = source.partition(":")
    try:
        is_folder = Path(name).is_dir() and Path(name).resolve() != Path(
            Path(name).resolve().anchor
        )
    except (OSError, ValueError, RecursionError):
        is_folder = False
    if not is_folder:
        return "no such file"
    endings = " or ".join(_ENDINGS.get(kind, ()))
    what = f"no file that ends in {endings}" if endings else "no file, such as one ending in .txt,"
    return f"{what} in the folder"


def _files_below(folder: Path, kind: str) -> list[Path]:
    """The files in a folder and its subfolders that are of the kind and not hidden."""
    files = []
    for place, folders, names in os.walk(folder, onerror=_fail):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files += [Path(place, name) for name in names if _is_of_kind(name, kind)]
        if len(files) > MOST_FILES:
            problem = f"has more than {MOST_FILES:,} files; join them, or name fewer by a pattern"
            raise OSError(errno.E2BIG, problem, str(folder))
    return sorted(file for file in files if file.is_file())


def _fail(error: OSError) -> NoReturn:
    raise error


def _is_of_kind(name: str, kind: str) -> bool:
    if name.startswith("."):
        return False
    stem = next((name.removesuffix(end) for end in _COMPRESSED if name.endswith(end)), name)
    return stem.endswith(_ENDINGS.get(kind, ""))
