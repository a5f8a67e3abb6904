"""No schedule makes the host wait for the GPU in a turn of steps: torch raises where one does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.gpu.findings import Bound, Finding
from benchmarks.gpu.training import trainer_on
from engine.plan.schedules.registry import SCHEDULES

NUM_MICROBATCHES = 4


@dataclass(frozen=True)
class Measurements:
    """By schedule, the line or error of a synchronisation; empty where there was none."""

    errors: dict[str, str]


def judge(measured: Measurements) -> list[Finding]:
    return [
        Finding.of(
            "synchronisation",
            f"hidden synchronisations in two steps of {schedule} in a row",
            int(bool(error)),
            Bound(at_most=0),
            note=error,
        )
        for schedule, error in measured.errors.items()
    ]


def measure(device: torch.device) -> Measurements:
    return Measurements({name: _error_of(name, device) for name in SCHEDULES})


def _error_of(schedule: str, device: torch.device) -> str:
    """Issue two steps in a row, their reading left aside."""
    trainer = trainer_on(device, schedule, NUM_MICROBATCHES)
    try:
        trainer.step(0)  # kernels are loaded
        with forbidden(device) as errors:
            issued = [trainer.issue(step) for step in (1, 2)]
        if errors:  # a step has been left half issued
            return errors[0]
        trainer.read(issued)
        return ""
    finally:
        trainer.close()


@contextlib.contextmanager
def forbidden(device: torch.device) -> Iterator[list[str]]:
    """Add to a list what makes the host wait for a GPU meanwhile; nothing else can be told.

    The marks of a turn are begun with a synchronisation by design: `Clock.begin`.
    """
    errors: list[str] = []
    if device.type != "cuda":
        yield errors
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield errors
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        errors.append(str(error).splitlines()[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
