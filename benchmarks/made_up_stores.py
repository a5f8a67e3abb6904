"""Made-up stores: of a nightly sweep over many commits, and of pairs that commands judge.

A nightly store has a few hundred cases, each measured many times. A store of pairs has 2 to 4
schedules in one or two settings, at two commits, with 1 to 8 launches each, made in turns or alone,
in one session or two; some are disturbed, missing or carry a caution. Schedules are equally fast or
not, and so are commits. Some have a budget, or launches of an earlier commit that tell of noise.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from engine.plan.action import Op
from engine.plan.spans import Lane, Span
from ppbench.analysis.running import Following
from ppbench.commits.check import check
from ppbench.commits.comparison import compare
from ppbench.comparison.lines import Comparison
from ppbench.config.case import Case, Measure
from ppbench.display.cases import varying_axes
from ppbench.errors import UsageError
from ppbench.judge.verdicts import SPEED, Verdict
from ppbench.report.pages.judgement import judge
from ppbench.store import Condition, Store
from ppbench.store.parquet import row_as_table, storable, write_parquet

TOKENS, BEGAN = 4096, pd.Timestamp("2026-01-01T00:00:00Z")
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


def row_of_run(case: Case, at: pd.Timestamp, number: int, step_ns: float) -> dict[str, object]:
    """The columns that every run has."""
    return {
        "run_id": f"{at:%Y%m%dT%H%M%S}000-{number:06x}",
        "sweep_file": "made_up.toml",
        "case_id": case.case_id,
        "launch": 0,
        "status": "ok",
        "created_at": at.isoformat(),
        **case.settings(),
        **Measure().settings(),
        "step_ns": step_ns,
        SPEED: TOKENS / step_ns * 1e9,
        "last_loss": 4.0,
        "branch": "main",
        "is_dirty": False,
        "fingerprint": "f1f2f3",
        "environment": json.dumps({"cpu": "made up", "num_cores": 2, "gpus": [], "n": "x" * 200}),
        "ppbench_version": "0.1.0",
    }


def rows_of_runs(num_runs: int, seed: int = 0) -> Iterator[dict[str, object]]:
    """Rows of `runs` of a nightly sweep, oldest first."""
    rng, every = random.Random(seed), cases()
    program = json.dumps([[f"{m}F{s}" for m in range(8)] for s in range(8)] * 6)
    for number in range(num_runs):
        at, case = BEGAN + pd.Timedelta(seconds=97 * number), every[number % len(every)]
        commit = f"{number // RUNS_PER_COMMIT:040x}"
        yield row_of_run(case, at, number, rng.lognormvariate(18, 0.1)) | {
            "sweep_id": commit[-12:],
            "sweep_name": "nightly",
            "resume_key": f"{rng.getrandbits(48):012x}",
            "attempt": 1,
            "status": "ok" if rng.random() < 0.98 else "oom",
            "optimizer_ns": rng.lognormvariate(16, 0.1),
            "bubble_fraction": rng.random(),
            "bubble_fraction_theory": 0.25,
            "peak_memory_bytes": rng.randrange(2**28, 2**30),
            "num_parameters": 8_000_000,
            "num_stages": case.world_size,
            "following": Following((0,) * case.world_size, meets=False).as_json(),
            "op_costs_ns": json.dumps({"F": [rng.random() * 1e7 for _ in range(8)]}),
            "cautions": rng.choice(["", "few_steps", "noisy_steps,few_steps"]),
            "program": program,
            "commit": commit,
        }


def spans_of_run(run_id: str) -> pd.DataFrame:
    """The rows of one run in `spans`, the largest table."""
    numbers = range(SPANS_PER_RUN)
    values = [
        Span(n % 5, n % 4, Lane.COMPUTE, n % 4, Op.F, n % 8, n * 1000, n * 1000 + 900, 0)
        for n in numbers
    ]
    return pd.DataFrame(values).assign(run_id=run_id)


SCHEDULES = ("afab", "1f1b", "zb_h1", "interleaved_1f1b")
COMMITS = {"earlier": "ea51" * 10, "old": "c0ffee" * 6 + "c0ff", "new": "decade" * 6 + "deca"}
SETTINGS: Mapping[str, tuple[int, int]] = {
    "seq_len": (64, 128),
    "num_microbatches": (4, 8),
    "world_size": (2, 4),
}
CAUTIONS = ("busy_machine", "behind_plan", "oversubscribed", "not_finite")
DIFFERENCES = (0.0, 0.01, 0.03, 0.08)
NUM_ROUNDS = 8
Said = Mapping[tuple[str, str], Verdict]
"""The verdict of each pair, a head and its base."""


def make_store_of_pairs(draw: np.random.Generator, folder: Path) -> None:
    """Write a store of sweeps of two commits, or three."""
    schedules = SCHEDULES[: draw.integers(2, 5)]
    axis = str(draw.choice(list(SETTINGS)))
    values = SETTINGS[axis][: draw.integers(1, 3)]
    num_launches = int(draw.integers(1, 9))
    in_turns, has_two_sessions, has_budget, has_earlier = draw.random(4) < (0.5, 0.3, 0.2, 0.3)
    disturbed, missing, cautioned = draw.choice((0.0, 0.2), 3, p=(0.6, 0.4))
    cautioned *= draw.choice((1, 3))
    spread = draw.choice((0.003, 0.01, 0.03))
    gains = {name: draw.choice(DIFFERENCES) for name in schedules}
    losses = {"earlier": 0.0, "old": 0.0, "new": draw.choice(DIFFERENCES)}
    peaks = {name: int(draw.integers(80, 120)) * 2**20 for name in schedules}
    tables = []
    for number, sweep in enumerate(losses):
        if sweep == "earlier" and not has_earlier:
            continue
        for launch in range(12 if sweep == "earlier" else num_launches):
            hours = 20 * (number > 0)
            hours += 12 if has_two_sessions and launch >= num_launches / 2 else 0
            for place, schedule in enumerate(schedules):
                for value in values:
                    if launch and draw.random() < missing:
                        continue
                    settings: dict[str, Any] = {"schedule": schedule, axis: value}
                    case = Case(**settings)
                    if schedule.startswith("interleaved"):
                        case = replace(case, stages_per_rank=2)
                    at = BEGAN + pd.Timedelta(
                        hours=hours, minutes=launch, seconds=10 * place + number
                    )
                    slow = np.log1p(draw.uniform(0.1, 0.35)) if draw.random() < disturbed else 0.0
                    log = np.log1p(gains[schedule]) - np.log1p(losses[sweep]) - slow
                    log += draw.normal(0, spread)
                    turns = 1000 * np.exp(log + draw.normal(0, 0.02, NUM_ROUNDS))
                    speed = float(np.median(turns))
                    row = row_of_run(case, at, value, TOKENS / speed * 1e9) | {
                        "sweep_id": sweep,
                        "sweep_name": sweep,
                        "launch": launch,
                        "measure_resolution": 0.02,
                        "measure_budget": "10m" if has_budget else "",
                        "peak_memory_bytes": peaks[schedule],
                        "cautions": str(draw.choice(CAUTIONS)) if draw.random() < cautioned else "",
                        "commit": COMMITS[sweep],
                    }
                    if in_turns:  # the commits that are compared took turns too
                        rounds = {"round": list(range(NUM_ROUNDS)), SPEED: turns.tolist()}
                        rounds["step_ns"] = (TOKENS / turns * 1e9).tolist()
                        start = f"{number > 0}-{launch}-{value}"
                        row |= {"process_start": start, "rounds": json.dumps(rounds)}
                    tables.append(row_as_table(storable(row), "runs"))
    write_parquet(pa.concat_tables(tables), folder / "runs" / "compacted" / "all.parquet")


def said_of_pairs(folder: Path) -> Iterator[tuple[str, Said, Said]]:
    """Yield what two commands say of the pairs of a store, with their names."""
    store = Store(folder)
    runs = store.runs(where=[Condition("sweep_id", "=", ("new",))])
    judged = judge(runs, varying_axes(runs), [store])
    report: dict[tuple[str, str], Verdict] = {}
    for judgement in judged.judgements:
        for head, base in itertools.permutations(range(len(judgement.arms)), 2):
            change = judgement.change(head, base)
            pair = judgement.arms[head], judgement.arms[base]
            report[pair] = Verdict.open if change is None else change.verdict
    planned = judge(runs, varying_axes(runs), [store], are_ranks_free=True)
    of_plan = {pair: planned.verdict(*pair) for pair in report if pair in planned.pairs}
    yield "report, plan", report, of_plan

    def compared(*sides: str, **how: Any) -> Said:
        try:
            return said_by(compare(*sides, metrics=[SPEED], results=folder, **how))
        except UsageError:  # all runs but those of one value have failed or are missing
            return {}

    across, every = (
        compared(across="schedule", runs=["new"], all_pairs=is_all) for is_all in (False, True)
    )
    yield "report, compare --across --all-pairs", report, every
    yield "compare --across with and without --all-pairs", every, across
    gate = said_by(check(base="old", head="new", results=folder).comparison)
    yield "compare, check of two commits", compared("old", "new"), gate


def said_by(result: Comparison) -> Said:
    """Return what a comparison says of the throughput of each of its pairs."""
    lines = [line for line in result.lines if line.metric.name == SPEED]
    keys = [(line.series.head_key[0], line.series.base_key[0]) for line in lines]
    return {key: line.change.verdict for key, line in zip(keys, lines, strict=True)}
