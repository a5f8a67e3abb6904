"""NVML, and matrix products, on the GPU that is here."""

import os
import time

import torch

from engine.run.peak import measured_peak_flops
from ppbench.run.machine.sampler import read_samples, start_sampler
from ppbench.run.machine.telemetry import summarize
from ppbench.run.runtimes.trained import peak_of

GPU = torch.device("cuda", 0)


def test_a_busy_gpu_uses_power_and_memory(tmp_path):
    sampler = start_sampler(tmp_path / "s", os.getpid())
    left = torch.rand(4096, 4096, device=GPU)
    assert sampler.sample()
    begin_ns = time.monotonic_ns()
    while time.monotonic_ns() < begin_ns + 1_500_000_000:
        left @ left
        torch.cuda.synchronize(GPU)
    assert sampler.sample()
    end_ns = time.monotonic_ns()
    sampler.stop()
    summary = summarize(read_samples(tmp_path / "s", begin_ns, end_ns), begin_ns, end_ns, 0)
    assert summary.gpu_power_w > 0
    assert summary.gpu_energy_j > 0
    assert summary.gpu_memory_used_bytes >= left.nbytes
    assert "NVIDIA driver" not in summary.telemetry_note


def test_no_product_is_faster_than_the_datasheet_says():
    peak = peak_of(GPU, "bfloat16")
    measured = measured_peak_flops(GPU, torch.bfloat16)
    assert 0 < measured <= 1.05 * peak.flops_per_s
