"""The machine and the software, on which timings depend besides the case.

Read without importing torch, so that the controller and every worker derive the same fingerprint
from the same facts.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from engine.packages import is_installed, missing
from ppbench.run.machine.counters import cpu_groups, quota_of_cores
from ppbench.run.machine.gpus import open_gpus
from ppbench.run.machine.inputs import sources_of
from ppbench.runtimes import entry_of

ON_GPUS = ("cuda", "xpu")
"""Devices of a case that are GPUs; ROCm's are `cuda`, as torch calls them."""
_DRIVER = Path("/dev/nvidiactl")
"""There while NVIDIA's driver is loaded."""


@dataclass(frozen=True)
class Gpu:
    """A GPU, or the part of one that a process may use; a part's name says which."""

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
    rocm: str | None = None

    def fingerprint(
        self, device: str, num_ranks: int, threads_per_rank: int, num_machines: int = 1
    ) -> str:
        """Return a short hash of the facts that must be equal for timings to be comparable.

        The variables of `engine.device_variables` and the precision of products are no part of it:
        every run has the same, or is refused.
        """
        is_on_gpu = device in ON_GPUS
        # Ranks that must share a GPU of their machine send through host memory.
        uses_nccl = is_on_gpu and -(-num_ranks // num_machines) <= len(self.gpus)
        facts: dict[str, object] = {
            "device": device,
            "backend": "nccl" if uses_nccl else "gloo",
            "cpu": self.cpu,
            "num_cores": self.num_cores,
            "torch": self.torch,
            "threads": threads_per_rank,
        }
        if is_on_gpu:
            facts |= {
                "gpus": sorted(gpu.name for gpu in self.gpus),
                "interconnect": self.interconnect,
                "driver_major": (self.driver or "").partition(".")[0],
                "cuda": self.cuda,
                "nccl": self.nccl,
                **({"machines": num_machines} if num_machines > 1 else {}),
                **({"rocm": self.rocm} if self.rocm else {}),
            }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]

    def as_json(self) -> str:
        return json.dumps(asdict(self))


@functools.cache
def read_environment() -> Environment:
    gpus, driver, interconnect = _read_gpus()
    torch_facts = _torch_build()
    nccl = (_version(f"nvidia-nccl-cu{cuda}") for cuda in (13, 12, 11))
    return Environment(
        hostname=platform.node(),
        platform=platform.platform(),
        python=platform.python_version(),
        cpu=name_of_cpu(),
        num_cores=available_cores(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        gpus=gpus,
        interconnect=interconnect,
        driver=driver,
        torch=torch_facts.get("__version__", _version("torch") or "missing"),
        cuda=torch_facts.get("cuda"),
        nccl=next((version for version in nccl if version), None),
        transformers=_version("transformers") or "missing",
        rocm=torch_facts.get("hip"),
    )


def fingerprint_here(device: str, num_ranks: int, threads_per_rank: int) -> str:
    """Return the fingerprint of ranks that this process starts, or of whose launch it is a rank."""
    # Each node starts as many ranks; the controller's are all here.
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    machines = -(-num_ranks // max(1, per_machine))
    return read_environment().fingerprint(device, num_ranks, threads_per_rank, machines)


def available_cores() -> int:
    """Return how many cores this process may use, by its affinity and its groups' quotas."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    try:
        own = Path("/proc/self/cgroup").read_text()
    except OSError:
        own = ""
    quota = quota_of_cores(list(cpu_groups(own, Path("/sys/fs/cgroup"))))
    return max(1, int(min(cores, quota)))


def name_of_cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model of the CPU; of ARM its implementer's and its parts' numbers."""
    text = ""
    with contextlib.suppress(OSError):
        text = cpuinfo.read_text()
    if model := re.search(r"^model name\s*:\s*(.+)", text, re.MULTILINE):
        return model[1]
    parts = re.findall(r"^CPU (?:implementer|part|variant)\s*:\s*(\S+)", text, re.MULTILINE)
    name = platform.processor() or platform.machine()
    return " ".join([name, *dict.fromkeys(parts)])


@functools.cache
def runtime_code(runtime: str) -> str | None:
    """Return the version of another package's runtime, with a hash of its code; None for ours.

    It is the distribution with its version, and a short hash of the sources that the runtime may
    depend on, which are not imported: a package in development keeps its version for long.
    """
    entry = entry_of(runtime)
    if entry is None:
        return None
    named = [] if entry.dist is None else [entry.dist.name, entry.dist.version]
    digest = hashlib.sha256()
    for path in sources_of(entry.module):
        digest.update(path.read_bytes())
    return " ".join([*named, digest.hexdigest()[:12]])


def default_device() -> str:
    """Return the device that `device = "auto"` means here."""
    environment = read_environment()
    return "cuda" if environment.gpus and environment.cuda else "cpu"


def why_gpus_are_not_seen() -> str | None:
    """Why GPUs of NVIDIA that have a driver here cannot be used; None where that is not so."""
    has_driver = _DRIVER.exists() and read_environment().cuda is not None
    if has_driver and not is_installed("pynvml"):
        return missing("pynvml", f"{_DRIVER}: measuring on GPUs of NVIDIA")
    return None


def _read_gpus() -> tuple[tuple[Gpu, ...], str | None, str | None]:
    """Read visible GPUs of NVIDIA, driver version and interconnect; empty without a driver."""
    devices = open_gpus().devices
    if not devices:
        return (), None, None
    import pynvml

    gpus = tuple(Gpu(device.name, device.memory_bytes) for device in devices)
    try:
        handles = [pynvml.nvmlDeviceGetHandleByUUID(d.parent or d.uuid) for d in devices]
        driver = pynvml.nvmlSystemGetDriverVersion()
    except pynvml.NVMLError:
        return gpus, None, None
    counts = []
    for handle in handles:
        counts.append(0)
        with contextlib.suppress(pynvml.NVMLError):  # it has no more links
            for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
                counts[-1] += pynvml.nvmlDeviceGetNvLinkState(handle, link)
    version = driver.decode() if isinstance(driver, bytes) else driver
    return gpus, version, f"{min(counts)} NVLink" if min(counts) else "PCIe"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _torch_build() -> dict[str, str]:
    """Return `__version__`, `cuda` and `hip` from torch's version file; torch is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return {}
    text = (Path(spec.origin).parent / "version.py").read_text()
    found = re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *'([^']*)'", text, re.MULTILINE)
    return dict(found)
