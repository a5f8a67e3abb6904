"""One parquet file of a table: rows of any version, and checksums.

A seal of checksums detects a flipped bit before anything is parsed:

    PAR1 | pages | seal | footer | length of the footer | PAR1

Readers find the footer from the end of the file and pages from the footer, so other programs ignore
the seal. Parquet's own page checksums do not cover the footer, which is most of a file of one run,
and are verified only for the columns that are read.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import stat
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ppbench.config.case import UNKNOWN, VARIABLE, Case
from ppbench.errors import MOST_OF_ERROR, encodable, readable
from ppbench.files import whole_file
from ppbench.store.columns import RUN_ID, absent_in, schema_of
from ppbench.store.damage import (
    DamagedError,
    Flaw,
    check_columns,
    check_text,
    check_version,
    flaws_in,
    names_of,
)

_VERSION = "schema_version"
WRITE_OPTIONS: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
"""Options of every file of the store."""
_RAISED_BY_PYARROW = (
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    OverflowError,
    MemoryError,
    RuntimeError,
    SystemError,
)
_EFFECT_BEFORE = {"launch_bind": False}
"""Values of settings in files older than the setting, where not the default."""
_MANY_FILES, _READERS = 32, 2
_FEW_ROWS = 1000
"""Rows that are read in less time than threads take to be called."""
_STORED = {VARIABLE: 0, UNKNOWN: -1}  # keeps `seq_len` a number for readers of the files


def write_rows(name: str, rows: pd.DataFrame, path: Path, option: str = "") -> None:
    """Write rows of a table to one parquet file, with the types that the store documents.

    Raises StoreError, which names the `option` to change if there is one.
    """
    write_parquet(as_table(rows, name), path, option)


def write_parquet(table: pa.Table, path: Path, option: str = "") -> None:
    """Write a table with checksums of its pages and of the whole. Raises StoreError."""
    sealed = io.BytesIO()  # a pipe can be neither sought nor read back
    pq.write_table(table, sealed, **WRITE_OPTIONS)
    seal(sealed)
    with whole_file(path, option) as file:
        file.write(sealed.getbuffer())


def as_table(frame: pd.DataFrame, name: str) -> pa.Table:
    """Convert rows to the columns and types of a table; columns that `frame` lacks are empty."""
    schema = schema_of(name)
    unknown = set(frame.columns) - set(schema.names)
    assert not unknown, f"undocumented columns: {sorted(unknown)}"
    frame = _with_settings_stored(frame).assign(
        **{one: value for one, value in absent_in(name).items() if one not in frame}
    )
    return pa.Table.from_pandas(
        frame.reindex(columns=schema.names), schema=schema, preserve_index=False
    )


def row_as_table(row: Mapping[str, object], name: str) -> pa.Table:
    """Convert one row as `as_table` does: a frame of a hundred columns takes 20 times as long."""
    schema = schema_of(name)
    unknown = row.keys() - set(schema.names)
    assert not unknown, f"undocumented columns: {sorted(unknown)}"
    stored = {**row, **({"seq_len": stored_seq_len(row["seq_len"])} if "seq_len" in row else {})}
    columns = [_one(stored.get(column.name), column.type) for column in schema]
    return pa.Table.from_arrays(columns, schema=schema)


def _one(value: object, kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind):  # a number is no text
        return pa.array([value], kind, from_pandas=True)
    return pa.array([value], from_pandas=True).cast(kind)  # refuses half an integer


def storable(run: Mapping[str, object]) -> dict[str, object]:
    """A row of `runs` whose text can be stored: its error bounded, and no lone surrogates."""
    row = {name: encodable(v) if isinstance(v, str) else v for name, v in run.items()}
    return {**row, **({"error": _readable_error(run["error"])} if "error" in run else {})}


def _readable_error(value: object) -> object:
    return readable(value, MOST_OF_ERROR) if isinstance(value, str) else value


@dataclass(frozen=True)
class Footer:
    """The footer of a file, and whether the file has a valid seal."""

    metadata: pq.FileMetaData
    is_sealed: bool


class TableFile:
    """An open file of a table of the store.

    Every method raises DamagedError for damage, and FileNotFoundError if the file is gone.
    """

    def __init__(self, path: Path, name: str, footer: Footer | None = None) -> None:
        """Open the file; a known `footer` is not read again."""
        self.path = path
        self._name = name
        with contextlib.ExitStack() as held, damage_in(path):
            raw = _in_memory(held.enter_context(_opened(path)))
            is_sealed = check_seal(raw) if footer is None else footer.is_sealed
            held_bytes = raw.getvalue() if isinstance(raw, io.BytesIO) else None
            self._file = pq.ParquetFile(
                pa.OSFile(str(path)) if held_bytes is None else pa.BufferReader(held_bytes),
                metadata=None if footer is None else footer.metadata,
                page_checksum_verification=True,
            )
            held.callback(self._file.close, force=True)
            self.footer = Footer(self._file.metadata, is_sealed)
            self.schema = self._file.schema_arrow
            self.names: list[str] = self.schema.names
            check_columns(self.names, name)
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._held.close()

    def newest_version(self) -> int | None:
        """The largest `schema_version` by the footer's statistics."""
        if _VERSION not in self.names:
            return None
        index, metadata = self.names.index(_VERSION), self.footer.metadata
        limits = [
            metadata.row_group(group).column(index).statistics
            for group in range(metadata.num_row_groups)
        ]
        known = [int(limit.max) for limit in limits if limit is not None and limit.has_min_max]
        return max(known, default=None)

    def raw_rows(
        self, columns: Iterable[str] | None = None, groups: Sequence[int] | None = None
    ) -> pa.Table:
        """All rows, or those of some groups, in the types of the file."""
        with damage_in(self.path):
            wanted = self._known(columns)
            is_parallel = self.footer.metadata.num_rows > _FEW_ROWS
            rows = (
                self._file.read(columns=wanted, use_threads=is_parallel)
                if groups is None
                else self._file.read_row_groups(
                    list(groups), columns=wanted, use_threads=is_parallel
                )
            )
            check_version(rows)
            return rows

    def rows(
        self, columns: Iterable[str] | None = None, groups: Sequence[int] | None = None
    ) -> pa.Table:
        """All rows that belong to a run, or those of some groups, as documented."""
        with damage_in(self.path):
            return rows_of(self.raw_rows(columns, groups), self._name, columns)

    def flaws(self, rows: pa.Table) -> list[Flaw]:
        """The flaws in documented rows of this file; none are looked for in a sealed file."""
        if self.footer.is_sealed:
            return []
        with damage_in(self.path):
            check_text(rows)
            return list(flaws_in(rows, self._name))

    def sound_rows(self, columns: Iterable[str] | None = None) -> pa.Table:
        """All rows. Raises DamagedError if any has a flaw."""
        rows = self.rows(columns)
        for flaw in self.flaws(rows):
            raise DamagedError(flaw.reason)
        return rows

    def _known(self, columns: Iterable[str] | None) -> list[str] | None:
        """The requested columns that the file has, and the run's id and version."""
        if columns is None:
            return None
        wanted = {RUN_ID, _VERSION, *columns}
        return [column for column in self.names if column in wanted]


