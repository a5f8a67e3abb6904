"""Whether what ppbench says is so: causes of idle time, memory, predicted steps, stragglers.

    python -m benchmarks.accuracy [attribution] [replicas] [memory] [prediction] [stragglers]

`attribution`: emulated 1F1B on 4 ranks has one cause of idle time at a time: a slow stage, a slow
link, jitter. `ppbench explain` must name it. Its true size comes from a walk over the settings.
`replicas`: of four replicas of four emulated ranks one computes 1.2 times as long, a gather takes
10 ms and a reduction 20 ms on each stage; what these add to the planned step is the truth.
`memory`: two replicas of llama-8m train under every policy; the peak is compared with the predicted
one, and what a rank keeps with the arithmetic of ZeRO. `prediction`: emulated ranks with drawn
costs run every schedule, and forwards alone; steps are compared with the predicted ones.
`stragglers`: made-up jobs of 64 replicas of 8 stages have one slow part each (`made_up_jobs`).
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from benchmarks.loop import ppbench, swept, within
from benchmarks.made_up_jobs import KINDS, Shape, make, named
from benchmarks.rows import Row, run
from engine.plan import collectives
from engine.plan.action import COMPUTE_OPS, SEND_OPS
from engine.plan.lower import lower
from engine.plan.messages import edge_of
from engine.plan.predict import Durations, timed
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.sharded_bytes import TrainingBytes, kept_bytes
from engine.run.emulation import Emulation
from ppbench.analysis.job_times import times_of
from ppbench.analysis.stragglers import stragglers_of
from ppbench.config.programs import lowered_of, planned_step_ns
from ppbench.config.reader import read_sweep
from ppbench.results import load

MS = 1_000_000
EMULATED = """\
name = "accuracy"
device = "emulated"
world_size = {ranks}
num_microbatches = 8
model.preset = "llama-tiny"
data.source = "synthetic"
measure = {{warmup_steps = 1, max_warmup_steps = 1, steps = {steps}}}
"""

# Attribution

LOWERED = lower(build_program("1f1b", 4, 8))
ACTIONS = [action for row in LOWERED.actions for action in row]
EVEN, SLOW, SPREAD = (20.0,) * 4, (20.0, 30.0, 20.0, 20.0), (22.5,) * 4
Explanation = Mapping[str, Any]
"""The JSON of `ppbench explain`."""


def saved(question: str) -> Callable[[Explanation], float]:
    """The idle time that an answer to a question saves."""

    def saved_ns(explanation: Explanation) -> float:
        answers = {one["question"]: one["idle_ns"] for one in explanation["what_if"]}
        idle: float = explanation["modelled"]["idle_ns"]
        return idle - float(answers.get(question, idle))

    return saved_ns


def part(name: str) -> Callable[[Explanation], float]:
    """A part of a step's idle time."""
    return lambda found: float(found["all_steps"][f"{name}_ns"]) / float(found["num_steps"])


@dataclass(frozen=True)
class Cause:
    """The words that `explain` must use, what it must find, and the settings."""

    words: str
    found_ns: Callable[[Explanation], float]
    thirds_ms: tuple[float, ...] = EVEN
    link_ms: float = 0.0  # of link 1-2
    jitter: float = 0.0
    without_ms: tuple[float, ...] = EVEN  # thirds without the cause

    @property
    def settings(self) -> str:
        """The emulated ranks of a sweep file."""
        thirds = "".join(f"{third}_ms = {list(self.thirds_ms)}\n" for third in "FIW")
        others = f"link_ms = [0, {self.link_ms}, 0]\njitter = {self.jitter}\n"
        return f"[emulated]\n{thirds}{others}"

    def true_ns(self, steps: Sequence[int]) -> float:
        """The idle time of these steps that it adds, by walks over the settings."""
        own = Emulation(durations_of(self.thirds_ms), self.jitter)
        added = [idle_ns(own, self.link_ms, step) for step in steps]
        return statistics.mean(added) - idle_ns(Emulation(durations_of(self.without_ms), 0.0), 0, 0)


def durations_of(thirds_ms: Sequence[float]) -> Durations:
    thirds = tuple(round(ms * MS) for ms in thirds_ms)
    return Durations(thirds, thirds, thirds)


def idle_ns(emulation: Emulation, link_ms: float, step: int) -> int:
    """Idle time of all ranks together in a step."""
    took = [
        emulation.duration_ns(action, step)
        if action.op in COMPUTE_OPS
        else round(link_ms * MS) * (action.op in SEND_OPS and min(edge_of(action)) == 1)
        for action in ACTIONS
    ]
    return sum(map(sum, timed(LOWERED, [took]).idle_ns))


STAGE = "stage imbalance: stage 1 takes 1.5"
MOVED = "exposed transfer: messages between stages 1 and 2"
VARIES = "jitter: an action's time varies"
FASTER_LINK = saved("link 1-2 like the others")
CAUSES = {
    "slow stage": Cause(STAGE, saved("stage 1 like the others"), SLOW),
    "link of 20 ms": Cause(MOVED, FASTER_LINK, link_ms=20.0),
    "jitter of 20 %": Cause(VARIES, part("jitter"), jitter=0.2),
    "slow stage, by the part": Cause(STAGE, part("imbalance"), SLOW, without_ms=SPREAD),
    "link of 5 ms": Cause(MOVED, FASTER_LINK, link_ms=5.0),
    "jitter of 10 %": Cause(VARIES, part("jitter"), jitter=0.1),
}


