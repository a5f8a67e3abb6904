"""A results folder: runs go in whole, and come out by their names.

A file is written aside and renamed, and `runs` comes last: a run exists wholly or not at all.
One file per run, so that sweeps never write the same file and a crash costs one run at most.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ppbench.errors import StoreError, UsageError
from ppbench.store.columns import SCHEMA_VERSION, schema_of
from ppbench.store.parquet import as_table, rows_of, with_settings_read, write_parquet

LAST = "last"
Row = Mapping[str, object]


def new_run_id() -> str:
    """Sorts by time; two made in the same millisecond differ at random."""
    now = datetime.now(UTC)
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}-{secrets.token_hex(3)}"


def check_writable(folder: Path, option: str) -> None:
    """Make the folder; raises StoreError, naming the option to change, when it takes no files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{secrets.token_hex(4)}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise StoreError(
            f"{folder}: cannot be written to: {error.strerror}; choose another with {option} DIR"
        ) from error


def _ignore(_problem: str) -> None:
    pass


class Store:
    """A results folder. Reading one that does not exist gives empty tables."""

    def __init__(self, folder: Path, on_skip: Callable[[str], None] = _ignore) -> None:
        """`on_skip` is told of each file that cannot be read; the others are read all the same."""
        self.folder = folder
        self._on_skip = on_skip

    def write_run(self, run: Row, tables: Mapping[str, pd.DataFrame]) -> None:
        """Store one run: its row, and its part of the other tables by their names.

        `run` must hold a `run_id`; columns that are left out are null.
        """
        run_id = str(run["run_id"])
        for name, frame in tables.items():
            self._write(name, run_id, frame)
        self._write("runs", run_id, pd.DataFrame([run]))

    def _write(self, name: str, run_id: str, frame: pd.DataFrame) -> None:
        path = self.folder / name / f"{run_id}.parquet"
        table = as_table(frame.assign(run_id=run_id, schema_version=SCHEMA_VERSION), name)
        write_parquet(table, path)

    def profiles_of(self, run_id: str) -> Path:
        """The folder of a run's Chrome traces; it exists if there are any."""
        return self.folder / "profiles" / run_id

    def has_run(self, run_id: str) -> bool:
        return (self.folder / "runs" / f"{run_id}.parquet").exists()

    def runs(self) -> pd.DataFrame:
        """Every run, oldest first."""
        paths = sorted((self.folder / "runs").glob("*.parquet"))
        return self._read("runs", paths)

    def table(self, name: str, run_ids: Iterable[str]) -> pd.DataFrame:
        """The rows that the given runs have in a table; none where a run has no part in it."""
        paths = [self.folder / name / f"{run_id}.parquet" for run_id in run_ids]
        return self._read(name, [path for path in paths if path.exists()])

    def _read(self, name: str, paths: list[Path]) -> pd.DataFrame:
        tables = [schema_of(name).empty_table()]
        for path in paths:
            try:
                tables.append(rows_of(pq.read_table(path), name))
            except (OSError, pa.ArrowException) as error:
                self._on_skip(f"{path}: skipped, not a readable parquet file of {name}: {error}")
        table = pa.concat_tables(tables)
        return with_settings_read(table) if name == "runs" else table.to_pandas()

    def every_run(self) -> pd.DataFrame:
        """As `runs`, at least one. Raises UsageError."""
        runs = self.runs()
        if runs.empty:
            raise UsageError(f"{self.folder}: no runs here yet; start with: ppbench sweep FILE")
        return runs

    def find(self, name: str, among: pd.DataFrame | None = None) -> pd.Series:
        """The run called by its id, a unique prefix of it, or `last`. Raises UsageError.

        `among` are rows of `runs`, at least one; by default all of them.
        """
        runs = self.every_run() if among is None else among
        if name == LAST:
            return runs.iloc[-1]
        found = runs[runs["run_id"].str.startswith(name)]
        if len(found) == 1:
            return found.iloc[0]
        if found.empty:
            raise UsageError(f'run "{name}": not in {self.folder}; list them with: ppbench ls')
        some = ", ".join(found["run_id"].tail(5))
        raise UsageError(f'run "{name}": {len(found)} runs begin so: {some}; give more of the id')

    def last_sweep(self) -> pd.DataFrame:
        """The newest run of each case and launch of the sweep that the last run belongs to.

        Raises UsageError when there is no run.
        """
        return last_sweep_of(self.every_run())


def last_sweep_of(runs: pd.DataFrame) -> pd.DataFrame:
    """As `Store.last_sweep`, among these rows of `runs`, at least one."""
    return newest_of(runs[runs["sweep_id"] == runs.iloc[-1]["sweep_id"]])


def newest_of(runs: pd.DataFrame) -> pd.DataFrame:
    """The newest of the rows of `runs` for each case and launch.

    One that was interrupted counts only where there is no other: nothing was found out.
    """
    is_whole = runs["status"] != "interrupted"
    whole = runs[is_whole].drop_duplicates("resume_key", keep="last")
    rest = runs[~is_whole & ~runs["resume_key"].isin(whole["resume_key"])]
    return pd.concat([whole, rest.drop_duplicates("resume_key", keep="last")]).sort_index()


def check_ok(run: pd.Series, what: str) -> None:
    """Raises UsageError for a run that was not measured to its end, and so has no such thing."""
    if run["status"] != "ok":
        raise UsageError(f"run {run['run_id']}: status is {run['status']}; it has no {what}")


def no_spans(run: pd.Series) -> StoreError:
    """To be raised where a run's spans are wanted and are not there."""
    return StoreError(
        f"run {run['run_id']}: its spans are not in the store (missing or unreadable); "
        "measure it again with: ppbench sweep FILE --rerun"
    )
