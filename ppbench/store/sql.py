"""SQL queries over a store, with a view for each table. Only this module uses duckdb.

DuckDB reads the files through arrow, so that it sees the same rows as `Store`: those of files that
open, each run once. It may read nothing else, and write nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from ppbench.errors import UsageError
from ppbench.store.columns import RUN_ID, TABLES, schema_of
from ppbench.store.damage import DamagedError, Skip
from ppbench.store.parquet import TableFile
from ppbench.store.reader import Reader
from ppbench.store.snapshot import VanishedFileError, files_of, read_consistently

if TYPE_CHECKING:
    import duckdb

_INSTALL = "in ppbench's folder: python -m pip install -e '.[sql]'"
_READS = ("SELECT", "EXPLAIN")


@dataclass(frozen=True)
class _Part:
    """Rows of a table without those of some runs."""

    rows: Any  # what duckdb registers: a table or a data set of arrow
    without: frozenset[str] = frozenset()


def query(folder: Path, text: str, on_skip: Skip) -> pd.DataFrame:
    """The result of one SELECT. Raises UsageError for refused SQL."""
    try:
        import duckdb
    except ImportError:
        raise UsageError(
            f"query: needs duckdb, which is not installed; install it {_INSTALL}"
        ) from None
    reader = Reader(folder, on_skip)

    def look() -> pd.DataFrame | Exception:
        try:
            with duckdb.connect(":memory:") as database:
                return _answer(database, folder, reader, text)
        except (duckdb.Error, pa.ArrowException, OSError) as error:
            return error  # raised unless compaction removed a file meanwhile

    answer = read_consistently(folder, look)
    if isinstance(answer, Exception):
        raise UsageError(f"query: {str(answer).strip()}") from answer
    return answer


def _answer(
    database: duckdb.DuckDBPyConnection, folder: Path, reader: Reader, text: str
) -> pd.DataFrame:
    statements = database.extract_statements(text)
    kinds = [statement.type.name for statement in statements]
    if len(kinds) != 1 or kinds[0] not in _READS:
        got = ", ".join(kinds) or "nothing"
        raise UsageError(f"query: expected one SELECT; got {got}")
    for name in TABLES:  # a view of its parts, each registered under a name of its own
        parts = _parts(folder, reader, name) if name in text.lower() else ()
        selects = []
        for number, part in enumerate([_Part(schema_of(name).empty_table()), *parts]):
            source = f"_{name}_{number}"
            database.register(source, part.rows)
            select = f"SELECT * FROM {source}"  # noqa: S608  # a name made here
            if part.without:
                database.register(f"{source}_not", pa.table({RUN_ID: sorted(part.without)}))
                select += f" ANTI JOIN {source}_not USING ({RUN_ID})"
            selects.append(select)
        database.execute(f"CREATE VIEW {name} AS {' UNION ALL '.join(selects)}")
    database.execute("SET enable_external_access = false")
    database.execute("SET lock_configuration = true")
    frame = database.execute(statements[0]).df()
    assert frame.columns.is_unique  # duckdb makes them so
    return frame.apply(_plain_column)


def _parts(folder: Path, reader: Reader, name: str) -> Iterator[_Part]:
    """The rows of a table, each run in one part; within `read_consistently`."""
    files, seen = files_of(folder, name), set()
    own = [path for path in files.single if _ids_in(reader, path, name) is not None]
    if own:
        yield _Part(_data_set(own, name))
        seen = {path.stem for path in own}
    for path in files.compacted:
        if (ids := _ids_in(reader, path, name)) is not None:
            yield _Part(_data_set([path], name), frozenset(seen & ids))
            seen |= ids


def _ids_in(reader: Reader, path: Path, name: str) -> set[str] | None:
    """The runs of a file; None, reported, if it cannot be read."""
    try:
        with TableFile(path, name) as file:
            return set(file.rows([RUN_ID])[RUN_ID].unique().to_pylist())
    except FileNotFoundError as error:
        raise VanishedFileError from error
    except DamagedError as error:
        reader.leave_out(path, name, error)
        return None


def _data_set(paths: Iterable[Path], name: str) -> ds.Dataset:
    """Files as a data set; a column that a file lacks is null."""
    options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    how = ds.ParquetFileFormat(default_fragment_scan_options=options)
    return ds.dataset([str(path) for path in paths], schema=schema_of(name), format=how)


def _plain_column(column: pd.Series) -> pd.Series:
    """Text, numbers or booleans; other types are written as text."""
    is_number = pd.api.types.is_numeric_dtype(column)
    if is_number and not np.isinf(column.to_numpy(dtype=float, na_value=np.nan)).any():
        return column
    return column.map(lambda value: None if value is None or value is pd.NaT else str(value))
