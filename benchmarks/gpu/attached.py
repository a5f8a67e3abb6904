"""`ppbench.attach` on a training of torch's own pipelining on a GPU."""

from __future__ import annotations

import os
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import ppbench
from benchmarks.gpu.clock import wait_for
from benchmarks.gpu.findings import Bound, Finding
from engine.plan.action import COMPUTE_OPS
from ppbench.external.attach import AttachWarning

NUM_MICROBATCHES = 4
RECORDED = range(3, 6)
WIDTHS = {"cuda": (4096, 4096), "cpu": (64, 64)}
"""Width of a layer, and rows of a microbatch."""


@dataclass(frozen=True)
class Measurements:
    warnings: tuple[str, ...]
    num_steps: int
    num_computations: int  # spans of a recorded step
    wall_s: tuple[float, ...]  # of the recorded steps
    span_s: tuple[float, ...]


def judge(measured: Measurements) -> list[Finding]:
    if not measured.num_steps:
        return [
            Finding.of(
                "attached",
                "recorded steps",
                0,
                Bound(at_least=len(RECORDED)),
                note="; ".join(measured.warnings),
            )
        ]
    shares = [s / wall for s, wall in zip(measured.span_s, measured.wall_s, strict=True)]
    return [
        Finding.of(
            "attached", "recorded steps", measured.num_steps, Bound(len(RECORDED), len(RECORDED))
        ),
        Finding.of(
            "attached",
            "computations of a step",
            measured.num_computations,
            Bound(2 * NUM_MICROBATCHES, 2 * NUM_MICROBATCHES),
        ),
        Finding.of(
            "attached",
            "computations by their spans, over the wall time of a step, at most",
            max(shares),
            Bound(at_least=0.5, at_most=1.0),
        ),
    ]


def measure(device: torch.device) -> Measurements:
    with tempfile.TemporaryDirectory(prefix="ppbench-gpu-") as folder:
        store = Path(folder)
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, f"file://{store}/meeting", rank=0, world_size=1)
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", AttachWarning)
                wall = _train(device, store / "results")
        finally:
            dist.destroy_process_group()
        kinds = (w for w in caught if issubclass(w.category, AttachWarning))
        return _read(store / "results", wall, tuple(str(w.message) for w in kinds))


def _train(device: torch.device, results: Path) -> tuple[float, ...]:
    width, rows = WIDTHS[device.type]
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))).to(device)
    stage = PipelineStage(model, 0, 1, device)
    schedule = Schedule1F1B(stage, NUM_MICROBATCHES, loss_fn=nn.functional.mse_loss)
    attachment = ppbench.attach(schedule, RECORDED, results=results)
    x = torch.rand(rows * NUM_MICROBATCHES, width, device=device)
    wall = []
    for step in range(RECORDED.stop + 1):
        wait_for(device)
        began = time.perf_counter()
        schedule.step(x, target=x)
        wait_for(device)
        if step in RECORDED:
            wall.append(time.perf_counter() - began)
    attachment.close()
    return tuple(wall)


def _read(results: Path, wall_s: tuple[float, ...], said: tuple[str, ...]) -> Measurements:
    if not results.exists():
        return Measurements(said, 0, 0, wall_s, ())
    spans = ppbench.load(results).table("spans")
    spans = spans[spans["op"].isin([op.value for op in COMPUTE_OPS])]
    by_step = [of_step for _, of_step in spans.groupby("step")]
    took = tuple(float((s["end_ns"] - s["start_ns"]).sum()) / 1e9 for s in by_step)
    return Measurements(said, len(by_step), max(map(len, by_step)), wall_s, took)
