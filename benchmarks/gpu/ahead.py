"""The host runs ahead of the GPU far enough to keep it busy, and no further than it is asked to.

A driver that queues some 1,000 launches and then lets the host wait would hold fewer than one
computation of a model of many kernels. That this is why an H100 gave 0.86 has not been tested.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from benchmarks.gpu.clock import wait_for
from benchmarks.gpu.findings import Bound, Finding
from benchmarks.gpu.training import BUSY, trainer_on
from engine.run.recording import Recording

NUM_MICROBATCHES = {"cuda": 32, "cpu": 4}


@dataclass(frozen=True)
class Measurements:
    """The computations of a step, and the seconds until all were issued and until all were done."""

    num_computations: int
    issued_s: float
    done_s: float
    most_ahead: int  # computations, as configured


def judge(measured: Measurements) -> list[Finding]:
    each_s = measured.done_s / measured.num_computations
    ahead = (measured.done_s - measured.issued_s) / each_s
    return [
        Finding.of(
            "ahead",
            "computations that the GPU had not done when the host had issued all",
            ahead,
            Bound(at_least=1, at_most=1.5 * measured.most_ahead),
            note=f"at most {measured.most_ahead} are asked for; by time, as if all took as long",
        )
    ]


def measure(device: torch.device) -> Measurements:
    trainer = trainer_on(device, "1f1b", NUM_MICROBATCHES[device.type], times_size=BUSY)
    for step in range(2):
        trainer.step(step)
    batch = trainer.batch(2)
    wait_for(device)
    began = time.perf_counter()
    trainer.runner.run(2, batch, Recording.flight_only)
    issued_s = time.perf_counter() - began
    wait_for(device)
    done_s = time.perf_counter() - began
    trainer.runner.end_step(2)
    most, count = trainer.config.issue_ahead, trainer.lowered.num_computations
    trainer.close()
    return Measurements(count, issued_s, done_s, most)
