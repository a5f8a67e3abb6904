"""How long the store's commands take with 100,000 runs in it, and how long compacting takes.

    python benchmarks/store.py [--runs 100000] [--single 20000] [--rounds 7]

Runs are made from a template with figures at random: a few hundred cases, each measured over and
over at many commits. Commands are timed as a whole, the start of their process included.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import functools
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd

from engine.plan.spans import COLUMNS
from ppbench.config.case import Case, Measure
from ppbench.store import SCHEMA_VERSION, Store, write_rows

RUNS_PER_COMMIT = 200
SPANS_PER_RUN = 120
PPBENCH = [sys.executable, "-c", "from ppbench.cli import main; main()"]
HISTORY = """
import sys
from pathlib import Path
from ppbench.store import Store
print(len(Store(Path(sys.argv[1])).history(sys.argv[2], "tokens_per_s")))
"""


def cases() -> list[Case]:
    """As a nightly sweep has them: schedules by ranks by microbatches by lengths."""
    return [
        Case(schedule=schedule, world_size=ranks, num_microbatches=m, seq_len=length)
        for schedule in ("afab", "1f1b", "interleaved_1f1b", "zb_h1")
        for ranks in (1, 2, 4, 8)
        for m in (8, 16, 32)
        for length in (128, 256, 512, 1024)
    ]


def rows(num_runs: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """Rows of `runs`, oldest first."""
    rng, every = random.Random(seed), cases()
    settings = [{"case_id": case.case_id, **case.settings()} for case in every]
    start = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    program = json.dumps([[f"{m}F{s}" for m in range(8)] for s in range(8)] * 6)
    for number in range(num_runs):
        when, case = start + dt.timedelta(seconds=97 * number), number % len(every)
        commit = f"{number // RUNS_PER_COMMIT:040x}"
        step_ns = rng.lognormvariate(18, 0.1)
        yield {
            "run_id": f"{when:%Y%m%dT%H%M%S}000-{rng.getrandbits(24):06x}",
            "sweep_id": commit[-12:],
            "sweep_name": "nightly",
            "sweep_file": "sweeps/nightly.toml",
            "resume_key": f"{rng.getrandbits(48):012x}",
            "launch": 0,
            "attempt": 1,
            "status": "ok" if rng.random() < 0.98 else "oom",
            "created_at": when.isoformat(),
            **settings[case],
            **Measure().settings(),
            **{name: step_ns * rng.uniform(0.9, 1.1) for name in ("step_ns", "optimizer_ns")},
            "tokens_per_s": 1e12 / step_ns,
            "bubble_fraction": rng.random(),
            "bubble_fraction_theory": 0.25,
            "peak_memory_bytes": rng.randrange(2**28, 2**30),
            "num_parameters": 8_000_000,
            "num_stages": every[case].world_size,
            "op_costs_ns": json.dumps({"F": [rng.random() * 1e7 for _ in range(8)]}),
            "cautions": rng.choice(["", "few_steps", "noisy_steps,few_steps"]),
            "program": program,
            "commit": commit,
            "branch": "main",
            "is_dirty": False,
            "fingerprint": "f1f2f3",
            "environment": json.dumps({"cpu": "a CPU", "num_cores": 8, "gpus": [], "n": "x" * 200}),
            "ppbench_version": "0.1.0",
        }


def spans(run_id: str) -> pd.DataFrame:
    """What one run has of the largest table."""
    numbers = range(SPANS_PER_RUN)
    some = [
        (n % 5, n % 4, "compute", n % 4, "F", n % 8, n * 1000, n * 1000 + 900, 0) for n in numbers
    ]
    frame = pd.DataFrame(some, columns=list(COLUMNS))
    return frame.assign(run_id=run_id, schema_version=SCHEMA_VERSION)


def make_compacted(folder: Path, num_runs: int) -> None:
    """Written a part at a time, then merged by `compact` itself."""
    part: list[dict[str, object]] = []
    for row in rows(num_runs):
        part.append({**row, "schema_version": SCHEMA_VERSION})
        if len(part) == 5000:
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
    of_all = pd.concat([spans(ids[0])] * len(ids), ignore_index=True)
    of_all["run_id"] = [run_id for run_id in ids for _ in range(SPANS_PER_RUN)]
    write_rows("spans", of_all, folder / "spans" / "compacted" / f"{first}.parquet")


def seconds_of(action: Callable[[], object]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def time_compact(folder: Path, num_runs: int) -> None:
    """`num_runs` runs of one file for each of two tables, as sweeps leave them."""
    store = Store(folder)
    for row in rows(num_runs):
        store.write_run(row, {"spans": spans(str(row["run_id"])).drop(columns=["schema_version"])})
    took = seconds_of(
        lambda: [
            print(" ", dataclasses.asdict(one)) for one in store.compact(print) if one.files_before
        ]
    )
    print(f"compact, {num_runs:,} runs in {2 * num_runs:,} files: {took:.1f} s")


def main() -> None:
    """Make a store, then time the commands on it."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--single", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to; a temporary folder by default")
    options = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load "
        f"{os.getloadavg()[0]:.1f}; Python {platform.python_version()}"
    )
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        folder = Path(scratch) / "results"
        took = seconds_of(lambda: make_compacted(folder, options.runs))
        print(f"made {options.runs:,} runs in {took:.0f} s")
        time_commands(folder, options.rounds)
        if options.single:
            time_compact(Path(scratch) / "single", options.single)


