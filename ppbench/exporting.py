"""What goes out of ppbench: traces for other viewers, tables for other programs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ppbench.analysis.metrics import chosen_step
from ppbench.errors import UsageError, nearest
from ppbench.export import trackers
from ppbench.export.chrome import chrome_trace
from ppbench.export.files import check_suffix, write_file
from ppbench.export.perfetto import perfetto_trace
from ppbench.export.tracks import Trace, trace_of
from ppbench.files import is_stream
from ppbench.format import TRACKERS, ExportFormat, Format
from ppbench.listing import render
from ppbench.report.cases import without_not_finite
from ppbench.report.recovered import steps_of_run
from ppbench.report.units import is_missing
from ppbench.results import Results
from ppbench.store import TABLES, Store, check_ok, no_spans, write_rows
from ppbench.stored import open_store, tell

ALL_STEPS = "all"
CHROME_SUFFIXES = (".json.gz", ".json")
PERFETTO_SUFFIXES = (".pftrace", ".pftrace.gz")
RUN_COLUMNS = [
    "run_id",
    "sweep_name",
    "status",
    "device",
    "model_preset",
    "schedule",
    "world_size",
    "stages_per_rank",
    "num_microbatches",
    "seq_len",
    "launch",
    "tokens_per_s",
    "step_ns",
    "bubble_fraction",
    "bubble_fraction_theory",
    "peak_memory_bytes",
    "cautions",
    "commit",
]
"""Of the table `runs`, what people see."""
_FACTS = ("run_id", "sweep_name", "device", "model_preset", "schedule", "world_size")
_MORE_FACTS = ("stages_per_rank", "num_microbatches", "seq_len", "commit", "ppbench_version")
_MEMORY_NOTE = "of an extra step that was not timed, drawn from the start of the first step"


def trace(
    name: str, output: Path | None, step: str, results: Path, reports: Path, *, is_perfetto: bool
) -> Path:
    """Write a run for a trace viewer; returns the path. Raises UsageError, StoreError."""
    store = open_store(results)
    run = store.find(name)
    suffixes = PERFETTO_SUFFIXES if is_perfetto else CHROME_SUFFIXES
    path = output or reports / f"trace-{run['run_id']}{suffixes[0]}"
    hint = "; leave --perfetto away for Chrome's JSON" if is_perfetto else ", or add --perfetto"
    if not is_stream(path):
        check_suffix(path, suffixes, hint)
    made = _trace_of(store, run, step)
    write_file(path, perfetto_trace(made) if is_perfetto else chrome_trace(made))
    return path


def _trace_of(store: Store, run: pd.Series, step: str) -> Trace:
    check_ok(run, "spans")
    ids = [run["run_id"]]
    spans, ranks, memory = (store.table(name, ids) for name in ("spans", "ranks", "memory"))
    steps = steps_of_run(store, run)
    if spans.empty or steps.empty:
        raise no_spans(store, run)
    every = [int(number) for number in steps["step"]]
    chosen = every if step == ALL_STEPS else [chosen_step(steps, step, ALL_STEPS)]
    shown = spans[spans["step"].isin(chosen)]
    if shown.empty:
        raise no_spans(store, run)
    told = [name for name in (*_FACTS, *_MORE_FACTS) if not pd.isna(run[name])]
    facts = {name: str(run[name]) for name in told}
    facts["steps"] = ", ".join(map(str, chosen))
    if not memory.empty:
        facts["memory"] = _MEMORY_NOTE
    return trace_of(facts, shown, ranks, memory)


def export(
    names: Sequence[str], table: str | None, how: ExportFormat, output: Path | None, results: Path
) -> str:
    """A table of the named runs, or of all; or what a tracker takes: text, or where it is."""
    if how in TRACKERS:
        if table is not None:
            raise UsageError(
                f"--table {table}: {how} takes figures of runs and no table; leave it out"
            )
        return _out(_for_tracker(names, how, output, results), output)
    wanted = table or "runs"
    if wanted not in TABLES:
        raise UsageError(f'--table: unknown table "{wanted}"{nearest(wanted, TABLES)}')
    runs = chosen(open_store(results), names)
    if how is ExportFormat.parquet:
        if output is None:
            raise UsageError("--format parquet: is no text to print; name a file with -o FILE")
        write_rows(wanted, runs.table(wanted), output, "-o")
        return str(output)
    return _out(_as_text(runs.table(wanted), wanted, Format(how.value)), output)


def _out(text: str, output: Path | None) -> str:
    if output is None:
        return text
    write_file(output, [text, "\n"])
    return str(output)


def _for_tracker(
    names: Sequence[str], how: ExportFormat, output: Path | None, results: Path
) -> str:
    """By default those of the last sweep; for otava, which takes a history, of all."""
    store = open_store(results)
    is_history = how is ExportFormat.otava
    runs = chosen(store, names).runs if names or is_history else store.last_sweep()
    finite = without_not_finite(runs)
    measured = finite[finite["status"] == "ok"]
    if measured.empty:
        raise UsageError(f"--format {how}: none of the {len(runs)} runs is ok; nothing to export")
    if is_history:
        return _history(measured, output)
    _check_one_commit(measured, how)
    last = measured.iloc[-1]
    if not is_missing(last["commit"]):  # a backfill's last sweep is not the newest commit's
        changed = " with uncommitted changes" if last["is_dirty"] else ""
        tell(f"figures of commit {str(last['commit'])[:9]}{changed}")
    return trackers.bencher(measured) if how is ExportFormat.bencher else trackers.github(measured)


def _check_one_commit(runs: pd.DataFrame, how: ExportFormat) -> None:
    commits = runs[["commit", "changes"]].drop_duplicates()
    if len(commits) > 1:
        some = ", ".join(str(commit)[:9] for commit in commits["commit"].unique()[:4])
        raise UsageError(
            f"--format {how}: takes the runs of one commit, and these are of {len(commits)}: "
            f"{some}; name the runs of one, or leave them out for the last sweep"
        )


def _history(runs: pd.DataFrame, output: Path | None) -> str:
    clean = runs[runs["commit"].notna() & ~runs["is_dirty"].eq(True)]
    if clean.empty:
        raise UsageError("--format otava: none of the runs is of a commit without changes")
    made = trackers.otava(clean, "FILE.csv" if output is None else str(output))
    if made.num_commits == 0:
        raise UsageError(
            "--format otava: no commit has every figure, and otava takes no gaps; name the runs of "
            "fewer cases"
        )
    if made.left_out:
        tell(f"left out, since otava takes no gaps: {made.left_out}")
    tell(f"# otava.yaml, to be read with: otava analyze ppbench\n{made.config}")
    return made.text


def _as_text(frame: pd.DataFrame, table: str, how: Format) -> str:
    """All columns for programs; for people those that hold something."""
    candidates = RUN_COLUMNS if table == "runs" else [column.name for column in TABLES[table]]
    told = [n for n in candidates if n != "schema_version" and frame[n].notna().any()]
    return render(frame, how, told or candidates)


def chosen(store: Store, names: Sequence[str]) -> Results:
    """The named runs, or all of them. Raises UsageError."""
    every = Results(store, store.every_run())
    return every.named(names) if names else every
