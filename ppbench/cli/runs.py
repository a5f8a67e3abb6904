"""`ppbench ls`, `show`, `query` and `compact`: what a store holds.

These commands import nothing that draws, simulates or launches: listings are fast.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from ppbench.cli.options import RESULTS, HowToPrint, Results, Run
from ppbench.console import note
from ppbench.display.fields import WORKLOAD, words
from ppbench.display.formats import Format
from ppbench.display.tables import as_records, facts, render
from ppbench.errors import UsageError, first_line
from ppbench.runtimes import ENGINE

if TYPE_CHECKING:
    from ppbench.results import RunDetails

BULKY = ("program", "environment")
LISTED = [
    *("run_id", "sweep_name", "status", "device", "model_preset", "runtime", *WORKLOAD),
    *("tokens_per_s", "bubble_fraction", "peak_memory_bytes", "cautions", "commit", "error"),
]
"""Columns of a list for people; `error` and `cautions` are shown if any run has some, `runtime` if
any run has another than the engine."""
MOST_LISTED = 200
COMPACTED = ["table", "files_before", "files_after", "bytes_before", "bytes_after", "seconds"]
RANK_COLUMNS = [
    *("rank", "device", "stages", "num_layers", "num_parameters", "compute_ns", "idle_fraction"),
    *("peak_memory_bytes", "peak_held_microbatches", "planned_peak_held_microbatches"),
]
MEMORY_COLUMNS = [
    *("rank", "peak_memory_bytes", "predicted_peak_memory_bytes"),
    *("parameter_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes", "activation_bytes"),
    *("reserved_bytes", "process_peak_bytes"),
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
STEP_COLUMNS = [
    *("step", "num_tokens", "step_ns", "optimizer_ns", "tokens_per_s"),
    *("bubble_fraction", "loss", "is_outlier"),
]
FAILURE_COLUMNS = ("error", "last_actions")


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
    results: Results = RESULTS,
    how: HowToPrint = Format.table,
) -> None:
    """List the runs in the store, oldest first; a table shows the newest 200."""
    from ppbench.store import TABLES, Store, read_conditions

    conditions = read_conditions(where or [])
    is_for_people = how in (Format.table, Format.markdown)
    most = limit if limit is not None else MOST_LISTED if is_for_people else 0
    every = [column.name for column in TABLES["runs"] if column.name not in BULKY]
    store = Store(results)
    runs = store.runs(LISTED if is_for_people else every, conditions, most + 1 if most else None)
    if runs.empty:
        is_there = bool(conditions) and not store.runs(["run_id"]).empty
        note(
            f"{results}: no run meets the conditions"
            if is_there
            else f"{results}: no runs here yet; start with: ppbench sweep FILE"
        )
        if how is Format.table:
            return
    if most and len(runs) > most:
        note(f"{results}: the newest {most:,}; --limit 0 lists all")
        runs = runs.tail(most)
    is_shown = {
        "error": runs["error"].notna().any(),
        "cautions": runs["cautions"].fillna("").ne("").any(),
        "runtime": runs["runtime"].ne(ENGINE).any(),
    }
    print(render(runs, how, [name for name in LISTED if is_shown.get(name, True)]))


def query(
    text: Annotated[str, typer.Argument(metavar="SQL", help="One SELECT over the store's tables.")],
    results: Results = RESULTS,
    how: HowToPrint = Format.table,
) -> None:
    """Query the store in SQL: `SELECT schedule, max(tokens_per_s) FROM runs GROUP BY schedule`."""
    from pandas.api.types import is_numeric_dtype

    from ppbench.store import ConsoleNote, sql

    if not results.is_dir():
        raise UsageError(f"{results}: no such folder; name the store with --results")
    frame = sql.query(results, text, ConsoleNote())
    columns = {
        str(name): words(str(name), is_number=is_numeric_dtype(frame[name])) for name in frame
    }
    print(render(frame, how, columns))


def compact(results: Results = RESULTS, how: HowToPrint = Format.table) -> None:
    """Merge the store's many small files into few large ones, which are read much faster."""
    import dataclasses

    import pandas as pd

    from ppbench.store import ConsoleNote, Store

    done = [dataclasses.asdict(table) for table in Store(results).compact(ConsoleNote())]
    frame = pd.DataFrame(done, columns=COMPACTED)
    if how in (Format.table, Format.markdown):
        total = {"table": "all", **frame.drop(columns="table").sum().to_dict()}
        frame = pd.concat([frame, pd.DataFrame([total])], ignore_index=True)
    print(render(frame, how, COMPACTED))


def show(run: Run, results: Results = RESULTS, how: HowToPrint = Format.table) -> None:
    """Show everything that is stored of a run: figures, ranks, steps."""
    from ppbench.results import details_of
    from ppbench.store import Store

    details = details_of(Store(results), run)
    if how is Format.json:
        tables = {"ranks": details.ranks, "steps": details.steps, "flight": details.flight}
        data = {
            "run": details.row,
            **{name: as_records(table) for name, table in tables.items()},
        }
        print(json.dumps(data, indent=2, allow_nan=False))
    elif how is Format.csv:
        print(facts(details.row, how))
    else:
        print("\n\n".join(_details(details, how)))


def _details(details: RunDetails, how: Format) -> list[str]:
    """The text of a run: how it failed, if it did, then its figures and tables."""
    failure = _failure(details, how) if details.row["status"] != "ok" else []
    hidden = {*BULKY, *(FAILURE_COLUMNS if failure else []), *details.unknown_settings}
    known = {
        key: value
        for key, value in details.row.items()
        if value not in (None, "") and key not in hidden
    }
    parts = [*failure, facts(known, how)]
    if not details.stages.empty:
        parts.append(render(details.stages, how, list(map(str, details.stages))))
    for frame, columns in (
        (details.ranks, RANK_COLUMNS),
        (details.ranks, MEMORY_COLUMNS),
        (details.ranks, MACHINE_COLUMNS),
        (details.ranks, GPU_COLUMNS),
        (details.steps, STEP_COLUMNS),
    ):
        filled = [name for name in columns if frame[name].notna().any()]
        if len(filled) > 1:
            parts.append(render(frame, how, filled))
    notes = details.ranks["telemetry_note"].dropna().unique()
    return parts + [f"note: {text}" for text in notes if text]


def _failure(details: RunDetails, how: Format) -> list[str]:
    """How a run failed, what each rank was doing, and the whole error if it has more lines."""
    from ppbench.run.failures.post_mortem import in_words

    row = details.row
    error = str(row["error"] or "no error was recorded").strip()
    where = "" if row["error_rank"] is None else f" at rank {row['error_rank']}"
    parts = [f"{row['status']}{where}: {first_line(error)}"]
    if not details.flight.empty:
        ranks = in_words(details.flight)
        parts.append(render(ranks, how, list(map(str, ranks))))
    if error != first_line(error):
        parts.append(f"```\n{error}\n```" if how is Format.markdown else error)
    return parts
