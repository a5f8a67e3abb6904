"""The machine and the software, on which timings depend besides the case.

Read without importing torch, so that the controller and every worker derive the same fingerprint
from the same facts.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from ppbench.runtimes import entry_of

_CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class Environment:
    """The machine and its software."""

    hostname: str
    platform: str
    python: str
    cpu: str
    num_cores: int
    memory_bytes: int
    gpus: tuple[Gpu, ...]
    interconnect: str | None
    driver: str | None
    torch: str
    cuda: str | None
    nccl: str | None
    transformers: str

    def shares_gpus(self, device: str, num_ranks: int) -> bool:
        """Whether ranks must share a GPU, and so send through host memory."""
        return device == "cuda" and num_ranks > len(self.gpus)

    def fingerprint(self, device: str, num_ranks: int, threads_per_rank: int) -> str:
        """Return a short hash of the facts that must be equal for timings to be comparable."""
        uses_nccl = device == "cuda" and not self.shares_gpus(device, num_ranks)
        facts: dict[str, object] = {
            "device": device,
            "backend": "nccl" if uses_nccl else "gloo",
            "cpu": self.cpu,
            "num_cores": self.num_cores,
            "torch": self.torch,
            "threads": threads_per_rank,
        }
        if device == "cuda":
            facts |= {
                "gpus": sorted(gpu.name for gpu in self.gpus),
                "interconnect": self.interconnect,
                "driver_major": (self.driver or "").partition(".")[0],
                "cuda": self.cuda,
                "nccl": self.nccl,
            }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    def as_json(self) -> str:
        return json.dumps(asdict(self))


@functools.cache
def read_environment() -> Environment:
    gpus, driver, interconnect = _read_gpus()
    torch_facts = _torch_build()
    return Environment(
        hostname=platform.node(),
        platform=platform.platform(),
        python=platform.python_version(),
        cpu=_cpu_model(),
        num_cores=available_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus,
        interconnect=interconnect,
        driver=driver,
        torch=torch_facts.get("__version__", _version("torch") or "missing"),
        cuda=torch_facts.get("cuda"),
        nccl=_nccl_version(),
        transformers=_version("transformers") or "missing",
    )


def available_cores() -> int:
    """Return how many cores this process may use, by its affinity and the container's quota."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        quota, period = _CPU_QUOTA.read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


@functools.cache
def runtime_code(runtime: str) -> str | None:
    """Return the version of another package's runtime, with a hash of its code; None for ours.

    It is the distribution with its version, and a short hash of the sources of its whole package,
    which is not imported: a package in development keeps its version for long.
    """
    entry = entry_of(runtime)
    if entry is None:
        return None
    spec = importlib.util.find_spec(entry.module.partition(".")[0])
    places = [] if spec is None else spec.submodule_search_locations or [spec.origin or ""]
    named = [] if entry.dist is None else [entry.dist.name, entry.dist.version]
    return " ".join([*named, _hash_of(Path(place) for place in places if place)])


def _hash_of(places: Iterable[Path]) -> str:
    """Hash files, and all Python sources that are in folders."""
    digest = hashlib.sha256()
    for place in places:
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def default_device() -> str:
    """Return the device that `device = "auto"` means here."""
    environment = read_environment()
    return "cuda" if environment.gpus and environment.cuda else "cpu"


def _cpu_model() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1] if match else platform.processor() or platform.machine()


def _read_gpus() -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """Read visible GPUs, driver version and interconnect from NVML; empty without a driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return (), None, None
    try:
        handles = visible_gpus(pynvml)
        gpus = tuple(Gpu(_text(pynvml.nvmlDeviceGetName(h)), _memory_bytes(h)) for h in handles)
        links = min((_num_nvlinks(handle) for handle in handles), default=0)
        interconnect = f"{links} NVLink" if links else "PCIe"
        return gpus, _text(pynvml.nvmlSystemGetDriverVersion()), interconnect
    except pynvml.NVMLError:
        return (), None, None
    finally:
        pynvml.nvmlShutdown()


class NvmlDevices(Protocol):
    """The part of pynvml that finds GPUs."""

    def nvmlDeviceGetCount(self) -> int: ...  # noqa: N802  # NVML's names, here and below
    def nvmlDeviceGetHandleByIndex(self, index: int) -> object: ...  # noqa: N802
    def nvmlDeviceGetUUID(self, handle: object) -> str | bytes: ...  # noqa: N802


def visible_gpus(nvml: NvmlDevices) -> list[object]:
    """Return NVML's handles of the GPUs that `CUDA_VISIBLE_DEVICES` leaves, in its order.

    It lists indices, or UUIDs or prefixes of them; -1 hides those after it. Names that match none
    (parts of a GPU, MIG) count from the first. `nvml` is the module pynvml, initialised.
    """
    everywhere, open_gpu = range(nvml.nvmlDeviceGetCount()), nvml.nvmlDeviceGetHandleByIndex
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return [open_gpu(index) for index in everywhere]
    names = [name.strip() for name in setting.split(",") if name.strip()]
    names = list(itertools.takewhile(lambda name: name != "-1", names))
    if all(name.isdigit() for name in names):  # others may be broken, and are left alone
        return [open_gpu(int(name)) for name in names if int(name) in everywhere]
    gpus = [open_gpu(index) for index in everywhere]
    uuids = [_text(nvml.nvmlDeviceGetUUID(gpu)) for gpu in gpus]
    named = [uuids.index(uuid) for name in names for uuid in uuids if uuid.startswith(name)]
    return [gpus[index] for index in named] or gpus[: len(names)]


def _memory_bytes(handle: object) -> int | None:
    """Return None where the GPU shares the host's memory and has none of its own to report."""
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        return None


def _num_nvlinks(handle: object) -> int:
    import pynvml

    count = 0
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        try:
            count += pynvml.nvmlDeviceGetNvLinkState(handle, link)
        except pynvml.NVMLError:
            break
    return count


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _nccl_version() -> str | None:
    names = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")
    return next((version for name in names if (version := _version(name))), None)


def _torch_build() -> dict[str, str]:
    """Return `__version__` and `cuda` from torch's own version file, without importing torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    text = (Path(spec.origin).parent / "version.py").read_text()
    return dict(re.findall(r"^(__version__|cuda)\b[^=\n]*= *'([^']*)'", text, flags=re.MULTILINE))
