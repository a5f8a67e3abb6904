"""Locks between processes: files that the system unlocks when their holder dies."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import IO

from ppbench.errors import StoreError

POLL_S = 0.2


class Lock:
    """A file that one process holds, or several that share it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def try_to_hold(self, *, shared: bool = False, note: str = "") -> bool:
        """Whether it is held now. `note` tells others who holds it. Raises StoreError."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            file = self.path.open("a+")
        except OSError as error:
            raise StoreError(f"{self.path}: cannot be written: {error.strerror}") from error
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return False
        except OSError as error:
            file.close()
            raise StoreError(
                f"{self.path}: cannot be locked: {error.strerror}; choose a file system "
                "that can, with --results DIR"
            ) from error
        self._file = file
        if note:
            self._write(note)
        return True

    def _write(self, note: str) -> None:
        """A note that finds no room is left out: the lock is held all the same."""
        assert self._file is not None
        with contextlib.suppress(OSError):
            self._file.truncate(0)
            self._file.write(note)
            self._file.flush()

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def holder(self) -> str:
        """The note of who holds it."""
        try:
            return self.path.read_text().strip()
        except OSError:
            return ""


@contextlib.contextmanager
def held(path: Path, note: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock; wait for it if another has it, and tell once whose it is. Raises StoreError."""
    lock, has_told = Lock(path), False
    while not lock.try_to_hold(note=note):
        if not has_told:
            on_wait(lock.holder())
            has_told = True
        time.sleep(POLL_S)
    try:
        yield
    finally:
        lock.release()


def who(what: str) -> str:
    """A note for others: what is done, by which process, since when."""
    now = datetime.now().astimezone()
    return f"{what} (process {os.getpid()} on {platform.node()}, since {now:%H:%M:%S})"
