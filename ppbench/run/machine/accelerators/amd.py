"""AMD's GPUs, by amdsmi, which comes with ROCm.

One call reads all that the firmware measures. A figure that a device does not measure is 0xFFFF or
"N/A" there, and None here. The energy counter counts units of 15.259 uJ. A package of two dies
(MI250X) is two devices, of which one alone has the counters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from ppbench.run.machine.accelerators.devices import Device, GpuReading

ENERGY_UNIT_J = 15.259e-6
_NOT_MEASURED = (0xFFFF, 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF)


class AmdSmi(Protocol):
    """The part of amdsmi that is used here."""

    AmdSmiException: type[Exception]

    def amdsmi_init(self) -> None: ...
    def amdsmi_get_processor_handles(self) -> Sequence[object]: ...
    def amdsmi_get_gpu_device_uuid(self, handle: object) -> str: ...
    def amdsmi_get_gpu_device_bdf(self, handle: object) -> str: ...
    def amdsmi_get_gpu_asic_info(self, handle: object) -> dict[str, Any]: ...
    def amdsmi_get_gpu_vram_usage(self, handle: object) -> dict[str, Any]: ...
    def amdsmi_get_gpu_metrics_info(self, handle: object) -> dict[str, Any]: ...


class AmdGpus:
    """The GPUs of the machine, by their addresses; and their counters."""

    def __init__(self, smi: AmdSmi) -> None:
        """Open the driver; `smi` is the module amdsmi. Without GPUs, `absent` has the reason."""
        self._smi = smi
        self._handles: dict[str, object] = {}
        self.everything: list[Device] = []
        self.absent = ""
        try:
            smi.amdsmi_init()
            handles = smi.amdsmi_get_processor_handles()
        except smi.AmdSmiException as error:
            self.absent = f"no AMD driver: {error}"
            return
        self.everything = [self._gpu(handle) for handle in handles]
        if not self.everything:
            self.absent = "no AMD GPU"

    @property
    def devices(self) -> list[Device]:
        return self.everything

    def read(self, uuids: Sequence[str] = ()) -> tuple[GpuReading, ...]:
        """Read the devices of these ids, UUIDs or addresses; all of them without any."""
        chosen = self.everything
        if uuids:
            by_id = {name: gpu for gpu in self.everything for name in (gpu.uuid, gpu.pci)}
            chosen = [by_id[uuid] for uuid in uuids if uuid in by_id]
        return tuple(self._read(gpu) for gpu in chosen)

    def _gpu(self, handle: object) -> Device:
        smi = self._smi
        uuid, pci = smi.amdsmi_get_gpu_device_uuid(handle), smi.amdsmi_get_gpu_device_bdf(handle)
        self._handles[uuid] = handle
        name = str(self._told(smi.amdsmi_get_gpu_asic_info, handle).get("market_name", ""))
        memory = _number(self._told(smi.amdsmi_get_gpu_vram_usage, handle).get("vram_total"))
        size = None if memory is None else int(memory) << 20
        return Device(uuid, name, size, pci.lower())

    def _read(self, device: Device) -> GpuReading:
        smi, handle = self._smi, self._handles[device.uuid]
        found = {
            name: _number(value)
            for name, value in self._told(smi.amdsmi_get_gpu_metrics_info, handle).items()
        }
        used = _number(self._told(smi.amdsmi_get_gpu_vram_usage, handle).get("vram_used"))
        energy, percent = found.get("energy_accumulator"), found.get("average_gfx_activity")
        power = found.get("current_socket_power")
        return GpuReading(
            power_w=found.get("average_socket_power") if power is None else power,
            energy_j=energy * ENERGY_UNIT_J if energy else None,
            utilization=None if percent is None else percent / 100,
            sm_mhz=found.get("current_gfxclk"),
            memory_mhz=found.get("current_uclk"),
            temperature_c=found.get("temperature_hotspot"),
            memory_used_bytes=None if used is None else int(used) << 20,
            uuid=device.uuid,
        )

    def _told(self, query: Any, handle: object) -> dict[str, Any]:
        try:
            told: dict[str, Any] = query(handle)
        except self._smi.AmdSmiException:
            return {}
        return told


def _number(value: object) -> float | None:
    """Return a measured number; None for what stands for no measurement."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(str(value)) if is_number and value not in _NOT_MEASURED else None
