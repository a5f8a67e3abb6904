"""`ppbench ls`, `show`, `query` and `compact`: what a store holds.

These commands import nothing that draws, simulates or launches: listings are fast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Annotated

import typer

from ppbench.cli.options import (
    RESULTS,
    Columns,
    HowToPrint,
    Run,
    Sort,
    StoredResults,
    check_exists,
    print_text,
)
from ppbench.config.case import Case
from ppbench.console import note
from ppbench.display.fields import OF_REPLICAS, Direction, field_of, figure, words
from ppbench.display.formats import Format
from ppbench.display.replicas import folded, folding_note
from ppbench.display.tables import Rows, View, as_records, facts, render
from ppbench.display.units import NO_UNIT
from ppbench.errors import first_line
from ppbench.runtimes import ENGINE

if TYPE_CHECKING:
    import pandas as pd

    from ppbench.results import RunDetails

BULKY = ("program", "environment", "replica_costs_ns")
LISTED = [
    *("run_id", "sweep_name", "status", "device", "model_preset", "runtime", *OF_REPLICAS),
    *("tokens_per_s", "bubble_fraction", "peak_memory_bytes", "cautions", "commit", "error"),
]
"""Columns of a list for people; `error` and `cautions` are shown if any run has some, `runtime` if
any run has another than the engine, `replicas` and what they share if any has several."""
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
PROGRAMS = (Format.json, Format.csv)
NUMBERS = (
    "TINYINT",
    "SMALLINT",
    "INTEGER",
    "BIGINT",
    "HUGEINT",
    "UBIGINT",
    "FLOAT",
    "DOUBLE",
    "DECIMAL",
)
"""Types of SQL whose columns are aligned as numbers; so are decimal ones."""
_WHOLE = View(remedy="--columns shows them, and --format json all")


def list_runs(
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="CONDITION",
            help="KEY=VALUE, or !=, <, <=, >, >=; several with `and`, or repeated.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=0, help="Only the newest N; 0: all."),
    ] = None,
    results: StoredResults = RESULTS,
    how: HowToPrint = Format.table,
    columns: Columns = None,
    sort: Sort = None,
) -> None:
    """List the runs in the store, oldest first; a table shows the newest 200."""
    from ppbench.store import TABLES, Store, read_conditions

    conditions = read_conditions(where or [])
    is_for_people = how in (Format.table, Format.markdown)
    most = limit if limit is not None else MOST_LISTED if is_for_people else 0
    every = [column.name for column in TABLES["runs"] if column.name not in BULKY]
    view, store = View.of(columns, sort), Store(results)
    wanted = view.within(every, LISTED if is_for_people else every)
    if unmet := store.unmet(conditions):
        note(unmet)
        if how is Format.table:
            return
    if how is Format.csv and not sort and not most:  # as values, half a store takes seconds
        print(store.csv(wanted, conditions), end="")
        return
    newest = most + 1 if most else None
    rows = Rows(wanted, store.listed(wanted, conditions, newest))
    if most and len(rows.cells) > most:
        note(f"{results}: the newest {most:,}; --limit 0 lists all")
        rows = Rows(wanted, rows.cells[1:])
    if how is Format.table and "run_id" in wanted:
        ids = [str(run_id) for (run_id,) in rows.of_columns(["run_id"])]
        view = replace(view, short_ids=store.short_ids(ids))
    shown = wanted
    if is_for_people and not columns:
        usual = {"error": "", "cautions": "", "runtime": ENGINE, "replicas": 1}
        is_told = {
            name: any(value not in (None, own) for (value,) in rows.of_columns([name]))
            for name, own in usual.items()
        }
        is_told["sharding_policy"] = is_told["replicas"]
        shown = [name for name in LISTED if is_told.get(name, True)]
    print(render(rows, how, shown, view))


def query(
    text: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT over the store's tables.")],
    results: StoredResults = RESULTS,
    how: HowToPrint = Format.table,
    columns: Columns = None,
    sort: Sort = None,
) -> None:
    """Query the store in SQL: `SELECT schedule, max(tokens_per_s) FROM runs GROUP BY schedule`."""
    from ppbench.store import Store

    check_exists(results)

    kinds, values = Store(results).query(text)
    rows = Rows(list(kinds), [tuple(_plain(value, how) for value in row) for row in values])
    fields = {
        name: words(name, is_number=kind.partition("(")[0] in NUMBERS)
        for name, kind in kinds.items()
    }
    print(render(rows, how, fields, View.of(columns, sort), list(fields)))


def _plain(value: object, how: Format) -> object:
    """A value of SQL as one of JSON; other formats have lists as text in JSON."""
    if isinstance(value, list | tuple):
        items = [_plain(item, Format.json) for item in value]
        return items if how is Format.json else json.dumps(items, ensure_ascii=False)
    if isinstance(value, dict):
        of_keys = {str(key): _plain(item, Format.json) for key, item in value.items()}
        return of_keys if how is Format.json else json.dumps(of_keys, ensure_ascii=False)
    if isinstance(value, Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    is_plain = value is None or isinstance(value, str | bool | int)
    return value if is_plain or (isinstance(value, float) and math.isfinite(value)) else str(value)


def compact(
    results: StoredResults = RESULTS,
    how: HowToPrint = Format.table,
    columns: Columns = None,
    sort: Sort = None,
) -> None:
    """Merge the store's many small files into few large ones, which are read much faster."""
    import dataclasses

    import pandas as pd

    from ppbench.store import ConsoleNote, Store

    done = [dataclasses.asdict(table) for table in Store(results).compact(ConsoleNote())]
    frame, view = pd.DataFrame(done, columns=COMPACTED), View.of(columns, sort)
    if how in (Format.table, Format.markdown):
        total = {"table": "all", **frame.drop(columns="table").sum().to_dict()}
        frame = pd.concat([frame, pd.DataFrame([total])], ignore_index=True)
    print(render(frame, how, COMPACTED, view))


