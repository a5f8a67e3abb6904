"""`ppbench trace` and `ppbench export`: traces for other viewers, tables for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppbench.cli import completion
from ppbench.cli.options import REPORTS, RESULTS, Run, StoredResults, print_path
from ppbench.console import note
from ppbench.display.formats import TRACKERS, ExportFormat, Format
from ppbench.display.tables import render
from ppbench.errors import UsageError, nearest
from ppbench.files import check_suffix, is_stream, write_file

if TYPE_CHECKING:
    import pandas as pd

CHROME_SUFFIXES = (".json.gz", ".json")
PERFETTO_SUFFIXES = (".pftrace", ".pftrace.gz")
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
    perfetto: Annotated[
        bool, typer.Option("--perfetto", help="Write Perfetto's protobuf, FILE.pftrace.")
    ] = False,
    results: StoredResults = RESULTS,
) -> None:
    """Write a run as a Chrome trace, for Perfetto and other viewers."""
    from ppbench.export.chrome import chrome_trace
    from ppbench.export.perfetto import perfetto_trace
    from ppbench.export.trace import trace_of_run
    from ppbench.store import Store

    store = Store(results)
    row = store.find(run)
    suffixes = PERFETTO_SUFFIXES if perfetto else CHROME_SUFFIXES
    path = output or REPORTS / f"trace-{row['run_id']}{suffixes[0]}"
    hint = "; leave --perfetto out for Chrome's JSON" if perfetto else ", or add --perfetto"
    if not is_stream(path):
        check_suffix(path, suffixes, hint)
    made = trace_of_run(store, row, step)
    write_file(path, perfetto_trace(made) if perfetto else chrome_trace(made))
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
    """Export a table of the store, or figures for a benchmark tracker."""
    text = (
        _for_tracker(runs or [], table, how, output, results)
        if how in TRACKERS
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
        return _as_text(frame, table, Format(how.value))
    if output is None:
        raise UsageError("--format parquet: is binary; write it to a file with -o FILE")
    write_rows(table, frame, output, "-o")
    return None


def _as_text(frame: pd.DataFrame, table: str, how: Format) -> str:
    """The table in a text format, without empty columns for people."""
    from ppbench.store import TABLES

    candidates = RUN_COLUMNS if table == "runs" else [column.name for column in TABLES[table]]
    filled = [n for n in candidates if n != "schema_version" and frame[n].notna().any()]
    return render(frame, how, filled or candidates)


def _for_tracker(
    names: list[str], table: str | None, how: ExportFormat, output: Path | None, results: Path
) -> str:
    """The figures of the named runs; default: of the last sweep, and for otava's history of all."""
    from ppbench.export import trackers
    from ppbench.store import Store

    if table is not None:
        raise UsageError(f"--table {table}: {how} takes figures of runs and no table; leave it out")
    store = Store(results)
    if how is ExportFormat.otava:
        runs = store.named(names) if names else store.every_run()
        made = trackers.otava_history(runs, "FILE.csv" if output is None else str(output))
        if made.left_out:
            note(f"left out, since otava takes no gaps: {made.left_out}")
        note(f"# otava.yaml, to be read with: otava analyze ppbench\n{made.config}")
        return made.text
    runs = trackers.of_one_commit(store.named(names) if names else store.last_sweep().runs, how)
    if commit := trackers.commit_text(runs):
        note(f"figures of commit {commit}")
    return trackers.bencher(runs) if how is ExportFormat.bencher else trackers.github(runs)
