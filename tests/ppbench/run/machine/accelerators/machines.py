"""Machines with GPUs, written down as NVML and amdsmi would describe them."""

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
    has_fields: bool = True
    is_broken: bool = False


class StandInForNvml:
    """GPUs as NVML describes them; it counts what it is asked."""

    class NVMLError(Exception):
        pass

    def __init__(self, gpus=None, problem=None):
        self.gpus = gpus or [Gpu("GPU-aa1", 0x3B), Gpu("GPU-bb2", 0xC1, is_full=False)]
        self.problem, self.asked = problem, []

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

    def of_full(self, handle, query, value):
        self.asked.append((query, handle.uuid))
        if isinstance(handle, Part):
            raise self.NVMLError("Invalid Argument")
        if not handle.is_full:
            raise self.NVMLError("Not Supported")
        return value

    def nvmlDeviceGetFieldValues(self, handle, fields):
        assert fields == [185, 83]
        self.of_full(handle, "fields", None)
        code = 0 if handle.has_fields else 3
        power, energy = SimpleNamespace(uiVal=250_500), SimpleNamespace(ullVal=7_500)
        return [
            SimpleNamespace(nvmlReturn=code, value=power),
            SimpleNamespace(nvmlReturn=code, value=energy),
        ]

    def nvmlDeviceGetPowerUsage(self, handle):
        self.asked.append(("power", handle.uuid))
        return 250_500

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        return self.of_full(handle, "energy", 7_500)

    def nvmlDeviceGetUtilizationRates(self, handle):
        return self.of_full(handle, "utilization", SimpleNamespace(gpu=87, memory=3))

    def nvmlDeviceGetClockInfo(self, handle, clock):
        return self.of_full(handle, f"clock {clock}", {1: 1980, 2: 2619}[clock])

    def nvmlDeviceGetTemperature(self, handle, sensor):
        return self.of_full(handle, "temperature", {0: 61}[sensor])

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return self.of_full(handle, "reasons", 0x44)

    def nvmlDeviceGetMemoryInfo(self, handle):
        self.asked.append(("memory", handle.uuid))
        if isinstance(handle, Part):
            return SimpleNamespace(used=2, total=handle.memory)
        if not handle.is_full:
            raise self.NVMLError("Not Supported")
        return SimpleNamespace(used=5, total=9)


class StandInForAmdSmi:
    """A card of two dies as amdsmi describes it: the first alone has the card's counters."""

    class AmdSmiException(Exception):
        pass

    def __init__(self, num=2, problem=None):
        self.num, self.problem = num, problem

    def amdsmi_init(self):
        if self.problem:
            raise self.AmdSmiException(self.problem)

    def amdsmi_get_processor_handles(self):
        return list(range(self.num))

    def amdsmi_get_gpu_device_uuid(self, handle):
        return f"uuid-{handle}"

    def amdsmi_get_gpu_device_bdf(self, handle):
        return f"0000:C{handle}:00.0"

    def amdsmi_get_gpu_asic_info(self, handle):
        return {"market_name": "AMD Instinct MI250X"}

    def amdsmi_get_gpu_vram_usage(self, handle):
        return {"vram_total": 65520, "vram_used": 100}

    def amdsmi_get_gpu_metrics_info(self, handle):
        counters = {"average_socket_power": 300, "energy_accumulator": 2_000_000}
        absent = {"average_socket_power": "N/A", "energy_accumulator": 0}
        return {
            **(absent if handle else counters),
            "current_socket_power": 0xFFFF,
            "average_gfx_activity": 50,
            "current_gfxclk": 1700,
            "current_uclk": 1600,
            "temperature_hotspot": 60,
        }