def show(
    run: Run,
    results: StoredResults = RESULTS,
    how: HowToPrint = Format.table,
    columns: Columns = None,
) -> None:
    """Show everything that is stored of a run: figures, ranks, settings, steps."""
    from ppbench.results import details_of
    from ppbench.store import Store

    details, view = details_of(Store(results), run), View.of(columns, None)
    frames = (details.stages, details.ranks, details.steps)
    known = [*details.row, *(str(name) for frame in frames for name in frame)]
    asked = view.names(list(dict.fromkeys(known)))
    if asked:
        facts_of_run = {name: details.row[name] for name in asked if name in details.row}
        parts = []
        if facts_of_run:
            parts.append(facts(facts_of_run if how in PROGRAMS else _readable(facts_of_run), how))
        ranks = ["replica", "rank"] if details.row["replicas"] not in (None, 1) else ["rank"]
        for frame, keys in zip(frames, (["stage"], ranks, ["step"]), strict=True):
            shown = [name for name in asked if name in frame and name not in facts_of_run]
            if shown and not frame.empty:
                shown = list(dict.fromkeys([*keys, *shown]))
                parts.append(render(frame[shown], how, shown))
        print("\n\n".join(parts))
    elif how is Format.json:
        tables = {"ranks": details.ranks, "steps": details.steps, "flight": details.flight}
        data = {"run": details.row, **{name: as_records(rows) for name, rows in tables.items()}}
        print(json.dumps(data, indent=2, allow_nan=False))
    elif how is Format.csv:
        print(facts(details.row, how))
    else:
        print_text("\n\n".join(_details(details, how)), how)


def _details(details: RunDetails, how: Format) -> list[str]:
    """The text of a run: how it failed, if it did, its figures, tables, settings and the rest."""
    row, failed = details.row, details.row["status"] != "ok"
    parts: list[str] = []
    if failed:  # what each rank was doing, and the whole error if it has more lines
        from ppbench.run.failures.post_mortem import in_words

        error = str(row["error"] or "no error was recorded").strip()
        where = "" if row["error_rank"] is None else f" at rank {row['error_rank']}"
        parts.append(f"{row['status']}{where}: {first_line(error)}")
        if not details.flight.empty:
            ranks = in_words(details.flight)
            parts.append(render(ranks, how, list(map(str, ranks))))
        if error != first_line(error):
            parts.append(f"```\n{error}\n```" if how is Format.markdown else error)
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
        parts.append(facts(_readable(measured), how))
    if not details.stages.empty:
        parts.append(render(details.stages, how, list(map(str, details.stages)), _WHOLE))
    for leading, columns in TABLES_OF_RANKS.items():
        if len(filled := _filled(details.ranks, columns)) > 1:
            ranks, names = folded(details.ranks, "rank", filled, leading)
            parts.append(render(ranks, how, names, _WHOLE))
    if hidden_ranks := folding_note(details.ranks, "rank"):
        parts.append(hidden_ranks)
    if len(filled := _filled(details.steps, STEP_COLUMNS)) > 1:
        parts.append(render(details.steps, how, filled, _WHOLE))
    notes = details.ranks["telemetry_note"].dropna().unique()
    parts += [facts(group, how) for group in (asked_for, rest) if group]
    return parts + [f"note: {text}" for text in notes if text]


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
