"""Machines with GPUs, written down as NVML would describe them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace


@dataclass
class Part:
    uuid: str
    name: str = "A MIG 1g"
    memory: int = 5


@dataclass
class Gpu:
    uuid: str
    bus: int
    parts: list[Part] = field(default_factory=list)
    is_divided: bool = False
    is_full: bool = True  # supports all queries
    is_broken: bool = False


class StandInForNvml:
    """GPUs as NVML describes them."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus=None, problem=None):
        self.gpus = gpus or [Gpu("GPU-aa1", 0x3B), Gpu("GPU-bb2", 0xC1, is_full=False)]
        self.problem = problem

    def nvmlInit(self):
        if self.problem:
            raise self.NVMLError(self.problem)

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        if self.gpus[index].is_broken:
            raise self.NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetName(self, handle):
        return getattr(handle, "name", "NVIDIA A")

    def nvmlDeviceGetUUID(self, handle):
        return handle.uuid

    def nvmlDeviceGetPciInfo(self, handle):
        return SimpleNamespace(domain=0, bus=handle.bus, device=0)

    def nvmlDeviceGetMigMode(self, handle):
        if not handle.is_full:
            raise self.NVMLError("Not Supported")
        return [int(handle.is_divided), 0]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle):
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):
        if index >= len(device.parts):
            raise self.NVMLError("Not Found")
        return device.parts[index]

    def of_full(self, handle, value):
        if isinstance(handle, Part):
            raise self.NVMLError("Invalid Argument")
        if not handle.is_full:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetPowerUsage(self, handle):
        return 250_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self.of_full(handle, 7_500)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self.of_full(handle, SimpleNamespace(gpu=87, memory=3))

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return self.of_full(handle, {1: 1980, 2: 2619}[clock])

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return self.of_full(handle, {0: 61}[sensor])

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.of_full(handle, 0x44)

    def nvmlDeviceGetMemoryInfo(self, handle):
        if isinstance(handle, Part):
            return SimpleNamespace(used=2, total=handle.memory)
        if not handle.is_full:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(used=5, total=9)
