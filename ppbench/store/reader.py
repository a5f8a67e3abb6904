"""Reads rows from the store, each run once, only the columns and row groups that are needed.

The footer of a file of many runs has the first and the last run of each row group, so the spans of
one run are read without those of the others. Conditions on `runs` are evaluated on their own
columns first; the remaining columns are read only in row groups with a matching run.

Damage is found here and nowhere else. A damaged file of one run is left out. Of a damaged file of
many runs, the unreadable row groups and the runs with invalid rows are left out. Each is one
`DamagedFile`, which is reported once.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ppbench.store.columns import RUN_ID, schema_of
from ppbench.store.conditions import Condition, holds
from ppbench.store.damage import DamagedError, DamagedFile, DamageLog, Skip
from ppbench.store.parquet import (
    Footer,
    TableFile,
    damage_in,
    documented,
    read_own_rows,
    read_sound_files,
    with_settings_filled,
)
from ppbench.store.snapshot import (
    COMPACTED,
    Listed,
    VanishedFileError,
    files_of,
    read_consistently,
)

Columns = Sequence[str] | None
TABLES_STORED = "tables"
_OF_EVERY_OK_RUN = frozenset({"steps", "ranks", "spans"})
_BEING_STORED_S = 2.0
"""A run's row is written last, moments after its other tables."""
_Positions = npt.NDArray[np.int64]


@dataclass
class _Part:
    """Rows of a file, with their row numbers in it."""

    path: Path
    rows: pa.Table
    places: _Positions | None = None  # None: every row of the file is here, in order


_Read = dict[Path, _Part | None]


@dataclass
class _Many:
    """Facts of a file of many runs, which never changes."""

    footer: Footer | None = None
    bad_groups: set[int] = field(default_factory=set)
    bad_runs: set[str] = field(default_factory=set)
    is_unusable: bool = False


