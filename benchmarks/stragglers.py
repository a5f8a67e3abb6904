"""Whether stragglers of made-up jobs are named, how well their slowness is known, and how soon.

    python -m benchmarks.stragglers [--jobs 600] [--rounds 3]

Jobs have 64 replicas of 8 stages, 8 to 16 microbatches and 3 steps, and one of these causes, each
equally often: a slow worker, stage, replica or link, unequal sequences, or nothing. Schedules and
policies of collectives, noise (0.5 to 4 % of a duration), place and size of what is injected are
random; its size is raised until it costs at least 3 % of the step. The truth comes from
`benchmarks.made_up_jobs`, which shares no code with the analysis.

Then a job of 512 ranks and 50 steps is stored, and analysed from there by the command line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks.made_up import rows
from benchmarks.made_up_jobs import KINDS, Job, Shape, make, named
from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.surroundings import read_surroundings
from engine.plan.collectives import CollectivePolicy, DataParallel, Zero2, Zero3
from engine.plan.program import to_json
from ppbench.analysis.job_times import times_of
from ppbench.analysis.stragglers import stragglers_of
from ppbench.config.case import Case, Measure
from ppbench.explanation import stored_job
from ppbench.store import Store

LONG = Shape(microbatches=16, num_steps=50)
POLICIES: list[CollectivePolicy] = [DataParallel(), Zero2(), Zero3(1, 0)]
GOAL_S = 10
PPBENCH = [sys.executable, "-c", "from ppbench.cli.app import main; main()"]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--jobs", type=int, default=600)
    options.add_argument("--rounds", type=int, default=3)
    settings, surroundings = options.parse_args(), read_surroundings()
    ratios = list(campaign(settings.jobs))
    with tempfile.TemporaryDirectory(prefix="ppbench-stragglers-") as folder:
        store_job(Path(folder))
        took = [seconds(Path(folder)) for _ in range(settings.rounds)]
    figures = [Figure(name, tuple(one[name] for one in took), "s") for name in took[0]]
    whole = tuple(one["whole command"] / GOAL_S for one in took)
    name = "512 ranks, 50 steps: the command over 10 s"
    ratios.append(Ratio(name, whole, goal=Goal(at_most=1)))
    write("stragglers", settings, surroundings, ratios, figures)


def campaign(num_jobs: int) -> Iterator[Ratio]:
    """The share of jobs whose cause is named, and the distance of S and of the cost from truth."""
    is_right, slowness_off, cost_off = [], [], []
    for seed in range(num_jobs):
        shape, job = drawn(seed)
        found = stragglers_of(times_of(job.walk.spans(), shape.lowered, shape.replicas))
        is_right.append(named(found.cause) == job.culprit)
        slowness_off.append(abs(found.slowness / job.slowness - 1))
        cost_off.append(abs((found.cause.share if found.cause else 0) - job.cost))
        if not is_right[-1]:
            print(f"job {seed}: {job.culprit} was called {named(found.cause)}")
    yield Ratio(
        "jobs named right", (sum(is_right) / num_jobs,), goal=Goal(at_least=0.99, is_exact=True)
    )
    yield Ratio("S off by, at most", (max(slowness_off),), goal=Goal(at_most=0.01, is_exact=True))
    yield Ratio("cost off by, in shares of the step, at most", (max(cost_off),))


def drawn(seed: int) -> tuple[Shape, Job]:
    """A job of the campaign."""
    rng = np.random.default_rng(seed)
    shape = Shape(
        schedule=str(rng.choice(["1f1b", "afab", "zb_h1"])),
        microbatches=int(rng.choice([8, 12, 16])),
        policy=POLICIES[rng.integers(len(POLICIES))],
        noise=float(rng.uniform(0.005, 0.04)),
    )
    return shape, make(shape, KINDS[seed % len(KINDS)], rng)


def store_job(results: Path) -> None:
    """Store a job with a slow worker as a run."""
    job = make(LONG, "worker", np.random.default_rng(0))
    case = Case(world_size=8, num_microbatches=16, replicas=LONG.replicas, device="emulated")
    program = to_json(LONG.lowered)
    run = {**next(rows(1)), **case.settings(), **Measure().settings(), "program": program}
    spans = job.walk.spans().assign(waiting_ns=0)
    Store(results).write_run({**run, "status": "ok"}, {"spans": spans})


def seconds(results: Path) -> dict[str, float]:
    """The time of each part in this process, and of the whole command in one of its own."""
    took, began = {}, time.perf_counter()

    def lap(name: str) -> None:
        nonlocal began
        took[name] = time.perf_counter() - began
        began = time.perf_counter()

    _, spans, lowered, replicas, following = stored_job(Store(results), "last")
    lap("reading the spans")
    times = times_of(spans, lowered, replicas, following)
    lap("matching them with the program")
    stragglers_of(times)
    lap("replaying")
    command = [*PPBENCH, "stragglers", "last", "--results", str(results), "--format", "json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lap("whole command")
    assert len(json.loads(done.stdout)["by_worker"]) == LONG.replicas * LONG.ranks
    return took


if __name__ == "__main__":
    main()
