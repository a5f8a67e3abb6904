"""The cost of a case beyond its steps: workers that live on, against a start per case.

    python -m benchmarks.case_cost [--cases 24] [--alone 2] [--rounds 6]

Two arms take turns: all cases in one `ppbench sweep`; and a few of them, different ones in each
round, by a supervisor each, which runs the same worker on a sweep file with a single case. So both
measure the same and store the same; they differ in what starts the ranks, and how often. Everything
counts but the steps themselves: the start of Python and torch, communicators, the model, the step
for memory, the store, the report. The cost of a case is the total time less the time of all steps,
warm-up included, over the number of cases.

There are two ratios: a case started alone over a case of a whole sweep, which shares its start, end
and report among its cases; and over one more case of living workers, from the beginning of the
first case to the row of the last. The figures show where rank 0 spends the time of a case in living
workers, observed from outside during one more sweep.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import ROOT, read_surroundings
from benchmarks.turns import results_in_turns
from engine.flight import Record, read_record
from ppbench.run.job import noted_node_folders
from ppbench.run.launch.local import SUPERVISOR, WORKER
from ppbench.run.machine.node_folder import flight_path, last_start
from ppbench.store import Store

WORLD_SIZE = 2
SWEEP = """\
name = "case_cost"
device = "cpu"
world_size = {world_size}

[model]
preset = "llama-tiny"

[measure]
warmup_steps = 1
max_warmup_steps = 1
steps = 3

[grid]
schedule = {schedules}
num_microbatches = {counts}
seq_len = {lengths}
"""
SCHEDULES = ("afab", "1f1b", "zb_h1")
COUNTS = (4, 8)
LOOK_S = 0.02
Cell = tuple[str, int, int]


@dataclass(frozen=True)
class Whole:
    """The times of some cases that were run together."""

    wall_s: float
    launches_s: float  # from the first case's beginning to the last one's row
    steps_s: float
    num_cases: int

    @property
    def cost_s(self) -> float:
        """Seconds of a case beyond its steps."""
        return (self.wall_s - self.steps_s) / self.num_cases

    @property
    def further_s(self) -> float:
        """Seconds of one more case beyond its steps, if the workers are running already."""
        return (self.launches_s - self.steps_s) / self.num_cases


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--cases", type=int, default=24)
    options.add_argument("--alone", type=int, default=2, help="cases started alone in each round")
    options.add_argument("--rounds", type=int, default=6)
    settings, surroundings = options.parse_args(), read_surroundings()
    cells = _cells(settings.cases)
    numbers = itertools.count()
    draw = random.Random(0)
    with tempfile.TemporaryDirectory(prefix="ppbench-case-cost-") as name:
        folder = Path(name)
        arms = {
            "living": lambda: _sweep(folder / str(next(numbers)), cells),
            "alone": lambda: _starts(
                folder / str(next(numbers)), draw.sample(cells, settings.alone)
            ),
        }
        wholes = results_in_turns(arms, settings.rounds, num_warmup=0)
        phases = _phases(folder / "phases", cells)
    costs = {
        f"one sweep of {len(cells)} cases": [whole.cost_s for whole in wholes["living"]],
        "one more case of living workers": [whole.further_s for whole in wholes["living"]],
    }
    alone = [whole.cost_s for whole in wholes["alone"]]
    ratios = [
        Ratio.of(f"cost of a case, a start each over {arm}", alone, values, Goal(at_least=10))
        for arm, values in costs.items()
    ]
    figures = [
        Figure(f"cost of a case, {arm}", tuple(values), "s")
        for arm, values in {**costs, "a start each": alone}.items()
    ]
    write("case_cost", settings, surroundings, ratios, [*figures, *phases])


def _cells(num_cases: int) -> list[Cell]:
    """Distinct cases, at least as many as asked for: the number is rounded up to whole axes."""
    cases_per_length = len(SCHEDULES) * len(COUNTS)
    lengths = [32 * (1 + n) for n in range(-(-num_cases // cases_per_length))]
    return list(itertools.product(SCHEDULES, COUNTS, lengths))


def _write_sweep(folder: Path, cells: Sequence[Cell]) -> str:
    folder.mkdir(parents=True)
    axes = [sorted(set(axis)) for axis in zip(*cells, strict=True)]
    names = ("schedules", "counts", "lengths")
    listed = {name: json.dumps(axis) for name, axis in zip(names, axes, strict=True)}
    (folder / "case_cost.toml").write_text(SWEEP.format(world_size=WORLD_SIZE, **listed))
    return "case_cost.toml"


def _sweep(folder: Path, cells: Sequence[Cell]) -> Whole:
    file = _write_sweep(folder, cells)
    command = [sys.executable, "-c", "from ppbench.cli import main; main()", "sweep", file]
    return _run([command], folder, len(cells))


def _starts(folder: Path, cells: Sequence[Cell]) -> Whole:
    """Start each case alone, all into one store, so that both arms write the same amount."""
    start = [sys.executable, "-m", SUPERVISOR, f"--ranks-per-node={WORLD_SIZE}", "-m", WORKER]
    commands = []
    for number, cell in enumerate(cells):
        file = _write_sweep(folder / str(number), [cell])
        commands.append([*start, f"{number}/{file}"])
    return _run(commands, folder, len(cells))


def _run(commands: Sequence[Sequence[str]], folder: Path, num_cases: int) -> Whole:
    """Run the commands one after the other; exits if one fails, raises if a case is missing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    wall_s = 0.0
    for command in commands:
        began_s = time.perf_counter()
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        wall_s += time.perf_counter() - began_s
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    results = folder / "results"
    return Whole(wall_s, _launches_s(results), _steps_s(results, num_cases), num_cases)