class CompactedFiles:
    """Reads files of many runs, and remembers which of their rows are unusable."""

    def __init__(self, damage: DamageLog) -> None:
        self._damage = damage
        self._known: dict[Path, _Many] = {}

    def damage_of(self, path: Path) -> tuple[int, int, bool]:
        """How many row groups and runs of a file are unusable, and whether all of it is."""
        known = self._known[path]
        return len(known.bad_groups), len(known.bad_runs), known.is_unusable

    def read(
        self, path: Path, name: str, columns: Columns, run_ids: list[str] | None = None
    ) -> _Part | None:
        """Rows of a file of many runs: all, or the row groups that may hold one of the runs.

        None if the file is unusable or has no such group. The ids are sorted.
        """
        known = self._known.setdefault(path, _Many())
        if known.is_unusable:
            return None
        try:
            with TableFile(path, name, known.footer) as file:
                known.footer = file.footer
                with damage_in(path):
                    groups = self._groups(file.footer.metadata, known, run_ids)
                return self._sound_part(file, name, columns, groups) if groups else None
        except FileNotFoundError as error:
            raise VanishedFileError from error
        except DamagedError as error:
            known.is_unusable = True
            self._damage.leave_out(path, name, error)
            return None

    def _groups(
        self, footer: pq.FileMetaData, known: _Many, run_ids: list[str] | None
    ) -> list[int]:
        """The row groups to read."""
        every = [g for g in range(footer.num_row_groups) if g not in known.bad_groups]
        if run_ids is None:
            return every
        bounds = bounds_of(footer)
        return [group for group in every if has_between(run_ids, *bounds[group])]

    def _sound_part(self, file: TableFile, name: str, columns: Columns, groups: list[int]) -> _Part:
        """The valid rows of some groups; the others are reported."""
        raw, places = self._raw_groups(file, name, columns, groups)
        known = self._known[file.path]
        with damage_in(file.path):
            rows = documented(raw, name, columns)
            if name == "runs":
                rows = with_settings_filled(rows)
            self._judge(file, name, rows)
            if rows[RUN_ID].null_count or known.bad_runs:
                is_good = pc.and_(
                    rows[RUN_ID].is_valid(), pc.invert(_is_of(rows, sorted(known.bad_runs)))
                )
                places = places[np.asarray(is_good, dtype=bool)]
                rows = rows.filter(is_good)
        is_whole = len(places) == file.footer.metadata.num_rows
        return _Part(file.path, rows, None if is_whole else places)

    def _judge(self, file: TableFile, name: str, rows: pa.Table) -> None:
        """Report runs with invalid rows, and remember them."""
        known = self._known[file.path]
        for flaw in file.flaws(rows):
            ids = rows[RUN_ID].filter(flaw.is_bad).drop_null().unique().to_pylist()
            fresh = sorted(set(ids) - known.bad_runs)
            if fresh:
                known.bad_runs.update(fresh)
                self._damage.leave_out(file.path, name, DamagedError(flaw.reason), fresh)

    def _raw_groups(
        self, file: TableFile, name: str, columns: Columns, groups: list[int]
    ) -> tuple[pa.Table, _Positions]:
        """Rows of the readable ones of some groups, with their row numbers."""
        try:
            return file.raw_rows(columns, groups), _places(file, groups)
        except DamagedError as error:
            first = error
        tables, good, lost = [], [], []
        for group in groups:
            try:
                tables.append(file.raw_rows(columns, [group]))
                good.append(group)
            except DamagedError:
                lost.append(group)
        self._known[file.path].bad_groups.update(lost)
        self._damage.leave_out(file.path, name, first, _ids_in(file, lost))
        empty = schema_of(name, columns).empty_table()
        return pa.concat_tables(tables) if tables else empty, _places(file, good)

    def whole_rows(self, path: Path, places: _Positions, columns: Columns) -> pa.Table | None:
        """Rows of a file of many runs, by their places in it; None if it cannot be used."""
        known = self._known[path]
        parts, start = [], 0
        try:
            with TableFile(path, "runs", known.footer) as file:
                for group in range(file.footer.metadata.num_row_groups):
                    end = start + file.footer.metadata.row_group(group).num_rows
                    mine = places[(places >= start) & (places < end)] - start
                    if len(mine):
                        raw, _ = self._raw_groups(file, "runs", columns, [group])
                        if group in known.bad_groups:
                            return None
                        with damage_in(path):
                            rows = documented(raw.take(mine), "runs", columns)
                        rows = with_settings_filled(rows)
                        self._judge(file, "runs", rows)
                        parts.append(rows)
                    start = end
        except FileNotFoundError as error:
            raise VanishedFileError from error
        except DamagedError as error:
            known.is_unusable = True
            self._damage.leave_out(path, "runs", error)
            return None
        return pa.concat_tables(parts)

    def ends_of(self, path: Path) -> set[str]:
        """The first and the last run of each row group of a file of many runs."""
        known = self._known.setdefault(path, _Many())
        if known.is_unusable:
            return set()
        try:
            if known.footer is None:
                with TableFile(path, "steps") as file:
                    known.footer = file.footer
            with damage_in(path):
                bounds = bounds_of(known.footer.metadata)
        except (DamagedError, FileNotFoundError):
            return set()  # reported when its rows are read
        return {end for ends in bounds for end in ends if end is not None}


