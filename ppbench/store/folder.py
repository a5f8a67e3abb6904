"""A results folder: runs are stored completely, and read by their names.

Files are written aside and renamed, that of `runs` last, so that a run exists completely or not at
all. Each run has its own files, so that sweeps never write the same file and a crash costs at most
one run.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ppbench.config.case import VARIABLE
from ppbench.config.conditions import Condition, none_has
from ppbench.errors import StoreError, UsageError, no_runs_in
from ppbench.store.columns import RUN_ID, TABLES
from ppbench.store.conditions import all_of
from ppbench.store.parquet import as_frame, as_table, row_as_table, storable, write_parquet
from ppbench.store.reader import (
    Columns,
    ConsoleNote,
    Reader,
    Tell,
    check_version,
    lock_of,
    quoted,
    shared_database,
)
from ppbench.store.sweeps import NOTED, SweepNote, last_sweep_in

if TYPE_CHECKING:  # listings import neither
    import duckdb
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    from ppbench.store.compaction import Compacted

LAST = "last"
_SHORTEST_ID = 6
"""Characters of the random part of an id; a shorter word is no end of one."""
_OF_MOST_RUNS = frozenset({"steps", "ranks", "edges"})
"""Small tables, in which nearly every run has rows."""
MIN_FREE_BYTES = 16 * 2**20
Row = Mapping[str, object]
T = TypeVar("T")


def new_run_id() -> str:
    """A new id, which sorts by time; ids of the same millisecond differ at random."""
    now = datetime.now(UTC)
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}-{secrets.token_hex(3)}"


def begun_at(run_id: str) -> datetime:
    """When a run began, UTC: its id was made then. Raises ValueError for what is no id."""
    return datetime.strptime(run_id.partition("-")[0], "%Y%m%dT%H%M%S%f").replace(tzinfo=UTC)


def check_writable(folder: Path, option: str) -> None:
    """Make the folder and check that files can be written and that there is space.

    Raises StoreError, which names the option to change.
    """
    fix = f"choose another with {option} DIR"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(4)}"
        try:
            probe.write_bytes(bytes(4096))
        finally:
            probe.unlink(missing_ok=True)
        space = shutil.disk_usage(folder)
    except OSError as error:
        raise StoreError(f"{folder}: cannot be written to: {error.strerror}; {fix}") from error
    if space.total and space.free < MIN_FREE_BYTES:
        free, needed = (f"{size / 2**20:.1f} MiB" for size in (space.free, MIN_FREE_BYTES))
        raise StoreError(
            f"{folder}: its disk has {free} left; a sweep needs at least {needed}; make room, "
            f"or {fix}"
        )


class Store:
    """A results folder; one that does not exist has empty tables."""

    def __init__(self, folder: Path, on_skip: Tell | None = None) -> None:
        """`on_skip` receives a line for each file that cannot be read; by default a warning."""
        self.folder = folder
        self._reader = Reader(folder, on_skip or ConsoleNote())

    def write_run(self, run: Row, tables: Mapping[str, pd.DataFrame]) -> None:
        """Store one run: its row, and its part of the other tables by their names.

        `run` must hold a `run_id`; columns that are left out are null. Raises StoreError when the
        disk is full or takes no files; then nothing of the run is left in the store. Nor is what
        a process that was killed had begun to store of the same run.
        """
        run_id = str(run[RUN_ID])
        check_version(self.folder)
        for name in TABLES.keys() - tables.keys() - {"runs"}:
            with contextlib.suppress(OSError):
                (self.folder / name / f"{run_id}.parquet").unlink()
        written: list[Path] = []
        try:
            for name in (*tables, "runs"):
                if name == "runs":
                    rows = row_as_table({**storable(run), RUN_ID: run_id}, name)
                else:
                    rows = as_table(tables[name].assign(run_id=run_id), name)
                path = self.folder / name / f"{run_id}.parquet"
                write_parquet(rows, path)
                written.append(path)
            lock_of(self.folder).touch()
        except StoreError:
            for path in written:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise

    @property
    def damaged(self) -> list[str]:
        """A line for each file that could not be read so far."""
        return list(self._reader.damaged.values())

    def profiles_of(self, run_id: str) -> Path:
        """The folder of a run's Chrome traces; it exists if there are any."""
        return self.folder / "profiles" / run_id

    def select(
        self,
        select: str,
        columns: Columns,
        fetch: Callable[[duckdb.DuckDBPyConnection, str], T],
        where: Iterable[Condition] = (),
        newest: int | None = None,
    ) -> T:
        """What `fetch` takes of a SELECT over the runs that meet the conditions, oldest first.

        `select` are its expressions, `columns` those of `runs` that they read; `newest` limits
        the runs.
        """
        where = tuple(where)
        tried = [condition.key for condition in where]
        if "seq_len" in (columns or ()) or "seq_len" in tried:
            tried.append("is_seq_len_variable")
        wanted = None if columns is None else [*columns, *tried]

        def answer(database: duckdb.DuckDBPyConnection, source: Mapping[str, str]) -> T:
            met = f"FROM {source['runs']} WHERE {all_of(where)}"
            if newest is not None:
                last = f"SELECT {RUN_ID} {met} ORDER BY {RUN_ID} DESC LIMIT {newest}"
                oldest = f"SELECT min({RUN_ID}) FROM ({last})"
                ((first,),) = database.execute(oldest).fetchall()
                met += f" AND {RUN_ID} >= {quoted(first)}" if first else " AND false"
            return fetch(database, f"SELECT {select} {met} ORDER BY {RUN_ID}")

        return self._reader.ask({"runs": wanted}, answer)

    def listed(
        self, columns: Sequence[str], where: Iterable[Condition] = (), newest: int | None = None
    ) -> list[tuple[object, ...]]:
        """Columns of the runs that meet the conditions, as values; a length may be `variable`."""
        length = columns.index("seq_len") if "seq_len" in columns else None
        read = [*columns, *(() if length is None else ("is_seq_len_variable",))]
        found = self.select(
            ", ".join(f'"{name}"' for name in read),
            read,
            lambda database, text: database.execute(text).fetchall(),
            where,
            newest,
        )
        if length is None:
            return found
        return [
            (*row[:length], VARIABLE if row[-1] else row[length], *row[length + 1 : -1])
            for row in found
        ]

    def unmet(self, where: Sequence[Condition]) -> str:
        """Say which of these conditions no run meets, and the values that runs have; "" if some do.

        Raises UsageError if there is no run.
        """
        if self.listed([RUN_ID], where, 1):
            return ""
        if not self.listed([RUN_ID], (), 1):
            raise no_runs_in(self.folder)
        each = next(
            where[:number]
            for number in range(1, len(where) + 1)
            if not self.listed([RUN_ID], where[:number], 1)
        )
        values = (value for (value,) in self.listed([each[-1].key], each[:-1]))
        return f"{self.folder}: --where {none_has('run', each, values)}"

    def csv(self, columns: Sequence[str], where: Iterable[Condition] = ()) -> str:
        """The same as CSV, for very many runs."""
        flags = {column.name for column in TABLES["runs"] if column.type == "bool"}
        words = f"CASE WHEN is_seq_len_variable THEN '{VARIABLE}' ELSE seq_len::VARCHAR END"
        cells = [
            f'CASE WHEN "{name}" THEN \'True\' WHEN NOT "{name}" THEN \'False\' END AS "{name}"'
            if name in flags
            else f"{words} AS seq_len"
            if name == "seq_len"
            else f'"{name}"'
            for name in columns
        ]
        with tempfile.NamedTemporaryFile(suffix=".csv") as file:
            to = f"TO {quoted(file.name)} (FORMAT csv, HEADER)"
            self.select(
                ", ".join(cells),
                columns,
                lambda database, text: database.execute(f"COPY ({text}) {to}"),
                where,
            )
            return Path(file.name).read_text()

    def runs(
        self,
        columns: Columns = None,
        where: Iterable[Condition] = (),
        newest: int | None = None,
    ) -> pd.DataFrame:
        """The runs that meet the conditions, each once, oldest first.

        `columns` limits the columns, which is much faster than reading all; `newest` the runs.
        """
        read = columns
        if columns is not None and "seq_len" in columns:
            read = [*columns, "is_seq_len_variable"]
        names = "*" if read is None else ", ".join(f'"{name}"' for name in dict.fromkeys(read))
        found = as_frame(self.select(names, read, _fetch, where, newest), "runs")
        return found if columns is None else found[list(columns)]

    def table(self, name: str, run_ids: Iterable[str]) -> pd.DataFrame:
        """The rows of the given runs in a table, in the order of the ids."""
        return self._rows(name, list(dict.fromkeys(run_ids)), "true")

    def spans_of_steps(self, steps_of_runs: Mapping[str, Sequence[int]]) -> pd.DataFrame:
        """The spans of some steps of each of these runs."""
        pairs = [
            f"({quoted(run_id)}, {int(step)})"
            for run_id, steps in steps_of_runs.items()
            for step in steps
        ]
        test = f"({RUN_ID}, step) IN ({', '.join(pairs)})" if pairs else "false"
        return self._rows("spans", list(steps_of_runs), test)

    def _rows(self, name: str, run_ids: Sequence[str], test: str) -> pd.DataFrame:
        listed = ", ".join(map(quoted, run_ids)) or "NULL"
        found = self._reader.ask(
            {name: None},
            lambda database, source: _fetch(
                database, f"FROM {source[name]} WHERE {RUN_ID} IN ({listed}) AND {test}"
            ),
            run_ids,
        )
        rows = as_frame(found, name)
        if len(run_ids) < 2:
            return rows
        places = rows[RUN_ID].map({run_id: place for place, run_id in enumerate(run_ids)})
        if places.is_monotonic_increasing:
            return rows
        return rows.iloc[places.argsort(kind="stable")].reset_index(drop=True)

    def query(self, text: str) -> tuple[dict[str, str], list[tuple[object, ...]]]:
        """The columns, with their types in SQL, and the rows of the answer to one SELECT.

        It reads nothing but the store, and writes nothing. Of the store it opens the tables whose
        names are words of the text, or all if there is none. Raises UsageError for other SQL.
        """
        from ppbench.store.database import duckdb

        def answer(
            database: duckdb.DuckDBPyConnection, source: Mapping[str, str]
        ) -> tuple[dict[str, str], list[tuple[object, ...]]]:
            for name, rows in source.items():
                database.execute(f"CREATE OR REPLACE VIEW {name} AS FROM {rows}")
            found = database.execute(text)
            columns: dict[str, str] = {}
            for name, kind, *_ in found.description:  # names may repeat
                free = (name, *(f"{name}_{n}" for n in range(1, len(columns) + 1)))
                columns[next(one for one in free if one not in columns)] = str(kind)
            return columns, found.fetchall()

        def connect() -> duckdb.DuckDBPyConnection:
            database = duckdb.connect(":memory:")
            database.execute(f"SET allowed_directories = [{quoted(f'{self.folder}/')}]")
            database.execute("SET enable_external_access = false")
            database.execute("SET lock_configuration = true")
            return database

        try:
            database = shared_database()
            kinds = [one.type.name for one in database.extract_statements(text)]
            ((parsed,),) = database.execute("SELECT json_serialize_sql(?)", [text]).fetchall()
            if '"COPY_QUERY_NODE"' in parsed:  # a SELECT may have one, which writes files
                kinds = ["COPY"]
            if kinds != ["SELECT"]:
                got = ", ".join(kinds) or "nothing"
                fix = "; PIVOT needs its values: ON column IN (...)" if "MULTI" in kinds else ""
                raise UsageError(f"query: expected one SELECT; got {got}{fix}")
            words = set(re.findall(r"\w+", text.lower()))
            named = [name for name in TABLES if name in words] or TABLES
            return self._reader.ask(dict.fromkeys(named), answer, connect=connect)
        except duckdb.Error as error:
            problem = str(error).strip()
            if "pytz" in problem:  # DuckDB wants it, and shows a traceback
                problem = "a time with a zone cannot be shown; make it text: now()::VARCHAR"
            raise UsageError(f"query: {problem}") from error

    def compact(self, tell: Tell) -> list[Compacted]:
        """Merge files of one run into files of many; see `compaction`. Raises StoreError."""
        from ppbench.store.compaction import compact

        return compact(self.folder, tell)

    def every_run(self) -> pd.DataFrame:
        """All runs. Raises UsageError if there is none."""
        return self._at_least_one(self.runs())

    def _at_least_one(self, runs: pd.DataFrame) -> pd.DataFrame:
        if runs.empty:
            raise no_runs_in(self.folder)
        return runs

    def find(self, name: str) -> pd.Series:
        """The run called by its id, a unique beginning or end of it, or `last`.

        Raises UsageError.
        """
        found = self.named([name])
        if len(found) > 1:
            raise UsageError(
                f'run "{name}": is a sweep of {len(found)} runs; name one of them: '
                f"{self._listing} --where sweep_name={name}"
            )
        return found.iloc[0]

    def short_ids(self, run_ids: Iterable[str]) -> dict[str, str]:
        """The shortest end of each of these ids that means this run alone: its random part."""
        left = list(run_ids)
        short = {run_id: run_id for run_id in left}
        for length in range(_SHORTEST_ID, max(map(len, left), default=0)):
            ends = ", ".join(quoted(run_id[-length:]) for run_id in left)
            clear = self._reader.ask(
                {"runs": [RUN_ID]},
                lambda database, source: database.execute(
                    f"SELECT right({RUN_ID}, {length}) AS ending FROM {source['runs']} "  # noqa: B023
                    f"WHERE ending IN ({ends}) GROUP BY ending HAVING count(*) = 1 "  # noqa: B023
                    f"EXCEPT SELECT left({RUN_ID}, {length}) FROM {source['runs']}"  # noqa: B023
                ).fetchall(),
            )
            short |= {run_id: run_id[-length:] for run_id in left if (run_id[-length:],) in clear}
            left = [run_id for run_id in left if short[run_id] == run_id]
            if not left:
                break
        return short

    def named(self, names: Sequence[str]) -> pd.DataFrame:
        """The runs of these names, each once, in this order, as far as their rows are readable.

        A sweep's name or id means all its runs.

        Raises UsageError for an unknown name, StoreError if no row is readable. `last` is the last
        readable run.
        """
        while True:
            num_damaged = len(self.damaged)
            known = self._at_least_one(self.runs([RUN_ID]))[RUN_ID]
            ids = [one for name in names for one in self._ids_of(name, known)]
            rows = self.table("runs", ids)
            if len(self.damaged) == num_damaged or (len(rows) and LAST not in names):
                return rows

    def _ids_of(self, name: str, known: pd.Series) -> list[str]:
        """The runs that a name means: one, or the newest of a sweep of that name or id."""
        try:
            return [self.id_of(name, known)]
        except UsageError:
            for column in ("sweep_name", "sweep_id"):
                runs = self.runs(
                    [RUN_ID, "resume_key", "status"], [Condition(column, "=", (name,))]
                )
                if len(runs):
                    return list(newest_of(runs)[RUN_ID])
            raise

    @property
    def _listing(self) -> str:
        is_default = self.folder == Path("results")
        return "ppbench ls" if is_default else f"ppbench ls --results {self.folder}"

    def id_of(self, name: str, known: pd.Series) -> str:
        """The id that a name means among the known ids, oldest first. Raises UsageError."""
        if name == LAST:
            return str(known.iloc[-1])
        found, end = known[known.str.startswith(name)], "start"
        if found.empty and len(name) >= _SHORTEST_ID:
            found, end = known[known.str.endswith(name)], "end"
        if len(found) == 1:
            return str(found.iloc[0])
        if found.empty:
            raise UsageError(f'run "{name}": not in {self.folder}; list them with: {self._listing}')
        some = ", ".join(found.tail(5))
        raise UsageError(
            f'run "{name}" is ambiguous: {len(found)} runs {end} with it: {some}; '
            "give more characters"
        )

    def last_sweep(self) -> StoredSweep:
        """The sweep that was called last, or that made the last run; see `sweeps`.

        Raises UsageError when there is no run.
        """
        known = self._at_least_one(self.runs(NOTED))
        while len(known):
            last, note = last_sweep_in(self.folder, known)
            runs = self.table("runs", newest_of(last)[RUN_ID])
            if len(runs):
                return StoredSweep(in_order(runs), note)
            known = known.drop(last.index)
        return StoredSweep(self._at_least_one(known), None)


