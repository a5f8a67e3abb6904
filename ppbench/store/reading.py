"""Rows out of a store's files: each run's once, from as few bytes as the question needs.

A file of many runs has groups of rows, and its footer tells the first and the last run of each: the
spans of one run are found without reading those of the others. Of `runs`, conditions are tried on
their own columns first, and the rest is read of the groups that hold a run that meets them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ppbench.store.columns import RUN_ID, schema_of
from ppbench.store.conditions import Condition, holds
from ppbench.store.listing import VanishedError, check_there, compacted_of, files_of, steadily
from ppbench.store.parquet import (
    Unreadable,
    known_in,
    open_parquet,
    read_rows,
    rows_of,
    with_settings_filled,
)

Skip = Callable[[str], None]
Columns = Sequence[str] | None
_Indices = npt.NDArray[np.int64]
_Read = dict[Path, pa.Table | None]


class Reader:
    """Reads the tables of a results folder, which may change meanwhile."""

    def __init__(self, folder: Path, on_skip: Skip) -> None:
        self._folder = folder
        self._on_skip = on_skip
        self._footers: dict[Path, pq.FileMetaData] = {}

    def runs(self, columns: Columns, where: Sequence[Condition], newest: int | None) -> pa.Table:
        """Of the runs that meet the conditions the newest so many, oldest first.

        With `run_id` beside the columns, and the conditions' own.
        """
        tried = [condition.column for condition in where]
        wanted = None if columns is None else [*columns, *tried]
        is_all = not where and newest is None
        read: _Read = {}  # what does not change is not read again when the folder has to be

        def look() -> pa.Table:
            files = files_of(self._folder, "runs")
            for path in files.single:
                self._read_into(read, path, "runs", wanted)
            for path in files.compacted:
                self._read_into(read, path, "runs", wanted if is_all else tried)
            parts = [
                (path, with_settings_filled(rows))
                for path in (*files.single, *files.compacted)
                if (rows := read[path]) is not None
            ]
            chosen = _chosen([rows for _, rows in parts], where, newest)
            return self._taken(parts, chosen, wanted, read)

        return steadily(self._folder, look)

    def rows_of_runs(self, name: str, run_ids: Sequence[str], columns: Columns = None) -> pa.Table:
        """The rows of these runs in a table, in the order of the ids, which are distinct."""
        read: _Read = {}

        def look() -> pa.Table:
            parts, missing = [schema_of(name, columns).empty_table()], []
            for run_id in run_ids:
                path = self._folder / name / f"{run_id}.parquet"
                if not path.exists() or self._read_into(read, path, name, columns) is None:
                    missing.append(run_id)
                else:
                    parts.append(read[path])
            if not missing:
                return pa.concat_tables(parts)
            parts.append(self.rows_in(compacted_of(self._folder, name), name, missing, columns))
            return _in_order(pa.concat_tables(parts), run_ids)

        return steadily(self._folder, look)

    def rows_in(
        self, paths: Iterable[Path], name: str, run_ids: Iterable[str], columns: Columns = None
    ) -> pa.Table:
        """The rows of these runs in files of many, each run's from the first file that has any."""
        parts, missing = [schema_of(name, columns).empty_table()], sorted(run_ids)
        for path in paths:
            rows = self._rows_in(path, name, missing, columns)
            found = set(rows[RUN_ID].unique().to_pylist())
            missing = [run_id for run_id in missing if run_id not in found]
            parts.append(rows)
        return pa.concat_tables(parts)

    def _read_into(self, read: _Read, path: Path, name: str, columns: Columns) -> pa.Table | None:
        """The file's rows, read once; None if it cannot be read."""
        if path not in read:
            try:
                read[path] = read_rows(path, name, columns)
            except Unreadable as error:
                self._skip(path, name, error)
                read[path] = None
        return read[path]

    def _skip(self, path: Path, name: str, error: Exception) -> None:
        check_there(path)
        self._on_skip(f"{path}: skipped, not a readable parquet file of {name}: {error}")

    def _rows_in(self, path: Path, name: str, run_ids: list[str], columns: Columns) -> pa.Table:
        """Rows of these runs, sorted, in a file of many; only groups that may hold one are read."""
        none = schema_of(name, columns).empty_table()
        try:
            groups = [
                group for group, (first, last) in enumerate(bounds_of(self._footer(path)))
                if has_between(run_ids, first, last)
            ]  # fmt: skip
            if not groups:
                return none
            with open_parquet(path, name, self._footer(path)) as file:
                rows = file.read_row_groups(groups, columns=known_in(file, columns))
            rows = rows_of(rows, name, columns)
        except Unreadable as error:
            self._skip(path, name, error)
            return none
        return rows.filter(pc.is_in(rows[RUN_ID], value_set=pa.array(run_ids, pa.string())))

    def _footer(self, path: Path) -> pq.FileMetaData:
        """Files of many runs never change, so neither does this."""
        if path not in self._footers:
            self._footers[path] = pq.read_metadata(path)
        return self._footers[path]

    def _taken(
        self, parts: list[tuple[Path, pa.Table]], chosen: _Indices, columns: Columns, read: _Read
    ) -> pa.Table:
        """The chosen rows; `chosen` are positions in all parts' rows together."""
        schema = schema_of("runs", columns)
        taken, places, start = [schema.empty_table()], [np.empty(0, np.int64)], 0
        for path, rows in parts:
            mine = np.sort(chosen[(chosen >= start) & (chosen < start + rows.num_rows)])
            if len(mine):
                taken.append(self._rest(path, rows, mine - start, columns, read))
            places.append(mine)
            start += rows.num_rows
        placed = np.concatenate(places)
        table = pa.concat_tables(taken)
        if np.array_equal(placed, chosen):
            return table
        by_place = np.argsort(placed)
        return table.take(by_place[np.searchsorted(placed[by_place], chosen)])

    def _rest(
        self, path: Path, rows: pa.Table, chosen: _Indices, columns: Columns, read: _Read
    ) -> pa.Table:
        """The chosen rows of a file with all columns, of which `rows` may have but some."""
        schema = schema_of("runs", columns)
        if len(rows.schema) == len(schema):
            return rows if len(chosen) == rows.num_rows else rows.take(chosen)
        parts, start = [], 0
        try:
            with open_parquet(path, "runs") as file:
                known = known_in(file, columns)
                for group in range(file.num_row_groups):
                    end = start + file.metadata.row_group(group).num_rows
                    mine = chosen[(chosen >= start) & (chosen < end)] - start
                    if len(mine):
                        whole = file.read_row_group(group, columns=known).take(mine)
                        parts.append(with_settings_filled(rows_of(whole, "runs", columns)))
                    start = end
        except Unreadable as error:
            self._skip(path, "runs", error)
            read[path] = None
            raise VanishedError from error  # what else it hid may now be told from other files
        return pa.concat_tables(parts)


