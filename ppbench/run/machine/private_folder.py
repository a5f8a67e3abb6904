"""Folders that only this user can write to, in shared memory or another safe place.

    /dev/shm/ppbench-<uid>       mode 0700; no link, owned by this user
        <launch>-<node>/         files of the ranks of a node
        .<launch>-<node>/        the same, once it has been collected
        <launch>-<node>.lock     locked while in use; names the process that restarts the ranks

Shared memory is open to all: any user can make a folder, a file or a link of this name first. So
the folder is opened without following links, and its owner and mode are read from the open folder.
The folder around it is checked as well: no other user may be able to replace it afterwards.

The system unlocks files when their holder dies, in any container, so that a folder whose lock is
free is a dead launch's, unless an agent is about to start the ranks again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.flight import reserve
from ppbench.errors import StoreError

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # each folder below it is checked
MODE = 0o700
IDLE_S = 3600.0
"""A launch whose agent cannot be looked up is over when no file has changed for so long."""

FRESH_S = 60.0
"""Launches of versions without locks write a sample every 0.2 s."""

KEPT = "left"
"""Folder beside a launch's logs with the copies that another store's sweep made of its folders."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class UnsafeFolderError(OSError):
    """A folder cannot be used; the message has its path and the reason."""


def parents() -> list[Path]:
    """Return where the user's folder may be, the best first; the same in all processes."""
    places = [SHARED_MEMORY] if sys.platform == "linux" else []
    session = Path(f"/run/user/{os.geteuid()}")
    places += [session] if session.is_dir() else []
    with contextlib.suppress(FileNotFoundError):  # there is no folder for temporary files
        places.append(Path(tempfile.gettempdir()))
    return list(dict.fromkeys(places))


def bases() -> list[Path]:
    """Return the user's folders that are safe to read, or to make; the best first."""
    safe = []
    for parent in parents():
        with contextlib.suppress(UnsafeFolderError):
            os.close(_open_base(parent))
            safe.append(_base_in(parent))
    return safe


@dataclass(frozen=True)
class Place:
    """A place for a launch's folders, and why better places cannot be used."""

    base: Path
    problems: tuple[str, ...]


def choose_place(num_bytes: int) -> Place:
    """Make the user's folder in the first place that is safe and has this much room.

    Raises StoreError, which names every place and its problem, if there is none.
    """
    problems: list[str] = []
    for parent in parents():
        try:
            _make_base(parent)
            _try_room(_base_in(parent), num_bytes)
        except UnsafeFolderError as error:
            problems.append(str(error))
        else:
            return Place(_base_in(parent), tuple(problems))
    raise StoreError(
        f"there is no place for the ranks' flight records: {'; '.join(problems)}; "
        "remove what is in the way, or set TMPDIR to a folder of your own"
    )


def make_folder(folder: Path) -> None:
    """Make a launch's folder, and the user's around it if that is gone. Raises StoreError."""
    try:
        _make_base(folder.parents[1])
        with contextlib.suppress(FileExistsError):
            folder.mkdir(MODE)
            folder.chmod(MODE)
    except UnsafeFolderError as error:
        raise StoreError(str(error)) from None
    except OSError as error:
        raise StoreError(f"{folder}: cannot be made: {error.strerror}") from error


def _base_in(parent: Path) -> Path:
    return parent / f"ppbench-{os.geteuid()}"


def _make_base(parent: Path) -> None:
    """Make the user's folder. Raises UnsafeFolderError."""
    base, descriptor = _base_in(parent), _open_parent(parent)
    try:
        os.mkdir(base.name, MODE, dir_fd=descriptor)
        os.chmod(base.name, MODE, dir_fd=descriptor)  # a umask may have taken our own rights
    except FileExistsError:
        pass
    except OSError as error:
        raise UnsafeFolderError(f"{base}: cannot be made: {error.strerror}") from error
    finally:
        os.close(descriptor)
    os.close(_open_base(parent, must_exist=True))


def _open_parent(parent: Path) -> int:
    """Open a folder in which no other user can replace this user's files."""
    try:
        descriptor = os.open(parent, _FOLDER)
    except OSError as error:
        raise UnsafeFolderError(f"{parent}: cannot be used: {error.strerror}") from error
    about = os.fstat(descriptor)
    problem = ""
    if about.st_uid not in (0, os.geteuid(), _unmapped_uid()):
        problem = f"belongs to another user (uid {about.st_uid}), who can replace what is in it"
    elif about.st_mode & _OTHERS_WRITE and not about.st_mode & stat.S_ISVTX:
        mode = stat.S_IMODE(about.st_mode)
        problem = f"other users can replace what is in it: it has mode {mode:04o}, expected 1777"
    if problem:
        os.close(descriptor)
        raise UnsafeFolderError(f"{parent}: {problem}")
    return descriptor


