"""The energy counter against the mean power, over seconds of load and of rest."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.clock import wait_for
from benchmarks.gpu.findings import Bound, Finding
from engine.run.device import is_accelerator
from ppbench.run.machine.sampler import Sampler, read_samples
from ppbench.run.machine.telemetry import summarize
from ppbench.run.runtimes.runtime import id_of

WINDOW_S = 8.0


@dataclass(frozen=True)
class Measurements:
    """A window: its joules by the counter, mean watts, and seconds; None where NVML tells none."""

    energy_j: float | None
    power_w: float | None
    window_s: float
    note: str


def judge(measured: Measurements) -> list[Finding]:
    name = "energy by the counter, over the integral of power"
    if measured.energy_j is None or measured.power_w is None:
        return [Finding.undecided("energy", name, measured.note or "NVML tells none")]
    share = measured.energy_j / (measured.power_w * measured.window_s)
    note = f"{measured.power_w:.0f} W for {measured.window_s:.1f} s. {measured.note}".strip()
    return [Finding.of("energy", name, share, Bound(at_least=0.95, at_most=1.05), note=note)]


def measure(device: torch.device, window_s: float = WINDOW_S) -> Measurements:
    with tempfile.TemporaryDirectory(prefix="ppbench-gpu-") as folder:
        path = Path(folder) / "samples"
        sampler = Sampler(path, os.getpid())
        # Power is a mean of the last second.
        _burn(device, 2.0 if device.type == "cuda" else 0.1, sampler)
        sampler.sample()
        begin_ns = time.monotonic_ns()
        _burn(device, window_s, sampler)
        sampler.sample()
        end_ns = time.monotonic_ns()
        sampler.close()
        gpu = id_of(device) if is_accelerator(device) else None
        summary = summarize(read_samples(path, begin_ns, end_ns), [(begin_ns, end_ns)], gpu)
    window = (end_ns - begin_ns) / 1e9
    return Measurements(
        summary["gpu_energy_j"], summary["gpu_power_w"], window, summary["telemetry_note"]
    )


def _burn(device: torch.device, seconds: float, sampler: Sampler) -> None:
    size = 4096 if device.type == "cuda" else 128
    left = torch.rand(size, size, device=device)
    began = time.monotonic()
    while time.monotonic() < began + seconds:
        left @ left
        wait_for(device)
        sampler.sample_if_due()
