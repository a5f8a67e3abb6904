"""torch and NVML mean the same GPU by a UUID, in whatever order the process sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.gpu.findings import Bound, Finding
from engine.run import device as devices


@dataclass(frozen=True)
class Measurements:
    """UUIDs of the devices that torch sees, and those of the GPUs and MIG slices that NVML sees."""

    of_torch: tuple[str, ...]
    of_nvml: tuple[str, ...]
    note: str = ""


def judge(measured: Measurements) -> list[Finding]:
    name = "devices of torch that NVML knows by their UUID"
    if not measured.of_nvml:
        return [Finding.undecided("identity", name, measured.note)]
    known = {_bare(uuid) for uuid in measured.of_nvml}
    found = sum(_bare(uuid) in known for uuid in measured.of_torch)
    return [Finding.of("identity", name, found, Bound(at_least=len(measured.of_torch)))]


def _bare(uuid: str) -> str:
    """NVML writes `GPU-` or `MIG-` before what torch writes alone."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def measure(device: torch.device) -> Measurements:
    if device.type == "cpu":
        return Measurements((), (), "the CPU has no UUID")
    here = [torch.device(device.type, index) for index in range(devices.count())]
    of_torch = tuple(devices.uuid_of(one) for one in here)
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Measurements(of_torch, (), str(error))
    return Measurements(of_torch, tuple(_uuids_of_nvml()))


def _uuids_of_nvml() -> list[str]:
    import pynvml

    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    uuids = (pynvml.nvmlDeviceGetUUID(handle) for handle in handles)
    return [uuid.decode() if isinstance(uuid, bytes) else str(uuid) for uuid in uuids]