class ReadOnce(Store):
    """A store that reads a small table of all these runs when one is first asked for.

    It is for a page that asks run by run.
    """

    def __init__(self, store: Store, run_ids: Iterable[str]) -> None:
        self.folder, self._reader = store.folder, store._reader
        self._ids = list(dict.fromkeys(run_ids))
        self._held: dict[str, tuple[pd.DataFrame, Mapping[str, np.ndarray]]] = {}

    def table(self, name: str, run_ids: Iterable[str]) -> pd.DataFrame:
        """The rows of the given runs in a table, in the order of the ids."""
        wanted = list(dict.fromkeys(run_ids))
        if name not in _OF_MOST_RUNS or not set(wanted) <= set(self._ids):
            return super().table(name, wanted)
        import numpy as np

        if name not in self._held:
            rows = super().table(name, self._ids)
            of_runs = rows.groupby(RUN_ID, sort=False).indices
            self._held[name] = rows, {str(run): np.asarray(own) for run, own in of_runs.items()}
        rows, places = self._held[name]
        own = [places[run_id] for run_id in wanted if run_id in places]
        return rows.iloc[np.concatenate([np.empty(0, int), *own])].reset_index(drop=True)


@dataclass(frozen=True)
class StoredSweep:
    """The newest run of each case and launch of a sweep, in its order, with its note."""

    runs: pd.DataFrame
    note: SweepNote | None

    @property
    def sweep_id(self) -> str:
        return self.note.sweep_id if self.note else str(self.runs.iloc[-1]["sweep_id"])