def attribution(asked: argparse.Namespace) -> Iterator[Row]:
    """Inject each cause, and compare what is found with the truth."""
    steps = 30 if asked.seconds else 5
    ratios, num_named, left_over = dict[str, float](), 0, list[float]()
    for name, cause in within(asked.seconds, CAUSES.items()):
        text = EMULATED.format(ranks=4, steps=steps) + 'schedule = "1f1b"\n' + cause.settings
        with tempfile.TemporaryDirectory() as folder:
            runs = swept(Path(folder), text)
            words = ppbench("explain", "last", "--format", "json", folder=Path(folder))
        explanation = json.loads(words)
        num_named += any(cause.words in sentence for sentence in explanation["sentences"])
        true_ns = cause.true_ns([row["step"] for row in explanation["by_step"]])
        ratios[name] = cause.found_ns(explanation) / true_ns
        parts = [column for column in PARTS_OF_IDLE if pd.notna(runs.iloc[0][column])]
        left_over.append(abs(runs.iloc[0][parts].sum() - runs.iloc[0]["bubble_mean"]))
    worst = max(abs(ratio - 1) for ratio in ratios.values())
    yield Row.exact("found off the truth by, at most", worst, note=f"of {len(ratios)} causes")
    yield Row.share("causes that are named", num_named, len(ratios))
    yield Row.exact("parts of idle time off its sum by, at most, points", 100 * max(left_over))
    for name, ratio in ratios.items():
        yield Row.exact(f"{name}: found over true idle time", ratio)


PARTS_OF_IDLE = [
    *("bubble_structure", "bubble_imbalance", "bubble_transfer", "bubble_collective"),
    *("bubble_skew", "bubble_jitter", "bubble_launch_gap", "bubble_between"),
]

# Replicas

ALIKE = ("emulated.replica_factors=[1.05, 1.05, 1.05, 1.05]",)
FREE = ("emulated.gather_ms=0", "emulated.reduce_ms=0")
REPLICAS = """\
replicas = 4
[emulated]
F_ms = 20
I_ms = 20
W_ms = 20
gather_ms = 10
reduce_ms = 20
replica_factors = [1.0, 1.0, 1.2, 1.0]
[grid]
schedule = {schedules}
sharding.policy = ["ddp", "zero3"]
"""


def replicas(asked: argparse.Namespace) -> Iterator[Row]:
    """Run emulated replicas, and compare step and causes with the plan."""
    schedules = '["1f1b", "interleaved_1f1b", "zbv"]' if asked.seconds else '["1f1b"]'
    text = EMULATED.format(ranks=4, steps=10 if asked.seconds else 3)
    off_step, off_causes = list[float](), list[float]()
    for _ in within(asked.seconds, range(3)):
        with tempfile.TemporaryDirectory() as folder:
            runs = swept(Path(folder), text + REPLICAS.format(schedules=schedules))
            file = Path(folder) / "sweep.toml"
            own, alike, free = (planned(file, *words) for words in ((), ALIKE, (*ALIKE, *FREE)))
        for _, row in runs.iterrows():
            key = row["schedule"], row["sharding_policy"]
            off_step.append(abs(row["step_ns"] / row["planned_step_ns"] - 1))
            added = {"collective": alike[key] - free[key], "skew": own[key] - alike[key]}
            for cause, true_ns in added.items():
                off_causes.append(abs(row[f"bubble_{cause}"] * row["step_ns"] / true_ns - 1))
    note = f"of {len(off_step)} runs"
    yield Row.exact("causes found off the truth by, at most", max(off_causes), note=note)
    yield Row.exact("step off the planned one by, at most", max(off_step), note=note)


def planned(file: Path, *overrides: str) -> dict[tuple[str, str], int]:
    """The planned step of each case of a sweep file, in ns, by schedule and policy."""
    cases = [case for case, _ in read_sweep(file, list(overrides), "emulated").cases]
    return {
        (case.schedule, case.sharding_policy): planned_step_ns(case, lowered_of(case))
        for case in cases
    }


# Memory

POLICIES: Mapping[str, collectives.CollectivePolicy] = {
    "none": collectives.NoCollectives(),
    "ddp": collectives.DataParallel(),
    "zero1": collectives.Zero1(),
    "zero2": collectives.Zero2(every_backward=False),
    "zero3": collectives.Zero3(),
    "torch": collectives.TorchWindow(),
}
TRAINED = """\
name = "memory"
device = "cpu"
replicas = 2
schedule = "1f1b"
seq_len = 128
num_microbatches = 4
model.preset = "llama-8m"
data.source = "synthetic"
measure = {{warmup_steps = 1, max_warmup_steps = 1, steps = 1}}
[grid]
world_size = {sizes}
sharding.policy = {policies}
[[override]]
where.sharding.policy = "zero2"
set.sharding.every_backward = false
"""


