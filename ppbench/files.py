"""Files that exist wholly or not at all: written aside, then renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from ppbench.errors import StoreError


@contextlib.contextmanager
def whole_file(path: Path, option: str = "") -> Iterator[IO[bytes]]:
    """A file to be written; a reader never meets half of it, and its folder is made.

    Raises StoreError, which names the `option` to change if there is one, when it cannot be done.
    """
    if not path.name:
        raise StoreError(f"{path}: names no file{_fix(option)}")
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}{_fix(option)}") from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def _fix(option: str) -> str:
    return f"; choose another path with {option} FILE" if option else ""
