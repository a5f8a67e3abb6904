"""As many streams as a rank may have edges run beside each other.

With fewer hardware queues than streams (`CUDA_DEVICE_MAX_CONNECTIONS`), a kernel that waits, such
as an open receive, holds up those behind it on other streams.
"""

from __future__ import annotations

import os
import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.gpu.clock import sleep, wait_for
from benchmarks.gpu.findings import Bound, Finding
from engine.device_variables import prepare
from engine.run.streams import MOST_EDGES, Streams

NUM_STREAMS = {"cuda": MOST_EDGES, "cpu": 1}
CYCLES = {"cuda": 20_000_000, "cpu": 1_000_000}  # some 10 ms; of the CPU nanoseconds
NUM_ROUNDS = 8


@dataclass(frozen=True)
class Measurements:
    """Seconds of one sleeping kernel, and of one on each stream, round by round."""

    num_streams: int
    one_s: tuple[float, ...]
    all_s: tuple[float, ...]


def judge(measured: Measurements) -> list[Finding]:
    ratios = [a / one for a, one in zip(measured.all_s, measured.one_s, strict=True)]
    return [
        Finding.of(
            "streams",
            f"{measured.num_streams} kernels that sleep, one on each stream, over one of them",
            statistics.median(ratios),
            Bound(at_most=1.2),
            error=(max(ratios) - min(ratios)) / 2 / len(ratios) ** 0.5,
        )
    ]


def measure(device: torch.device) -> Measurements:
    prepare(os.environ)
    number = NUM_STREAMS[device.type]
    one, everything = [], []
    streams = Streams(device) if device.type != "cpu" else None
    for _ in range(NUM_ROUNDS + 1):
        one.append(_seconds(streams, 1, device))
        everything.append(_seconds(streams, number, device))
    return Measurements(number, tuple(one[1:]), tuple(everything[1:]))


def _seconds(streams: Streams | None, number: int, device: torch.device) -> float:
    wait_for(device)
    began = time.perf_counter()
    for index in range(number):
        if streams is None:
            sleep(CYCLES[device.type], device)
            continue
        with streams.of_edge(index):
            sleep(CYCLES[device.type], device)
    wait_for(device)
    return time.perf_counter() - began
