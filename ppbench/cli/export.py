"""`ppbench trace` and `ppbench export`: traces for other viewers, tables for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ppbench.cli import completion
from ppbench.cli.options import REPORTS, RESULTS, Run, StoredResults, print_path
from ppbench.console import note
from ppbench.display.formats import ExportFormat, Format
from ppbench.display.tables import render
from ppbench.errors import UsageError, nearest
from ppbench.files import check_suffix, is_stream, write_file

CHROME_SUFFIXES = (".json.gz", ".json")
RUN_COLUMNS = [
    *("run_id", "sweep_name", "status", "device", "model_preset", "schedule"),
    *("world_size", "stages_per_rank", "num_microbatches", "seq_len", "launch"),
    *("tokens_per_s", "step_ns", "bubble_fraction", "bubble_fraction_theory"),
    *("peak_memory_bytes", "cautions", "commit"),
]
"""The columns of the table `runs` in a markdown export."""


def trace(
    run: Run,
    output: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="FILE.json.gz", help="Output file."),
    ] = None,
    step: Annotated[
        str, typer.Option("--step", metavar="K|median|slowest|all", help="The steps to write.")
    ] = "all",
    results: StoredResults = RESULTS,
) -> None:
    """Write a run as a Chrome trace, for Perfetto and other viewers."""
    from ppbench.export.chrome import chrome_trace
    from ppbench.export.trace import trace_of_run
    from ppbench.store import Store

    store = Store(results)
    row = store.find(run)
    path = output or REPORTS / f"trace-{row['run_id']}{CHROME_SUFFIXES[0]}"
    if not is_stream(path):
        check_suffix(path, CHROME_SUFFIXES)
    write_file(path, chrome_trace(trace_of_run(store, row, step)))
    print_path(path)


def export(
    how: Annotated[ExportFormat, typer.Option("--format", help="Output format.")],
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...", help="Runs; default: all.", autocompletion=completion.runs
        ),
    ] = None,
    table: Annotated[
        str | None,
        typer.Option(
            "--table",
            metavar="NAME",
            help="runs (the default), steps, ranks, ...",
            autocompletion=completion.tables,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Output file; default: standard output."
        ),
    ] = None,
    results: StoredResults = RESULTS,
) -> None:
    """Export a table of the store, or figures for Bencher."""
    text = (
        _for_bencher(runs or [], table, results)
        if how is ExportFormat.bencher
        else _table(runs or [], table or "runs", how, output, results)
    )
    if output is None:
        print(text)
        return
    if text is not None:
        write_file(output, [text, "\n"])
    print_path(str(output), output)


def _table(
    names: list[str], table: str, how: ExportFormat, output: Path | None, results: Path
) -> str | None:
    """A table of the named runs, or of all; None if it is written already."""
    from ppbench.results import Results as Chosen
    from ppbench.store import TABLES, Store, write_rows

    if table not in TABLES:
        raise UsageError(f'--table: unknown table "{table}"{nearest(table, TABLES)}')
    store = Store(results)
    every = Chosen(store, store.every_run())
    frame = (every.named(names) if names else every).table(table)
    if how is not ExportFormat.parquet:
        names = RUN_COLUMNS if table == "runs" else [column.name for column in TABLES[table]]
        filled = [n for n in names if n != "schema_version" and frame[n].notna().any()]
        return render(frame, Format(how.value), filled or names)
    if output is None:
        raise UsageError("--format parquet: is binary; write it to a file with -o FILE")
    write_rows(table, frame, output, "-o")
    return None


def _for_bencher(names: list[str], table: str | None, results: Path) -> str:
    """The figures of the named runs, by default of the last sweep."""
    from ppbench.export.bencher import bencher, commit_text, of_one_commit
    from ppbench.store import Store

    if table is not None:
        raise UsageError(f"--table {table}: bencher takes figures of runs, no table; leave it out")
    store = Store(results)
    runs = of_one_commit(store.named(names) if names else store.last_sweep().runs)
    if commit := commit_text(runs):
        note(f"figures of commit {commit}")
    return bencher(runs)
