"""Writes output files completely or not at all, and locks files between processes.

    a regular file       is written under another name, then renamed; its mode and owner stay
    a link               stays, and its target is written
    a device or a pipe   is written to directly, as are descriptors such as /dev/stdout
    a folder             is refused

The same content gives the same bytes, gzipped or not. A lock is a file that the system unlocks when
its holder dies.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gzip
import os
import platform
import secrets
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import IO

from ppbench.errors import StoreError, UsageError

_DESCRIPTORS = Path("/proc/self/fd")
_MOST_LINKS = 40  # as many as the kernel follows


@contextlib.contextmanager
def whole_file(path: Path, option: str = "") -> Iterator[IO[bytes]]:
    """Open a file for writing that no reader ever sees half-written; its folder is made.

    A regular file can be sought and read back. Raises StoreError when it cannot be written, naming
    the `option` to change if there is one; the old file then stays as it was.
    """
    try:
        descriptor = _descriptor_of(path)
        if descriptor is not None:
            sys.stdout.flush()
            with os.fdopen(os.dup(descriptor), "wb") as file:
                yield file
            return
        try:
            held = path.stat()
        except FileNotFoundError:  # also a dangling link, whose target is made
            held = None
        if held is None or stat.S_ISREG(held.st_mode):
            with _replacing(path, held) as file:
                yield file
        elif stat.S_ISDIR(held.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        else:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY), "wb") as file:
                yield file
    except OSError as error:
        reason = "its reader has gone" if error.errno == errno.EPIPE else error.strerror or error
        fix = f"; choose another path with {option} FILE" if option else ""
        raise StoreError(f"{path}: cannot be written: {reason}{fix}") from error


def is_stream(path: Path) -> bool:
    """Whether the path is a device, a pipe or a descriptor rather than a file or folder."""
    try:
        mode = path.stat().st_mode
        return _descriptor_of(path) is not None or not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
    except OSError:
        return False


@contextlib.contextmanager
def _replacing(path: Path, held: os.stat_result | None) -> Iterator[IO[bytes]]:
    """Open a file that replaces `path` once it is complete; `held` is the status of the old one."""
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".ppbench-{secrets.token_hex(8)}")
    try:
        with aside.open("w+b") as file:
            yield file
            file.flush()
            if held is not None:
                with contextlib.suppress(OSError):  # of another owner, where that is not permitted
                    os.fchown(file.fileno(), held.st_uid, held.st_gid)
                os.fchmod(file.fileno(), stat.S_IMODE(held.st_mode))
            os.fsync(file.fileno())
        aside.replace(target)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def _descriptor_of(path: Path) -> int | None:
    """The descriptor of this process that a path such as /dev/stdout means.

    Opening it by its path would fail for a socket, and overwrite a file from its start.
    """
    own = os.path.realpath(_DESCRIPTORS)
    for _ in range(_MOST_LINKS):
        if path.name.isdigit() and os.path.realpath(path.parent) == own:
            return int(path.name)
        try:
            path = path.parent / path.readlink()
        except OSError:  # not a link, or an unreadable one, which opening it will report
            return None
    return None


GZIPPED = ".gz"
_LEVEL = 6


def check_suffix(path: Path, expected: Sequence[str], hint: str = "") -> str:
    """The one of the `expected` suffixes that the name ends in.

    Raises UsageError if it ends in none of them, or is nothing but one of them.
    """
    if path.name in expected:
        raise UsageError(f"{path}: the file name is only an extension; write a name before it")
    for suffix in expected:
        if path.name.endswith(suffix):
            return suffix
    *others, last = expected
    names = f"{', '.join(others)} or {last}" if others else last
    raise UsageError(f"{path}: unknown file extension; expected {names}{hint}")


def write_file(path: Path, pieces: Iterable[str | bytes]) -> None:
    """Write the pieces one after the other, gzipped if the name ends in `.gz`.

    Raises StoreError.
    """
    with whole_file(path, "-o") as file:
        is_zipped = path.name.endswith(GZIPPED)
        # Without a name and a time of 0, the same content would give other bytes each time.
        target = gzip.GzipFile("", "wb", _LEVEL, file, mtime=0) if is_zipped else file
        for piece in pieces:
            target.write(piece.encode() if isinstance(piece, str) else piece)
        if is_zipped:
            target.close()


POLL_S = 0.2


class Lock:
    """A lock on a file, held by one process or shared by several."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def try_to_hold(self, *, shared: bool = False, note: str = "") -> bool:
        """Take the lock if it is free; return whether it is held now.

        `note` describes the holder to other processes. Raises StoreError.
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
            with contextlib.suppress(OSError):  # a full disk: the lock is held in any case
                file.truncate(0)
                file.write(note)
                file.flush()
        return True

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def holder(self) -> str:
        """The note of the process that holds the lock; empty if it cannot be read."""
        try:
            return self.path.read_text().strip()
        except OSError:
            return ""


@contextlib.contextmanager
def hold_lock(path: Path, note: str, on_wait: Callable[[str], None]) -> Iterator[None]:
    """Hold a lock; if another process has it, report its note once to `on_wait` and wait.

    Blocks. Raises StoreError.
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
    """A lock's note: the activity, the process and the time at which it began."""
    now = datetime.now().astimezone()
    return f"{activity} (process {os.getpid()} on {platform.node()}, since {now:%H:%M:%S})"