def read_own_rows(path: Path, name: str, columns: Iterable[str] | None = None) -> pa.Table:
    """The rows of a run's own file. Raises DamagedError, FileNotFoundError."""
    with TableFile(path, name) as file:
        rows = file.sound_rows(columns)
    check_own(path, rows)
    return rows


def read_sound_files(
    paths: Sequence[Path], name: str, columns: Iterable[str] | None = None
) -> dict[Path, pa.Table]:
    """The rows of those runs' own files that are there; nothing if any may be damaged.

    Flaws are looked for in all rows together, which takes much less time than file by file, but
    does not say which file has them.
    """
    raw: dict[Path, pa.Table] = {}
    is_sealed = True
    with contextlib.suppress(DamagedError):
        read = functools.partial(_raw_own, name=name, columns=columns)
        with _mapping_over(paths) as mapped:
            for path, found in zip(paths, mapped(read, paths), strict=True):
                if found is not None:
                    raw[path], has_seal = found
                    is_sealed &= has_seal
        if not raw:
            return {}
        with damage_in(path):
            chunks = pa.concat_tables(raw.values(), promote_options="default")
            together = chunks.combine_chunks()
            rows = documented(together, name, columns)
            if not is_sealed:
                check_text(rows)
            if is_sealed or not any(flaws_in(rows, name)):
                rows = with_settings_filled(rows) if name == "runs" else rows
                starts = itertools.accumulate(map(len, raw.values()), initial=0)
                return {
                    path: rows.slice(start, len(own))
                    for (path, own), start in zip(raw.items(), starts, strict=False)
                }
    return {}


