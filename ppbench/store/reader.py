"""Reads the tables of a results folder in SQL; DuckDB opens the files.

    results/schema-1                         the version of the columns; it is the store's lock too
    results/runs/<run_id>.parquet            a run's own file, until it is compacted
    results/runs/compacted/<name>.parquet    many runs
    results/runs/compacted/_<name>.replaces  the names of the files that <name>.parquet replaces

A run is in two files only while files are replaced, or when that was killed. One rule makes it
count once: a file that a `.replaces` names is not read if <name>.parquet is there.

Readers share the store's lock while they read, and files are replaced under it: a file that was
listed is there when it is opened. A file that cannot be read is left out and named, once.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ppbench.console import warn
from ppbench.errors import StoreError, printable, shortened
from ppbench.store.columns import RUN_ID, SCHEMA_VERSION, SQL_TYPES, TABLES

if TYPE_CHECKING:
    import duckdb

COMPACTED, REPLACES, PARQUET = "compacted", ".replaces", ".parquet"
_SCHEMA = "schema-"
_LONGEST_REASON = 200
Columns = Sequence[str] | None
"""Some columns of a table; None: all."""
Sources = dict[str, str]
"""SQL for each table, to be selected from."""
Tell = Callable[[str], None]
"""A function that receives a problem as a line of text."""
T = TypeVar("T")


class ConsoleNote:
    """Warns once of each problem of a store."""

    def __init__(self) -> None:
        self._seen: set[str] = set()

    def __call__(self, problem: str) -> None:
        """Warn unless that was done."""
        if problem not in self._seen:
            self._seen.add(problem)
            warn(problem)


def lock_of(folder: Path) -> Path:
    """The empty file by whose name a store tells its version, and which is its lock."""
    return folder / f"{_SCHEMA}{SCHEMA_VERSION}"


def check_version(folder: Path) -> None:
    """Raise StoreError for a store that another version of ppbench wrote."""
    for path in folder.glob(f"{_SCHEMA}*"):
        if path.name != lock_of(folder).name:
            version = path.name.removeprefix(_SCHEMA)
            raise StoreError(
                f"{folder}: another version of ppbench wrote it (schema {version}; this one reads "
                f"{SCHEMA_VERSION}); use that version, or another folder with --results DIR"
            )


@contextlib.contextmanager
def holding(folder: Path, *, alone: bool = False) -> Iterator[None]:
    """Share the store's lock so that its files stay, or hold it alone to replace some."""
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):  # no store yet, or a disk that has no locks
            lock = held.enter_context(lock_of(folder).open("rb"))
            fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


def files_of(folder: Path, name: str) -> tuple[list[Path], list[Path]]:
    """The files of a table that count: of one run each, oldest first, and of many runs.

    Raises StoreError for a folder that cannot be listed.
    """
    single, many = _listed(folder / name), _listed(folder / name / COMPACTED)
    there = {path.name for path in many}
    replaced = {
        old
        for path in many
        if path.suffix == REPLACES and replacing(path).name in there
        for old in path.read_text(errors="replace").splitlines()
    }

    def counted(paths: list[Path]) -> list[Path]:
        return [p for p in paths if p.suffix == PARQUET and p.name not in replaced]

    return counted(single), counted(many)


def replacing(note: Path) -> Path:
    """The file that replaces those that a note names."""
    return note.with_name(f"{note.stem.removeprefix('_')}{PARQUET}")


def _listed(place: Path) -> list[Path]:
    """The files of a folder by their names, but for unfinished ones (dot files)."""
    try:
        names = os.listdir(place)  # noqa: PTH208  # fast
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"{place}: cannot be read: {error.strerror}") from error
    return [place / name for name in sorted(names) if not name.startswith(".")]


