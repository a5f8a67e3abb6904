"""Accelerators as their vendors' libraries describe them, and which of them a process may use.

Pure data: a device is known by its UUID, because its number differs between processes and
libraries: NVML counts in the order of the bus, CUDA by speed or as `CUDA_VISIBLE_DEVICES` says.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

SLICE, WHOLE = "MIG-", "GPU-"
"""How the UUIDs of parts of a GPU, and of whole ones, begin."""


@dataclass(frozen=True)
class Device:
    """An accelerator, or a part of one that is a device of its own (MIG)."""

    uuid: str  # such as `GPU-5a1f...`
    name: str = ""
    memory_bytes: int | None = None
    pci: str = ""  # address, such as `0000:c1:00.0`; a part has its GPU's
    slices: tuple[Device, ...] = ()  # the parts into which it is divided
    parent: str = ""  # of a part: the UUID of its GPU

    @property
    def is_slice(self) -> bool:
        return bool(self.parent)


def visible(gpus: Sequence[Device], setting: str | None) -> list[Device]:
    """Return the devices that CUDA shows under a `CUDA_VISIBLE_DEVICES`, in its order.

    `gpus` are all of the machine, in the order of the bus. The setting lists numbers, or UUIDs or
    their beginnings, of GPUs or of their parts; the first that is wrong hides those after it, and
    one that occurs twice hides all. Of parts, CUDA shows one process the first only.
    """
    chosen: list[Device] = []
    if setting is None:
        chosen = list(gpus)
    elif setting.startswith((SLICE, WHOLE)):
        prefix = SLICE if setting.startswith(SLICE) else WHOLE
        known = gpus if prefix == WHOLE else [part for gpu in gpus for part in gpu.slices]
        names = setting.split(",")
        names = list(itertools.takewhile(lambda name: name.startswith(prefix), names))
        for name in names:
            matching = [device for device in known if device.uuid.startswith(name)]
            if len(matching) != 1:
                break
            chosen += matching
        if len(set(names)) < len(names) or len(set(chosen)) < len(chosen):
            return []
    else:
        numbers: list[int] = []
        for text in setting.split(","):
            match = re.match(r"[+-]?\d+", text.strip())
            number = -1 if match is None else int(match[0])
            if number in numbers:
                return []
            if number < 0:
                break
            numbers.append(number)
        there = itertools.takewhile(lambda number: number < len(gpus), numbers)
        chosen = [gpus[number] for number in there]
    # GPUs that are divided are replaced by their parts; of all parts, the first alone is kept.
    parts = [part for device in chosen for part in ([device] if device.is_slice else device.slices)]
    return parts[:1] if parts else chosen


def find(gpus: Sequence[Device], uuid: str) -> Device | None:
    """Return the device with a UUID, whether or not it is written with its prefix."""
    everything = itertools.chain(gpus, *(gpu.slices for gpu in gpus))
    return next((device for device in everything if bare(device.uuid) == bare(uuid)), None)


def bare(uuid: str) -> str:
    """Return a UUID without its prefix, which torch leaves out."""
    return uuid.removeprefix(SLICE).removeprefix(WHOLE).lower()
