"""What is asked of a store as a whole: runs listed, SQL answered, files compacted.

Apart from `commands`, so that a listing loads nothing that draws, simulates or launches.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pandas as pd
from pandas.api.types import is_numeric_dtype

from ppbench.error_text import printable
from ppbench.errors import UsageError
from ppbench.format import Format
from ppbench.listing import Field, render
from ppbench.runtimes import ENGINE
from ppbench.store import TABLES, ConsoleNote, Store, read_conditions

BULKY = ("program", "environment")
WORKLOAD = ("schedule", "world_size", "num_microbatches", "seq_len")
LISTED = [
    *("run_id", "sweep_name", "status", "device", "model_preset", "runtime", *WORKLOAD),
    *("tokens_per_s", "bubble_fraction", "peak_memory_bytes", "cautions", "commit", "error"),
]
"""Of a run, what people see in a list; its error if some run has one, and its runtime if some run
has another than the engine."""
MOST_LISTED = 200
COMPACTED = ["table", "files_before", "files_after", "bytes_before", "bytes_after", "seconds"]


def open_store(results: Path) -> Store:
    """A store that names the files it has to skip, each once."""
    return Store(results)


def list_runs(results: Path, where: Sequence[str], limit: int | None, how: Format) -> str:
    """The newest runs that meet the conditions, oldest first.

    `limit` 0 is all of them; by default people see the newest MOST_LISTED, programs all.
    """
    conditions = read_conditions(where)
    is_for_people = how in (Format.table, Format.markdown)
    most = limit if limit is not None else MOST_LISTED if is_for_people else 0
    every = [column.name for column in TABLES["runs"] if column.name not in BULKY]
    store = open_store(results)
    runs = store.runs(LISTED if is_for_people else every, conditions, most + 1 if most else None)
    if runs.empty:
        is_there = bool(conditions) and not store.runs(["run_id"]).empty
        tell(
            f"{results}: no run meets the conditions"
            if is_there
            else f"{results}: no runs here yet; start with: ppbench sweep FILE"
        )
    if most and len(runs) > most:
        tell(f"{results}: the newest {most:,}; --limit 0 lists all")
        runs = runs.tail(most)
    is_shown = {
        "error": runs["error"].notna().any(),
        "runtime": runs["runtime"].ne(ENGINE).any(),
    }
    return render(runs, how, [name for name in LISTED if is_shown.get(name, True)])


def query(text: str, results: Path, how: Format) -> str:
    """The answer to a question in SQL, its columns as they were asked for."""
    from ppbench.store import sql

    if not results.is_dir():
        raise UsageError(f"{results}: no such folder; --results names the store")
    frame = sql.query(results, text, ConsoleNote())
    fields = {str(name): _field(str(name), frame[name]) for name in frame}
    return render(frame, how, list(fields), fields)


def _field(name: str, column: pd.Series) -> Field:
    return Field(name, is_number=is_numeric_dtype(column))


def compact(results: Path, how: Format) -> str:
    """Merge the files of a store; what became of each table's."""
    done = [dataclasses.asdict(one) for one in Store(results).compact(ConsoleNote())]
    fields = {
        "files_before": Field("files before", _written("{:,.0f}")),
        "files_after": Field("files after", _written("{:,.0f}")),
        "bytes_before": Field("KiB before", _written("{:,.0f}", 1 / 2**10)),
        "bytes_after": Field("KiB after", _written("{:,.0f}", 1 / 2**10)),
        "seconds": Field("s", _written("{:.1f}")),
    }
    frame = pd.DataFrame(done, columns=COMPACTED)
    if how in (Format.table, Format.markdown):
        total = {"table": "all", **frame.drop(columns="table").sum().to_dict()}
        frame = pd.concat([frame, pd.DataFrame([total])], ignore_index=True)
    return render(frame, how, COMPACTED, fields)


def _written(pattern: str, factor: float = 1.0) -> Callable[[object], str]:
    return lambda value: pattern.format(float(str(value)) * factor)


def tell(text: str) -> None:
    """To the user, not into the results."""
    print(printable(text), file=sys.stderr)
