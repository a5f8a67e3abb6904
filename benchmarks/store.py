"""The time of questions to a store of 100,000 runs, over reading its files by hand.

    python -m benchmarks.store [--runs 100000] [--rounds 8]

Each question is answered in turn by ppbench's command and by the shortest Python program that
answers it from the same compacted parquet files without ppbench: with pandas, pyarrow or DuckDB.
Whole processes are timed, from their start to their end. A ratio below 1 means that ppbench is
faster.

Wall time and core time are given; core time is the fairer one on a busy machine. Runs are made
from a template with random figures; each has 120 spans, 12 million in all.

With `--single N`, the time of `compact` is printed too, for N runs with one file per table and run.
"""

from __future__ import annotations

import dataclasses
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from benchmarks.made_up import SPANS_PER_RUN, cases, rows, spans
from benchmarks.outcome import Figure, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from benchmarks.turns import results_in_turns, seconds_of
from ppbench.store import Store, write_rows

PART = 5000
PPBENCH = [sys.executable, "-c", "from ppbench.cli import main; main()"]
BY_RUN = "SELECT schedule, median(tokens_per_s) FROM runs GROUP BY 1"
BY_SPAN = "SELECT op, sum(end_ns - start_ns) FROM spans GROUP BY 1"
COLUMNS = "['run_id', 'created_at', 'schedule', 'world_size', 'status', 'tokens_per_s', 'step_ns']"
READ = (
    "import sys, pyarrow.dataset as ds; from pyarrow.compute import field as f; "
    "runs = ds.dataset(sys.argv[1] + '/runs'); "
)
DUCKDB = (
    "import sys, duckdb; files = sys.argv[1] + '/{table}/**/*.parquet'; "
    "{table} = duckdb.read_parquet(files); print(duckdb.sql({query!r}))"
)


class Question(NamedTuple):
    """A question, as ppbench's arguments and as code written by hand."""

    name: str
    ours: list[str]  # arguments of ppbench
    beside: str  # the library
    code: str  # gets the store's folder


def questions() -> list[Question]:
    case = cases()[5].case_id
    one_case = (
        f"runs.to_table(columns={COLUMNS}, filter=(f('case_id') == {case!r}) & "
        "(f('status') == 'ok'))"
    )
    half = f"runs.to_table(columns={COLUMNS}, filter=f('world_size') <= 2)"
    last = f"runs.to_table(columns={COLUMNS}).sort_by('created_at')"
    whole = (
        "import sys, pandas as pd; print(pd.read_parquet(sys.argv[1] + '/runs')"
        ".sort_values('created_at').tail(20).to_string())"
    )
    where = f"case_id={case} and status=ok"
    return [
        Question("ls, last 20", ["ls", "--limit", "20"], "pandas", whole),
        Question(
            "ls, last 20",
            ["ls", "--limit", "20"],
            "pyarrow",
            f"{READ}print({last}.to_pandas().tail(20).to_string())",
        ),
        Question(
            "ls --where, one case",
            ["ls", "--where", where],
            "pyarrow",
            f"{READ}print({one_case}.to_pandas().to_string())",
        ),
        Question(
            "ls --where as CSV, half of all",
            ["ls", "--format", "csv", "--where", "world_size<=2"],
            "pyarrow",
            f"{READ}print({half}.to_pandas().to_csv())",
        ),
        Question(
            "query, runs", ["query", BY_RUN], "DuckDB", DUCKDB.format(table="runs", query=BY_RUN)
        ),
        Question(
            "query, spans",
            ["query", BY_SPAN],
            "DuckDB",
            DUCKDB.format(table="spans", query=BY_SPAN),
        ),
    ]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--runs", type=int, default=100_000)
    options.add_argument("--single", type=int, default=0)
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument(
        "--folder", type=Path, help="folder of the store; by default a temporary one"
    )
    settings, surroundings = options.parse_args(), read_surroundings()
    with tempfile.TemporaryDirectory(prefix="ppbench-store-", dir=settings.folder) as scratch:
        folder = Path(scratch) / "results"
        took = seconds_of(lambda: make_compacted(folder, settings.runs))
        print(f"made {settings.runs:,} runs in {took:.0f} s")
        ratios, figures = _asked(folder, settings.rounds)
        if settings.single:
            time_compact(Path(scratch) / "single", settings.single)
    del settings.folder
    write("store", settings, surroundings, ratios, figures)


def make_compacted(folder: Path, num_runs: int) -> None:
    """Make a store: write it a part at a time, then merge it by `compact` itself."""
    part: list[dict[str, object]] = []
    for row in rows(num_runs):
        part.append(row)
        if len(part) == PART:
            _write_part(folder, part)
            part = []
    if part:
        _write_part(folder, part)
    for done in Store(folder).compact(print):
        if done.files_before:
            print(f"  {done.table}: {done.files_after} file(s), {done.bytes_after / 2**20:.0f} MiB")


def _write_part(folder: Path, part: list[dict[str, object]]) -> None:
    first = part[0]["run_id"]
    write_rows("runs", pd.DataFrame(part), folder / "runs" / "compacted" / f"{first}.parquet")
    ids = [str(row["run_id"]) for row in part]
    of_part = pd.concat([spans(ids[0])] * len(ids), ignore_index=True)
    of_part["run_id"] = [run_id for run_id in ids for _ in range(SPANS_PER_RUN)]
    write_rows("spans", of_part, folder / "spans" / "compacted" / f"{first}.parquet")


class Took(NamedTuple):
    """The time that a process took."""

    wall_s: float
    core_s: float


def _asked(folder: Path, num_rounds: int) -> tuple[list[Ratio], list[Figure]]:
    """Ask each question of both in turn, one question after the other."""
    ratios, figures = [], []
    for name, arguments, library, code in questions():
        ours, theirs = f"ppbench {name}", f"{library}: {name}"
        arms = {
            ours: _process([*PPBENCH, *arguments, "--results", str(folder)]),
            theirs: _process([sys.executable, "-c", code, str(folder)]),
        }
        taken = results_in_turns(arms, num_rounds)
        for kind in Took._fields:
            values = {arm: tuple(getattr(took, kind) for took in taken[arm]) for arm in arms}
            time = "wall time" if kind == "wall_s" else "core time"
            title = f"`{name}`, {time}, ppbench over {library}"
            ratios.append(Ratio.of(title, values[ours], values[theirs]))
            figures += [Figure(f"{arm}, {time}", each, "s") for arm, each in values.items()]
    return ratios, figures


def _process(command: list[str]) -> Callable[[], Took]:
    def run() -> Took:
        before_s = _core_seconds()
        wall_s = seconds_of(lambda: subprocess.run(command, check=True, capture_output=True))
        return Took(wall_s, _core_seconds() - before_s)

    return run


def _core_seconds() -> float:
    """Core time that commands have used until now."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def time_compact(folder: Path, num_runs: int) -> None:
    """Print the time of compacting runs that have one file for each of two tables."""
    store = Store(folder)
    for row in rows(num_runs):
        store.write_run(row, {"spans": spans(str(row["run_id"]))})
    took = seconds_of(
        lambda: [
            print(" ", dataclasses.asdict(done))
            for done in store.compact(print)
            if done.files_before
        ]
    )
    print(f"compact, {num_runs:,} runs in {2 * num_runs:,} files: {took:.1f} s")


if __name__ == "__main__":
    main()
