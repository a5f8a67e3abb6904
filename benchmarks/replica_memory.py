"""Tests whether trained replicas hold the bytes that arithmetic says, and peak where predicted.

Two replicas of llama-8m, of one rank and of two, are trained on the CPU by the command line, as a
user would. What a rank keeps at the end of a step is compared with the arithmetic of ZeRO
(`engine.plan.sharded_bytes`), its peak with the prediction that the store has beside it.

    python -m benchmarks.replica_memory
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path

import ppbench as library
from benchmarks.attribution import ppbench
from engine.plan.collectives import (
    CollectivePolicy,
    DataParallel,
    NoCollectives,
    TorchWindow,
    Zero1,
    Zero2,
    Zero3,
)
from engine.plan.sharded_bytes import TrainingBytes, kept_bytes

REPLICAS = 2
MOST_OFF_KEPT, MOST_OFF_PEAK = 0.05, 0.10
POLICIES: dict[str, CollectivePolicy] = {
    "none": NoCollectives(),
    "ddp": DataParallel(),
    "zero1": Zero1(),
    "zero2": Zero2(every_backward=False),
    "zero3": Zero3(),
    "torch": TorchWindow(),
}
SWEEP = f"""
name = "replica-memory"
device = "cpu"
replicas = {REPLICAS}
schedule = "1f1b"
seq_len = 128
num_microbatches = 4
model.preset = "llama-8m"
data.source = "synthetic"
measure = {{warmup_steps = 1, steps = 1}}
[grid]
world_size = [1, 2]
sharding.policy = {list(POLICIES)}
[[override]]
where.sharding.policy = "zero2"
set.sharding.every_backward = false
""".replace("'", '"')
PARAMETER_BYTES, ADAM_STATES = 4, 2
MIB = 2**20


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "replica-memory.toml"
        file.write_text(SWEEP)
        ppbench("sweep", str(file), "--results", name, "--no-report")
        results = library.load(name)
        policies, ranks, levels = results.runs, results.ranks, results.memory
    keys = ["run_id", "replica", "rank"]
    last = levels.sort_values("time_ns").groupby(keys)["num_bytes"].last().rename("kept")
    rows = ranks.join(last, on=keys).merge(policies[["run_id", "sharding_policy", "world_size"]])
    print(
        "policy  ranks   kept, MiB: arithmetic  measured  ratio   peak: predicted  measured  ratio"
    )
    off_kept = off_peak = 0.0
    by_case = dict(iter(rows.groupby(["world_size", "sharding_policy"])))
    for world_size, policy in itertools.product((1, 2), POLICIES):
        those = by_case[world_size, policy]
        whole = those["num_parameters"] * PARAMETER_BYTES
        stages = [TrainingBytes(n, n, ADAM_STATES * n) for n in whole]
        expected = [sum(kept_bytes(stage, POLICIES[policy], REPLICAS)) for stage in stages]
        kept = those["kept"] / expected
        peak = those["predicted_peak_memory_bytes"] / those["peak_memory_bytes"]
        off_kept = max(off_kept, (kept - 1).abs().max())
        off_peak = max(off_peak, (peak - 1).abs().max())
        figures = [sum(expected), those["kept"].sum(), those["predicted_peak_memory_bytes"].sum()]
        held, found, planned, most = (
            total / len(those) / MIB for total in (*figures, those["peak_memory_bytes"].sum())
        )
        worst = [one.iloc[(one - 1).abs().argmax()] for one in (kept, peak)]
        print(
            f"{policy:7} {world_size:5} {held:23.1f} {found:9.1f} {worst[0]:6.3f} "
            f"{planned:17.1f} {most:9.1f} {worst[1]:6.3f}"
        )
    print(f"kept at most {off_kept:.1%} off, the goal is {MOST_OFF_KEPT:.0%}")
    print(f"peaks at most {off_peak:.1%} off, the goal is {MOST_OFF_PEAK:.0%}")
    sys.exit(bool(off_kept > MOST_OFF_KEPT or off_peak > MOST_OFF_PEAK))


if __name__ == "__main__":
    main()
