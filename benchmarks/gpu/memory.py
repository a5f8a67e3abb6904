"""Peak memory by number of microbatches: linear for AFAB, flat for 1F1B, and as predicted."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.findings import Bound, Finding
from benchmarks.gpu.training import trainer_on

NUMBERS = (2, 3, 4, 5)


@dataclass(frozen=True)
class Peak:
    """The peak of a step, measured and predicted; None without a prediction."""

    num_microbatches: int
    peak_bytes: int
    predicted_bytes: int | None


@dataclass(frozen=True)
class Measurements:
    afab: tuple[Peak, ...]
    one_f_one_b: tuple[Peak, ...]


def judge(measured: Measurements) -> list[Finding]:
    flat = [peak.peak_bytes for peak in measured.one_f_one_b]
    return [
        Finding.of(
            "memory",
            "peak of afab, off its line over microbatches by",
            off_line(measured.afab),
            Bound(at_most=0.05),
            note="of the growth from the fewest microbatches to the most",
        ),
        Finding.of(
            "memory",
            "peak of afab with the most microbatches, over that of 1f1b",
            measured.afab[-1].peak_bytes / flat[-1],
            Bound(at_least=1.2),
        ),
        Finding.of(
            "memory",
            "peak of 1f1b, the most over the least, less 1",
            max(flat) / min(flat) - 1,
            Bound(at_most=0.05),
            note="over numbers of microbatches",
        ),
        *_judge_prediction([*measured.afab, *measured.one_f_one_b]),
    ]


def off_line(peaks: tuple[Peak, ...]) -> float:
    """The worst distance from the line through the first and the last, of what these differ by."""
    first, last = peaks[0], peaks[-1]
    growth = last.peak_bytes - first.peak_bytes
    if growth <= 0:
        return float("inf")
    width = last.num_microbatches - first.num_microbatches
    return (
        max(
            abs(
                peak.peak_bytes
                - first.peak_bytes
                - growth * (peak.num_microbatches - first.num_microbatches) / width
            )
            for peak in peaks
        )
        / growth
    )


def _judge_prediction(peaks: list[Peak]) -> list[Finding]:
    name = "predicted peak off the measured one by, at worst"
    known = [(p.predicted_bytes, p.peak_bytes) for p in peaks if p.predicted_bytes is not None]
    if len(known) < len(peaks):
        return [Finding.undecided("memory", name, "the allocator keeps no history to learn from")]
    worst = max(abs(predicted / peak - 1) for predicted, peak in known)
    return [Finding.of("memory", name, worst, Bound(at_most=0.05))]


def measure(device: torch.device) -> Measurements:
    return Measurements(*(_peaks(schedule, device) for schedule in ("afab", "1f1b")))


def _peaks(schedule: str, device: torch.device) -> tuple[Peak, ...]:
    return tuple(_peak(schedule, number, device) for number in NUMBERS)


def _peak(schedule: str, num_microbatches: int, device: torch.device) -> Peak:
    trainer = trainer_on(device, schedule, num_microbatches)
    try:
        for step in range(2):
            trainer.step(step)
        use = trainer.measure_memory(2)
    finally:
        trainer.close()
    return Peak(num_microbatches, use.peak_bytes, use.predicted_peak_bytes)