def _unmapped_uid() -> int:
    """Return the user that root is seen as where a user namespace does not know it; else 0."""
    with contextlib.suppress(OSError, ValueError):
        mapped = Path("/proc/self/uid_map").read_text().split()
        if mapped != ["0", "0", str(2**32 - 1)]:
            return int(Path("/proc/sys/kernel/overflowuid").read_text())
    return 0


def _open_base(parent: Path, *, must_exist: bool = False) -> int:
    """Open the user's folder; make it if it is absent. Raises UnsafeFolderError.

    A folder that other users could read, as older versions made it, is closed to them.
    """
    base, outside = _base_in(parent), _open_parent(parent)
    try:
        descriptor = os.open(base.name, _FOLDER | os.O_NOFOLLOW, dir_fd=outside)
    except FileNotFoundError as error:
        if not must_exist:
            return outside
        os.close(outside)
        raise UnsafeFolderError(f"{base}: cannot be used: {error.strerror}") from error
    except OSError as error:
        problem = _what_it_is(base.name, outside) or f"cannot be used: {error.strerror}"
        os.close(outside)
        raise UnsafeFolderError(f"{base}: {problem}") from error
    os.close(outside)
    if problem := _problem_of(descriptor):
        os.close(descriptor)
        raise UnsafeFolderError(f"{base}: {problem}")
    return descriptor


def _what_it_is(name: str, folder: int) -> str:
    """Say why a path that could not be opened is no folder of the user; empty if it may be one."""
    with contextlib.suppress(OSError):
        about = os.stat(name, dir_fd=folder, follow_symlinks=False)
        if stat.S_ISLNK(about.st_mode):
            return "is a symbolic link, expected a folder"
        if not stat.S_ISDIR(about.st_mode):
            return "is a file, expected a folder"
        if about.st_uid != os.geteuid():
            return f"belongs to another user (uid {about.st_uid})"
    return ""


def _problem_of(descriptor: int) -> str:
    about = os.fstat(descriptor)
    if about.st_uid != os.geteuid():
        return f"belongs to another user (uid {about.st_uid})"
    if about.st_mode & _OTHERS_WRITE:
        mode = stat.S_IMODE(about.st_mode)
        return f"other users can write to it: it has mode {mode:04o}, expected 0700"
    if about.st_mode & _OTHERS:
        with contextlib.suppress(OSError):  # a read-only file system: there is nothing to hide
            os.fchmod(descriptor, MODE)
    return ""


def _try_room(base: Path, num_bytes: int) -> None:
    """Reserve this much for a moment. Raises UnsafeFolderError.

    A process that uses mapped memory beyond the free space ends without a message (SIGBUS).
    """
    try:
        with tempfile.TemporaryFile(dir=base) as file:
            reserve(file.fileno(), num_bytes)
    except OSError as error:
        space = shutil.disk_usage(base)
        has_room = space.free >= num_bytes or not space.total  # of another kind: descriptors, files
        words = f"cannot be written to: {error.strerror}"
        if not has_room:
            free, needed = (f"{size / 2**20:.1f} MiB" for size in (space.free, num_bytes))
            words = f"has {free} left, and {needed} are needed"
        raise UnsafeFolderError(f"{base}: {words}") from error


class Claim:
    """A claim of this process on a launch's folder; several processes can have one at once."""

    def __init__(
        self, folder: Path, marker: Path | None = None, agent_pid: int | None = None
    ) -> None:
        """Claim the folder, which need not exist yet; the user's folder must. Raises StoreError.

        `marker`: a file in the launch's folder in the store, there until the launch's runs are
        closed; if the launch dies before, its folder is copied beside that. `agent_pid`: the
        process that starts the ranks again when they have died, where no other claims the folder.
        """
        self._path = lock_path(folder)
        note = {"marker": marker and str(marker.absolute()), "agent": _process(agent_pid)}
        try:
            self._descriptor = self._open()
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, json.dumps(note).encode())
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be locked: {error.strerror}") from error

    def _open(self) -> int:
        """Open the lock; blocks while a process that cleans up looks at it."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_at(descriptor, self._path):
                return descriptor
            os.close(descriptor)  # it was removed before it was locked

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.lock")


def aside_path(folder: Path) -> Path:
    """Return where a launch's folder is moved once it has been collected."""
    return folder.with_name(f".{folder.name}")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    except FileNotFoundError:
        return False