def _raw_own(path: Path, name: str, columns: Iterable[str] | None) -> tuple[pa.Table, bool] | None:
    """The rows of a run's own file as it has them, and whether it is sealed; None without one."""
    with contextlib.suppress(FileNotFoundError), TableFile(path, name) as file:
        with damage_in(path):
            rows = _of_some_run(file.raw_rows(columns))
            check_own(path, rows)
        return rows, file.footer.is_sealed
    return None


@contextlib.contextmanager
def _mapping_over(paths: Sequence[Path]) -> Iterator[Callable[..., Iterable[Any]]]:
    """A `map` that reads many files on two cores: what reads one lets others run meanwhile."""
    if len(paths) < _MANY_FILES:
        yield map
        return
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_READERS) as pool:
        yield pool.map


def check_own(path: Path, rows: pa.Table) -> None:
    """Raise DamagedError for rows of another run than the file's name says."""
    others = [run_id for run_id in rows[RUN_ID].unique().to_pylist() if run_id != path.stem]
    if others:
        raise DamagedError(f"it holds rows of {names_of(others)}, not of the run in its name")


@contextlib.contextmanager
def damage_in(path: Path) -> Iterator[None]:
    """Convert every exception of reading a file to DamagedError.

    Damage makes pyarrow raise exceptions of many kinds, builtin ones among them. A missing file
    keeps its FileNotFoundError, unless the path is a broken link.
    """
    try:
        yield
    except DamagedError:
        raise
    except FileNotFoundError as error:
        if path.is_symlink():
            raise DamagedError("it is a broken link") from error
        raise
    except PermissionError as error:
        raise DamagedError(error.strerror, fix="make it readable with: chmod u+r") from error
    except OSError as error:
        raise DamagedError(error.strerror or error) from error
    except (pa.ArrowException, *_RAISED_BY_PYARROW) as error:
        raise DamagedError(error) from error


def _opened(path: Path) -> IO[bytes]:
    """Open a regular file; opening a pipe in its place must not block."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        raise DamagedError("it is a folder" if stat.S_ISDIR(kind) else "it is not a regular file")
    return os.fdopen(handle, "rb")


def regular_bytes(path: Path) -> bytes:
    """The content of a regular file. Raises DamagedError, OSError."""
    with _opened(path) as file:
        return file.read()


def _in_memory(file: IO[bytes]) -> IO[bytes]:
    """The bytes of a small file, read once; a large file is read from disk in parts."""
    is_large = os.fstat(file.fileno()).st_size > WHOLE_BYTES
    return file if is_large else io.BytesIO(file.read())


def rows_of(table: pa.Table, name: str, columns: Iterable[str] | None = None) -> pa.Table:
    """Rows of a file as `documented`, without those that have no run id."""
    return _of_some_run(documented(table, name, columns))


def _of_some_run(rows: pa.Table) -> pa.Table:
    return rows.filter(rows[RUN_ID].is_valid()) if rows[RUN_ID].null_count else rows


def documented(table: pa.Table, name: str, columns: Iterable[str] | None = None) -> pa.Table:
    """Rows of a file with documented columns, empty where its version lacks them.

    With `columns`, only these and `run_id`. Raises ArrowException for cells that cannot be cast to
    the documented types.
    """
    schema = schema_of(name, columns)
    if table.schema != schema:
        cast = [
            table[field.name].cast(field.type)
            if field.name in table.schema.names
            else pa.nulls(table.num_rows, field.type)
            for field in schema
        ]
        table = pa.table(cast, schema=schema)
    return _filled(table, absent_in(name))


def _filled(table: pa.Table, values: Mapping[str, object]) -> pa.Table:
    """The table with a value for null in some of its columns."""
    for name, value in values.items():
        index = table.schema.get_field_index(name)
        if index >= 0 and table[name].null_count:
            column = table[name].fill_null(value)
            table = table.set_column(index, table.schema.field(index), column)
    return table


def with_settings_filled(table: pa.Table) -> pa.Table:
    """Fill settings that an older version did not know, in rows of `runs`.

    They had the effect of their default, as case ids assume too, or the one in `_EFFECT_BEFORE`.
    """
    return _filled(table, effects_when_absent())


def effects_when_absent() -> dict[str, object]:
    """The value of each setting in runs that are older than it."""
    return {**Case().settings(), **_EFFECT_BEFORE}


def as_frame(table: pa.Table, name: str) -> pd.DataFrame:
    """Rows as a frame; settings of `runs` are written as in a case."""
    filled = with_settings_filled(table) if name == "runs" else table
    frame: pd.DataFrame = filled.to_pandas()
    if name == "runs" and "error" in frame:  # older versions stored it unbounded
        frame["error"] = frame["error"].map(_readable_error)
    if name != "runs" or "seq_len" not in frame:
        return frame
    for word, number in _STORED.items():
        is_word = frame["seq_len"] == number
        if is_word.any():
            frame["seq_len"] = frame["seq_len"].astype(object).mask(is_word, word)
    return frame


def stored_seq_len(value: object) -> object:
    """A case's `seq_len` as files hold it."""
    return _STORED.get(value, value) if isinstance(value, str) else value


