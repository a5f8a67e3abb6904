"""Tests whether emulated replicas take the step that the joined replay predicts.

Four replicas of a pipeline of four ranks are sixteen sleeping processes; a gather takes 10 ms and a
reduction 20 ms on each stage, and one replica's computations 1.2 times as long. The command line
runs them as a user would, and stores the planned step beside the measured one.

Run on a quiet machine: python -m benchmarks.replicas
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from benchmarks.attribution import ppbench

MOST_OFF = 0.05
SWEEP = """
name = "replicas"
device = "emulated"
replicas = 4
world_size = 4
num_microbatches = 8
model.preset = "llama-tiny"
data.source = "synthetic"
measure = {warmup_steps = 1, steps = 10}
[emulated]
F_ms = 20
I_ms = 20
W_ms = 20
gather_ms = 10
reduce_ms = 20
replica_factors = [1, 1, 1.2, 1]
[grid]
schedule = ["1f1b", "interleaved_1f1b", "zbv"]
sharding.policy = ["ddp", "zero2", "zero3"]
"""
COLUMNS = ("schedule", "sharding_policy", "step_ns", "planned_step_ns")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "replicas.toml"
        file.write_text(SWEEP)
        ppbench("sweep", str(file), "--results", str(folder), "--no-report")
        listed = ppbench(
            *("ls", "--results", str(folder), "--format", "json", "--columns", ",".join(COLUMNS))
        )
    runs = json.loads(listed)
    print(f"{'schedule':18} {'sharding':10} {'measured, ms':>12} {'planned, ms':>12} {'ratio':>7}")
    ratios = []
    for run in runs:
        schedule, policy, step_ns, planned_ns = (run[column] for column in COLUMNS)
        ratios.append(step_ns / planned_ns)
        times = f"{step_ns / 1e6:12.1f} {planned_ns / 1e6:12.1f} {ratios[-1]:7.4f}"
        print(f"{schedule:18} {policy:10} {times}", flush=True)
    worst = max(abs(ratio - 1) for ratio in ratios)
    print(f"at most {worst:.1%} off the plan; the goal is {MOST_OFF:.0%}")
    sys.exit(worst > MOST_OFF)


if __name__ == "__main__":
    main()
