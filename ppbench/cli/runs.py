"""`ppbench ls`, `show`, `query` and `compact`: what a store holds.

These commands import nothing that draws, simulates or launches: listings are fast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ppbench.cli.commands import EXCHANGE, LOOK
from ppbench.cli.declare import argument, option
from ppbench.cli.emit import answers, catalogue
from ppbench.cli.options import RESULTS, Run, StoredResults, check_exists
from ppbench.config.case import Case
from ppbench.console import note
from ppbench.display.document import Block, Code, Facts, Result, Text
from ppbench.display.fields import OF_REPLICAS, Direction, Field, field_of, figure
from ppbench.display.replicas import folded, folding_note
from ppbench.display.rows import AS_IT_IS, Record, Rows, View, as_records
from ppbench.display.tables import Table
from ppbench.display.units import NO_UNIT
from ppbench.errors import first_line
from ppbench.runtimes import ENGINE

if TYPE_CHECKING:
    import pandas as pd

    from ppbench.results import RunDetails
    from ppbench.store import Condition, Store

BULKY = ("program", "environment", "replica_costs_ns")
LISTED = [
    *("run_id", "sweep_name", "status", "device", "model_preset", "runtime", *OF_REPLICAS),
    *("tokens_per_s", "bubble_fraction", "peak_memory_bytes", "cautions", "commit", "error"),
]
"""Columns of a list for people."""
USUAL = {"error": "", "cautions": "", "runtime": ENGINE, "replicas": 1, "sharding_policy": "ddp"}
"""Those of them that are left out where every run has this value."""
MOST_LISTED = 200
COMPACTED = ["table", "files_before", "files_after", "bytes_before", "bytes_after", "seconds"]
RANK_COLUMNS = [
    *("rank", "device", "stages", "num_layers", "num_parameters", "compute_ns", "idle_fraction"),
    *("peak_memory_bytes", "peak_held_microbatches", "planned_peak_held_microbatches"),
]
MEMORY_COLUMNS = [
    *("rank", "peak_memory_bytes", "predicted_peak_memory_bytes"),
    *("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "activation_bytes"),
    *("active_bytes", "reserved_bytes", "in_flight_bytes", "outside_bytes", "process_peak_bytes"),
]
MACHINE_COLUMNS = [
    *("rank", "hostname", "other_load_cores", "watched_cores"),
    *("steal_fraction", "cpu_throttled_fraction", "cpu_mhz", "cpu_energy_j"),
    *("clock", "clock_error_ns"),
]
GPU_COLUMNS = [
    *("rank", "gpu_power_w", "gpu_energy_j", "gpu_utilization", "gpu_sm_mhz"),
    *("gpu_temperature_c", "gpu_throttle_reasons", "gpu_memory_used_bytes"),
]
TABLES_OF_RANKS = {
    "compute_ns": RANK_COLUMNS,
    "peak_memory_bytes": MEMORY_COLUMNS,
    "other_load_cores": MACHINE_COLUMNS,
    "gpu_power_w": GPU_COLUMNS,
}
"""By the figure by which the worst replica of a rank is chosen."""
STEP_COLUMNS = [
    *("step", "num_tokens", "step_ns", "optimizer_ns", "tokens_per_s"),
    *("bubble_fraction", "loss", "is_outlier"),
]
NO_FIGURES = ("load_window_s", "clock_offset_ns")
NUMBERS = (
    *("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UBIGINT"),
    *("FLOAT", "DOUBLE", "DECIMAL"),
)
"""Types of SQL whose columns are aligned as numbers; so are decimal ones."""
_REMEDY = "--table with --columns shows them, and --format json all"


class RunTable(StrEnum):
    """A table of one run."""

    run = "run"
    stages = "stages"
    ranks = "ranks"
    steps = "steps"
    flight = "flight"


@dataclass(frozen=True)
class StoredRows(Rows):
    """Runs that meet conditions; only the columns that are asked for are read."""

    store: Store | None = None
    conditions: Sequence[Condition] = ()
    limit: int | None = None

    def read(self, names: Iterable[str], newest: int | None = None) -> Rows:
        assert self.store is not None
        most, names = self.limit or newest, list(names)
        return Rows(names, self.store.listed(names, self.conditions, most))

    def csv(self, view: View = AS_IT_IS) -> str:
        assert self.store is not None
        if self.limit or view.sort:
            return super().csv(view)
        names = view.names(self.columns) or self.columns  # as values, half a store takes seconds
        return self.store.csv(names, self.conditions).rstrip("\n")


@answers("ls", LOOK, 1)
def list_runs(
    where: Annotated[
        list[str] | None,
        option(
            "--where CONDITION", "KEY=VALUE, or !=, <, <=, >, >=; several with `and`, or repeated."
        ),
    ] = None,
    limit: Annotated[int | None, option("--limit N", "Only the newest N; 0: all.", min=0)] = None,
    results: StoredResults = RESULTS,
) -> Result:
    """List the runs in the store, oldest first; a table shows the newest 200."""
    return listing(results, where or [], limit)


def listing(results: Path, where: Sequence[str], limit: int | None = None) -> Result:
    """The runs of a store that meet conditions."""
    from ppbench.store import TABLES, Store, read_conditions

    store, conditions = Store(results), read_conditions(where)
    every = [column.name for column in TABLES["runs"] if column.name not in BULKY]
    if unmet := store.unmet(conditions):
        note(unmet)
        return Result(rows=Rows(every))
    rows = StoredRows(every, store=store, conditions=conditions, limit=limit)
    most = MOST_LISTED if limit is None else None
    return Result([Table(rows, LISTED, usual=USUAL, short_ids=store.short_ids, most=most)], rows)


@answers("query", LOOK, 8)
def query(
    text: Annotated[str, argument("SQL", "One SELECT over the store's tables.")],
    results: StoredResults = RESULTS,
) -> Result:
    """Query the store in SQL: `SELECT schedule, max(tokens_per_s) FROM runs GROUP BY schedule`."""
    from ppbench.store import Store

    check_exists(results)

    kinds, values = Store(results).query(text)
    rows = Rows(list(kinds), [tuple(map(_plain, row)) for row in values])
    fields = {
        name: Field(name, is_number=kind.partition("(")[0] in NUMBERS)
        for name, kind in kinds.items()
    }
    return Result([Table(rows, fields, list(fields))], rows)


def _plain(value: object) -> object:
    """A value of SQL as one of JSON."""
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    is_plain = value is None or isinstance(value, str | bool | int)
    return value if is_plain or (isinstance(value, float) and math.isfinite(value)) else str(value)


@answers("compact", EXCHANGE, 4, catalogue)
def compact(results: StoredResults = RESULTS) -> Result:
    """Merge the store's many small files into few large ones, which are read much faster."""
    import dataclasses

    from ppbench.store import ConsoleNote, Store

    done = [dataclasses.asdict(table) for table in Store(results).compact(ConsoleNote())]
    rows = Rows(COMPACTED, [tuple(one[name] for name in COMPACTED) for one in done])
    total = tuple(sum(one[name] for one in done) for name in COMPACTED[1:])
    shown = Rows(COMPACTED, [*rows.cells, ("all", *total)])
    return Result([Table(shown, COMPACTED)], rows)


