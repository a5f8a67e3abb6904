"""Spans against the wall time of a step, and against its kernels as torch's profiler sees them."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.clock import wait_for
from benchmarks.gpu.findings import Bound, Finding
from benchmarks.gpu.training import BUSY, trainer_on
from engine.plan.spans import Lane, Span
from engine.trainer import Trainer

NUM_STEPS = 8
NUM_MICROBATCHES = 8


@dataclass(frozen=True)
class Measurements:
    """Seconds of each step: by the host, in computations by their spans, and in kernels."""

    wall_s: tuple[float, ...]
    span_s: tuple[float, ...]
    profiled_span_s: float  # of the step that the profiler saw
    kernel_s: float | None  # None without a GPU


def judge(measured: Measurements) -> list[Finding]:
    shares = [s / wall for s, wall in zip(measured.span_s, measured.wall_s, strict=True)]
    error = (max(shares) - min(shares)) / 2 / len(shares) ** 0.5
    share = Finding.of(
        "spans",
        "computations by their spans, over the wall time of a step on one rank",
        statistics.median(shares),
        Bound(at_least=0.8, at_most=1.005),
        error=error,
        note=f"the median of {len(shares)} steps",
    )
    return [share, judge_kernels(measured)]


def judge_kernels(measured: Measurements) -> Finding:
    name = "time in kernels, over computations by their spans"
    if not measured.kernel_s:
        return Finding.undecided("spans", name, "the profiler saw no kernels")
    share = measured.kernel_s / measured.profiled_span_s
    note = "spans contain their kernels, and launch gaps between them"
    return Finding.of("spans", name, share, Bound(at_least=0.7, at_most=1.01), note=note)


def measure(device: torch.device) -> Measurements:
    trainer = trainer_on(device, "1f1b", NUM_MICROBATCHES, times_size=BUSY)
    for step in range(2):
        trainer.step(step)
    timed = [_timed(trainer, 2 + step, device) for step in range(NUM_STEPS)]
    wall, spans = zip(*timed, strict=True)
    profiled, kernels = _profiled(trainer, 2 + NUM_STEPS, device)
    trainer.close()
    return Measurements(wall, spans, profiled, kernels)


def _timed(trainer: Trainer, step: int, device: torch.device) -> tuple[float, float]:
    wait_for(device)
    began = time.perf_counter()
    spans = trainer.step(step).spans
    return time.perf_counter() - began, seconds_of(spans)


def seconds_of(spans: list[Span]) -> float:
    """The time in computations."""
    return sum(s.end_ns - s.start_ns for s in spans if s.lane is Lane.COMPUTE) / 1e9


def _profiled(trainer: Trainer, step: int, device: torch.device) -> tuple[float, float | None]:
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        spans = trainer.step(step).spans
        wait_for(device)
    kernels = [
        (event.time_range.start, event.time_range.end)
        for event in profiler.events()
        if event.device_type.name != "CPU" and not event.is_user_annotation
    ]
    return seconds_of(spans), _covered(kernels) / 1e6 if kernels else None


def _covered(ranges: list[tuple[float, float]]) -> float:
    """The length of what at least one of the ranges covers."""
    covered, until = 0.0, float("-inf")
    for begin, end in sorted(ranges):
        covered += max(0.0, end - max(begin, until))
        until = max(until, end)
    return covered
