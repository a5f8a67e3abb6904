"""`ppbench noise`: a sweep against itself, launch by launch, so that verdicts know this machine."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pandas as pd

from ppbench.analysis.compare import FLOOR, METRICS, SPEED, Metric, effective_floor
from ppbench.analysis.noise import NoiseLevel, detectable_change
from ppbench.analysis.noise import measure_noise as noise_of
from ppbench.analysis.ratios import FEWEST_LAUNCHES
from ppbench.config.sweep_file import read_sweep
from ppbench.format import Format
from ppbench.listing import render
from ppbench.report.cases import without_not_finite
from ppbench.run.environment import default_device
from ppbench.run.sweep import Choice, runs_of
from ppbench.store import check_writable
from ppbench.store.noise import StoredNoise, write_noise
from ppbench.stored import WORKLOAD, open_store
from ppbench.sweeping import run_missing
from ppbench.tracking.outcome import FAILED, FINE, NOT_ENOUGH, Outcome

NUM_LAUNCHES = 5
"""Of a side, for which the change that can be found is told."""
COLUMNS = [
    "num_launches",
    "deviation",
    "deviation_low",
    "deviation_high",
    "floor",
    "detectable_change",
]


def measure_noise(
    file: Path, overrides: Sequence[str], num_launches: int, results: Path, how: Format
) -> Outcome:
    """Launch a sweep so often, and keep by how much its launches differ, case by case.

    Raises what running a sweep raises.
    """
    read = read_sweep(file, [*overrides, f"measure.launches={num_launches}"], default_device())
    store = open_store(results)
    check_writable(results, "--results")
    words = [word for override in overrides for word in ("--set", override)]
    options = ["--launches", str(num_launches), "--results", str(results), *words]
    command = shlex.join(["ppbench", "noise", str(file), *options])
    plan = run_missing(read, store, Choice(), command)
    runs = runs_of(plan, store)
    runs = without_not_finite(runs)
    good = runs[runs["status"] == "ok"]
    rows = [
        _row(results, of_case)
        for _, of_case in good.groupby("case_id", sort=False)
        if len(of_case) >= FEWEST_LAUNCHES
    ]
    table = render(pd.DataFrame(rows), how, [*(read.axes or WORKLOAD), *COLUMNS]) if rows else ""
    if len(good) < len(plan.items):
        return Outcome(table, FAILED)
    return Outcome(table, FINE if rows else NOT_ENOUGH)


def _row(results: Path, runs: pd.DataFrame) -> dict[str, object]:
    """Keep the noise of one case; what is told of it."""
    last = runs.iloc[-1]
    levels = {name: _level(metric, runs) for name, metric in METRICS.items()}
    known = {name: level.noise.deviation for name, level in levels.items() if level is not None}
    commit = None if pd.isna(last["commit"]) else str(last["commit"])
    when = datetime.now(UTC).isoformat(timespec="seconds")
    facts = (str(last["case_id"]), str(last["fingerprint"]), when, commit, len(runs), known)
    write_noise(results, StoredNoise(*facts, run_ids=list(map(str, runs["run_id"]))))
    speed = levels[SPEED]
    assert speed is not None  # a run that is ok has a speed
    return {
        **last,
        "num_launches": len(runs),
        "deviation": speed.noise.deviation,
        "deviation_low": speed.low,
        "deviation_high": speed.high,
        "floor": effective_floor(FLOOR, speed.noise),
        "detectable_change": detectable_change(speed.noise, NUM_LAUNCHES),
    }


def _level(metric: Metric, runs: pd.DataFrame) -> NoiseLevel | None:
    """None of a figure that these runs do not have."""
    if runs[metric.name].isna().any():
        return None
    return noise_of([runs[metric.name].tolist()], in_points=metric.in_points)