def _launches_s(results: Path) -> float:
    """Seconds from the first run's start, which its id holds, to the last run's row."""
    paths = sorted((results / "runs").glob("*.parquet"))
    first = datetime.strptime(paths[0].name[:18], "%Y%m%dT%H%M%S%f").replace(tzinfo=UTC)
    return max(path.stat().st_mtime for path in paths) - first.timestamp()


def _steps_s(results: Path, num_cases: int) -> float:
    """Seconds of all steps: those of the warm-up, and those measured."""
    store = Store(results)
    runs = store.runs()
    assert list(runs["status"]) == ["ok"] * num_cases, "not every case was run"
    measured_ns = store.table("steps", runs["run_id"])["step_ns"].sum()
    warmup_ns = sum(sum(json.loads(text)) for text in runs["warmup_step_ns"])
    return float(measured_ns + warmup_ns) / 1e9


def _phases(folder: Path, cells: Sequence[Cell]) -> list[Figure]:
    """The seconds of a case that rank 0 spends in each phase."""
    with _Watched(folder) as watched:
        whole = _sweep(folder, cells)
    spent = watched.spent_s()
    spent["start, end and report"] = whole.wall_s - sum(spent.values())
    return [
        Figure(f"seconds of a living case, rank 0: {words}", (seconds / len(cells),), "s")
        for words, seconds in sorted(spent.items(), key=lambda item: -item[1])
    ]


class _Watched:
    """Reads rank 0's flight record repeatedly while a sweep runs."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._is_over = folder, threading.Event()
        self._records: dict[int, Record] = {}
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_S):
            for launch in (self._folder / "results" / "launches").glob("*"):
                for folder in noted_node_folders(launch):
                    start = last_start(folder)
                    record = None if start is None else read_record(flight_path(start, 0))
                    if record is not None and record.number is not None:
                        self._records[record.number] = record

    def spent_s(self) -> dict[str, float]:
        """Seconds in each phase over all cases; the actions of steps are one phase."""
        spent: dict[str, float] = defaultdict(float)
        for record, end_ns in self._ended():
            begins = [entry.began_ns for entry in record.entries]
            for entry, until_ns in zip(record.entries, [*begins[1:], end_ns], strict=True):
                name = "actions of steps" if entry.phase is None else entry.phase.words
                spent[name] += (until_ns - entry.began_ns) / 1e9
        return spent

    def _ended(self) -> Iterator[tuple[Record, int]]:
        """Each case's last record, and when the next case began."""
        records = sorted(self._records.values(), key=lambda record: record.began_ns)
        for record, after in itertools.pairwise(records):
            yield record, after.began_ns
        if records:
            yield records[-1], records[-1].entries[-1].began_ns


if __name__ == "__main__":
    main()
