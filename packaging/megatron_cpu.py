"""Trains a small pipeline by megatron-core's own schedule on two CPU ranks, for `ppbench import`.

    pip install megatron-core
    torchrun --nproc-per-node 2 packaging/megatron_cpu.py traces

docs/howto/other-trainers.md says how `ppbench import` reads the traces. megatron-core asks for GPUs
by name: what it asks for is made on the CPU here, and messages go through gloo.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, schedule

WIDTH, LAYERS, STEPS, MICROBATCH, MICROBATCHES, SEQ_LEN = 64, 4, 6, 4, 8, 16


class OnCpu(TorchFunctionMode):
    """Makes on the CPU what is asked for on a GPU."""

    def __torch_function__(
        self, function: Any, _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


class Part(nn.Module):
    """The layers of a rank; its input is what the schedule has received, if anything."""

    def __init__(self, config: ModelParallelConfig) -> None:
        super().__init__()
        self.config, self.model_type = config, ModelType.encoder_or_decoder
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
        self.received: torch.Tensor | None = None

    def set_input_tensor(self, received: list[torch.Tensor | None]) -> None:
        (self.received,) = received

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(x if self.received is None else self.received)
        return output


def step_of_microbatch(batches: Iterator[torch.Tensor], part: Part) -> Any:
    """Run a forward, as the schedule asks for; return the output, and how its loss follows."""
    x, target = next(batches)

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = nn.functional.mse_loss(output, target)
        return loss, {"loss": loss.detach()}

    return part(x), loss_of


def train(folder: Path) -> None:
    """Train some steps; each rank writes a trace of two of them."""
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    config = ModelParallelConfig(pipeline_model_parallel_size=2, pipeline_dtype=torch.float32)
    config.hidden_size, config.timers = WIDTH, None
    config.fine_grained_activation_offloading = False
    part = Part(config)
    optimizer = torch.optim.SGD(part.parameters(), 0.01)
    batches = itertools.repeat(torch.randn(2, SEQ_LEN, MICROBATCH, WIDTH))
    path = folder / f"rank{torch.distributed.get_rank()}.json"
    with profile(
        activities=[ProfilerActivity.CPU],
        with_stack=True,
        schedule=schedule(wait=2, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(path)),
    ) as profiler:
        for _ in range(STEPS):
            with OnCpu():
                get_forward_backward_func()(
                    forward_step_func=step_of_microbatch,
                    data_iterator=batches,
                    model=[part],
                    num_microbatches=MICROBATCHES,
                    seq_length=SEQ_LEN,
                    micro_batch_size=MICROBATCH,
                    forward_only=False,
                )
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()


if __name__ == "__main__":
    to = Path(sys.argv[1])
    to.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    train(to)