def bounds_of(footer: pq.FileMetaData) -> list[tuple[str | None, str | None]]:
    """The first and last run of each group of rows; None where the footer does not tell."""
    names = [footer.schema.column(index).path for index in range(footer.num_columns)]
    if RUN_ID not in names:
        raise pa.ArrowInvalid(f"it has no column {RUN_ID}")
    index = names.index(RUN_ID)
    bounds: list[tuple[str | None, str | None]] = []
    for group in range(footer.num_row_groups):
        told = footer.row_group(group).column(index).statistics
        has_both = told is not None and told.has_min_max
        bounds.append((str(told.min), str(told.max)) if has_both else (None, None))
    return bounds


def has_between(names: list[str], first: str | None, last: str | None) -> bool:
    """Whether one of the sorted names lies between, both ends included."""
    if first is None or last is None:
        return True
    index = bisect.bisect_left(names, first)
    return index < len(names) and names[index] <= last


def _in_order(rows: pa.Table, run_ids: Sequence[str]) -> pa.Table:
    places = pc.index_in(rows[RUN_ID], value_set=pa.array(run_ids, pa.string()))
    return rows.take(pc.sort_indices(places))  # stable: the rows of a run stay in their order


def _chosen(parts: list[pa.Table], where: Sequence[Condition], newest: int | None) -> _Indices:
    """Positions in all parts' rows together: each run's first row, by id, if it meets them all."""
    empty = schema_of("runs", [RUN_ID]).empty_table()
    ids = pa.chunked_array(
        [chunk for part in [empty, *parts] for chunk in part[RUN_ID].chunks], pa.string()
    )
    order = np.asarray(pc.sort_indices(ids))
    by_id = ids.take(pa.array(order))
    is_wanted = np.ones(len(order), dtype=bool)
    if len(order) > 1:
        is_wanted[1:] = pc.not_equal(by_id[1:], by_id[:-1]).to_numpy()
    if where:
        met = [np.asarray(holds(part, where)) for part in parts]
        is_wanted &= np.concatenate([np.empty(0, bool), *met])[order]
    found = order[is_wanted].astype(np.int64)
    return found if newest is None else found[max(0, len(found) - newest) :]
