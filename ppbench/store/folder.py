"""A results folder: runs are stored completely, and read by their names.

Files are written aside and renamed, that of `runs` last, so that a run exists completely or not at
all. Each run has its own files, so that sweeps never write the same file and a crash costs at most
one run.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ppbench.errors import StoreError, UsageError, no_runs_in
from ppbench.store.columns import RUN_ID, SCHEMA_VERSION, TABLES
from ppbench.store.compaction import Compacted, compact
from ppbench.store.conditions import Condition
from ppbench.store.damage import ConsoleNote, DamagedFile, Skip
from ppbench.store.parquet import as_frame, as_table, row_as_table, storable, write_parquet
from ppbench.store.reader import Reader
from ppbench.store.snapshot import files_of
from ppbench.store.sweeps import NOTED, SweepNote, last_sweep_in

LAST = "last"
_SHORTEST_ID = 6
"""Characters of the random part of an id; a shorter word is no end of one."""
_FEW = 500
"""So many runs' own files are opened once for all columns, rather than again for those wanted."""
_OF_MOST_RUNS = frozenset({"steps", "ranks", "edges"})
"""Small tables, in which nearly every run has rows."""
MIN_FREE_BYTES = 16 * 2**20
Row = Mapping[str, object]


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

    def __init__(self, folder: Path, on_skip: Skip | None = None) -> None:
        """`on_skip` receives a line for each unusable file; by default it is a warning."""
        self.folder = folder
        self._reader = Reader(folder, on_skip or ConsoleNote())

    def write_run(self, run: Row, tables: Mapping[str, pd.DataFrame]) -> None:
        """Store one run: its row, and its part of the other tables by their names.

        `run` must hold a `run_id`; columns that are left out are null. Raises StoreError when the
        disk is full or takes no files; then nothing of the run is left in the store. Nor is what
        a process that was killed had begun to store of the same run.
        """
        run_id = str(run[RUN_ID])
        for name in TABLES.keys() - tables.keys() - {"runs"}:
            with contextlib.suppress(OSError):
                (self.folder / name / f"{run_id}.parquet").unlink()
        row = {**storable(run), RUN_ID: run_id, "schema_version": SCHEMA_VERSION}
        written: list[Path] = []
        try:
            for name in (*tables, "runs"):
                if name == "runs":
                    rows = row_as_table(row, name)
                else:
                    owned = tables[name].assign(run_id=run_id, schema_version=SCHEMA_VERSION)
                    rows = as_table(owned, name)
                path = self.folder / name / f"{run_id}.parquet"
                write_parquet(rows, path)
                written.append(path)
        except StoreError:
            for path in written:
                with contextlib.suppress(OSError):
                    path.unlink()
            raise

    @property
    def damaged(self) -> list[DamagedFile]:
        """The files that could not be read so far."""
        return list(self._reader.damaged)

    def damage_to(self, run_id: str, table: str) -> DamagedFile | None:
        """The damage that explains missing rows of a run in a table; None if there is none.

        A damaged file with unknown runs may have had any run.
        """
        possible = [known for known in self.damaged if known.table == table]
        certain = [known for known in possible if run_id in known.run_ids]
        unknown = [known for known in possible if not known.run_ids]
        return next(iter((*certain, *unknown)), None)

    def profiles_of(self, run_id: str) -> Path:
        """The folder of a run's Chrome traces; it exists if there are any."""
        return self.folder / "profiles" / run_id

    def runs(
        self,
        columns: Sequence[str] | None = None,
        where: Iterable[Condition] = (),
        newest: int | None = None,
    ) -> pd.DataFrame:
        """The runs that meet the conditions, each once, oldest first.

        `columns` limits the columns, which is much faster than reading all; `newest` the runs.
        """
        found = self._reader.runs(columns, tuple(where), newest)
        return as_frame(found if columns is None else found.select(list(columns)), "runs")

    def table(self, name: str, run_ids: Iterable[str]) -> pd.DataFrame:
        """The rows of the given runs in a table, in the order of the ids."""
        return as_frame(self._reader.rows_of_runs(name, list(dict.fromkeys(run_ids))), name)

    def spans_of_steps(self, run_id: str, steps: Sequence[int]) -> pd.DataFrame:
        """The spans of some steps of a run."""
        rows = self._reader.rows_of_runs("spans", [run_id])
        return as_frame(rows.filter(pc.is_in(rows["step"], pa.array(steps))), "spans")

    def compact(self, tell: Skip) -> list[Compacted]:
        """Merge files of one run into files of many; see `compaction`. Raises StoreError."""
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

    def short_ids(self) -> dict[str, str]:
        """The shortest end of each run's id that means this run alone: its random part."""
        known = left = [str(run_id) for run_id in self.runs([RUN_ID])[RUN_ID]]
        short: dict[str, str] = {}
        for length in range(_SHORTEST_ID, max(map(len, known), default=0)):
            ends = Counter(run_id[-length:] for run_id in known)
            starts = {run_id[:length] for run_id in known}
            for run_id in left:
                if ends[run_id[-length:]] == 1 and run_id[-length:] not in starts:
                    short[run_id] = run_id[-length:]
            left = [run_id for run_id in left if run_id not in short]
            if not left:
                break
        return {run_id: short.get(run_id, run_id) for run_id in known}

    def named(self, names: Sequence[str]) -> pd.DataFrame:
        """The runs of these names, each once, in this order, as far as their rows are readable.

        A sweep's name or id means all its runs.

        Raises UsageError for an unknown name, StoreError if no row is readable. `last` is the last
        readable run.
        """
        runs = self._at_least_one(self.runs([RUN_ID]))
        while True:
            known = runs[RUN_ID]
            ids = [one for name in names for one in self._ids_of(name, known)]
            rows = self.table("runs", ids)
            lost = set(ids) - set(rows[RUN_ID])
            if not lost or LAST not in names or self.id_of(LAST, known) not in lost:
                break
            runs = self._at_least_one(runs[~known.isin(lost)])
        if rows.empty:
            raise self._unreadable(ids[0])
        return rows

    def _ids_of(self, name: str, known: pd.Series) -> list[str]:
        """The runs that a name means: one, or the newest of a sweep of that name or id."""
        try:
            return [self.id_of(name, known)]
        except UsageError:
            for column in ("sweep_name", "sweep_id"):
                runs = self.runs([RUN_ID, "resume_key", "status"], [Condition(column, "=", name)])
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
            damaged = (damage.run_ids for damage in self.damaged if damage.table == "runs")
            for run_id in itertools.chain.from_iterable(damaged):
                if run_id.startswith(name):
                    raise self._unreadable(run_id)
            raise UsageError(f'run "{name}": not in {self.folder}; list them with: {self._listing}')
        some = ", ".join(found.tail(5))
        raise UsageError(
            f'run "{name}" is ambiguous: {len(found)} runs {end} with it: {some}; '
            "give more characters"
        )

    def _unreadable(self, run_id: str) -> StoreError:
        damage = self.damage_to(run_id, "runs")
        reason = f"{damage.path} is damaged" if damage else "no file of runs has it"
        return StoreError(
            f"run {run_id}: its row cannot be read: {reason}; measure it again with: "
            "ppbench sweep FILE"
        )

    def last_sweep(self) -> StoredSweep:
        """The sweep that was called last, or that made the last run; see `sweeps`.

        Raises UsageError when there is no run.
        """
        files = files_of(self.folder, "runs")
        has_all = not files.compacted and len(files.single) <= _FEW
        found = self._reader.runs(None if has_all else NOTED, (), None)
        known = self._at_least_one(as_frame(found.select(list(NOTED)), "runs"))
        while len(known):
            last, note = last_sweep_in(self.folder, known)
            newest = newest_of(last)
            if has_all:
                runs = as_frame(found.take(pa.array(newest.index)), "runs")
            else:
                runs = self.table("runs", newest[RUN_ID])
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
    is_whole = runs["status"] != "interrupted"
    whole = runs[is_whole].drop_duplicates("resume_key", keep="last")
    rest = runs[~is_whole & ~runs["resume_key"].isin(whole["resume_key"])]
    return pd.concat([whole, rest.drop_duplicates("resume_key", keep="last")]).sort_index()


def check_ok(run: pd.Series, what: str) -> None:
    """Raise UsageError for a run that did not finish and so lacks `what`."""
    if run["status"] != "ok":
        raise UsageError(f"run {run['run_id']}: status is {run['status']}; it has no {what}")


def missing_spans(store: Store, run: pd.Series) -> StoreError:
    """The error for a run whose spans or steps are needed but not stored."""
    run_id = str(run["run_id"])
    damage = store.damage_to(run_id, "spans") or store.damage_to(run_id, "steps")
    reason = f"{damage.path} is damaged" if damage else "missing or unreadable"
    return StoreError(
        f"run {run_id}: its spans are not in the store ({reason}); "
        "measure it again with: ppbench sweep FILE --rerun"
    )