def remove_folder(folder: Path) -> None:
    """Remove a launch's folder, also if it has been collected, and its lock."""
    for path in (folder, aside_path(folder)):
        shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        lock_path(folder).unlink()


def remove_dead() -> list[Path]:
    """Remove the folders of launches that were killed with all their processes.

    Launches of every store are removed, since a sweep into their store may never come. If one does,
    it finds the copy beside the launch's logs; see `kept_folders`.
    """
    removed = []
    for base in bases():
        for folder in sorted(set(_folders_in(base))):
            with _locked(folder) as is_free:
                if is_free and not _is_in_use(folder):
                    _keep(folder)
                    remove_folder(folder)
                    removed.append(folder)
    return removed


def _folders_in(base: Path) -> Iterator[Path]:
    """Return every launch's folder by its name, also where only its lock is left."""
    with contextlib.suppress(OSError):
        for path in base.iterdir():
            yield path.with_name(path.name.removeprefix(".").removesuffix(".lock"))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Whether no other process holds the folder; meanwhile, none can begin to."""
    path = lock_path(folder)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True  # of a version without locks
        return
    except OSError:
        yield False
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = _is_at(descriptor, path)
    except OSError:
        is_free = False
    try:
        yield is_free
    finally:
        os.close(descriptor)


def _is_in_use(folder: Path) -> bool:
    """Whether a folder that no process claims belongs to a launch that still runs."""
    if not lock_path(folder).exists():  # of a version without locks
        samples = list(folder.glob("telemetry-*.jsonl"))
        return bool(samples) and _idle_s(samples) < FRESH_S
    agent = _note_of(folder).get("agent")
    if not isinstance(agent, dict):
        return False
    here = _process(os.getpid())
    assert here is not None
    if agent.get("boot") != here["boot"]:
        return False
    if agent.get("namespace") != here["namespace"]:
        return _idle_s([lock_path(folder), *folder.glob("*")]) < IDLE_S
    return _is_running(agent)


def _note_of(folder: Path) -> dict[str, object]:
    """Return a launch's note in its lock; nothing if it was killed before it wrote one."""
    with contextlib.suppress(OSError, ValueError):
        note = json.loads(lock_path(folder).read_text())
        if isinstance(note, dict):
            return note
    return {}


def _keep(folder: Path) -> None:
    """Copy a dead launch's folder into its store, whose next sweep closes its runs.

    The copy is whole, or there is none.
    """
    marker = _note_of(folder).get("marker")
    source = folder if folder.exists() else aside_path(folder)
    if not isinstance(marker, str):
        return
    with contextlib.suppress(OSError):  # a store that cannot be reached, or not by this user
        if Path(marker).is_file() and source.exists():
            _copy_whole(source, Path(marker).with_name(KEPT), folder.name)


def _copy_whole(source: Path, kept: Path, name: str) -> None:
    """Copy a folder; leave nothing of it where there is no room or no permission."""
    aside = kept / f".{name}.partial"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(source, aside)
        aside.rename(kept / name)
    except (OSError, shutil.Error):
        shutil.rmtree(aside, ignore_errors=True)


def kept_folders(launch: Path) -> list[Path]:
    """Return the copies of a launch's folders made by another store's sweep.

    `launch` is the launch's folder in its own store.
    """
    return sorted(path for path in (launch / KEPT).glob("[!.]*") if path.is_dir())


def _is_running(process: dict[str, object]) -> bool:
    """Whether a process of this namespace and boot lives."""
    pid = process.get("pid")
    if not isinstance(pid, int):
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        pass
    return _process(pid) == process


def _idle_s(paths: list[Path]) -> float:
    """Return the seconds since the last of these files changed."""
    newest = 0.0
    for path in paths:
        with contextlib.suppress(OSError):
            newest = max(newest, path.stat().st_mtime)
    return time.time() - newest


def _process(pid: int | None) -> dict[str, object] | None:
    """Return facts that identify a process, even from a later one with the same id."""
    if pid is None:
        return None
    known: dict[str, object] = {"pid": pid, "began": "", "namespace": "", "boot": ""}
    with contextlib.suppress(OSError):
        known["boot"] = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        known["namespace"] = str(Path("/proc/self/ns/pid").readlink())
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        known["began"] = "" if fields[0] in "ZX" else fields[19]  # it has ended
    return known
