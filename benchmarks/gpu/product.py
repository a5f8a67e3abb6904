"""What ppbench says of a GPU: its name, speed and energy, attached trainings, failed ranks.

    python -m benchmarks.gpu.product [identity] [products] [energy] [attached] [failures]

`identity`: torch and NVML mean the same GPU by a UUID, in whatever order the process sees them.
`products`: 8192 x 8192 matrices in bfloat16 over the datasheet, the denominator of every MFU.
`energy`: the counter against the mean power, over seconds of load and of rest. `attached`:
`ppbench.attach` on a training of torch's own pipelining. `failures`: a rank that runs out of
memory, asserts, is killed or stops is named, and a sound case of the same launch is sound.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ppbench
from benchmarks.claims import Goal
from benchmarks.gpu.device import run_checks, unknown, wait_for
from benchmarks.loop import swept
from benchmarks.rows import Row
from engine.plan.action import COMPUTE_OPS
from engine.run import device as devices
from ppbench.analysis.mfu import datasheet_peak
from ppbench.external.attach import AttachWarning
from ppbench.run.machine.sampler import Sampler, read_samples
from ppbench.run.machine.telemetry import summarize
from ppbench.run.runtimes.runtime import id_of


def identity(device: torch.device) -> Iterator[Row]:
    """Look for each device of torch among those of NVML."""
    name = "devices of torch that NVML knows by their UUID"
    if device.type == "cpu":
        yield unknown(name, "the CPU has no UUID")
        return
    import pynvml

    of_torch = [devices.uuid_of(torch.device(device.type, at)) for at in range(devices.count())]
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        yield unknown(name, str(error))
        return
    handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
    found = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    known = {bare(uuid.decode() if isinstance(uuid, bytes) else str(uuid)) for uuid in found}
    num = sum(bare(uuid) in known for uuid in of_torch)
    yield Row.exact(name, num, Goal(len(of_torch)))


def bare(uuid: str) -> str:
    """NVML writes `GPU-` or `MIG-` before what torch writes alone."""
    return uuid.lower().removeprefix("gpu-").removeprefix("mig-")


def products(device: torch.device, window_s: float = 2.0) -> Iterator[Row]:
    """Multiply matrices for some seconds, after the clock has risen."""
    size = 8192 if device.type == "cuda" else 256
    left, right = (torch.rand(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(left)
    began, num = time.perf_counter(), 0
    for seconds in (window_s / 4, window_s):
        wait_for(device)
        began, num = time.perf_counter(), 0
        while time.perf_counter() - began < seconds:
            for _ in range(10):
                torch.mm(left, right, out=product)
            wait_for(device)
            num += 10
    flops_per_s = num * 2 * size**3 / (time.perf_counter() - began)
    model = devices.name_of(device) if devices.is_accelerator(device) else "the CPU"
    peak, note = datasheet_peak(model, "bfloat16"), f"{flops_per_s / 1e12:.3g} TFLOP/s on {model}"
    name = "8192³ bfloat16 products, of the datasheet's speed"
    if peak is None:
        yield unknown(name, f"no datasheet; {note}")
    else:
        yield Row.exact(name, flops_per_s / peak.flops_per_s, Goal(0.7, 0.9), note=note)


def energy(device: torch.device, window_s: float = 8.0) -> Iterator[Row]:
    """Multiply matrices for some seconds beside a sampler."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples"
        sampler = Sampler(path, os.getpid())
        size = 4096 if device.type == "cuda" else 128
        left, moments = torch.rand(size, size, device=device), list[int]()
        for seconds in (2.0 if device.type == "cuda" else 0.1, window_s):  # power is a mean of 1 s
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                left @ left
                wait_for(device)
                sampler.sample_if_due()
            sampler.sample()
            moments.append(time.monotonic_ns())
        sampler.close()
        gpu = id_of(device) if devices.is_accelerator(device) else None
        begin_ns, end_ns = moments
        found = summarize(read_samples(path, begin_ns, end_ns), [(begin_ns, end_ns)], gpu)
    name, note = "energy by the counter, over the integral of power", found["telemetry_note"]
    if found["gpu_energy_j"] is None or found["gpu_power_w"] is None:
        yield unknown(name, note or "NVML tells none")
        return
    share = found["gpu_energy_j"] / (found["gpu_power_w"] * (end_ns - begin_ns) / 1e9)
    yield Row.exact(name, share, Goal(0.95, 1.05), note=f"{found['gpu_power_w']:.0f} W. {note}")