def commands_of(folder: Path) -> dict[str, list[str]]:
    """What is timed, by its name."""
    case = cases()[5]
    at = ["--results", str(folder)]
    return {
        "--version": [*PPBENCH, "--version"],
        "ls, last 20": [*PPBENCH, "ls", "--limit", "20", *at],
        "ls --where, one case": [
            *PPBENCH,
            "ls",
            "--where",
            f"case_id={case.case_id} and status=ok",
            *at,
        ],
        "ls --where, 5 keys": [
            *PPBENCH,
            "ls",
            "--where",
            "schedule=1f1b and world_size>=4 and train.microbatch_size=1 and seq_len=512",
            "--where",
            "tokens_per_s>15000",
            *at,
        ],
        "ls --where, half of all": [*PPBENCH, "ls", "--where", "world_size<=2", *at],
        "ls --where, json, one commit": [
            *PPBENCH,
            "ls",
            "--format",
            "json",
            "--where",
            f"commit={7:040x}",
            *at,
        ],
        "history of a case": [sys.executable, "-c", HISTORY, str(folder), case.case_id],
        "show last": [*PPBENCH, "show", "last", *at],
        "query, runs": [
            *PPBENCH,
            "query",
            "SELECT schedule, median(tokens_per_s) FROM runs GROUP BY 1",
            *at,
        ],
        "query, spans": [
            *PPBENCH,
            "query",
            "SELECT op, sum(end_ns - start_ns) FROM spans GROUP BY 1",
            *at,
        ],
    }


def time_commands(folder: Path, num_rounds: int) -> None:
    """Interleaved, so that a busy moment meets them all."""
    commands = commands_of(folder)
    times: dict[str, list[float]] = {name: [] for name in commands}
    cpu_times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(num_rounds):
        for name, command in commands.items():
            begin_s = _cpu_seconds()
            run = functools.partial(subprocess.run, command, check=True, capture_output=True)
            times[name].append(seconds_of(run))
            cpu_times[name].append(_cpu_seconds() - begin_s)
    for name, took in times.items():
        cpu = statistics.median(cpu_times[name])
        wall = f"{statistics.median(took):6.2f} s ({min(took):.2f} to {max(took):.2f})"
        print(f"  {name:30} {wall}, of which {cpu:.2f} s on a core")


def _cpu_seconds() -> float:
    """What commands have used of the cores until now: of a busy machine the fairer figure."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
