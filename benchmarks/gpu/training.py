"""Trainers on one device, for the checks: small enough for seconds, large enough to fill it."""

from __future__ import annotations

import torch

from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.run.clock import clock_for
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, TrainerConfig, agree

PRESETS = {"cuda": ModelSpec("llama-160m", "bfloat16"), "cpu": ModelSpec("llama-tiny", "float32")}
SHAPES = {"cuda": (512, 16), "cpu": (32, 1)}
"""Tokens of a sequence, and sequences of a microbatch, by type of device."""


BUSY = 4
"""How many times as large microbatches are where the device is to be busy all the time."""


def trainer_on(
    device: torch.device, schedule: str, num_microbatches: int, *, times_size: int = 1
) -> Trainer:
    """One rank with all stages on the device; microbatches so many times the usual size."""
    seq_len, microbatch_size = SHAPES[device.type]
    config = TrainerConfig(
        PRESETS[device.type],
        DataSpec(
            seq_len=seq_len,
            microbatch_size=times_size * microbatch_size,
            num_microbatches=num_microbatches,
        ),
        schedule,
        1,
    )
    fabric = Fabric(device, clock_for(device), is_device_shared=False)
    return Trainer(agree(config, fabric), fabric)
