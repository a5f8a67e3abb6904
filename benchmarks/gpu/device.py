"""The device of the checks, and trainers on it: seconds are enough, and it is full."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Mapping

import torch

from benchmarks.rows import Row, parser, run
from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.run import device as devices
from engine.run.clock import clock_for
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, TrainerConfig, agree

PRESETS = {"cuda": ModelSpec("llama-160m", "bfloat16"), "cpu": ModelSpec("llama-tiny", "float32")}
SHAPES = {"cuda": (512, 16), "cpu": (32, 1)}
"""Tokens of a sequence, and sequences of a microbatch, by type of device."""
BUSY = 4  # times as large are microbatches where the device is to be busy all the time
Check = Callable[[torch.device], Iterable[Row]]


def run_checks(module: str, doc: str | None, checks: Mapping[str, Check]) -> None:
    """Run checks as the command line says."""

    def on_device(check: Check) -> Callable[[argparse.Namespace], Iterable[Row]]:
        def part(asked: argparse.Namespace) -> Iterable[Row]:
            if asked.device == "cpu":
                torch.set_num_threads(1)
                return check(torch.device("cpu"))
            return check(torch.device(asked.device, 0))

        return part

    parts = {name: on_device(check) for name, check in checks.items()}
    options = parser(doc, parts)
    options.add_argument("--device", default=devices.kind() or "cpu")
    run(module, doc, parts, options)


def unknown(name: str, why: str) -> Row:
    """A row of what could not be measured here."""
    return Row(name, math.nan, note=why)


def config_on(device: torch.device, schedule: str, num: int, times_size: int = 1) -> TrainerConfig:
    """One rank with all stages; so many microbatches, so many times the usual size."""
    seq_len, size = SHAPES[device.type]
    data = DataSpec(seq_len=seq_len, microbatch_size=times_size * size, num_microbatches=num)
    return TrainerConfig(PRESETS[device.type], data, schedule, 1)


def trainer_on(device: torch.device, schedule: str, num: int, *, times_size: int = 1) -> Trainer:
    """A trainer on the device that has made two steps."""
    fabric = Fabric(device, clock_for(device), is_device_shared=False)
    trainer = Trainer(agree(config_on(device, schedule, num, times_size), fabric), fabric)
    trainer.steps(range(2))
    return trainer


def sleep(cycles: int, device: torch.device) -> None:
    """Let the device sleep; the CPU for as many nanoseconds."""
    if device.type == "cuda":
        torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]  # torch's
    else:
        time.sleep(cycles / 1e9)


def wait_for(device: torch.device) -> None:
    """Block until the device has done all that was issued."""
    if device.type != "cpu":
        devices.wait_for_all(device)
