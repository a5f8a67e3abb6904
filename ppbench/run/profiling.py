"""A few steps of a rank under torch's profiler, written as a kernel-level Chrome trace.

Beside the spans, not instead of them: a profile tells which kernels an action consists of, and
slows the step down meanwhile. So its steps are extra ones, and nothing else is measured in them.
"""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from engine.run.watch import RANGES
from ppbench.run.runtimes.runtime import Runtime


def profiler_for(device: str) -> profile:
    """torch's profiler with as little as it can record: operators, and kernels on `cuda`."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    return profile(activities=activities)


def profile_steps(
    runtime: Runtime, device: str, steps: range, group: dist.ProcessGroup, folder: Path
) -> None:
    """Run these steps and write `folder/rank<r>.json.gz`.

    Each step is a range "step 13", each action in it a range of its name. Blocks until every rank
    of the group is there.
    """
    with profiler_for(device) as profiler:
        for step in steps:
            dist.barrier(group)
            with record_function(f"step {step}"):
                runtime.step(step, RANGES)
    folder.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(folder / f"rank{dist.get_rank()}.json.gz"))