def in_order(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of a sweep as its file has their cases."""
    return runs.sort_values("position", kind="stable")


def newest_of(runs: pd.DataFrame) -> pd.DataFrame:
    """The newest row of `runs` for each case and launch.

    An interrupted run counts only where there is no other: it has no result.
    """
    import pandas as pd

    is_whole = runs["status"] != "interrupted"
    whole = runs[is_whole].drop_duplicates("resume_key", keep="last")
    rest = runs[~is_whole & ~runs["resume_key"].isin(whole["resume_key"])]
    return pd.concat([whole, rest.drop_duplicates("resume_key", keep="last")]).sort_index()


def check_ok(run: pd.Series, what: str) -> None:
    """Raise UsageError for a run that did not finish and so lacks `what`."""
    if run["status"] != "ok":
        raise UsageError(f"run {run['run_id']}: status is {run['status']}; it has no {what}")


def missing_spans(run: pd.Series) -> StoreError:
    """The error for a run whose spans or steps are needed but not stored."""
    return StoreError(
        f"run {run[RUN_ID]}: its spans are not in the store (missing or unreadable); "
        "measure it again with: ppbench sweep FILE --rerun"
    )


def _fetch(database: duckdb.DuckDBPyConnection, text: str) -> pa.Table:
    """The answer as an arrow table, in which null differs from NaN and integers stay whole."""
    return database.sql(text).to_arrow_table()
