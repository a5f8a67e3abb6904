"""Tests whether emulated replicas take the planned step, and whether idle time names the causes.

Four replicas of a pipeline of four ranks are sixteen sleeping processes; a gather takes 10 ms and a
reduction 20 ms on each stage, and one replica's computations 1.2 times as long. The command line
runs them as a user would, and stores the planned step beside the measured one. What collectives
and the slow replica add to the plan is what the run's idle time is to name:

    exposed collective   the step with replicas alike, less that with free collectives as well
    replica skew         the step, less that with replicas alike

    python -m benchmarks.replicas

On a quiet machine: sixteen processes sleep on few cores.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

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
    settings, surroundings = parser(__doc__).parse_args(), read_surroundings()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = folder / "replicas.toml"
        file.write_text(SWEEP)
        ppbench("sweep", str(file), "--results", str(folder), "--no-report")
        listed = ppbench(
            *("ls", "--results", str(folder), "--format", "json", "--columns", ",".join(COLUMNS))
        )
    steps_off, causes_off, figures = list[float](), list[float](), list[Figure]()
    print("in ms, measured / planned")
    print(f"{'schedule':18} {'sharding':8} {'step':>21} {'exposed collective':>21} {'skew':>21}")
    for run in json.loads(listed):
        step_ms, planned_ms = run["step_ns"] / 1e6, run["planned_step_ns"] / 1e6
        steps_off.append(abs(step_ms / planned_ms - 1))
        name = f"{run['schedule']}, {run['sharding_policy']}"
        figures += [
            Figure(f"{name}, {what}", (ms,), "ms")
            for what, ms in (("step", step_ms), ("planned", planned_ms))
        ]
        cells = [_cell(step_ms, planned_ms)]
        for cause, true_ms in zip(CAUSES, _true_ms(run), strict=True):
            named_ms = run[cause] * step_ms
            causes_off.append(abs(named_ms / true_ms - 1))
            cells.append(_cell(named_ms, true_ms))
        print(f"{run['schedule']:18} {run['sharding_policy']:8} {' '.join(cells)}", flush=True)
    ratios = [
        Ratio(f"{what} off by, at most", (max(off),), goal=Goal(at_most=most))
        for what, off, most in (
            ("step", steps_off, MOST_OFF),
            ("exposed collective and replica skew", causes_off, MOST_OFF_CAUSE),
        )
    ]
    write("replicas", settings, surroundings, ratios, figures)


def _cell(measured: float, planned: float) -> str:
    return f"{measured:7.1f} /{planned:6.1f} {measured / planned:5.3f}"


def _true_ms(run: Mapping[str, str]) -> tuple[float, float]:
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