def _with_settings_stored(frame: pd.DataFrame) -> pd.DataFrame:
    if "seq_len" not in frame:
        return frame
    return frame.assign(seq_len=frame["seq_len"].map(stored_seq_len))


WHOLE_BYTES = 2**20
"""Largest file whose seal is checked as a whole.

Of a larger file the footer is checked, and pages when they are read.
"""
_MAGIC = b"PPB\x00SEAL"
_SEAL = struct.Struct("<8sII")  # magic, CRC-32 of the bytes before the seal, and after it
_TAIL = struct.Struct("<I4s")  # length of the footer, PAR1
_PARQUET = b"PAR1"
_CHUNK_BYTES = 2**20


def seal(file: IO[bytes]) -> None:
    """Insert the seal before the footer of a complete parquet file, open for update."""
    file.flush()
    start = _footer_start(file)
    file.seek(start)
    footer = file.read()
    before = _crc_until(file, start)
    file.seek(start)
    file.truncate()
    file.write(_SEAL.pack(_MAGIC, before, zlib.crc32(footer)) + footer)


def check_seal(file: IO[bytes]) -> bool:
    """Whether the file has a seal, which older files lack. Raises OSError.

    Raises DamagedError for a broken seal and for an incomplete parquet file.
    """
    start = _footer_start(file)
    at = max(0, start - _SEAL.size)
    file.seek(at)
    held = file.read(start - at)
    if len(held) < _SEAL.size or not held.startswith(_MAGIC):
        return False
    _, before, after = _SEAL.unpack(held)
    if zlib.crc32(file.read()) != after:
        raise DamagedError("the checksum of its footer does not match")
    if file.tell() <= WHOLE_BYTES and _crc_until(file, at) != before:
        raise DamagedError("its checksum does not match")
    return True


def _footer_start(file: IO[bytes]) -> int:
    """The offset of the footer. Raises DamagedError if the file does not end like parquet."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        raise DamagedError("it is empty")
    if size < len(_PARQUET) + _TAIL.size:
        raise DamagedError(f"it is not a parquet file: {size} bytes long")
    file.seek(size - _TAIL.size)
    length, end = _TAIL.unpack(file.read(_TAIL.size))
    start = size - _TAIL.size - int(length)
    if end != _PARQUET:
        raise DamagedError("it is not a parquet file, or it is truncated")
    if start < len(_PARQUET):
        raise DamagedError("its footer is longer than the file")
    return start


def _crc_until(file: IO[bytes], end: int) -> int:
    file.seek(0)
    crc, left = 0, end
    while left and (chunk := file.read(min(left, _CHUNK_BYTES))):
        crc = zlib.crc32(chunk, crc)
        left -= len(chunk)
    return crc
