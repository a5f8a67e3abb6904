"""Tests whether trained replicas hold the bytes that arithmetic says, and peak where predicted.

    python -m benchmarks.replica_memory

Two replicas of llama-8m, of one rank and of two, are trained on the CPU by the command line, as a
user would. What a rank keeps at the end of a step is compared with the arithmetic of ZeRO
(`engine.plan.sharded_bytes`), its peak with the prediction that the store has beside it.
"""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

import pandas as pd

import ppbench as library
from benchmarks.attribution import ppbench
from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
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
    settings, surroundings = parser(__doc__).parse_args(), read_surroundings()
    rows = trained()
    off_kept, off_peak, figures = list[float](), list[float](), list[Figure]()
    for world_size, policy in itertools.product((1, 2), POLICIES):
        those = rows[world_size, policy]
        held = arithmetic(those, POLICIES[policy])
        peak = those["predicted_peak_memory_bytes"] / those["peak_memory_bytes"]
        off_kept.append(float((those["kept"] / held - 1).abs().max()))
        off_peak.append(float((peak - 1).abs().max()))
        found = {
            "kept": those["kept"],
            "kept, by arithmetic": held,
            "peak": those["peak_memory_bytes"],
            "predicted peak": those["predicted_peak_memory_bytes"],
        }
        figures += [
            Figure(f"{policy}, {world_size} ranks: {what}", (float(each.mean()) / MIB,), "MiB")
            for what, each in found.items()
        ]
    ratios = [
        Ratio(f"{what} off by, at most", (max(off),), goal=Goal(at_most=at_most, is_exact=True))
        for what, off, at_most in (
            ("bytes kept", off_kept, MOST_OFF_KEPT),
            ("peak", off_peak, MOST_OFF_PEAK),
        )
    ]
    write("replica_memory", settings, surroundings, ratios, figures)


def trained() -> dict[tuple[int, str], pd.DataFrame]:
    """The rows of ranks of a sweep, with what each keeps, by ranks and policy."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "replica-memory.toml"
        file.write_text(SWEEP)
        ppbench("sweep", str(file), "--results", name, "--no-report")
        results = library.load(name)
        runs, ranks, levels = results.runs, results.ranks, results.memory
    keys = ["run_id", "replica", "rank"]
    last = levels.sort_values("time_ns").groupby(keys)["num_bytes"].last().rename("kept")
    rows = ranks.join(last, on=keys).merge(runs[["run_id", "sharding_policy", "world_size"]])
    by_case = rows.groupby(["world_size", "sharding_policy"])
    return {(int(str(key[0])), str(key[1])): those for key, those in by_case}


def arithmetic(ranks: pd.DataFrame, policy: CollectivePolicy) -> pd.Series:
    """The bytes that each of some ranks should keep."""
    whole = (ranks["num_parameters"] * PARAMETER_BYTES).tolist()
    stages = [TrainingBytes(n, n, ADAM_STATES * n) for n in whole]
    held = [sum(kept_bytes(stage, policy, REPLICAS)) for stage in stages]
    return pd.Series(held, index=ranks.index)


if __name__ == "__main__":
    main()
