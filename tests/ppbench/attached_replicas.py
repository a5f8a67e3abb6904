"""A training script whose replicas FSDP2 or DDP shares; the tests of attach run it on each rank."""

from __future__ import annotations

import contextlib
import json
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

import ppbench

WIDTH, MICROBATCHES, STEPS, ANCHORS = 64, 4, 4, 20
CPU = torch.device("cpu")
MESHES = {  # rows are pipelines
    "replica by replica": [[0, 1], [2, 3]],
    "rank by rank": [[0, 2], [1, 3]],
    "one rank": [[0], [1]],
}
made: dict[str, DeviceMesh] = {}  # once in a session


def mesh_of(order: str) -> DeviceMesh:
    if order not in made:
        made[order] = DeviceMesh("cpu", MESHES[order], mesh_dim_names=("replica", "rank"))
    return made[order]


class Script:
    """A rank of a pipeline with replicas."""

    def __init__(self, mesh: DeviceMesh, wrap: str, stages_per_rank: int) -> None:
        rank, group = mesh.get_local_rank("rank"), mesh.get_group("rank")
        size, replica = mesh["rank"].size(), mesh.get_local_rank("replica")
        num_stages = size * stages_per_rank
        indices = [rank + size * turn for turn in range(stages_per_rank)]
        self.modules = [_wrapped(_layers(index), wrap, mesh["replica"]) for index in indices]
        example = torch.zeros(2, WIDTH, requires_grad=True)
        stages = [
            PipelineStage(module, i, num_stages, CPU, example, example, group=group)
            for module, i in zip(self.modules, indices, strict=True)
        ]
        arguments = {"n_microbatches": MICROBATCHES, "loss_fn": nn.functional.mse_loss}
        self.schedule = (
            Schedule1F1B(stages[0], **arguments)
            if stages_per_rank == 1
            else ScheduleInterleaved1F1B(stages, **arguments)
        )
        self.is_first, self.is_last = 0 in indices, num_stages - 1 in indices
        parameters = [p for module in self.modules for p in module.parameters()]
        self.optimizer = torch.optim.SGD(parameters, 0.1)
        generator = torch.Generator().manual_seed(replica)
        self.inputs, self.targets = torch.randn(2, 8, WIDTH, generator=generator).unbind()

    def step(self) -> list[float]:
        self.optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        last = {"target": self.targets, "losses": losses} if self.is_last else {}
        self.schedule.step(*([self.inputs] if self.is_first else []), **last)
        self.optimizer.step()
        return [float(loss.detach()) for loss in losses]

    def weights(self) -> list[torch.Tensor]:
        """What the rank holds of its parameters."""
        parameters = (p for module in self.modules for p in module.parameters())
        return [(p.to_local() if hasattr(p, "to_local") else p).detach() for p in parameters]


def _layers(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _wrapped(module: nn.Module, wrap: str, mesh: DeviceMesh) -> nn.Module:
    if wrap == "ddp":
        return DistributedDataParallel(module, process_group=mesh.get_group())
    if wrap == "replicate":
        return replicate(module, mesh=mesh)
    options = {"mesh": mesh, "reshard_after_forward": wrap == "resharded"}
    fully_shard(module[0], **options)
    return fully_shard(module, **options)


def trained(_fabric, _is_member, wrap, stages_per_rank, order, folder: Path | None):
    """Train; with a folder attached to all but the first step, and profiled in the last one."""
    mesh = mesh_of(order)
    if mesh.get_coordinate() is None:
        return None
    script = Script(mesh, wrap, stages_per_rank)
    with warnings.catch_warnings(record=True) as caught, contextlib.ExitStack() as stack:
        warnings.simplefilter("always")
        attachment = None
        if folder is not None:
            steps = range(1, STEPS)
            attachment = stack.enter_context(
                ppbench.attach(script.schedule, steps, results=folder, optimizer=script.optimizer)
            )
        losses = [script.step() for _ in range(STEPS - 1)]
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            anchors_ns = []
            for _ in range(ANCHORS):
                with record_function("anchor"):
                    anchors_ns.append(time.monotonic_ns())
            losses.append(script.step())
    return SimpleNamespace(
        run_id=getattr(attachment, "run_id", None),
        losses=losses,
        weights=script.weights(),
        warnings=[str(one.message) for one in caught if "ppbench" in str(one.message)],
        spans=None if attachment is None else attachment._recording.spans,  # on the host's clock
        profiled=None if folder is None else _profiled(profiler, anchors_ns, folder),
    )


def _profiled(profiler: profile, anchors_ns: list[int], folder: Path) -> list[tuple[str, int, int]]:
    """What gloo did between replicas: name, start and end on the host's clock, in nanoseconds."""
    path = folder / f"profile{dist.get_rank()}.json"
    profiler.export_chrome_trace(str(path))
    events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    begun_us = sorted(e["ts"] for e in events if e["name"] == "anchor")
    # The host's clock was read a little after an anchor began: the least delay is nearest.
    offset = min(ns - 1000 * us for ns, us in zip(anchors_ns, begun_us, strict=True))

    def host_ns(at_us: float) -> int:
        return round(1000 * at_us + offset)

    return [
        (e["name"], host_ns(e["ts"]), host_ns(e["ts"] + e["dur"]))
        for e in events
        if e["name"] in ("gloo:all_gather", "gloo:all_reduce")
    ]
