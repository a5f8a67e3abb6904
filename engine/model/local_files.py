"""The files of a local source of text: a file, a folder or a pattern, in an order that is fixed.

    text:book.txt       the file
    text:books          every file in the folder and those below it, hidden ones left out
    text:books/*.md     every file that matches; ** stands for any number of folders
    files:rows/*.json   likewise, for the sources of rows

Files come in the order of their paths, whatever order the file system has them in: every rank and
every machine reads the same text.
"""

from __future__ import annotations

import errno
import glob
import itertools
import os
from pathlib import Path

LOCAL_KINDS = ("text", "files")
MOST_PATHS = 100_000
"""A source that has more is refused: the root of a machine would take hours to list."""


def local_files(source: str) -> list[Path]:
    """The files of a source, in order of path; empty if none matches or the source is not local.

    Raises OSError where more than `MOST_PATHS` files and folders match.
    """
    kind, _, name = source.partition(":")
    if kind not in LOCAL_KINDS or not name or "://" in name:
        return []
    try:
        if Path(name).is_file():
            return [Path(name)]
        # `Path.glob` has another meaning of a final ** in every version of Python.
        pattern = f"{glob.escape(name)}/**" if Path(name).is_dir() else name
        matches = list(itertools.islice(glob.iglob(pattern, recursive=True), MOST_PATHS + 1))  # noqa: PTH207
        too_many = len(matches) > MOST_PATHS
        files = [] if too_many else sorted(path for path in map(Path, matches) if path.is_file())
    # A name that is too long or has a null byte; a pattern of a thousand folders.
    except (OSError, ValueError, RecursionError):
        return []
    if too_many:
        problem = f"has more than {MOST_PATHS:,} files; join them, or name fewer by a pattern"
        raise OSError(errno.E2BIG, problem, name)
    return files


def why_no_file(source: str) -> str:
    """Say what is wrong with a local source that has no files."""
    is_folder = os.path.isdir(source.partition(":")[2])  # noqa: PTH112  # False for what is no path
    return "no file in the folder" if is_folder else "no such file"