class Reader:
    """Answers questions to the tables of a results folder, which may change meanwhile."""

    def __init__(self, folder: Path, tell: Tell) -> None:
        """`tell` receives a line for each file that cannot be read, once."""
        self._folder = folder
        self._tell = tell
        self.damaged: dict[Path, str] = {}
        """The files that were left out so far, each with its line."""

    def ask(
        self,
        tables: Mapping[str, Columns],
        answer: Callable[[duckdb.DuckDBPyConnection, Sources], T],
        run_ids: Collection[str] | None = None,
        connect: Callable[[], duckdb.DuckDBPyConnection] | None = None,
    ) -> T:
        """What `answer` makes of some columns of some tables.

        With `run_ids`, only files that may have these runs are opened. Raises duckdb.Error for SQL
        that is wrong, StoreError for a store that cannot be read.
        """
        from ppbench.store.database import duckdb

        of_statements = (
            *(duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException),
            duckdb.PermissionException,
        )
        check_version(self._folder)
        with holding(self._folder):
            while True:
                files = {name: self._files(name, run_ids) for name in tables}
                sources = {name: source(name, tables[name], files[name]) for name in tables}
                try:
                    return answer((connect or shared_database)(), sources)
                except duckdb.Error as error:
                    if isinstance(error, of_statements):
                        raise
                    _database.cache_clear()  # some errors of damaged files end a whole database
                    found = [self.leave_out_damaged(n, tables[n], files[n]) for n in tables]
                    if not any(found):
                        raise

    def _files(self, name: str, run_ids: Collection[str] | None) -> list[Path]:
        """The files to read, but for damaged ones; those of the given runs in their order."""
        single, many = files_of(self._folder, name)
        if run_ids is not None:
            own = {path.stem: path for path in single}
            single = [own[run_id] for run_id in run_ids if run_id in own]
            many = many if len(single) < len(run_ids) else []
        return [path for path in (*single, *many) if path not in self.damaged]

    def leave_out_damaged(self, name: str, columns: Columns, paths: Sequence[Path]) -> bool:
        """Find by halves the files of which these columns cannot be read; tell, read no more."""
        from ppbench.store.database import duckdb

        text = f"SELECT bit_xor(hash(COLUMNS(*))) FROM {source(name, columns, paths)}"
        try:
            with duckdb.connect(":memory:") as database:
                database.execute(text).fetchall()
        except duckdb.Error as error:
            reason = next((line for line in str(error).splitlines() if line.strip()), "")
        else:
            return False
        if len(paths) > 1:
            half = len(paths) // 2
            is_first = self.leave_out_damaged(name, columns, paths[:half])
            return self.leave_out_damaged(name, columns, paths[half:]) or is_first
        (path,) = paths
        if path.exists():
            plain = shortened(printable(reason.strip().rstrip(".")), _LONGEST_REASON)
            self.damaged[path] = (
                f"{path}: damaged, its rows of {name} are left out: {plain}; remove it, "
                "and measure again with: ppbench sweep FILE"
            )
            self._tell(self.damaged[path])
        return True


def shared_database() -> duckdb.DuckDBPyConnection:
    """A session of this process's database, which takes 20 ms to make."""
    return _database(os.getpid()).cursor()


@functools.cache
def _database(_process: int) -> duckdb.DuckDBPyConnection:
    from ppbench.store.database import duckdb

    return duckdb.connect(":memory:")


def source(name: str, columns: Columns, files: Sequence[Path]) -> str:
    """A table as SQL: rows of files with the declared types. A column that no file has is null."""
    types = {
        column.name: SQL_TYPES[column.type]
        for column in TABLES[name]
        if columns is None or column.name in (RUN_ID, *columns)
    }
    empty = "SELECT " + ", ".join(f'NULL::{kind} AS "{one}"' for one, kind in types.items())
    empty += " WHERE false"
    if not files:
        return f"({empty})"
    cast = ", ".join(f'"{one}"::{kind} AS "{one}"' for one, kind in types.items())
    listed = ", ".join(map(quoted, files))
    return (
        f"(SELECT {cast} FROM ({empty} UNION ALL BY NAME "
        f"SELECT * FROM read_parquet([{listed}], union_by_name=true)))"
    )


def quoted(value: object) -> str:
    """A value as text in SQL."""
    return "'" + str(value).replace("'", "''") + "'"
