"""Whether a step takes as long without ppbench as ppbench says.

    python -m benchmarks.running [--rounds 8] [--steps 10] [--cases torch:1f1b engine:zb_h2 ...]

Two CPU ranks with one thread each hold both sides of a case, with the same model, data, optimizer
and schedule. In a turn of ppbench, steps follow each other with spans, as in a sweep, and the time
of a step is the period that a run stores. In a turn of the other side as many steps follow each
other by the clock on the wall:

    torch     a loop of torch.distributed.pipelining as its users write it: `schedule.step`, the
              optimizer's step, gradients set to none; nothing of ppbench in it
    engine    the loop of `python -m engine.train`: a step, and a look whether it is finite

The first step of a turn counts on neither side. A ratio is tokens per second of ppbench over those
of the other side, round by round.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from benchmarks.outcome import Figure, Goal, parser, write
from benchmarks.pipelines import WORLD_SIZE, on_two_ranks
from benchmarks.surroundings import read_surroundings
from benchmarks.turns import Turns, in_turns
from engine.configuration import TrainerConfig
from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.plan.spans import COLUMNS, Span
from engine.run.optimizer import build_optimizer
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, agree
from ppbench.analysis.metrics import step_figures, windows
from ppbench.config.feasibility import TORCH_SCHEDULES
from ppbench.run.runtimes.torch_pipelining import TorchPipeline

CASES = (
    *("torch:1f1b", "torch:interleaved_zb", "torch:zbv"),
    *("engine:1f1b", "engine:zb_h2", "engine:zbv"),
)
GOAL = Goal(at_least=0.98, at_most=1.02)
PPBENCH, ALONE = "ppbench", "without ppbench"

Turn = Callable[[], float]
"""Runs a turn; returns the seconds of a step."""


@dataclass(frozen=True)
class Asked:
    """What all ranks measure."""

    runtime: str
    schedule: str
    num_steps: int  # of a turn, after the first one
    num_rounds: int


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=8)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--cases", nargs="+", default=list(CASES), metavar="RUNTIME:SCHEDULE")
    settings, surroundings = options.parse_args(), read_surroundings()
    ratios, figures = [], []
    for case in settings.cases:
        runtime, _, schedule = case.partition(":")
        turns = measure(Asked(runtime, schedule, settings.steps, settings.rounds))
        name = f"{schedule} on {runtime}: tokens/s of ppbench over those without it"
        ratios.append(turns.ratio(name, ALONE, PPBENCH, GOAL))
        figures += _steps(f"{schedule} on {runtime}", turns)
    write("running", settings, surroundings, ratios, figures)


def _steps(name: str, turns: Turns) -> list[Figure]:
    return [
        Figure(f"{name}, {side}: step", tuple(s * 1e3 for s in taken), "ms")
        for side, taken in turns.values.items()  # noqa: PD011  # not of pandas
    ]


def measure(asked: Asked) -> Turns:
    """Seconds of a step of both sides, round by round."""
    return on_two_ranks(_both_sides, asked)


def _both_sides(fabric: Fabric, asked: Asked) -> Turns:
    config = TrainerConfig(
        ModelSpec("llama-8m", weights="random"),
        DataSpec(seq_len=64, num_microbatches=4),
        asked.schedule,
        WORLD_SIZE,
    )
    build = TorchPipeline if asked.runtime == "torch" else None
    trainers = [Trainer(agree(config, fabric), fabric, build=build) for _ in range(2)]
    alone = _plain_loop if asked.runtime == "torch" else _training_loop
    arms = {
        PPBENCH: _of_ppbench(trainers[0], asked.num_steps),
        ALONE: alone(trainers[1], asked.num_steps),
    }
    gc.freeze()
    turns = in_turns(arms, asked.num_rounds)
    for trainer in trainers:
        trainer.close()
    return turns


def _of_ppbench(trainer: Trainer, num_steps: int) -> Turn:
    """Turns as a sweep measures them; the period is what `runs` has of their steps."""
    done = 0

    def turn() -> float:
        nonlocal done
        dist.barrier()
        results = trainer.steps(range(done, done + 1 + num_steps))
        gathered: list[list[Span]] = [[] for _ in range(WORLD_SIZE)]
        dist.all_gather_object(gathered, [span for result in results for span in result.spans])
        spans = pd.DataFrame([span for own in gathered for span in own], columns=list(COLUMNS))
        spans["op"] = [getattr(op, "value", op) for op in spans["op"]]
        tokens = {done + at: result.num_tokens for at, result in enumerate(results)}
        figures = step_figures(spans, windows(spans, WORLD_SIZE, [done]), tokens)
        done += 1 + num_steps
        return float(figures["step_ns"].iloc[1:].mean()) / 1e9

    return turn


def _by_the_clock(step: Callable[[int], None], num_steps: int) -> Turn:
    """Turns of steps that follow each other; a step's time is the mean over ranks."""
    done = 0

    def turn() -> float:
        nonlocal done
        dist.barrier()
        step(done)
        began = time.perf_counter()
        for number in range(done + 1, done + 1 + num_steps):
            step(number)
        seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
        done += 1 + num_steps
        dist.all_reduce(seconds)
        return float(seconds) / WORLD_SIZE / num_steps

    return turn


def _training_loop(trainer: Trainer, num_steps: int) -> Turn:
    """The loop of `engine.train`, without what it prints and saves."""

    def step(number: int) -> None:
        trainer.step(number)
        trainer.find_not_finite()

    return _by_the_clock(step, num_steps)


def _plain_loop(trainer: Trainer, num_steps: int) -> Turn:
    """A loop of torch.distributed.pipelining; the trainer gives it modules and batches alone."""
    modules, config = trainer.modules, trainer.config
    num_stages, num_tokens = trainer.lowered.num_stages, 1
    stages = [
        PipelineStage(_Whole(module), index, num_stages, trainer.device)
        for index, module in sorted(modules.items())
    ]

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return trainer.model.task.loss(logits, targets, num_tokens)

    kind: Any = get_schedule_class(TORCH_SCHEDULES[config.schedule])
    owned = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
    schedule = kind(owned, config.data.num_microbatches, loss_fn=loss_fn, scale_grads=False)
    optimizer = build_optimizer(config.optimizer, list(trainer.parameters().values()))
    assert optimizer is not None

    def step(number: int) -> None:
        nonlocal num_tokens
        batch = trainer.batch(number)
        num_tokens = batch.num_tokens
        inputs = [torch.cat(batch.inputs)] if stages[0].is_first else []
        target = torch.cat(batch.targets) if stages[-1].is_last else None
        schedule.step(*inputs, target=target, losses=[], return_outputs=False)
        optimizer.step()
        optimizer.zero_grad()

    return _by_the_clock(step, num_steps)


class _Whole(torch.nn.Module):
    """A stage that returns its one tensor rather than a tuple."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        (output,) = self.module(*inputs)
        assert isinstance(output, torch.Tensor)
        return output


if __name__ == "__main__":
    main()
