"""The GPUs of a machine, by NVML: which there are, which a process may use, and their counters.

A GPU is known by its UUID, because its number differs between processes and libraries: NVML counts
in the order of the bus, CUDA by speed or as `CUDA_VISIBLE_DEVICES` says. What a driver does not
support is None. A part of a GPU (MIG) has memory of its own, but shares the sensors of its GPU:
power and energy are those of all parts together, so none is given for one. Accelerators of other
vendors have the figures of torch alone.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.packages import missing
from ppbench.run.machine.counters import By, Figure, Reading

SLICE, WHOLE = "MIG-", "GPU-"
"""How the UUIDs of parts of a GPU, and of whole ones, begin."""
THROTTLE_REASONS: Mapping[int, str] = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
"""Bits of NVML's clocks event reasons (`nvml.h`, nvmlClocksEventReasons)."""

SM_CLOCK, MEMORY_CLOCK = 1, 2
"""NVML_CLOCK_SM and NVML_CLOCK_MEM."""
GPU_SENSOR = 0
"""NVML_TEMPERATURE_GPU."""

GPU_FIGURES = {
    "gpu_power_w": Figure("power_w", By.mean),
    "gpu_energy_j": Figure("energy_j", By.amount),
    "gpu_utilization": Figure("utilization", By.mean),
    "gpu_sm_mhz": Figure("clock_mhz", By.mean),
    "gpu_temperature_c": Figure("temperature_c", By.highest),
    "gpu_throttle_reasons": Figure("throttle_reasons", By.names),
    "gpu_memory_used_bytes": Figure("memory_used_bytes", By.highest),
}
"""What is made of the readings of a rank's GPU."""

OF_A_SLICE = "no power, energy or utilisation: the GPU counts all its MIG slices together"


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


class NvidiaGpus:
    """The GPUs that this process may use, or others by their UUIDs; and their counters."""

    def __init__(self, nvml: Any, setting: str | None = None) -> None:
        """Open the driver; `nvml` is the module pynvml, None where it is not installed.

        Without GPUs, `absent` has the reason.

        `setting` stands for the environment's `CUDA_VISIBLE_DEVICES`.
        """
        self._nvml = nvml
        self._handles: dict[str, object] = {}
        self._memory: dict[str, int | None] = {}
        self.everything: list[Device] = []
        self.devices: list[Device] = []
        self.absent = ""
        setting = os.environ.get("CUDA_VISIBLE_DEVICES") if setting is None else setting
        if nvml is None:
            self.absent = missing("pynvml", "reading GPUs of NVIDIA")
            return
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            self.absent = f"no NVIDIA driver: {error}"
            return
        self.everything = [self._gpu(index) for index in range(count)]
        self.devices = visible(self.everything, setting)
        if not self.devices:
            self.absent = "no visible NVIDIA GPU"

    def read(self, uuids: Sequence[str] = ()) -> tuple[Reading, ...]:
        """Read the devices of these UUIDs in their order; those that are visible without any."""
        found = [find(self.everything, uuid) for uuid in uuids] if uuids else self.devices
        return tuple(self._read(device) for device in found if device is not None)

    def _gpu(self, index: int) -> Device:
        """Describe a GPU; one that is broken has a number for a name, so that others count on."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        except nvml.NVMLError:
            return Device(f"broken {index}")
        pci = ""
        with contextlib.suppress(nvml.NVMLError):  # as /sys writes it: NVML's domain is longer
            address = nvml.nvmlDeviceGetPciInfo(handle)
            pci = f"{address.domain:04x}:{address.bus:02x}:{address.device:02x}.0"
        slices = tuple(self._described(part, pci, uuid) for part in self._slices(handle))
        whole = self._described(handle, pci)
        return Device(uuid, whole.name, whole.memory_bytes, pci, slices)

    def _slices(self, handle: object) -> Iterable[object]:
        nvml = self._nvml
        try:
            if not nvml.nvmlDeviceGetMigMode(handle)[0]:
                return
            most = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
        except nvml.NVMLError:  # a GPU that cannot be divided
            return
        for index in range(most):
            try:
                yield nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
            except nvml.NVMLError:  # fewer are made than could be
                continue

    def _described(self, handle: object, pci: str, parent: str = "") -> Device:
        nvml = self._nvml
        uuid = _text(nvml.nvmlDeviceGetUUID(handle))
        self._handles[uuid] = handle
        try:
            name = _text(nvml.nvmlDeviceGetName(handle))
        except nvml.NVMLError:
            name = ""
        memory = self._ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total)
        return Device(uuid, name, memory, pci, parent=parent)

    def _read(self, device: Device) -> Reading:
        nvml, ask = self._nvml, self._ask
        own = self._handles[device.uuid]
        sensors = self._handles[device.parent] if device.is_slice else own
        power = energy = percent = None  # of whole GPUs alone, in mW and mJ
        if not device.is_slice:
            power = ask(lambda: nvml.nvmlDeviceGetPowerUsage(own))
            energy = ask(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(own))
            percent = ask(lambda: nvml.nvmlDeviceGetUtilizationRates(own).gpu)
        # The older of two names: drivers before 535 have no other, and newer ones keep it.
        reasons = ask(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(sensors))
        return {
            "power_w": None if power is None else power / 1e3,
            "energy_j": None if energy is None else energy / 1e3,  # since the driver was loaded
            "utilization": None if percent is None else percent / 100,
            "clock_mhz": ask(lambda: nvml.nvmlDeviceGetClockInfo(sensors, SM_CLOCK)),
            "memory_clock_mhz": ask(lambda: nvml.nvmlDeviceGetClockInfo(sensors, MEMORY_CLOCK)),
            "temperature_c": ask(lambda: nvml.nvmlDeviceGetTemperature(sensors, GPU_SENSOR)),
            "throttle_reasons": None if reasons is None else reason_names(reasons),
            "memory_used_bytes": ask(lambda: nvml.nvmlDeviceGetMemoryInfo(own).used),
            "uuid": device.uuid,
            "note": OF_A_SLICE if device.is_slice else "",  # what it cannot give, and why
        }

    def _ask(self, query: Callable[[], int]) -> int | None:
        try:
            return int(query())
        except self._nvml.NVMLError:
            return None


def open_gpus() -> NvidiaGpus:
    try:
        import pynvml
    except ImportError:
        return NvidiaGpus(None)
    return NvidiaGpus(pynvml)


def reason_names(bits: int) -> list[str]:
    """Return NVML's reasons for a clock below the highest; a bit without a name as a number."""
    set_bits = (1 << place for place in range(bits.bit_length()) if bits >> place & 1)
    return [THROTTLE_REASONS.get(bit, hex(bit)) for bit in set_bits]


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
