"""Questions in SQL: every table of a store as a view of its name. The only user of duckdb.

DuckDB reads the files through arrow, so that it sees the rows that `Store` has: of readable files,
each run once, older versions with what they lack as null. It may read nothing else, and write
nothing at all.
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
import pyarrow.parquet as pq

from ppbench.errors import UsageError
from ppbench.store.columns import RUN_ID, TABLES, schema_of
from ppbench.store.listing import check_there, files_of, steadily
from ppbench.store.parquet import Unreadable, effects_when_absent, open_parquet, rows_of
from ppbench.store.reading import Skip, bounds_of

if TYPE_CHECKING:
    import duckdb

_INSTALL = "python -m pip install 'ppbench[sql]'"
_READS = ("SELECT", "EXPLAIN")


@dataclass(frozen=True)
class _Part:
    """Rows of a table, less those of some runs."""

    rows: Any  # what duckdb registers: a table or a data set of arrow
    without: frozenset[str] = frozenset()


def query(folder: Path, text: str, on_skip: Skip) -> pd.DataFrame:
    """The answer to one SELECT. Raises UsageError for what SQL refuses."""
    try:
        import duckdb
    except ImportError:
        raise UsageError(f"query: needs duckdb, which is not installed: {_INSTALL}") from None

    def look() -> pd.DataFrame | duckdb.Error:
        try:
            with duckdb.connect(":memory:") as database:
                return _answer(database, folder, text, on_skip)
        except duckdb.Error as error:
            return error  # perhaps of a file that was just replaced

    found = steadily(folder, look)
    if isinstance(found, duckdb.Error):
        raise UsageError(f"query: {str(found).strip()}") from found
    return found


def _answer(
    database: duckdb.DuckDBPyConnection, folder: Path, text: str, on_skip: Skip
) -> pd.DataFrame:
    statements = database.extract_statements(text)
    kinds = [statement.type.name for statement in statements]
    if len(kinds) != 1 or kinds[0] not in _READS:
        told = ", ".join(kinds) or "nothing"
        raise UsageError(f"query: expected one SELECT, which reads; got {told}")
    for name in TABLES:  # one that is not asked for is there, and costs nothing
        is_asked = name in text.lower()
        _make_view(database, name, list(_parts(folder, name, on_skip)) if is_asked else [])
    database.execute("SET enable_external_access = false")
    database.execute("SET lock_configuration = true")
    return _plain(database.execute(statements[0]).df())


def _make_view(database: duckdb.DuckDBPyConnection, name: str, parts: list[_Part]) -> None:
    """Registered under names of their own, the parts make one view."""
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
    """Settings that an older version did not know as what was in force then."""
    if name != "runs":
        return "*"
    filled = ", ".join(
        f'coalesce("{column}", {_literal(effect)}) AS "{column}"'
        for column, effect in effects_when_absent().items()
    )
    return f"* REPLACE ({filled})"


def _literal(value: object) -> str:
    quoted = str(value).replace("'", "''")
    return f"'{quoted}'" if isinstance(value, str) else str(value).lower()


def _parts(folder: Path, name: str, on_skip: Skip) -> Iterator[_Part]:
    """The rows of a table, each run's in one part. To be called within `steadily`."""
    files = files_of(folder, name)
    singles = [path for path in files.single if _is_own(path, name)]
    if singles:
        yield _Part(_data_set(singles, name))
    seen = {path.stem for path in singles}
    for path in (*files.compacted, *(path for path in files.single if path.stem not in seen)):
        rows, ids = _opened(path, name, on_skip)
        yield _Part(rows, frozenset(seen & ids))
        seen |= ids


def _is_own(path: Path, name: str) -> bool:
    """Whether a file has the documented columns, or some, and only rows of the run it is named by.

    Then duckdb reads of it what it needs; what is different is opened, judged and cast here.
    """
    try:
        with open_parquet(path, name) as file:
            bounds, schema = bounds_of(file.metadata), file.schema_arrow
    except Unreadable:
        return False
    return _is_documented(schema, name) and set(bounds) <= {(path.stem, path.stem)}


def _is_documented(schema: pa.Schema, name: str) -> bool:
    documented = schema_of(name)
    return all(
        field.name in documented.names and documented.field(field.name).type == field.type
        for field in schema
    )


def _opened(path: Path, name: str, on_skip: Skip) -> tuple[Any, set[str]]:
    """The rows of a file, and the runs that they are of; none, and said, if it cannot be read."""
    try:
        with open_parquet(path, name) as file:
            if not _is_documented(file.schema_arrow, name):
                rows = rows_of(file.read(), name)
                return rows, set(rows[RUN_ID].unique().to_pylist())
        column = pq.ParquetFile(path, read_dictionary=[RUN_ID]).read([RUN_ID])[RUN_ID]
        return _data_set([path], name), {one for one in column.unique().to_pylist() if one}
    except Unreadable as error:
        check_there(path)
        on_skip(f"{path}: skipped, not a readable parquet file of {name}: {error}")
        return schema_of(name).empty_table(), set()


def _data_set(paths: Iterable[Path], name: str) -> ds.Dataset:
    """Rows that belong to no run are left out."""
    files = ds.dataset([str(path) for path in paths], schema=schema_of(name), format="parquet")
    return files.filter(ds.field(RUN_ID).is_valid())


def _plain(frame: pd.DataFrame) -> pd.DataFrame:
    """An answer of text, numbers and booleans: what else SQL has is written out."""
    columns = dict.fromkeys(map(str, frame.columns))
    assert len(columns) == len(frame.columns)  # duckdb tells columns of one name apart
    return frame.apply(_plain_column)


def _plain_column(column: pd.Series) -> pd.Series:
    is_number = pd.api.types.is_numeric_dtype(column)
    if is_number and not np.isinf(column.to_numpy(dtype=float, na_value=np.nan)).any():
        return column
    return column.map(lambda value: None if value is None or value is pd.NaT else str(value))
