"""Tests whether the attribution finds an injected cause of idle time, and its size.

Emulated 1F1B on 4 ranks with 8 microbatches, with one cause at a time, is run by the command line
as a user would run it. The true size comes from a replay of the settings, without any measurement.
A slow stage and a slow link are judged by the time that is saved when they are as fast as the
others, jitter by its share.

Run on a quiet machine: python -m benchmarks.attribution
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from types import MappingProxyType
from typing import Any

from engine.plan.action import COMPUTE_OPS, SEND_OPS
from engine.plan.lower import lower
from engine.plan.messages import edge_of
from engine.plan.predict import Durations, timed
from engine.plan.schedules.registry import build_program
from engine.run.emulation import Emulation

MS = 1_000_000
Explanation = dict[str, Any]
"""The JSON of `ppbench explain`."""
NUM_RANKS, NUM_MICROBATCHES, STEPS = 4, 8, 30
LOWERED = lower(build_program("1f1b", NUM_RANKS, NUM_MICROBATCHES))
ACTIONS = [action for row in LOWERED.actions for action in row]
SWEEP = """
name = "injected"
device = "emulated"
world_size = 4
num_microbatches = 8
model.preset = "llama-tiny"
data.source = "synthetic"
measure.steps = {steps}
[emulated]
{emulated}
"""


@dataclass(frozen=True)
class Cause:
    """The settings, the words that `ppbench explain` must use, the idle time it must find (ns)."""

    emulated: Mapping[str, object]
    words: str
    size_ns: Callable[[Explanation], float]
    truth_ns: Callable[[Sequence[int]], float]  # takes the measured steps


def idle_ns(
    thirds_ms: tuple[float, ...],
    link_ms: Mapping[int, float],
    jitter: float = 0,
    steps: Sequence[int] = (0,),
) -> float:
    """Idle time of all ranks together, mean over steps."""
    thirds = tuple(round(ms * MS) for ms in thirds_ms)
    plan = Emulation(Durations(thirds, thirds, thirds), jitter)
    sends = [action for action in ACTIONS if action.op in SEND_OPS]
    moving = {send: round(link_ms.get(min(edge_of(send)), 0) * MS) for send in sends}

    def of_step(step: int) -> int:
        took = [
            plan.duration_ns(a, step) if a.op in COMPUTE_OPS else moving.get(a, 0) for a in ACTIONS
        ]
        return sum(map(sum, timed(LOWERED, [took]).idle_ns))

    return mean(map(of_step, steps))


def saved_ns(question: str) -> Callable[[Explanation], float]:
    """The time that the model saves without the slow stage or link."""

    def saved(explanation: Explanation) -> float:
        answers = {answer["question"]: answer["idle_ns"] for answer in explanation["what_if"]}
        idle_ns: float = explanation["modelled"]["idle_ns"]
        return idle_ns - float(answers.get(question, idle_ns))

    return saved


def part_ns(part: str) -> Callable[[Explanation], float]:
    def per_step(explanation: Explanation) -> float:
        return float(explanation["all_steps"][f"{part}_ns"]) / float(explanation["num_steps"])

    return per_step


def more_than(
    usual: float, link_ms: Mapping[int, float] = MappingProxyType({}), jitter: float = 0
) -> Callable[[Sequence[int]], float]:
    """Idle time that a slow link or jitter adds when all stages are equal."""
    return lambda steps: idle_ns(EVEN, link_ms, jitter, steps) - usual


EVEN = (20.0,) * NUM_RANKS
SLOW = (20.0, 30.0, 20.0, 20.0)
SPREAD = (22.5,) * NUM_RANKS
NO_LINKS: dict[int, float] = {}


def thirds(ms: object) -> dict[str, object]:
    return {"F_ms": ms, "I_ms": ms, "W_ms": ms}


def causes() -> dict[str, Cause]:
    usual = idle_ns(EVEN, NO_LINKS)
    by_title = {
        "stage 1 takes 1.5 times as long": Cause(
            thirds(list(SLOW)),
            "stage imbalance: stage 1 takes 1.5",
            saved_ns("stage 1 like the others"),
            lambda _: idle_ns(SLOW, NO_LINKS) - usual,
        ),
        "the same, by the part": Cause(
            thirds(list(SLOW)),
            "stage imbalance: stage 1 takes 1.5",
            part_ns("imbalance"),
            lambda _: idle_ns(SLOW, NO_LINKS) - idle_ns(SPREAD, NO_LINKS),
        ),
    }
    for ms in (5.0, 20.0):
        by_title[f"link 1-2 takes {ms:g} ms longer"] = Cause(
            {**thirds(20.0), "link_ms": [0, ms, 0]},
            "exposed transfer: messages between stages 1 and 2",
            saved_ns("link 1-2 like the others"),
            more_than(usual, link_ms={1: ms}),
        )
    for jitter in (0.1, 0.2):
        by_title[f"durations vary by {jitter:.0%}"] = Cause(
            {**thirds(20.0), "jitter": jitter},
            "jitter: an action's time varies",
            part_ns("jitter"),
            more_than(usual, jitter=jitter),
        )
    return by_title


def explained(cause: Cause, folder: Path) -> Explanation:
    """Run the sweep, and return the JSON of `ppbench explain`."""
    lines = "\n".join(f"{key} = {json.dumps(value)}" for key, value in cause.emulated.items())
    file = folder / "injected.toml"
    file.write_text(SWEEP.format(steps=STEPS, emulated=lines))
    ppbench("sweep", str(file), "--rerun", "--results", str(folder), "--reports", str(folder))
    explanation: Explanation = json.loads(
        ppbench("explain", "last", "--results", str(folder), "--format", "json")
    )
    return explanation


def ppbench(*arguments: str) -> str:
    command = [sys.executable, "-c", "from ppbench.cli import main; main()", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    print(f"{'cause':34} {'named':6} {'truth, ms':>10} {'found, ms':>10} {'found / truth':>13}")
    with tempfile.TemporaryDirectory() as name:
        for title, cause in causes().items():
            explanation = explained(cause, Path(name))
            is_named = any(cause.words in sentence for sentence in explanation["sentences"])
            truth_ns = cause.truth_ns([row["step"] for row in explanation["by_step"]])
            size_ns = cause.size_ns(explanation)
            print(
                f"{title:34} {'yes' if is_named else 'NO':6} {truth_ns / MS:10.1f} "
                f"{size_ns / MS:10.1f} {size_ns / truth_ns:13.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
