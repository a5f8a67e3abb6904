"""Measures the costs of a model's layers here, and of a link between two ranks of this machine.

The answer to a `CostRequest`, which `engine.describe` prints as JSON:

    {"costs": [{"microbatch_size": 1, "recompute": false, "before": {...}, ...}, ...],
     "left_out": [{"microbatch_size": 64, "recompute": false, "reason": "..."}],
     "link": {...}, "device_name": "...", "problem": null}

Costs are the fields of `engine.plan.model_costs.ModelCosts`. A setting that has no room is left
out. With a problem, the setting at fault and what is wrong with it, there are no costs. Progress is
told on standard error.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import platform
import sys
import tempfile
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from engine import device_variables
from engine.connection import autocast_of
from engine.interfaces import keep_to_loopback
from engine.model.descriptions import CostRequest
from engine.model.split import open_model, try_model
from engine.model.stage_module import ModelError, first_line
from engine.plan.model_costs import LinkCosts, ModelCosts
from engine.run import device as devices
from engine.run.clock import clock_for
from engine.run.layer_costs import measure_model_costs
from engine.run.link_costs import measure_link
from engine.run.optimizer import OptimizerSpec
from engine.run.p2p.fabric import Fabric
from engine.run.precision import force_ieee

PATIENCE = timedelta(seconds=120)
Answer = dict[str, Any]


def answer_to(request: CostRequest) -> Answer:
    """Measure every setting of a request, and the link. What cannot be is the answer's problem."""
    answer: Answer = {"costs": [], "left_out": [], "link": None, "problem": None}
    try:
        device = _device(request.device, rank=0)
        torch.set_num_threads(request.num_threads)
        if devices.is_accelerator(device):
            answer["device_name"] = devices.name_of(device)
        else:
            answer["device_name"] = platform.processor() or platform.machine()
        for size, recompute in request.settings:
            setting = {"microbatch_size": size, "recompute": recompute}
            try:
                costs = _measured(request, size, device, recompute=recompute)
            except (MemoryError, RuntimeError) as error:
                # torch's allocator for the CPU raises a RuntimeError
                is_for_memory = isinstance(error, MemoryError | torch.OutOfMemoryError)
                if not is_for_memory and "t allocate memory" not in str(error):
                    raise
                devices.empty_cache()
                reason = f"no room for it: {first_line(error)}"
                answer["left_out"].append({**setting, "reason": reason})
            else:
                answer["costs"].append({**setting, **dataclasses.asdict(costs)})
        if request.has_link:
            tell("the link between two ranks")
            link = _measured_link(request.device)
            answer["link"] = None if link is None else dataclasses.asdict(link)
    except ModelError as error:
        answer["problem"] = {"key": error.key, "message": str(error)}
    except RuntimeError as error:
        answer["problem"] = {"key": "device", "message": str(error)}
    return answer


def _measured(
    request: CostRequest, size: int, device: torch.device, *, recompute: bool
) -> ModelCosts:
    shape = (size, request.seq_len)
    model = open_model(request.identity.spec, shape, device)
    try_model(model, request.identity.spec)
    force_ieee()
    if model.max_positions is not None and request.seq_len > model.max_positions:
        raise ModelError(
            f"seq_len is {request.seq_len}, more than the {model.max_positions} positions of "
            f"{request.identity.spec.name}; at most {model.max_positions}",
            "seq_len",
        )
    name = f"{request.identity.spec.name}, microbatches of {size}{', recomputed' * recompute}"

    def tell_parts(done: int, total: int) -> None:
        tell(f"{name}: {done} of {total} parts")

    return measure_model_costs(
        model,
        shape,
        device,
        autocast_of(request.autocast, device),
        OptimizerSpec(**request.optimizer),  # type: ignore[arg-type]  # checked by the caller
        recompute=recompute,
        budget_s=request.budget_s,
        on_progress=tell_parts,
    )


def _device(kind: str, rank: int) -> torch.device:
    """The device of a rank: GPUs in turns. Raises RuntimeError where none can be measured."""
    if kind == "cpu":
        return devices.CPU
    device_variables.check(os.environ)
    return devices.of_local_rank(rank, kind)


def _measured_link(kind: str) -> LinkCosts | None:
    """Measure it with a second process as the other rank. Raises RuntimeError."""
    keep_to_loopback(os.environ)
    with tempfile.TemporaryDirectory(prefix="engine-costs-") as folder:
        context = multiprocessing.get_context("spawn")
        other = context.Process(target=_measure_as, args=(1, kind, folder), daemon=True)
        other.start()
        try:
            return _measure_as(0, kind, folder)
        finally:
            other.join(10)
            other.kill()


def _measure_as(rank: int, kind: str, folder: str) -> LinkCosts | None:
    torch.set_num_threads(1)
    device = _device(kind, rank)
    is_shared = devices.is_accelerator(device) and devices.count() < 2
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=PATIENCE)
    try:
        return measure_link(Fabric(device, clock_for(device), is_shared))
    finally:
        dist.destroy_process_group()


def tell(text: str) -> None:
    """Tell how far the work is, on standard error."""
    print(text, file=sys.stderr, flush=True)
