"""`ppbench trace` and `ppbench export`: traces for other viewers, tables for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ppbench.cli import completion
from ppbench.cli.commands import EXCHANGE
from ppbench.cli.declare import argument, option
from ppbench.cli.emit import answers, file_written
from ppbench.cli.options import REPORTS, RESULTS, Run, StoredResults
from ppbench.console import note
from ppbench.display.document import Code, Result, render
from ppbench.display.formats import ExportFormat, Format
from ppbench.display.rows import Rows
from ppbench.display.tables import Table
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


@answers("trace", EXCHANGE, 3)
def trace(
    run: Run,
    output: Annotated[Path | None, option("-o --output FILE.json.gz", "Output file.")] = None,
    step: Annotated[str, option("--step K|median|slowest|all", "The steps to write.")] = "all",
    results: StoredResults = RESULTS,
) -> Result:
    """Write a run as a Chrome trace, for Perfetto and other viewers."""
    from ppbench.export.chrome import trace_of_run
    from ppbench.store import Store

    store = Store(results)
    row = store.find(run)
    path = output or REPORTS / f"trace-{row['run_id']}{CHROME_SUFFIXES[0]}"
    if not is_stream(path):
        check_suffix(path, CHROME_SUFFIXES)
    write_file(path, trace_of_run(store, row, step))
    return file_written(path)


@answers("export", EXCHANGE, 2)
def export(
    how: Annotated[ExportFormat, option("--format", "Output format.")],
    runs: Annotated[
        list[str] | None, argument("[RUN]...", "Runs; default: all.", completion.runs)
    ] = None,
    table: Annotated[
        str | None,
        option("--table NAME", "runs (the default), steps, ranks, ...", completion.tables),
    ] = None,
    output: Annotated[
        Path | None, option("-o --output FILE", "Output file; default: standard output.")
    ] = None,
    results: StoredResults = RESULTS,
) -> Result:
    """Export a table of the store, or figures for Bencher."""
    from ppbench.store import TABLES, Store, write_rows

    names, store = runs or [], Store(results)
    if how is ExportFormat.bencher:
        from ppbench.export.bencher import bencher, commit_text, of_one_commit

        if table is not None:
            raise UsageError(
                f"--table {table}: bencher takes figures of runs, no table; leave it out"
            )
        chosen = of_one_commit(store.named(names) if names else store.last_sweep().runs)
        if commit := commit_text(chosen):
            note(f"figures of commit {commit}")
        text = bencher(chosen)
    else:
        from ppbench.results import Results as Chosen

        table = table or "runs"
        if table not in TABLES:
            raise UsageError(f'--table: unknown table "{table}"{nearest(table, TABLES)}')
        every = Chosen(store, store.every_run())
        frame = (every.named(names) if names else every).table(table)
        if how is ExportFormat.parquet:
            if output is None:
                raise UsageError("--format parquet: is binary; write it to a file with -o FILE")
            write_rows(table, frame, output, "-o")
            return file_written(output)
        columns = RUN_COLUMNS if table == "runs" else [column.name for column in TABLES[table]]
        filled = [name for name in columns if frame[name].notna().any()]
        rows = Rows.of(frame)
        text = render(Result([Table(rows, filled or columns)], rows), Format(how.value))
    if output is None:
        return Result([Code(text)])
    write_file(output, [text, "\n"])
    return file_written(output)
