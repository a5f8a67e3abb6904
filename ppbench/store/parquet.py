"""One parquet file of a table: its rows, with the checksums of parquet's own pages."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ppbench.config.case import UNKNOWN, VARIABLE
from ppbench.errors import MOST_OF_ERROR, StoreError, encodable, readable
from ppbench.files import whole_file
from ppbench.store.columns import RUN_ID, SCHEMA_VERSION, absent_in, schema_of
from ppbench.store.damage import DamagedError

_VERSION = "schema_version"
WRITE_OPTIONS: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
"""Options of every file of the store."""
WHOLE_BYTES = 2**20
"""Largest file that is read at once; a larger one is read from disk in parts."""
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
    """Write a table with checksums of its pages. Raises StoreError."""
    written = io.BytesIO()  # a pipe can be neither sought nor read back
    pq.write_table(table, written, **WRITE_OPTIONS)
    with whole_file(path, option) as file:
        file.write(written.getbuffer())


def as_table(frame: pd.DataFrame, name: str) -> pa.Table:
    """Convert rows to the columns and types of a table; columns that `frame` lacks are empty."""
    schema = schema_of(name)
    unknown = set(frame.columns) - set(schema.names)
    assert not unknown, f"undocumented columns: {sorted(unknown)}"
    absent = {column: v for column, v in absent_in(name).items() if column not in frame}
    frame = frame.assign(**absent)
    if "seq_len" in frame:
        frame = frame.assign(seq_len=frame["seq_len"].map(stored_seq_len))
    return pa.Table.from_pandas(
        frame.reindex(columns=schema.names), schema=schema, preserve_index=False
    )


def row_as_table(row: Mapping[str, object], name: str) -> pa.Table:
    """Convert one row as `as_table` does: a frame of a hundred columns takes 20 times as long."""
    schema = schema_of(name)
    unknown = row.keys() - set(schema.names)
    assert not unknown, f"undocumented columns: {sorted(unknown)}"
    stored = {**row, **({"seq_len": stored_seq_len(row["seq_len"])} if "seq_len" in row else {})}
    columns = []
    for column in schema:
        cell = [stored.get(column.name)]
        if pa.types.is_string(column.type):  # a number is no text
            columns.append(pa.array(cell, column.type, from_pandas=True))
        else:  # the cast refuses half an integer
            columns.append(pa.array(cell, from_pandas=True).cast(column.type))
    return pa.Table.from_arrays(columns, schema=schema)


def storable(run: Mapping[str, object]) -> dict[str, object]:
    """A row of `runs` whose text can be stored: its error bounded, and no lone surrogates."""
    row = {name: encodable(v) if isinstance(v, str) else v for name, v in run.items()}
    error = run.get("error")
    return {**row, "error": readable(error, MOST_OF_ERROR)} if isinstance(error, str) else row


class TableFile:
    """An open file of a table of the store.

    Every method raises DamagedError for a file that cannot be read, and FileNotFoundError if it is
    gone.
    """

    def __init__(self, path: Path, name: str, footer: pq.FileMetaData | None = None) -> None:
        """Open the file; a known `footer` is not read again.

        Raises StoreError for a file that another version of ppbench wrote.
        """
        self._name = name
        with damage_in():
            self._file = pq.ParquetFile(
                pa.BufferReader(path.read_bytes())
                if path.stat().st_size <= WHOLE_BYTES
                else pa.OSFile(str(path)),
                metadata=footer,
                page_checksum_verification=True,
            )
            self.footer = self._file.metadata
            self.names: list[str] = self._file.schema_arrow.names
            for needed in (RUN_ID, _VERSION):
                if needed not in self.names:
                    raise DamagedError(f"it has no column {needed}")
            index = self.names.index(_VERSION)
            limits = [  # the ends of each row group's range of versions
                self.footer.row_group(group).column(index).statistics
                for group in range(self.footer.num_row_groups if footer is None else 0)
            ]
            known = [limit for limit in limits if limit is not None and limit.has_min_max]
            others = {int(v) for limit in known for v in (limit.min, limit.max)} - {SCHEMA_VERSION}
        if others:
            raise StoreError(
                f"{path}: another version of ppbench wrote it (schema {max(others)}; this one "
                f"reads {SCHEMA_VERSION}); use that version, or another folder with --results DIR"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._file.close(force=True)

    def rows(
        self, columns: Iterable[str] | None = None, groups: Sequence[int] | None = None
    ) -> pa.Table:
        """All rows, or those of some groups, with the documented types.

        With `columns`, only these and `run_id`. A column that the file lacks is null.
        """
        schema = schema_of(self._name, columns)
        with damage_in():
            wanted = [column for column in self.names if column in schema.names]
            is_parallel = self.footer.num_rows > _FEW_ROWS
            rows = (
                self._file.read(columns=wanted, use_threads=is_parallel)
                if groups is None
                else self._file.read_row_groups(
                    list(groups), columns=wanted, use_threads=is_parallel
                )
            )
            if rows.schema == schema:
                return rows
            cells = [
                rows[field.name].cast(field.type)
                if field.name in wanted
                else pa.nulls(rows.num_rows, field.type)
                for field in schema
            ]
            return pa.table(cells, schema=schema)


def read_own_files(
    paths: Sequence[Path], name: str, columns: Iterable[str] | None = None
) -> dict[Path, pa.Table | DamagedError]:
    """The rows of those runs' own files that are there, or why they cannot be read.

    Raises StoreError for a file that another version of ppbench wrote.
    """

    def read(path: Path) -> pa.Table | DamagedError | None:
        try:
            with TableFile(path, name) as file:
                return file.rows(columns)
        except FileNotFoundError:
            return None
        except DamagedError as error:
            return error

    if len(paths) < _MANY_FILES:
        found = [read(path) for path in paths]
    else:  # what reads one lets others run meanwhile
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_READERS) as pool:
            found = list(pool.map(read, paths))
    return {path: rows for path, rows in zip(paths, found, strict=True) if rows is not None}


@contextlib.contextmanager
def damage_in() -> Iterator[None]:
    """Convert every exception of reading a file to DamagedError.

    Damage makes pyarrow raise exceptions of many kinds, builtin ones among them. A missing file
    keeps its FileNotFoundError.
    """
    try:
        yield
    except (DamagedError, FileNotFoundError):
        raise
    except PermissionError as error:
        raise DamagedError(error.strerror, fix="make it readable with: chmod u+r") from error
    except OSError as error:
        raise DamagedError(error.strerror or error) from error
    except (pa.ArrowException, *_RAISED_BY_PYARROW) as error:
        raise DamagedError(error) from error


def as_frame(table: pa.Table, name: str) -> pd.DataFrame:
    """Rows as a frame; settings of `runs` are written as in a case."""
    frame: pd.DataFrame = table.to_pandas()
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
