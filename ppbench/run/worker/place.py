"""This rank's place: its machine, its accelerator if the launch computes on any, its memory."""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from engine import device_variables
from engine.run import device as devices
from engine.run.memory import process_peak_bytes
from ppbench.config.case import Case
from ppbench.run.machine.counters import available_bytes
from ppbench.run.machine.environment import ON_GPUS, available_cores
from ppbench.run.machine.gpus import find, open_gpus
from ppbench.run.machine.placement import Place, machine_id
from ppbench.run.runtimes.runtime import RefusalError, id_of


def own_device(kind: str) -> torch.device:
    """Return the rank's device of a case's kind; an accelerator becomes the current device.

    Raises RuntimeError where there is none, RefusalError under variables that bend its timings.
    """
    if kind not in ON_GPUS:
        return devices.CPU
    if (problem := device_variables.refused(os.environ)) is not None:
        raise RefusalError(problem)
    return devices.of_local_rank(int(os.environ["LOCAL_RANK"]), kind)


def most_used_bytes(device: torch.device) -> int:
    """Return the most that this process has used since the last reset, or that is used of a device.

    0 where the system does not tell.
    """
    if devices.is_accelerator(device):
        return devices.used_bytes(device)
    return process_peak_bytes() or 0


def left_bytes(device: torch.device) -> float:
    """Return this rank's part of the memory that is left; infinite where it is not known."""
    if devices.is_accelerator(device):
        return devices.free_bytes(device)
    return available_bytes() / int(os.environ["LOCAL_WORLD_SIZE"])


def own_place(cases: Iterable[Case]) -> Place:
    """Return where this rank is; a device is asked for only if some case computes on one.

    One that is not to be had is left out here: the case that asks for it says why.
    """
    kind = next((case.device for case in cases if case.device in ON_GPUS), None)
    machine, num_cores = machine_id(), available_cores()
    if kind is None:
        return Place(machine, num_cores)
    try:
        uuid = id_of(own_device(kind))
    except (RuntimeError, RefusalError):
        return Place(machine, num_cores)
    known = find(open_gpus().everything, uuid)
    return Place(machine, num_cores, uuid, "" if known is None else known.pci)
