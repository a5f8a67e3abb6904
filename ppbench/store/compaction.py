"""Compaction: merges the files of many runs into few, without ever losing a row.

    1. copy the rows of many files into a new one, under a name that no reader sees
    2. note the files that it replaces
    3. rename it into place, remove these files, then the note

The last step holds the store's lock, so that no reader sees it half done. If it is killed before,
nothing has changed; if within it, readers leave out what the note names, and the next compaction
removes it. Only runs with a row in `runs` are copied, so that runs being written are left alone.
One compaction works on a store at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from ppbench.errors import StoreError
from ppbench.files import whole_file
from ppbench.store.columns import RUN_ID, TABLES
from ppbench.store.database import duckdb
from ppbench.store.reader import (
    COMPACTED,
    PARQUET,
    REPLACES,
    Reader,
    Tell,
    files_of,
    holding,
    lock_of,
    quoted,
    replacing,
)

TARGET_BYTES = 128 * 2**20
"""Size at which a file is complete; files of less than half of it are merged again."""
MOST_FILES = 1000
"""Most files that are merged at once: while they are, all their footers are in memory."""
_ROWS_IN_GROUP = {"runs": 2048}
_MOST_ROWS_IN_GROUP = 122_880


@dataclass(frozen=True)
class Compacted:
    """The result of compacting a table."""

    table: str
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    seconds: float


def compact(folder: Path, tell: Tell) -> list[Compacted]:
    """Merge the files of a store, table by table.

    `tell` receives a line for each file that is left unchanged, because it cannot be read, and when
    another compaction is running. Raises StoreError.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder}: no such folder; name the store with --results")
    lock = folder / "locks" / "compact.lock"
    try:
        lock.parent.mkdir(exist_ok=True)
        lock_of(folder).touch()
        held = lock.open("ab")  # locked until it is closed, at the latest when the process ends
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"{lock}: another ppbench compact is running; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
    except OSError as error:
        raise StoreError(f"{lock}: cannot be locked: {error.strerror}") from error
    with held:
        reader = Reader(folder, tell)
        finished = reader.ask(
            {"runs": [RUN_ID]},
            lambda database, source: {
                run_id for (run_id,) in database.execute(f"FROM {source['runs']}").fetchall()
            },
        )
        return [_compact(folder, name, finished, reader) for name in TABLES]


def _compact(folder: Path, name: str, finished: set[str], reader: Reader) -> Compacted:
    begin_s = time.monotonic()
    place = folder / name / COMPACTED
    try:
        for path in place.glob(".*"):
            path.unlink()  # of a killed compaction; no other process writes here
        with holding(folder, alone=True):
            for note in place.glob(f"*{REPLACES}"):
                _remove_replaced(note)
        files_before, bytes_before = _size(folder, name)
        while sources := _sources(folder, name, finished, reader):
            _merge(folder, name, sources, reader)
        files_after, bytes_after = _size(folder, name)
    except OSError as error:
        raise StoreError(f"{error.filename}: cannot be replaced: {error.strerror}") from error
    seconds = time.monotonic() - begin_s
    return Compacted(name, files_before, files_after, bytes_before, bytes_after, seconds)


def _size(folder: Path, name: str) -> tuple[int, int]:
    single, many = files_of(folder, name)
    sizes = []
    for path in (*single, *many):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return len(sizes), sum(sizes)


def _sources(folder: Path, name: str, finished: set[str], reader: Reader) -> list[Path]:
    """The next files to merge, in order of their runs; empty if merging would change nothing."""
    single, many = (
        [path for path in paths if path not in reader.damaged] for paths in files_of(folder, name)
    )
    single = [path for path in single if path.stem in finished][:MOST_FILES]
    many = [path for path in many if path.stat().st_size < TARGET_BYTES / 2]
    if not single and len(many) < 2:
        return []
    taken: list[Path] = []
    size = 0
    for path in sorted((*single, *many), key=lambda path: path.stem):
        size += path.stat().st_size
        if size > TARGET_BYTES and len(taken) > 1:
            break
        taken.append(path)
    return taken


def _merge(folder: Path, name: str, sources: list[Path], reader: Reader) -> None:
    """Put the rows of some files into one; a file that cannot be read is told and left alone."""
    first = sources[0].stem.partition(".")[0]
    path = folder / name / COMPACTED / f"{first}.{secrets.token_hex(6)}{PARQUET}"
    path.parent.mkdir(exist_ok=True)
    aside = path.with_name(f".{path.name}")
    listed = ", ".join(map(quoted, sources))
    rows_in_group = _ROWS_IN_GROUP.get(name, _MOST_ROWS_IN_GROUP)
    try:
        with duckdb.connect(":memory:") as database:
            database.execute(
                f"COPY (FROM read_parquet([{listed}], union_by_name=true)) TO {quoted(aside)} "
                f"(FORMAT parquet, COMPRESSION zstd, ROW_GROUP_SIZE {rows_in_group}, "
                "WRITE_BLOOM_FILTER false)"
            )
            ((num_rows, *_),) = database.fetchall()
    except duckdb.Error as error:
        if not reader.leave_out_damaged(name, None, sources):
            raise StoreError(f"{path}: cannot be written: {error}") from error
        return
    if not num_rows:
        aside.unlink()  # runs without rows in a table need no file
        with holding(folder, alone=True):
            for source in sources:
                source.unlink()
        return
    with aside.open("rb") as file:
        os.fsync(file.fileno())
    note = path.with_name(f"_{path.stem}{REPLACES}")
    with whole_file(note) as file:
        file.write("\n".join(source.name for source in sources).encode())
    with holding(folder, alone=True):
        aside.replace(path)
        handle = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(handle)  # a power failure must not keep the removals alone
        finally:
            os.close(handle)
        _remove_replaced(note)


def _remove_replaced(note: Path) -> None:
    """Remove the files that a note names, then the note; of a file that never came, only that."""
    if replacing(note).exists():
        for old in note.read_text().splitlines():
            for place in (note.parent, note.parent.parent):
                (place / old).unlink(missing_ok=True)
    note.unlink()
