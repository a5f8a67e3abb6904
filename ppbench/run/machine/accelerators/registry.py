"""Which library speaks for which vendor's accelerators; the first that finds a device is used.

    NVIDIA   NVML, by pynvml
    AMD      amdsmi, a package that comes with ROCm
    Intel    Level Zero's sysman would, and no library of it is at hand: nothing is claimed

A library that is not installed is passed over: amdsmi comes with ROCm alone.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ppbench.run.machine.accelerators.amd import AmdGpus
from ppbench.run.machine.accelerators.devices import Device, GpuReading
from ppbench.run.machine.accelerators.nvidia import NvidiaGpus

NO_LIBRARY = "no GPU figures: no library of the GPU's vendor is here (NVML, amdsmi)"


class Accelerators(Protocol):
    """The accelerators of one vendor."""

    absent: str  # why there are none; empty if there are

    @property
    def everything(self) -> Sequence[Device]:
        """All of the machine."""

    @property
    def devices(self) -> Sequence[Device]:
        """Those that this process may use, in the order in which torch numbers them."""

    def read(self, uuids: Sequence[str] = ()) -> tuple[GpuReading, ...]:
        """Read the counters of these devices, or of all that this process may use."""


VENDORS: Mapping[str, Callable[[Any], Accelerators]] = {"pynvml": NvidiaGpus, "amdsmi": AmdGpus}
"""The module of each vendor's library, and who reads it."""


def open_accelerators(load: Callable[[str], Any] = importlib.import_module) -> Accelerators:
    """Open the library of the vendor whose devices are here.

    Where none are, the reason is that of the first library that is installed.
    """
    reasons: list[str] = []
    for name, opened in VENDORS.items():
        try:
            library = load(name)
        except (ImportError, OSError, KeyError):  # amdsmi raises these where ROCm is not whole
            continue
        found = opened(library)
        if not found.absent:
            return found
        reasons.append(found.absent)
    return NoAccelerators(reasons[0] if reasons else NO_LIBRARY)


class NoAccelerators:
    """A machine without accelerators, or with such as no library here can read."""

    def __init__(self, absent: str) -> None:
        self.absent = absent
        self.everything: Sequence[Device] = ()
        self.devices: Sequence[Device] = ()

    def read(self, uuids: Sequence[str] = ()) -> tuple[GpuReading, ...]:  # noqa: ARG002
        return ()
