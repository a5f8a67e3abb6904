"""SQL queries over a store, with a view for each table. Only this module uses duckdb.

DuckDB reads the files through arrow, so that it sees the same rows as `Store`: those of readable
files, each run once, with null where an older version lacks a column. It may read nothing else, and
write nothing.
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
from ppbench.store.columns import RUN_ID, SCHEMA_VERSION, TABLES, absent_in, schema_of
from ppbench.store.damage import DamagedError, Skip
from ppbench.store.parquet import TableFile, damage_in, effects_when_absent
from ppbench.store.reader import Reader, bounds_of
from ppbench.store.snapshot import read_consistently

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
    run_ids = _runs_before(reader)
    tables = _Tables(reader, set())

    def look() -> pd.DataFrame | duckdb.Error:
        while True:
            try:
                with duckdb.connect(":memory:") as database:
                    return _answer(database, tables, text)
            except (duckdb.Error, pa.ArrowException, OSError) as error:
                # A file may be damaged in columns that only the query reads.
                found = _damaged_files(reader, text) - tables.suspects
                if not found:
                    return error if isinstance(error, duckdb.Error) else duckdb.Error(str(error))
                tables.suspects.update(found)

    answer = read_consistently(folder, look)
    if isinstance(answer, duckdb.Error):
        raise UsageError(f"query: {str(answer).strip()}") from answer
    for name, there in tables.runs_of.items():
        if name != "runs":
            reader.find_missing(name, there, run_ids)
    return answer


def _runs_before(reader: Reader) -> list[str]:
    """The runs stored before the query; later ones must not be reported as missing.

    Runs that have steps but no row are reported.
    """
    rows = reader.runs([RUN_ID], (), None)
    return [str(run_id) for run_id in rows[RUN_ID].to_pylist()]


def _answer(database: duckdb.DuckDBPyConnection, tables: _Tables, text: str) -> pd.DataFrame:
    statements = database.extract_statements(text)
    kinds = [statement.type.name for statement in statements]
    if len(kinds) != 1 or kinds[0] not in _READS:
        got = ", ".join(kinds) or "nothing"
        raise UsageError(f"query: expected one SELECT; got {got}")
    for name in TABLES:  # unused tables are views without rows
        _make_view(database, name, list(tables.parts(name)) if _is_asked(name, text) else [])
    database.execute("SET enable_external_access = false")
    database.execute("SET lock_configuration = true")
    return _plain(database.execute(statements[0]).df())


def _is_asked(name: str, text: str) -> bool:
    return name in text.lower()


def _make_view(database: duckdb.DuckDBPyConnection, name: str, parts: list[_Part]) -> None:
    """Make one view of the parts, which are registered under names of their own."""
    selects = []
    for number, part in enumerate([_Part(schema_of(name).empty_table()), *parts]):
        source = f"_{name}_{number}"
        database.register(source, part.rows)
        select = f"SELECT * FROM {source}"  # noqa: S608  # a name made here
        if part.without:
            database.register(f"{source}_not", pa.table({RUN_ID: sorted(part.without)}))
            select += f" ANTI JOIN {source}_not USING ({RUN_ID})"
        selects.append(select)
    rows = " UNION ALL ".join(selects)
    database.execute(f"CREATE VIEW {name} AS SELECT {_all_columns(name)} FROM ({rows})")  # noqa: S608  # as above


def _all_columns(name: str) -> str:
    """The select list of a table; what an older version lacked is filled in, where it is known."""
    filled = ", ".join(
        f'coalesce("{column}", {_literal(effect)}) AS "{column}"'
        for column, effect in (effects_when_absent() if name == "runs" else absent_in(name)).items()
    )
    return f"* REPLACE ({filled})" if filled else "*"


def _literal(value: object) -> str:
    quoted = str(value).replace("'", "''")
    return f"'{quoted}'" if isinstance(value, str) else str(value).lower()


class _Tables:
    """The tables of a store as duckdb sees them."""

    def __init__(self, reader: Reader, suspects: set[Path]) -> None:
        """`suspects` are files with damage; their valid rows are read here, not by duckdb."""
        self._reader = reader
        self.suspects = suspects
        self.runs_of: dict[str, set[str]] = {}
        """The runs with rows in each table of the query."""

    def parts(self, name: str) -> Iterator[_Part]:
        """The rows of a table, each run in one part; within `read_consistently`."""
        files = self._reader.files(name)
        singles = [path for path in files.single if self._is_own(path, name)]
        if singles:
            yield _Part(_data_set(singles, name))
        seen = {path.stem for path in singles}
        others = [path for path in files.single if path.stem not in seen]
        rows = [rows for path in others if (rows := self._reader.own_rows(path, name)) is not None]
        if rows:
            yield _Part(pa.concat_tables(rows))
            seen |= {path.stem for path in others}
        for path in files.compacted:
            found, ids = self._opened(path, name)
            yield _Part(found, frozenset(seen & ids))
            seen |= ids
        self.runs_of[name] = seen

    def _is_own(self, path: Path, name: str) -> bool:
        """Whether duckdb can read a file itself: documented columns, and rows of its run only.

        Other files are read, checked and cast here.
        """
        if path in self.suspects:
            return False
        try:
            with TableFile(path, name) as file, damage_in(path):
                bounds, version = bounds_of(file.footer.metadata), file.newest_version()
                is_documented = _is_documented(file.schema, name)
                is_sealed = file.footer.is_sealed
        except (DamagedError, FileNotFoundError):
            return False
        is_known = version is None or 1 <= version <= SCHEMA_VERSION
        # Without a seal, rows are checked, which duckdb cannot do.
        return is_sealed and is_documented and is_known and set(bounds) <= {(path.stem, path.stem)}

    def _opened(self, path: Path, name: str) -> tuple[Any, set[str]]:
        """The rows of a file of many runs, and their runs."""
        if path not in self.suspects:
            try:
                with TableFile(path, name) as file:
                    if file.footer.is_sealed and _is_documented(file.schema, name):
                        column = file.raw_rows([RUN_ID])[RUN_ID]
                        return _data_set([path], name), {
                            one for one in column.unique().to_pylist() if one
                        }
            except (DamagedError, FileNotFoundError):
                pass  # the reader reports it
        rows = self._reader.many_rows(path, name)
        if rows is None:
            return schema_of(name).empty_table(), set()
        return rows, set(rows[RUN_ID].unique().to_pylist())


def _damaged_files(reader: Reader, text: str) -> set[Path]:
    """The damaged files of the query's tables, found by reading all of them."""
    for name in TABLES:
        if _is_asked(name, text):
            files = reader.files(name)
            for path in files.single:
                reader.own_rows(path, name)
            for path in files.compacted:
                reader.many_rows(path, name)
    return {damage.path for damage in reader.damage.files}


def _is_documented(schema: pa.Schema, name: str) -> bool:
    documented = schema_of(name)
    return all(
        field.name in documented.names and documented.field(field.name).type == field.type
        for field in schema
    )


def _data_set(paths: Iterable[Path], name: str) -> ds.Dataset:
    """Files as a data set, without rows that have no run."""
    options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    how = ds.ParquetFileFormat(default_fragment_scan_options=options)
    files = ds.dataset([str(path) for path in paths], schema=schema_of(name), format=how)
    return files.filter(ds.field(RUN_ID).is_valid())


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """A result of text, numbers and booleans; other types are written as text."""
    columns = dict.fromkeys(map(str, frame.columns))
    assert len(columns) == len(frame.columns)  # duckdb makes column names unique
    return frame.apply(_plain_column)


def _plain_column(column: pd.Series) -> pd.Series:
    is_number = pd.api.types.is_numeric_dtype(column)
    if is_number and not np.isinf(column.to_numpy(dtype=float, na_value=np.nan)).any():
        return column
    return column.map(lambda value: None if value is None or value is pd.NaT else str(value))
