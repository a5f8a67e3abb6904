"""Reads rows from the store, each run once, only the columns and row groups that are needed.

The footer of a file of many runs has the first and the last run of each row group, so the spans of
one run are read without those of the others. Conditions on `runs` are evaluated on their own
columns first; the remaining columns are read only in row groups with a matching run.

A file that cannot be read is left out as a whole. It is one `DamagedFile`, which is reported once.
"""

from __future__ import annotations

import bisect
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ppbench.store.columns import RUN_ID, schema_of
from ppbench.store.conditions import Condition, holds
from ppbench.store.damage import DamagedError, DamagedFile, Skip
from ppbench.store.parquet import TableFile, damage_in, read_own_files
from ppbench.store.snapshot import VanishedFileError, files_of, read_consistently

Columns = Sequence[str] | None
_Positions = npt.NDArray[np.int64]


@dataclass
class _Part:
    """Rows of a file, with their row numbers in it."""

    path: Path
    rows: pa.Table
    places: _Positions | None = None  # None: every row of the file is here, in order


_Read = dict[Path, _Part | None]


class Reader:
    """Reads the tables of a results folder, which may change meanwhile."""

    def __init__(self, folder: Path, on_skip: Skip) -> None:
        """`on_skip` receives each problem, once."""
        self._folder = folder
        self._on_skip = on_skip
        self.damaged: dict[DamagedFile, None] = {}
        """The files that were left out so far."""
        self._footers: dict[Path, pq.FileMetaData | None] = {}
        """Of files of many runs, which never change; None: the file cannot be read."""

    def runs(self, columns: Columns, where: Sequence[Condition], newest: int | None) -> pa.Table:
        """The newest runs that meet the conditions, oldest first; all without `newest`.

        The rows also have `run_id` and the columns of the conditions.
        """
        tried = [condition.column for condition in where]
        wanted = None if columns is None else [*columns, *tried]
        is_all = not where and newest is None
        read: _Read = {}  # files never change, so a second look need not read them again

        def look() -> pa.Table:
            files = files_of(self._folder, "runs")
            self._read_own(read, files.single, "runs", wanted)
            for path in files.compacted:
                if path not in read:
                    read[path] = self._read_many(path, "runs", wanted if is_all else tried)
            paths = (*files.single, *files.compacted)
            if any(path not in read for path in paths):
                raise VanishedFileError
            parts = [part for path in paths if (part := read[path]) is not None]
            chosen = _chosen([part.rows for part in parts], where, newest)
            return self._taken(parts, chosen, wanted, read)

        return read_consistently(self._folder, look)

    def rows_of_runs(self, name: str, run_ids: Sequence[str], columns: Columns = None) -> pa.Table:
        """The rows of these runs, in the order of the ids, which are distinct."""
        read: _Read = {}

        def look() -> pa.Table:
            paths = [self._folder / name / f"{run_id}.parquet" for run_id in run_ids]
            self._read_own(read, paths, name, columns)
            own = [part for path in paths if (part := read.get(path)) is not None]
            parts = [schema_of(name, columns).empty_table(), *(part.rows for part in own)]
            if len(own) == len(paths):
                return pa.concat_tables(parts)
            missing = sorted(set(run_ids) - {part.path.stem for part in own})
            for path in files_of(self._folder, name).compacted:  # the first with a run counts
                part = self._read_many(path, name, columns, missing) if missing else None
                if part is None:
                    continue
                is_missing = pc.is_in(part.rows[RUN_ID], value_set=pa.array(missing, pa.string()))
                parts.append(part.rows.filter(is_missing))
                present = set(parts[-1][RUN_ID].unique().to_pylist())
                missing = [run_id for run_id in missing if run_id not in present]
            rows = pa.concat_tables(parts)
            places = pc.index_in(rows[RUN_ID], value_set=pa.array(run_ids, pa.string()))
            return rows.take(pc.sort_indices(places))  # stable: a run's rows stay in their order

        return read_consistently(self._folder, look)

    def leave_out(self, path: Path, name: str, error: DamagedError) -> None:
        """Report a file of one run or of many, once. Raises VanishedFileError if it is gone."""
        if not os.path.lexists(path):
            raise VanishedFileError
        run_ids = (path.stem,) if path.parent == self._folder / name else ()
        damage = DamagedFile(path, name, str(error), run_ids, error.fix)
        if damage not in self.damaged:
            self.damaged[damage] = None
            self._on_skip(str(damage))

    def _read_own(self, read: _Read, paths: Iterable[Path], name: str, columns: Columns) -> None:
        """Add the rows of runs' own files to those read; None for one that cannot be read."""
        unread = [path for path in paths if path not in read]
        for path, rows in read_own_files(unread, name, columns).items():
            if isinstance(rows, DamagedError):
                self.leave_out(path, name, rows)
                read[path] = None
            else:
                read[path] = _Part(path, rows)

    def _read_many(
        self, path: Path, name: str, columns: Columns, run_ids: list[str] | None = None
    ) -> _Part | None:
        """Rows of a file of many runs: all, or the row groups that may hold one of the runs.

        None if the file cannot be read or has no such group. The ids are sorted.
        """
        if path in self._footers and self._footers[path] is None:
            return None
        try:
            with TableFile(path, name, self._footers.get(path)) as file:
                self._footers[path] = file.footer
                groups = list(range(file.footer.num_row_groups))
                if run_ids is not None:
                    with damage_in():
                        bounds = bounds_of(file.footer)
                    groups = [g for g in groups if has_between(run_ids, *bounds[g])]
                if not groups:
                    return None
                rows = file.rows(columns, groups)
        except FileNotFoundError as error:
            raise VanishedFileError from error
        except DamagedError as error:
            self._footers[path] = None
            self.leave_out(path, name, error)
            return None
        if len(groups) == file.footer.num_row_groups:
            return _Part(path, rows)
        starts = _starts(file.footer)
        places = [np.arange(starts[group], starts[group + 1]) for group in groups]
        return _Part(path, rows, np.concatenate(places))

    def _taken(
        self, parts: list[_Part], chosen: _Positions, columns: Columns, read: _Read
    ) -> pa.Table:
        """The chosen rows; `chosen` are positions in the concatenated rows of all parts."""
        schema = schema_of("runs", columns)
        taken, places, start = [schema.empty_table()], [np.empty(0, np.int64)], 0
        for part in parts:
            mine = np.sort(chosen[(chosen >= start) & (chosen < start + part.rows.num_rows)])
            if len(mine):
                taken.append(self._rest(part, mine - start, columns, read))
            places.append(mine)
            start += part.rows.num_rows
        placed = np.concatenate(places)
        table = pa.concat_tables(taken)
        if np.array_equal(placed, chosen):
            return table
        by_place = np.argsort(placed)
        return table.take(by_place[np.searchsorted(placed[by_place], chosen)])

    def _rest(self, part: _Part, chosen: _Positions, columns: Columns, read: _Read) -> pa.Table:
        """The chosen rows of a file with all columns; `part` may have only some columns."""
        rows, path = part.rows, part.path
        if len(rows.schema) == len(schema_of("runs", columns)):
            return rows if len(chosen) == rows.num_rows else rows.take(chosen)
        places = chosen if part.places is None else part.places[chosen]
        found = []
        try:
            with TableFile(path, "runs", self._footers[path]) as file:
                starts = _starts(file.footer)
                for group in range(file.footer.num_row_groups):
                    is_in = (places >= starts[group]) & (places < starts[group + 1])
                    if is_in.any():
                        whole = file.rows(columns, [group])
                        found.append(whole.take(places[is_in] - starts[group]))
        except FileNotFoundError as error:
            raise VanishedFileError from error
        except DamagedError as error:
            self._footers[path] = read[path] = None
            self.leave_out(path, "runs", error)
            raise VanishedFileError from error  # other files may have rows of these runs
        return pa.concat_tables(found)


