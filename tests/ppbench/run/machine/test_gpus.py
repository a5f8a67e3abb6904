"""Which devices a process sees, and their counters, on machines that are written down."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ppbench.run.machine.gpus import OF_A_SLICE, Device, NvidiaGpus, find, reason_names, visible


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


FULL = {
    "power_w": 250.5,
    "energy_j": 7.5,
    "utilization": 0.87,
    "clock_mhz": 1980,
    "memory_clock_mhz": 2619,
    "temperature_c": 61,
    "throttle_reasons": ["sw_power_cap", "hw_thermal_slowdown"],
    "memory_used_bytes": 5,
    "uuid": "GPU-aa1",
    "note": "",
}
FOUR = [Device(uuid) for uuid in ("GPU-11aa", "GPU-11bb", "GPU-2", "GPU-3")]
DIVIDED = [
    Device("GPU-0", slices=(Device("MIG-5a", parent="GPU-0"), Device("MIG-5b", parent="GPU-0"))),
    Device("GPU-1"),
]


def uuids(devices):
    return [device.uuid for device in devices]


SETTINGS = st.lists(
    st.sampled_from(
        [
            *("0", "1", "2", "3", "4", "-1", " 2", "1gpu", "x", "", "+3"),
            *("GPU-11aa", "GPU-11bb", "GPU-11", "GPU-2", "GPU-3", "GPU-9", "MIG-5"),
        ]
    ),
    max_size=4,
).map(",".join)


@given(SETTINGS)
def test_torch_reads_a_setting_alike(setting):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", setting)
        theirs = torch.cuda._parse_visible_devices()
    if theirs and isinstance(theirs[0], str):
        theirs = torch.cuda._transform_uuid_to_ordinals(theirs, uuids(FOUR))
    if any(number >= len(FOUR) for number in theirs):  # torch then counts what CUDA shows
        theirs = theirs[: next(i for i, number in enumerate(theirs) if number >= len(FOUR))]
    if not setting.startswith("MIG-"):
        assert visible(FOUR, setting) == [FOUR[number] for number in theirs]


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        (None, ["MIG-5a"]),  # CUDA shows a process the first part alone
        ("0,1", ["MIG-5a"]),
        ("1", ["GPU-1"]),
        ("MIG-5b", ["MIG-5b"]),
        ("MIG-5b,MIG-5a", ["MIG-5b"]),
        ("MIG-5", []),
        ("GPU-0", ["MIG-5a"]),
    ],
)
def test_of_a_divided_gpu_its_parts_are_the_devices(setting, shown):
    assert uuids(visible(DIVIDED, setting)) == shown


def test_a_device_is_found_as_torch_writes_its_uuid():
    assert find(DIVIDED, "1") == DIVIDED[1]
    assert find(DIVIDED, "5B") == DIVIDED[0].slices[1]
    assert find(DIVIDED, "7") is None


def test_a_gpu_is_read_in_the_units_of_its_columns():
    gpus = NvidiaGpus(StandInForNvml(), "0,1")
    assert gpus.read() == (
        FULL,
        dict.fromkeys(FULL) | {"power_w": 250.5, "uuid": "GPU-bb2", "note": ""},
    )
    assert gpus.absent == ""


@pytest.mark.parametrize(
    ("setting", "wanted", "read"),
    [
        ("1,0", (), ["GPU-bb2", "GPU-aa1"]),
        ("1,0", ("aa1",), ["GPU-aa1"]),
        ("1", ("GPU-aa1", "GPU-bb2"), ["GPU-aa1", "GPU-bb2"]),  # the rank's, though not shown here
        ("0", ("GPU-zz",), []),
    ],
)
def test_gpus_are_known_by_uuid_in_whatever_order_they_are_shown(setting, wanted, read):
    assert [one["uuid"] for one in NvidiaGpus(StandInForNvml(), setting).read(wanted)] == read


def divided():
    parts = [Part("MIG-a", "A MIG 3g", 20), Part("MIG-b")]
    return StandInForNvml([Gpu("GPU-1", 0xC1, parts, is_divided=True), Gpu("GPU-2", 0xC2)])


def test_a_part_of_a_gpu_has_memory_and_clocks_and_no_energy_of_its_gpu():
    nvml = divided()
    gpus = NvidiaGpus(nvml, "MIG-a")
    (reading,) = gpus.read()
    assert (reading["power_w"], reading["energy_j"], reading["utilization"]) == (None, None, None)
    assert (reading["clock_mhz"], reading["memory_used_bytes"], reading["uuid"]) == (
        1980,
        2,
        "MIG-a",
    )
    assert reading["note"] == OF_A_SLICE
    assert gpus.devices == [Device("MIG-a", "A MIG 3g", 20, "0000:c1:00.0", parent="GPU-1")]
    assert gpus.read(["MIG-b", "2"])[1]["energy_j"] == 7.5


def test_a_broken_gpu_leaves_the_numbers_of_the_others():
    broken = StandInForNvml([Gpu("GPU-1", 1, is_broken=True), Gpu("GPU-2", 2)])
    assert uuids(NvidiaGpus(broken, "1").devices) == ["GPU-2"]


@pytest.mark.parametrize("setting", ["", "-1"])
def test_hidden_gpus_are_not_read(setting):
    gpus = NvidiaGpus(StandInForNvml(), setting)
    assert gpus.read() == ()
    assert gpus.absent == "no visible NVIDIA GPU"


def test_the_setting_is_that_of_the_process(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert uuids(NvidiaGpus(StandInForNvml()).devices) == ["GPU-bb2"]


def test_without_a_driver_there_are_no_gpus_and_the_reason_is_stated():
    gpus = NvidiaGpus(StandInForNvml(problem="Library Not Found"))
    assert gpus.read() == ()
    assert gpus.absent == "no NVIDIA driver: Library Not Found"


def test_every_function_that_is_used_of_nvml_exists():
    import pynvml

    names = [name for name in vars(StandInForNvml) if name.startswith(("nvml", "NVML"))]
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_reasons_have_nvmls_names():
    assert reason_names(0) == []
    assert reason_names(0x9) == ["gpu_idle", "hw_slowdown"]
    assert reason_names(0x4000) == ["0x4000"]
