"""Products of 8192 x 8192 matrices in bfloat16 over the datasheet: the denominator of every MFU."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from benchmarks.gpu.clock import wait_for
from benchmarks.gpu.findings import Bound, Finding
from engine.run import device as devices
from ppbench.analysis.mfu import datasheet_peak

SIZES = {"cuda": 8192, "cpu": 256}
WINDOW_S = 2.0


@dataclass(frozen=True)
class Measurements:
    device: str
    flops_per_s: float
    datasheet_flops_per_s: float | None


def judge(measured: Measurements) -> list[Finding]:
    name = "8192³ bfloat16 products, of the datasheet's speed"
    if measured.datasheet_flops_per_s is None:
        why = f"no datasheet of {measured.device}; {measured.flops_per_s / 1e12:.0f} TFLOP/s"
        return [Finding.undecided("products", name, why)]
    share = measured.flops_per_s / measured.datasheet_flops_per_s
    note = f"{measured.flops_per_s / 1e12:.0f} TFLOP/s on {measured.device}"
    return [Finding.of("products", name, share, Bound(at_least=0.7, at_most=0.9), note=note)]


def measure(device: torch.device, window_s: float = WINDOW_S) -> Measurements:
    size = SIZES[device.type]
    left, right = (torch.rand(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(left)
    began, count = time.perf_counter(), 0
    for is_timed in (False, True):  # the clock rises first
        wait_for(device)
        began, count = time.perf_counter(), 0
        while time.perf_counter() - began < (window_s if is_timed else window_s / 4):
            for _ in range(10):
                torch.mm(left, right, out=product)
            wait_for(device)
            count += 10
    flops_per_s = count * 2 * size**3 / (time.perf_counter() - began)
    name = devices.name_of(device) if devices.is_accelerator(device) else "the CPU"
    peak = datasheet_peak(name, "bfloat16")
    return Measurements(name, flops_per_s, None if peak is None else peak.flops_per_s)