class Reader:
    """Reads the tables of a results folder, which may change meanwhile."""

    def __init__(self, folder: Path, on_skip: Skip) -> None:
        """`on_skip` receives each problem, once."""
        self._folder = folder
        self.damage = DamageLog(on_skip)
        self._compacted = CompactedFiles(self.damage)

    def runs(self, columns: Columns, where: Sequence[Condition], newest: int | None) -> pa.Table:
        """The newest runs that meet the conditions, oldest first; all without `newest`.

        The rows also have `run_id` and the columns of the conditions.
        """
        tried = [condition.column for condition in where]
        wanted = None if columns is None else [*columns, *tried]
        is_all = not where and newest is None
        read: _Read = {}  # files never change, so a second look need not read them again

        def look() -> tuple[pa.Table, list[str]]:
            files = self.files("runs")
            self._read_sound(read, files.single, "runs", wanted)
            for path in files.single:
                self._read_own(read, path, "runs", wanted)
            for path in files.compacted:
                if path not in read:
                    read[path] = self._compacted.read(path, "runs", wanted if is_all else tried)
            paths = (*files.single, *files.compacted)
            if any(path not in read for path in paths):
                raise VanishedFileError
            parts = [part for path in paths if (part := read[path]) is not None]
            chosen = _chosen([part.rows for part in parts], where, newest)
            return self._taken(parts, chosen, wanted, read), self._lost_runs(parts)

        # What is missing is reported only of files that stayed while they were read.
        table, lost = read_consistently(self._folder, look)
        for run_id in lost:
            path = self._folder / "runs" / f"{run_id}.parquet"
            fix = "the sweep repeats the run; remove its files of other tables"
            self.damage.report(DamagedFile(path, "runs", "it is missing", (run_id,), fix))
        return table

    def rows_of_runs(self, name: str, run_ids: Sequence[str], columns: Columns = None) -> pa.Table:
        """The rows of these runs, in the order of the ids, which are distinct."""
        read: _Read = {}

        def look() -> tuple[pa.Table, list[str]]:
            parts, missing = [schema_of(name, columns).empty_table()], []
            paths = [self._folder / name / f"{run_id}.parquet" for run_id in run_ids]
            self._read_sound(read, paths, name, columns)
            for run_id, path in zip(run_ids, paths, strict=True):
                part = self._read_own(read, path, name, columns)
                if part is None:
                    missing.append(run_id)
                else:
                    parts.append(part.rows)
            if not missing:
                return pa.concat_tables(parts), []
            parts.append(self.rows_in(self.files(name).compacted, name, missing, columns))
            return _in_order(pa.concat_tables(parts), run_ids), missing

        rows, missing = read_consistently(self._folder, look)
        if missing and name != "runs":
            self.find_missing(name, set(rows[RUN_ID].unique().to_pylist()), missing)
        return rows

    def rows_in(
        self, paths: Iterable[Path], name: str, run_ids: Iterable[str], columns: Columns = None
    ) -> pa.Table:
        """The rows of these runs in files of many runs, each from the first file with any."""
        parts, missing = [schema_of(name, columns).empty_table()], sorted(run_ids)
        for path in paths:
            part = self._compacted.read(path, name, columns, missing) if missing else None
            if part is None:
                continue
            rows = part.rows.filter(_is_of(part.rows, missing))
            present = set(rows[RUN_ID].unique().to_pylist())
            missing = [run_id for run_id in missing if run_id not in present]
            parts.append(rows)
        return pa.concat_tables(parts)

    def files(self, name: str) -> Listed:
        """The files of a table; a folder that cannot be listed is reported and counts as empty."""
        files = files_of(self._folder, name)
        for path, reason in files.unlisted:
            self.damage.report(
                DamagedFile(path, name, reason, fix="repair the folder, or remove it")
            )
        return files

    def own_rows(self, path: Path, name: str) -> pa.Table | None:
        """All rows of a run's own file; None if it cannot be used."""
        part = self._read_own({}, path, name, None)
        return None if part is None else part.rows

    def many_rows(self, path: Path, name: str) -> pa.Table | None:
        """All usable rows of a file of many runs; None if the file is unusable."""
        part = self._compacted.read(path, name, None)
        return None if part is None else part.rows

    def _read_sound(self, read: _Read, paths: Iterable[Path], name: str, columns: Columns) -> None:
        """Read runs' own files, if all are sound; else `_read_own` looks at one after the other."""
        unread = [path for path in paths if path not in read]
        for path, rows in read_sound_files(unread, name, columns).items():
            read[path] = _Part(path, rows)

    def _read_own(self, read: _Read, path: Path, name: str, columns: Columns) -> _Part | None:
        """The rows of a run's own file, read once; None if it is missing or unusable."""
        if path not in read:
            try:
                rows = read_own_rows(path, name, columns)
                if name == "runs":
                    rows = with_settings_filled(rows)
                read[path] = _Part(path, rows)
            except FileNotFoundError:
                return None
            except DamagedError as error:
                self.damage.leave_out(path, name, error, [path.stem])
                read[path] = None
        return read[path]

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
        rows = part.rows
        if len(rows.schema) == len(schema_of("runs", columns)):
            return rows if len(chosen) == rows.num_rows else rows.take(chosen)
        places = chosen if part.places is None else part.places[chosen]
        before = self._compacted.damage_of(part.path)
        whole = self._compacted.whole_rows(part.path, places, columns)
        if whole is None or self._compacted.damage_of(part.path) != before:
            del read[part.path]
            raise VanishedFileError  # other files may have valid rows of these runs
        return whole

    def find_missing(self, name: str, there: AbstractSet[str], run_ids: Iterable[str]) -> None:
        """Report runs that were stored with rows of a table but are not among `there`."""
        lost = [run_id for run_id in run_ids if run_id not in there]
        damaged = [known for known in self.damage.files if known.table == name]
        if not lost or any(known.path.parent.name == COMPACTED for known in damaged):
            return  # the runs of a damaged file of many may be unknown
        reported = {run_id for known in damaged for run_id in known.run_ids}
        columns = [TABLES_STORED, "status", "origin", "bubble_structure", "world_size"]
        for run in self.rows_of_runs("runs", lost, columns).to_pylist():
            if run[RUN_ID] not in reported and name in _tables_of(run):
                path = self._folder / name / f"{run[RUN_ID]}.parquet"
                fix = "measure the run again with: ppbench sweep FILE --rerun"
                self.damage.report(DamagedFile(path, name, "it is missing", (run[RUN_ID],), fix))

    def _lost_runs(self, parts: list[_Part]) -> list[str]:
        """The runs that have steps but no row of their own."""
        files = self.files("steps")
        lost = {path.stem for path in files.single if _is_old(path)}
        lost -= {part.path.stem for part in parts}
        for path in files.compacted:
            lost |= self._compacted.ends_of(path)
        if not lost:
            return []
        for part in parts:
            names = pa.array(sorted(lost), pa.string())  # few, beside the rows of a part
            found = pc.is_in(names, value_set=part.rows[RUN_ID].combine_chunks())
            lost -= set(names.filter(found).to_pylist())
        bad = [known for known in self.damage.files if known.table == "runs"]
        if any(not known.run_ids for known in bad):
            return []  # a damaged file of unknown runs may have had them
        return sorted(lost - {run_id for known in bad for run_id in known.run_ids})


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