@answers("show", LOOK, 2)
def show(
    run: Run,
    results: StoredResults = RESULTS,
    table: Annotated[
        RunTable, option("--table", "What --columns, --sort and CSV are of.")
    ] = RunTable.run,
) -> Result:
    """Show everything that is stored of a run: figures, ranks, settings, steps."""
    from ppbench.results import details_of
    from ppbench.store import Store

    details = details_of(Store(results), run)
    frames = {name.value: getattr(details, name) for name in RunTable if name is not RunTable.run}
    data = {name: as_records(frame) for name, frame in frames.items()} | {"run": details.row}
    rows = Record(details.row) if table is RunTable.run else Rows.of(frames[table])
    return Result(_details(details), rows, data, key=table.value)


def _details(details: RunDetails) -> list[Block]:
    """How a run failed, if it did, its figures, tables, settings and the rest."""
    row, failed = details.row, details.row["status"] != "ok"
    blocks: list[Block] = []
    if failed:  # what each rank was doing, and the whole error if it has more lines
        from ppbench.run.failures.post_mortem import in_words

        error, rank = str(row["error"] or "no error was recorded").strip(), row["error_rank"]
        first = first_line(error)
        where = "" if rank is None or f"rank {rank}" in first else f" at rank {rank}"
        blocks.append(Text(f"{row['status']}{where}: {first}"))
        if not details.flight.empty:
            ranks = in_words(details.flight)
            blocks.append(Table(Rows.of(ranks), list(map(str, ranks))))
        whole, _, more = error.partition("\n")
        if below := more if first == whole.rstrip() else error:
            blocks.append(Code(below))
    hidden = {
        *BULKY,
        "is_seq_len_variable",
        *(("error", "last_actions") if failed else ()),
        *details.unknown_settings,
    }
    known = {
        key: value for key, value in row.items() if value not in (None, "") and key not in hidden
    }
    settings = set(Case().settings())
    measured = {key: known[key] for key in known if key not in settings and _is_figure(key)}
    asked_for = {key: known[key] for key in known if key in settings}
    rest = {key: known[key] for key in known if key not in measured and key not in asked_for}
    if measured:
        blocks.append(Facts(_readable(measured)))
    if not details.stages.empty:
        blocks.append(_table(details.stages, list(map(str, details.stages))))
    for leading, columns in TABLES_OF_RANKS.items():
        if len(filled := _filled(details.ranks, columns)) > 1:
            blocks.append(_table(*folded(details.ranks, "rank", filled, leading)))
    if hidden_ranks := folding_note(details.ranks, "rank"):
        blocks.append(Text(hidden_ranks))
    if len(filled := _filled(details.steps, STEP_COLUMNS)) > 1:
        blocks.append(_table(details.steps, filled))
    notes = details.ranks["telemetry_note"].dropna().unique()
    blocks += [Facts(group) for group in (asked_for, rest) if group]
    return blocks + [Text(f"note: {text}") for text in notes if text]


def _table(frame: pd.DataFrame, columns: Sequence[str]) -> Table:
    return Table(Rows.of(frame), columns, remedy=_REMEDY)


def _filled(frame: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    return [name for name in columns if frame[name].notna().any()]


def _is_figure(column: str) -> bool:
    """Whether a column of a run is a result with a direction or a unit."""
    field = field_of(column)
    return column not in NO_FIGURES and (
        field.direction is not Direction.neither or field.unit is not NO_UNIT
    )


def _readable(values: Mapping[str, object]) -> dict[str, object]:
    """Figures in their usual units; other facts as they are."""
    return {
        key: figure(key, value) if _is_figure(key) and not isinstance(value, str) else value
        for key, value in values.items()
    }
