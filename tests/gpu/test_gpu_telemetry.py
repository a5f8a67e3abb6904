"""NVML, the device's identity, and matrix products, on the GPU that is here."""

import os
import time
from pathlib import Path

import torch

from benchmarks.gpu.product import products
from engine.run import device as devices
from engine.run.peak import measured_peak_flops
from ppbench.run.machine.sampler import Sampler, read_samples
from ppbench.run.machine.telemetry import summarize
from ppbench.run.runtimes.runtime import id_of
from ppbench.run.runtimes.trained import peak_of


def test_a_busy_gpu_uses_power_and_memory(gpu: torch.device, tmp_path: Path) -> None:
    sampler = Sampler(tmp_path / "s", os.getpid())
    left = torch.rand(4096, 4096, device=gpu)
    sampler.sample()
    begin_ns = time.monotonic_ns()
    while time.monotonic_ns() < begin_ns + 1_500_000_000:
        left @ left
        devices.wait_for_all(gpu)
        sampler.sample_if_due()
    sampler.sample()
    end_ns = time.monotonic_ns()
    sampler.close()
    summary = summarize(
        read_samples(tmp_path / "s", begin_ns, end_ns), [(begin_ns, end_ns)], id_of(gpu)
    )
    assert summary["gpu_power_w"] is not None
    assert summary["gpu_power_w"] > 0
    assert summary["gpu_energy_j"] is not None
    assert summary["gpu_energy_j"] > 0
    assert summary["gpu_memory_used_bytes"] is not None
    assert summary["gpu_memory_used_bytes"] >= left.nbytes
    assert "NVIDIA driver" not in summary["telemetry_note"]


def test_no_product_is_faster_than_the_datasheet_says(gpu: torch.device) -> None:
    peak = peak_of(gpu, "bfloat16", 1, 1)
    measured = measured_peak_flops(gpu, torch.bfloat16)
    assert 0 < measured <= 1.05 * peak.flops_per_s


def test_products_have_a_speed_on_every_device(device: torch.device) -> None:
    (row,) = products(device, window_s=0.05)
    assert "TFLOP/s on" in row.note
