"""Watches torchtitan's own pipeline builder on two CPU ranks, and compares with training unwatched.

    pip install torchtitan triton ppbench-torch
    torchrun --nproc-per-node 2 packaging/torchtitan_cpu.py

torchtitan cuts its Llama 3 debug model, builds the stages and the schedule. What a CPU lacks is
replaced: its device, and flex attention by plain attention, which torchtitan has as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

import ppbench

BATCH, SEQ_LEN, STEPS = 8, 64, 6


def loss_of(prediction: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, None]:
    return torch.nn.functional.cross_entropy(prediction.flatten(0, 1), target.flatten()), None


def train(dims: Any, *, is_watched: bool) -> list[float]:
    """Train some steps, and return the losses on the last stage's rank."""
    torch.manual_seed(0)
    config: Any = model_registry("debugmodel").model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    model.init_states()
    schedule, parts, is_first, is_last = pipeline_llm(
        model,
        parallel_dims=dims,
        training=TrainingConfig(local_batch_size=BATCH, seq_len=SEQ_LEN),
        parallelism=PARALLELISM,
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder="",
        device=torch.device("cpu"),
        model_config=config,
        parallelize_fn=lambda part, **_: part,
        loss_fn=loss_of,
    )
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], 1e-3)
    if is_watched:
        ppbench.attach(
            schedule,
            steps=range(2, STEPS - 1),
            name="titan",
            optimizer=optimizer,
            tokens_per_step=BATCH * SEQ_LEN,
        )
    ids = torch.randint(0, 2048, (BATCH, SEQ_LEN + 1))
    means = []
    for _ in range(STEPS):
        losses: list[torch.Tensor] = []
        last = {"target": ids[:, 1:].contiguous(), "losses": losses} if is_last else {}
        schedule.step(*([ids[:, :-1]] if is_first else []), **last)
        optimizer.step()
        optimizer.zero_grad()
        means += [float(torch.stack(losses).detach().mean())] if is_last else []
    return means


if __name__ == "__main__":
    PARALLELISM = ParallelismConfig(
        pipeline_parallel_degree=2, pipeline_parallel_schedule="1F1B", data_parallel_shard_degree=1
    )
    parallel_dims.device_type = "cpu"
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = ParallelDims.from_config(PARALLELISM, dist.get_world_size())
    alone, watched = train(mesh, is_watched=False), train(mesh, is_watched=True)
    if alone:
        print("losses:", *(f"{loss:.6f}" for loss in watched))
        print("equal to those of the training that nobody watched:", alone == watched)
    dist.destroy_process_group()
