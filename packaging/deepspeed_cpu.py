"""Trains a small pipeline with DeepSpeed's own engine on two CPU ranks, for `ppbench import`.

    DS_BUILD_OPS=0 pip install deepspeed
    torchrun --nproc-per-node 2 packaging/deepspeed_cpu.py traces

docs/howto/other-trainers.md says how `ppbench import` reads the traces. The first start compiles
DeepSpeed's messages in shared memory, which needs a C++ compiler and a minute.
"""

from __future__ import annotations

import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

WIDTH, LAYERS, STEPS, MICROBATCH, MICROBATCHES = 64, 8, 6, 4, 8


def train(folder: Path) -> None:
    """Train some steps; each rank writes a trace of two of them."""
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)]
    loss = nn.MSELoss()
    model = PipelineModule(layers, num_stages=2, loss_fn=loss, partition_method="uniform")
    data = torch.randn(STEPS * MICROBATCHES * MICROBATCH, 2, WIDTH)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        training_data=[(x, y) for x, y in data],
        config={
            "train_batch_size": MICROBATCHES * MICROBATCH,
            "train_micro_batch_size_per_gpu": MICROBATCH,
            "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
        },
    )
    path = folder / f"rank{torch.distributed.get_rank()}.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        with_stack=True,
        schedule=schedule(wait=2, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(STEPS):
            engine.train_batch()
            profiler.step()


if __name__ == "__main__":
    to = Path(sys.argv[1])
    to.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    train(to)