def _places(file: TableFile, groups: list[int]) -> _Positions:
    """The row numbers of some groups in the file."""
    metadata = file.footer.metadata
    sizes = [metadata.row_group(group).num_rows for group in range(metadata.num_row_groups)]
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    some = [np.arange(starts[group], starts[group + 1]) for group in groups]
    return np.concatenate([np.empty(0, np.int64), *some])


def _ids_in(file: TableFile, groups: list[int]) -> list[str]:
    """The runs in damaged row groups; empty if their ids cannot be read."""
    try:
        return sorted(set(file.raw_rows([RUN_ID], groups)[RUN_ID].drop_null().to_pylist()))
    except DamagedError:
        return []


def _tables_of(run: dict[str, object]) -> frozenset[str]:
    """The tables that a run was stored with; of older versions, those that are certain."""
    if run[TABLES_STORED] is not None:
        return frozenset(str(run[TABLES_STORED]).split(","))
    if run["status"] != "ok" or run["origin"] is not None:
        return frozenset()
    if run["bubble_structure"] is None:
        return _OF_EVERY_OK_RUN
    has_channels = isinstance(run["world_size"], int) and run["world_size"] > 1
    return _OF_EVERY_OK_RUN | {"attribution", "planned"} | ({"edges"} if has_channels else set())


def _is_old(path: Path) -> bool:
    """Whether a file is older than a run that is being stored."""
    try:
        return time.time() - path.stat().st_mtime > _BEING_STORED_S
    except OSError:
        return False


def _is_of(rows: pa.Table, run_ids: Sequence[str]) -> pa.ChunkedArray:
    return pc.is_in(rows[RUN_ID], value_set=pa.array(run_ids, pa.string()))


def _in_order(rows: pa.Table, run_ids: Sequence[str]) -> pa.Table:
    places = pc.index_in(rows[RUN_ID], value_set=pa.array(run_ids, pa.string()))
    return rows.take(pc.sort_indices(places))  # stable: the rows of a run stay in their order


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
