"""Compaction: merges the files of many runs into few, without ever losing a row.

    1. copy the rows of many files into a temporary one, flush it, rename it into place
    2. change the token, so that concurrent readers list the folder again
    3. remove the files whose rows were copied

If it is killed before 1 is complete, nothing has changed. If later, some runs are in two files:
readers use one, and the next compaction removes the other. Only runs with a row in `runs` are
copied, so that runs being written are left alone. One compaction works on a store at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from ppbench.errors import StoreError
from ppbench.files import whole_file
from ppbench.store.columns import RUN_ID, TABLES, schema_of
from ppbench.store.damage import DamagedError, Skip
from ppbench.store.parquet import WRITE_OPTIONS, TableFile, damage_in
from ppbench.store.reader import Reader, bounds_of, has_between
from ppbench.store.snapshot import COMPACTED, LOCKS, change_token, files_of

TARGET_BYTES = 128 * 2**20
"""Size at which a file is complete; files of less than half of it are merged again."""
_ROWS_IN_GROUP = {"runs": 8192}
_MOST_ROWS_IN_GROUP = 131_072
_MOST_BYTES_IN_GROUP = 32 * 2**20
T = TypeVar("T")


@dataclass(frozen=True)
class Compacted:
    """The result of compacting a table."""

    table: str
    files_before: int
    files_after: int
    bytes_before: int
    bytes_after: int
    seconds: float


def compact(folder: Path, tell: Skip) -> list[Compacted]:
    """Merge the files of a store, table by table.

    `tell` receives a line for each file that is left unchanged, because it cannot be read, and when
    another compaction is running. Raises StoreError.
    """
    if not folder.is_dir():
        raise StoreError(f"{folder}: no such folder; name the store with --results")
    lock = folder / LOCKS / "compact.lock"
    try:
        lock.parent.mkdir(exist_ok=True)
        held = lock.open("ab")  # locked until it is closed, at the latest when the process ends
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tell(f"{lock}: another ppbench compact is running; waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
    except OSError as error:
        raise StoreError(f"{lock}: cannot be locked: {error.strerror}") from error
    with held:
        finished = frozenset(Reader(folder, tell).runs([RUN_ID], (), None)[RUN_ID].to_pylist())
        return [_Table(folder, name, finished, tell).compact() for name in TABLES]


@dataclass
class _Batch:
    """A file that is being written, and the files that it will replace."""

    writer: pq.ParquetWriter
    rows_in_group: int
    num_rows: int = 0
    waiting_rows: int = 0
    waiting_bytes: int = 0
    waiting: list[pa.Table] = field(default_factory=list)
    replaced: list[Path] = field(default_factory=list)

    def add(self, rows: pa.Table) -> None:
        self.num_rows += rows.num_rows
        self.waiting_rows += rows.num_rows
        self.waiting_bytes += rows.nbytes
        self.waiting.append(rows)
        if self.waiting_rows >= self.rows_in_group or self.waiting_bytes >= _MOST_BYTES_IN_GROUP:
            self.write_group()

    def write_group(self) -> None:
        if self.waiting and (rows := pa.concat_tables(self.waiting)).num_rows:
            self.writer.write_table(rows.combine_chunks(), row_group_size=rows.num_rows)
        self.waiting.clear()
        self.waiting_rows = self.waiting_bytes = 0


class _Table:
    """The compaction of one table."""

    def __init__(self, folder: Path, name: str, finished: frozenset[str], tell: Skip) -> None:
        self._folder = folder
        self._name = name
        self._finished = finished
        self._tell = tell
        self._place = folder / name / COMPACTED
        self._reader = Reader(folder, tell)
        self._apart: set[Path] = set()

    def compact(self) -> Compacted:
        begin_s = time.monotonic()
        for path in self._place.glob(".*"):
            _remove(path)  # of a killed compaction; no other process writes here
        files_before, bytes_before = self._size()
        self._drop_copies()
        sources = self._sources()
        while sources:
            sources = self._merge(sources)
        files_after, bytes_after = self._size()
        seconds = time.monotonic() - begin_s
        return Compacted(self._name, files_before, files_after, bytes_before, bytes_after, seconds)

    def _size(self) -> tuple[int, int]:
        files = files_of(self._folder, self._name)
        sizes = []
        for path in (*files.single, *files.compacted):
            with contextlib.suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        return len(sizes), sum(sizes)

    def _drop_copies(self) -> None:
        """Remove files whose rows another file has too, left by a killed compaction."""
        files = files_of(self._folder, self._name)
        spans = {path: span for path in files.compacted if (span := self._span(path))}
        names = [path.stem for path in files.single]
        many: dict[Path, dict[str, int]] = {}  # number of rows by run, where ranges of runs overlap
        for path, (first, last) in spans.items():
            others = [span for other, span in spans.items() if other != path]
            if has_between(names, first, last) or any(
                first <= end and begin <= last for begin, end in others
            ):
                ids = self._read(path, lambda file: file.rows([RUN_ID])[RUN_ID])
                if ids is not None:
                    counts = ids.value_counts().to_pylist()
                    many[path] = {count["values"]: count["counts"] for count in counts}
        for path in sorted(many, key=lambda path: len(many[path])):
            rest = [rows for other, rows in many.items() if other != path]
            if any(many[path].items() <= rows.items() for rows in rest):
                del many[path]
                _remove(path)
        held: dict[str, int] = {}
        for path, rows in many.items():
            if not held.keys().isdisjoint(rows):
                self._apart.add(path)  # stores were copied into each other; readers use one
            held |= rows
        for path in files.single:
            if path.stem in held:
                _remove(path)

    def _span(self, path: Path) -> tuple[str, str] | None:
        """The first and the last run of a file of many runs; None, reported, if unreadable."""
        bounds = self._read(path, lambda file: bounds_of(file.footer))
        if not bounds:
            return None
        firsts = [first for first, _ in bounds if first is not None]
        lasts = [last for _, last in bounds if last is not None]
        if len(firsts) < len(bounds):
            self._leave(path, "its footer does not list its runs")
            return None
        return min(firsts), max(lasts)

    def _sources(self) -> list[Path]:
        """Files to merge, in order of their runs; empty if merging would change nothing."""
        files = files_of(self._folder, self._name)
        single = [
            (path.stem, path)
            for path in files.single
            if path.stem in self._finished and path not in self._apart
        ]
        many = [
            (span[0], path)
            for path in files.compacted
            if path not in self._apart
            and path.stat().st_size < TARGET_BYTES / 2
            and (span := self._span(path))
        ]
        found = sorted(single + many)
        return [path for _, path in found] if single or len(many) > 1 else []

    def _merge(self, sources: list[Path]) -> list[Path]:
        """Merge as many files as one may hold; returns the others."""
        path = self._place / f"{sources[0].stem.partition('.')[0]}.{secrets.token_hex(6)}.parquet"
        num_taken = 0
        with (
            whole_file(path) as file,
            pq.ParquetWriter(file, schema_of(self._name), **WRITE_OPTIONS) as writer,
        ):
            batch = _Batch(writer, _ROWS_IN_GROUP.get(self._name, _MOST_ROWS_IN_GROUP))
            for source in sources:
                if file.tell() >= TARGET_BYTES:
                    break
                num_taken += 1
                groups = self._read(
                    source,
                    lambda one: [one.rows(groups=[n]) for n in range(one.footer.num_row_groups)],
                )
                if groups is not None:
                    batch.replaced.append(source)
                    for rows in groups:
                        batch.add(rows)
            batch.write_group()
        if not batch.num_rows:
            _remove(path)  # runs without rows in a table need no file
        else:
            _flush_folder(path.parent)
            change_token(self._folder)
        for source in batch.replaced:
            _remove(source)
        _flush_folder(path.parent)
        return sources[num_taken:]

    def _read(self, path: Path, read: Callable[[TableFile], T]) -> T | None:
        """Return what `read` returns of a file; None, reported, if it is damaged and must stay."""
        try:
            with TableFile(path, self._name) as file, damage_in():
                return read(file)
        except DamagedError as error:
            self._leave(path, error)
            return None

    def _leave(self, path: Path, reason: object) -> None:
        self._apart.add(path)
        self._tell(f"{path}: left unchanged: {reason}")


def _remove(path: Path) -> None:
    """Raises StoreError."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"{path}: cannot be removed: {error.strerror}") from error


def _flush_folder(folder: Path) -> None:
    """Flush a folder, so that a power failure cannot keep a removal but lose the new file."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
