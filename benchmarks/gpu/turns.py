"""Steps in a row: their spans cost no time, and the GPU goes from one to the next at once."""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.gpu.clock import wait_for
from benchmarks.gpu.findings import Bound, Finding
from benchmarks.gpu.training import trainer_on
from benchmarks.outcome import Ratio
from engine.plan.action import Op
from engine.plan.spans import Lane
from engine.run.recording import Recording
from engine.trainer import StepResult

NUM_STEPS = 12
NUM_ROUNDS = 8
NUM_MICROBATCHES = 4


@dataclass(frozen=True)
class Measurements:
    """Seconds of a turn in each round, and how its steps follow each other."""

    with_spans_s: tuple[float, ...]
    bare_s: tuple[float, ...]
    gaps: tuple[float, ...]  # from a step's last computation to the next one's first, in periods


def judge(measured: Measurements) -> list[Finding]:
    ratio = Ratio.of("", measured.with_spans_s, measured.bare_s)
    low, high = ratio.interval or (min(ratio.values), max(ratio.values))
    return [
        Finding.of(
            "turns",
            "a turn with spans over bare steps in a row",
            ratio.median,
            Bound(at_most=1.01),
            error=(high - low) / 2,
            note=f"the median of {len(ratio.values)} rounds, within half its 95 % interval",
        ),
        Finding.of(
            "turns",
            "gap between a step's optimizer and the next step, over the period of steps",
            statistics.median(measured.gaps),
            Bound(at_most=0.05),
            note=f"the median of {len(measured.gaps)} gaps",
        ),
        Finding.of(
            "turns",
            "steps that begin before the one before them has ended",
            sum(gap < 0 for gap in measured.gaps),
            Bound(at_most=0),
        ),
    ]


def measure(device: torch.device, num_rounds: int = NUM_ROUNDS) -> Measurements:
    trainer = trainer_on(device, "1f1b", NUM_MICROBATCHES)
    trainer.steps(range(2))
    first, gaps = 2, list[float]()
    took_s: dict[Recording, list[float]] = {Recording.spans: [], Recording.flight_only: []}
    for index in range(num_rounds):
        arms = list(took_s)
        for recording in arms if index % 2 == 0 else reversed(arms):
            wait_for(device)
            began = time.perf_counter()
            results = trainer.steps(range(first, first + NUM_STEPS), recording)
            took_s[recording].append(time.perf_counter() - began)
            first += NUM_STEPS
            if recording.has_spans:
                gaps += _gaps(results)
    trainer.close()
    with_spans_s, bare_s = took_s.values()
    return Measurements(tuple(with_spans_s), tuple(bare_s), tuple(gaps))


def _gaps(results: list[StepResult]) -> list[float]:
    """The gaps between steps of a turn, each over the time from a step's begin to the next's."""
    gaps = []
    for before, after in itertools.pairwise(results):
        (end_ns,) = (span.end_ns for span in before.spans if span.op is Op.OPT)
        begin_ns, next_ns = (
            min(span.start_ns for span in result.spans if span.lane is Lane.COMPUTE)
            for result in (before, after)
        )
        gaps.append((next_ns - end_ns) / (next_ns - begin_ns))
    return gaps
