"""Output files, whole or not there, and locks between processes.

a regular file       written aside, then renamed over it; its mode and owner stay
a link               stays, and what it leads to is written
a device or a pipe   is written to as it is, as are descriptors such as /dev/stdout
a folder             is refused

Files as they are written out: the same bytes for the same content.

A lock is a file that the system unlocks when its holder dies.
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
from typing import IO, cast

from ppbench.errors import StoreError, UsageError

_DESCRIPTORS = Path("/proc/self/fd")
_MOST_LINKS = 40  # as many as the kernel follows


@contextlib.contextmanager
def whole_file(path: Path, option: str = "") -> Iterator[IO[bytes]]:
    """A file to be written; a reader never meets half of it, and its folder is made.

    A regular one can be sought and read back. Raises StoreError, which names the `option` to change
    if there is one, when it cannot be done; then the file that was there is as it was.
    """
    try:
        with _opened(path) as file:
            yield file
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {_reason(error)}{_fix(option)}") from error


def is_stream(path: Path) -> bool:
    """Whether the path is a device, a pipe or a descriptor rather than a file."""
    try:
        return _descriptor_of(path) is not None or not _is_file_or_folder(path.stat().st_mode)
    except OSError:
        return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Raises OSError."""
    if not path.name:
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    descriptor = _descriptor_of(path)
    if descriptor is not None:
        sys.stdout.flush()
        with os.fdopen(os.dup(descriptor), "wb") as file:
            yield file
        return
    held = _status(path)
    if held is None or stat.S_ISREG(held.st_mode):
        with _replacing(path, held) as file:
            yield file
    elif stat.S_ISDIR(held.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    else:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOCTTY), "wb") as file:
            yield file


@contextlib.contextmanager
def _replacing(path: Path, held: os.stat_result | None) -> Iterator[IO[bytes]]:
    """A file that takes the path's place once it is complete; `held` is of the one there is."""
    target = Path(os.path.realpath(path)) if path.is_symlink() else path
    target.parent.mkdir(parents=True, exist_ok=True)
    aside = target.with_name(f".ppbench-{secrets.token_hex(8)}")
    try:
        with aside.open("w+b") as file:
            yield file
            file.flush()
            if held is not None:
                _keep_rights(file.fileno(), held)
            os.fsync(file.fileno())
        aside.replace(target)
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def _keep_rights(handle: int, held: os.stat_result) -> None:
    """Give a file the mode of another, and its owner where that is permitted."""
    with contextlib.suppress(OSError):
        os.fchown(handle, held.st_uid, held.st_gid)
    os.fchmod(handle, stat.S_IMODE(held.st_mode))


def _status(path: Path) -> os.stat_result | None:
    """What a path leads to; None if there is nothing yet, as at the end of a dangling link."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _descriptor_of(path: Path) -> int | None:
    """The descriptor of this process that a path such as /dev/stdout stands for.

    To open it by its path would fail for a socket, and overwrite a file from its start.
    """
    own = os.path.realpath(_DESCRIPTORS)
    for _ in range(_MOST_LINKS):
        if path.name.isdigit() and os.path.realpath(path.parent) == own:
            return int(path.name)
        try:
            path = path.parent / path.readlink()
        except OSError:  # no link, or none that can be read: what follows says which
            return None
    return None


def _is_file_or_folder(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode)


def _reason(error: OSError) -> str:
    if error.errno == errno.EPIPE:
        return "its reader has gone"
    return error.strerror or str(error)


def _fix(option: str) -> str:
    return f"; choose another path with {option} FILE" if option else ""


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
