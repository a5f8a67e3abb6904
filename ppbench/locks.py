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
    """A lock on a file, held by one process or shared by several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def try_to_hold(self, *, shared: bool = False, note: str = "") -> bool:
        """Whether the lock is held now.

        `note` tells other processes who holds it. Raises StoreError.
        """
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
        """Write the note, or leave it out where the disk is full: the lock is held all the same."""
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
        """Return the note of the process that holds the lock."""
        try:
            return self.path.read_text().strip()
        except OSError:
            return ""


@contextlib.contextmanager
def hold_lock(path: Path, note: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock; where another process has it, report its holder once and wait.

    Raises StoreError.
    """
    lock, has_reported = Lock(path), False
    while not lock.try_to_hold(note=note):
        if not has_reported:
            on_wait(lock.holder())
            has_reported = True
        time.sleep(POLL_S)
    try:
        yield
    finally:
        lock.release()


def lock_note(activity: str) -> str:
    """Describe for other processes what is done, by which process and since when."""
    now = datetime.now().astimezone()
    return f"{activity} (process {os.getpid()} on {platform.node()}, since {now:%H:%M:%S})"