def bounds_of(footer: pq.FileMetaData) -> list[tuple[str | None, str | None]]:
    """The first and last run of each row group; None where the footer lacks them."""
    names = [footer.schema.column(index).path for index in range(footer.num_columns)]
    index = names.index(RUN_ID)
    bounds: list[tuple[str | None, str | None]] = []
    for group in range(footer.num_row_groups):
        limits = footer.row_group(group).column(index).statistics
        has_both = limits is not None and limits.has_min_max
        bounds.append((str(limits.min), str(limits.max)) if has_both else (None, None))
    return bounds


def has_between(names: list[str], first: str | None, last: str | None) -> bool:
    """Whether one of the sorted names lies in a range, both ends included; None is unknown."""
    if first is None or last is None:
        return True
    index = bisect.bisect_left(names, first)
    return index < len(names) and names[index] <= last


def _starts(footer: pq.FileMetaData) -> list[int]:
    """The row number at which each row group starts, and that after the last."""
    sizes = [footer.row_group(group).num_rows for group in range(footer.num_row_groups)]
    return [*itertools.accumulate(sizes, initial=0)]


def _chosen(parts: list[pa.Table], where: Sequence[Condition], newest: int | None) -> _Positions:
    """Positions in the concatenated parts of each run's first row, by id, if it matches."""
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