def memory(asked: argparse.Namespace) -> Iterator[Row]:
    """Train under each policy, and compare what a rank holds with prediction and arithmetic."""
    sizes, policies = ([1, 2], list(POLICIES)) if asked.seconds else ([1], ["zero2"])
    with tempfile.TemporaryDirectory() as folder:
        text = TRAINED.format(sizes=sizes, policies=json.dumps(policies))
        runs = swept(Path(folder), text)
        results = load(Path(folder) / "results")
        ranks, levels = results.ranks, results.memory
    keys = ["run_id", "replica", "rank"]
    kept = levels.sort_values("time_ns").groupby(keys)["num_bytes"].last().rename("kept")
    ranks = ranks.join(kept, on=keys).merge(runs[["run_id", "sharding_policy"]])
    off_peak = (ranks["predicted_peak_memory_bytes"] / ranks["peak_memory_bytes"] - 1).abs().max()
    should = []
    for num, policy in zip(ranks["num_parameters"], ranks["sharding_policy"], strict=True):
        of_stage = TrainingBytes(4 * num, 4 * num, 2 * 4 * num)  # float32, and two states of Adam
        should.append(sum(kept_bytes(of_stage, POLICIES[policy], 2)))
    off_kept = (ranks["kept"] / np.array(should) - 1).abs().max()
    note = f"of {len(ranks)} ranks under {len(policies)} policies"
    yield Row.exact("peak off the predicted one by, at most", float(off_peak), note=note)
    yield Row.exact("bytes kept off the arithmetic by, at most", float(off_kept), note=note)


# Prediction


def prediction(asked: argparse.Namespace) -> Iterator[Row]:
    """Run schedules on emulated ranks with drawn costs and links, then their forwards alone."""
    every, few = list(SCHEDULES), ["1f1b", "looped_bfs", "zbv"]
    modes = {"train": every if asked.seconds else few[::2], "evaluate": few}
    off: dict[str, list[float]] = {mode: [] for mode in modes}
    for seed in within(asked.seconds, count()):
        for mode, schedules in modes.items():
            draw = random.Random(seed)
            thirds = "FIW" if mode == "train" else "F"
            lines = "".join(f"{third}_ms = {draw.uniform(4, 16):.2f}\n" for third in thirds)
            text = f'mode = "{mode}"\n' + EMULATED.format(ranks=draw.choice([2, 4]), steps=8)
            text += f"[emulated]\n{lines}link_ms = {draw.uniform(0, 3):.2f}\n"
            text += f"[grid]\nschedule = {json.dumps(schedules)}\n"
            if "seq1f1b" in schedules:
                text += "[[override]]\nwhere = {schedule = 'seq1f1b'}\nset = {slices.number = 4, "
                text += f"slices.attention = {draw.uniform(0, 0.5):.2f}}}\n"
            with tempfile.TemporaryDirectory() as folder:
                runs = swept(Path(folder), text)
            off[mode] += list((runs["step_ns"] / runs["planned_step_ns"] - 1).abs())
    for mode, found in off.items():
        yield Row.exact(f"step off by, at most ({mode})", max(found), note=f"of {len(found)} runs")


# Stragglers

JOB_POLICIES: list[collectives.CollectivePolicy] = [
    collectives.DataParallel(),
    collectives.Zero2(),
    collectives.Zero3(1, 0),
]


def stragglers(asked: argparse.Namespace) -> Iterator[Row]:
    """Make up jobs with a slow part each, and count those whose part is named."""
    is_right, slowness_off, cost_off = list[bool](), list[float](), list[float]()
    for seed in within(asked.seconds, range(600), fewest=6):
        rng = np.random.default_rng(seed)
        shape = Shape(
            schedule=str(rng.choice(["1f1b", "afab", "zb_h1"])),
            microbatches=int(rng.choice([8, 12, 16])),
            policy=JOB_POLICIES[rng.integers(len(JOB_POLICIES))],
            noise=float(rng.uniform(0.005, 0.04)),
        )
        job = make(shape, KINDS[seed % len(KINDS)], rng)
        found = stragglers_of(times_of(job.walk.spans(), shape.lowered, shape.replicas))
        is_right.append(named(found.cause) == job.culprit)
        slowness_off.append(abs(found.slowness / job.slowness - 1))
        cost_off.append(abs((found.cause.share if found.cause else 0) - job.cost))
        if not is_right[-1]:
            print(f"job {seed}: {job.culprit} was called {named(found.cause)}")
    yield Row.share("jobs whose slow part is named", sum(is_right), len(is_right))
    yield Row.exact("slowdown S off by, at most", max(slowness_off))
    yield Row.exact("cost off by, in shares of the step, at most", max(cost_off))


PARTS = {"attribution": attribution, "replicas": replicas, "memory": memory}
PARTS |= {"prediction": prediction, "stragglers": stragglers}

if __name__ == "__main__":
    run("accuracy", __doc__, PARTS)
