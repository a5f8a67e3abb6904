"""A store of made-up runs: a few hundred cases, each measured many times at many commits."""

from __future__ import annotations

import datetime as dt
import json
import random
from collections.abc import Iterator

import pandas as pd

from engine.plan.action import Op
from engine.plan.spans import Lane, Span
from ppbench.analysis.running import Following
from ppbench.config.case import Case, Measure

RUNS_PER_COMMIT = 200
SPANS_PER_RUN = 120


def cases() -> list[Case]:
    """The cases of a nightly sweep: schedules by ranks by microbatches by lengths."""
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
            "following": Following((0,) * every[case].world_size, meets=False).as_json(),
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
    """The rows of one run in `spans`, the largest table."""
    numbers = range(SPANS_PER_RUN)
    values = [
        Span(n % 5, n % 4, Lane.COMPUTE, n % 4, Op.F, n % 8, n * 1000, n * 1000 + 900, 0)
        for n in numbers
    ]
    return pd.DataFrame(values).assign(run_id=run_id)
