"""A pipeline on GPUs that are almost full: it ends, or says that memory is out, and never hangs.

What is out of memory synchronises the device, under receives that are open. AFAB and zbv have
places at which that hangs.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

import torch

from benchmarks.gpu.exactness import NUM_MICROBATCHES
from benchmarks.gpu.findings import Bound, Finding
from benchmarks.gpu.ranks import ENDED, RankError, on_ranks
from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.run import device as devices
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, TrainerConfig, agree

SCHEDULES = ("afab", "zbv")
LEFT_BYTES = (256 * 2**20, 64 * 2**20)
PATIENCE_S = 15.0
"""Two steps that take longer are taken to hang, and the ranks are ended."""
OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class Measurements:
    """By schedule and bytes left: `ended`, `out of memory`, or what else happened."""

    ends: dict[str, str]


def judge(measured: Measurements) -> list[Finding]:
    return [
        Finding.of(
            "memory_full",
            f"{case}: ends, or is out of memory",
            int(end in ("ended", OUT_OF_MEMORY)),
            Bound(at_least=1),
            note=end,
        )
        for case, end in measured.ends.items()
    ]


def measure(device: torch.device) -> Measurements:
    ends = {}
    for schedule in SCHEDULES:
        for left in LEFT_BYTES if device.type == "cuda" else LEFT_BYTES[:1]:
            case = f"{schedule} with {left // 2**20} MiB left"
            ends[case] = _end_of(schedule, left, device)
    return Measurements(ends)


def _end_of(schedule: str, left_bytes: int, device: torch.device) -> str:
    is_shared = device.type == "cpu"
    try:
        on_ranks(2, device.type, train, schedule, left_bytes, is_shared=is_shared)
    except RankError as error:
        text = str(error)
        if ENDED in text:
            return f"hangs: two steps took longer than {PATIENCE_S:.0f} s"
        return OUT_OF_MEMORY if OUT_OF_MEMORY in text else text.strip().splitlines()[-1]
    return "ended"


def train(fabric: Fabric, schedule: str, left_bytes: int) -> bool:
    """Two steps with all but so many bytes of the device taken, in pieces of growing lengths."""
    preset = "llama-160m" if fabric.device.type == "cuda" else "llama-tiny"
    seq_len = 1024 if fabric.device.type == "cuda" else 16
    data = DataSpec(seq_len=seq_len, num_microbatches=2 * NUM_MICROBATCHES)
    config = TrainerConfig(ModelSpec(preset, "float32"), data, schedule, 2)
    trainer = Trainer(agree(config, fabric), fabric)
    filling = _fill(fabric.device, left_bytes)
    watchdog = threading.Timer(PATIENCE_S, os._exit, [1])
    watchdog.daemon = True
    watchdog.start()
    for step in range(2):
        trainer.step(step)
    watchdog.cancel()
    del filling
    return True


def _fill(device: torch.device, left_bytes: int) -> list[torch.Tensor]:
    if device.type == "cpu":
        return []
    size = max(0, devices.free_bytes(device) - left_bytes)
    return [torch.empty(size, dtype=torch.uint8, device=device)]