# Attached

RECORDED = range(3, 6)


def attached(device: torch.device) -> Iterator[Row]:
    """Attach to a training of torch's pipelining on one rank, and read what was stored."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, f"file://{folder}/meeting", rank=0, world_size=1)
        results = Path(folder) / "results"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", AttachWarning)
            wall_s = _train(device, results)
        dist.destroy_process_group()
        said = "; ".join(str(w.message) for w in caught if issubclass(w.category, AttachWarning))
        if not results.exists():
            yield Row.exact("recorded steps", 0, Goal(len(RECORDED)), note=said)
            return
        spans = ppbench.load(results).table("spans")
    spans = spans[spans["op"].isin([op.value for op in COMPUTE_OPS])]
    by_step = [of_step for _, of_step in spans.groupby("step")]
    took_s = [float((own["end_ns"] - own["start_ns"]).sum()) / 1e9 for own in by_step]
    yield Row.exact("recorded steps", len(by_step), Goal(len(RECORDED), len(RECORDED)), note=said)
    yield Row.exact("computations of a step", max(map(len, by_step)), Goal(8, 8))
    name = "computations by their spans, over the wall time of a step, at most"
    shares = [own / wall for own, wall in zip(took_s, wall_s, strict=False)]
    yield Row.exact(name, max(shares), Goal(0.5, 1.0))


def _train(device: torch.device, results: Path) -> list[float]:
    """Train four microbatches a step; the seconds of the recorded steps."""
    width = rows = 4096 if device.type == "cuda" else 64
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)
    schedule = Schedule1F1B(PipelineStage(model, 0, 1, device), 4, loss_fn=nn.functional.mse_loss)
    attachment = ppbench.attach(schedule, RECORDED, results=results)
    x, wall_s = torch.rand(4 * rows, width, device=device), []
    for step in range(RECORDED.stop + 1):
        wait_for(device)
        began = time.perf_counter()
        schedule.step(x, target=x)
        wait_for(device)
        if step in RECORDED:
            wall_s.append(time.perf_counter() - began)
    attachment.close()
    return wall_s


# Failures

EXPECTED = {
    "out_of_memory": ("oom",),
    "asserts": ("error", "crash"),  # a failed assertion may end the process
    "is_killed": ("crash",),
    "stops": ("timeout",),
}
"""The statuses that a fault may end in."""
SWEEP = """\
name = "failures"
device = "{device}"
world_size = 2
seq_len = 16
measure = {{warmup_steps = 1, max_warmup_steps = 1, steps = 2, timeout_s = 20}}
[grid]
num_microbatches = [4]
"model.preset" = {presets}
"""


def failures(device: torch.device) -> Iterator[Row]:
    """Sweep as many sound cases as faults, in one launch, a sound one after each fault."""
    factory = "benchmarks.gpu.faulty:"
    presets = [f"{factory}{prefix}{fault}" for fault in EXPECTED for prefix in ("", "after_")]
    text = SWEEP.format(device=device.type, presets=json.dumps(presets))
    with tempfile.TemporaryDirectory() as folder:
        runs = swept(Path(folder), text, allowed=range(256))
    names = runs["model_preset"].str.removeprefix(factory)
    found = dict(zip(names, runs["status"].astype(str), strict=True))
    for fault, statuses in EXPECTED.items():
        status, after = found.get(fault, "no run"), found.get(f"after_{fault}", "no run")
        name = f"{fault}: a run with status {' or '.join(statuses)}"
        yield Row.exact(name, int(status in statuses), Goal(1), note=f"status {status}")
        name = f"{fault}: a sound case of the same launch is ok"
        yield Row.exact(name, int(after == "ok"), Goal(1), note=f"status {after}")


PARTS = {"identity": identity, "products": products, "energy": energy}
PARTS |= {"attached": attached, "failures": failures}

if __name__ == "__main__":
    run_checks("gpu.product", __doc__, PARTS)
