"""Tests whether emulated replicas take the planned step, and whether idle time names the causes.

Four replicas of a pipeline of four ranks are sixteen sleeping processes; a gather takes 10 ms and a
reduction 20 ms on each stage, and one replica's computations 1.2 times as long. The command line
runs them as a user would, and stores the planned step beside the measured one. What collectives
and the slow replica add to the plan is what the run's idle time is to name:

    exposed collective   the step with replicas alike, less that with free collectives as well
    replica skew         the step, less that with replicas alike

    python -m benchmarks.replicas [--rounds 3]

On a quiet machine: sixteen processes sleep on few cores.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.attribution import ppbench
from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from ppbench.config.case import Case
from ppbench.config.programs import lowered_of, planned_step_ns

MOST_OFF, MOST_OFF_CAUSE = 0.05, 0.10
FACTORS = (1.0, 1.0, 1.2, 1.0)
SWEEP = f"""
name = "replicas"
device = "emulated"
replicas = 4
world_size = 4
num_microbatches = 8
model.preset = "llama-tiny"
data.source = "synthetic"
measure = {{warmup_steps = 1, steps = 10}}
[emulated]
F_ms = 20
I_ms = 20
W_ms = 20
gather_ms = 10
reduce_ms = 20
replica_factors = {list(FACTORS)}
[grid]
schedule = ["1f1b", "interleaved_1f1b", "zbv"]
sharding.policy = ["ddp", "zero2", "zero3"]
"""
COLUMNS = (
    *("schedule", "stages_per_rank", "sharding_policy", "step_ns", "planned_step_ns"),
    *("bubble_mean", "bubble_collective", "bubble_skew"),
)
CAUSES = ("bubble_collective", "bubble_skew")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=3, help="launches of all nine cases")
    settings, surroundings = options.parse_args(), read_surroundings()
    steps_off, causes_off = list[float](), list[float]()
    taken: dict[str, list[float]] = {}
    print("in ms, measured / planned")
    print(f"{'schedule':18} {'sharding':8} {'step':>21} {'exposed collective':>21} {'skew':>21}")
    for _ in range(settings.rounds):
        runs = launched()
        steps_off.append(max(_off(run["step_ns"] / run["planned_step_ns"]) for run in runs))
        causes_off.append(max(max(map(_off, _named(run, taken))) for run in runs))
    ratios = [
        Ratio(f"{what} off by, at most", tuple(off), goal=Goal(at_most=most))
        for what, off, most in (
            ("step", steps_off, MOST_OFF),
            ("exposed collective and replica skew", causes_off, MOST_OFF_CAUSE),
        )
    ]
    figures = [Figure(name, tuple(values), "ms") for name, values in taken.items()]
    write("replicas", settings, surroundings, ratios, figures)


def launched() -> list[dict[str, Any]]:
    """The runs of one launch of all cases."""
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "replicas.toml"
        file.write_text(SWEEP)
        ppbench("sweep", str(file), "--results", name, "--no-report")
        listed = ppbench(
            "ls", "--results", name, "--format", "json", "--columns", ",".join(COLUMNS)
        )
    runs: list[dict[str, Any]] = json.loads(listed)["rows"]
    return runs


def _off(ratio: float) -> float:
    return abs(ratio - 1)


def _named(run: Mapping[str, Any], taken: dict[str, list[float]]) -> list[float]:
    """Print and keep a run's figures; returns what is named of each cause over its true size."""
    step_ms, planned_ms = run["step_ns"] / 1e6, run["planned_step_ns"] / 1e6
    named_ms = [run[cause] * step_ms for cause in CAUSES]
    pairs = [(step_ms, planned_ms), *zip(named_ms, _true_ms(run), strict=True)]
    for what, pair in zip(("step", "exposed collective", "replica skew"), pairs, strict=True):
        for kind, ms in zip(("measured", "planned"), pair, strict=True):
            name = f"{run['schedule']}, {run['sharding_policy']}, {what}, {kind}"
            taken.setdefault(name, []).append(ms)
    cells = " ".join(_cell(*pair) for pair in pairs)
    print(f"{run['schedule']:18} {run['sharding_policy']:8} {cells}", flush=True)
    return [measured / planned for measured, planned in pairs[1:]]


def _cell(measured: float, planned: float) -> str:
    return f"{measured:7.1f} /{planned:6.1f} {measured / planned:5.3f}"


def _true_ms(run: Mapping[str, Any]) -> tuple[float, float]:
    """What collectives, and then the slow replica, add to the planned step."""
    own = Case(
        device="emulated",
        schedule=run["schedule"],
        stages_per_rank=int(run["stages_per_rank"]),
        sharding_policy=run["sharding_policy"],
        replicas=4,
        world_size=4,
        num_microbatches=8,
        emulated_F_ms=(20.0,),
        emulated_I_ms=(20.0,),
        emulated_W_ms=(20.0,),
        emulated_gather_ms=(10.0,),
        emulated_reduce_ms=(20.0,),
        emulated_replica_factors=FACTORS,
    )
    alike = replace(own, emulated_replica_factors=(mean(FACTORS),) * 4)
    free = replace(alike, emulated_gather_ms=(), emulated_reduce_ms=())
    steps = [planned_step_ns(case, lowered_of(case)) / 1e6 for case in (free, alike, own)]
    return steps[1] - steps[0], steps[2] - steps[1]


if __name__ == "__main__":
    main()
