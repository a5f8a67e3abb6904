"""The engine beside torch.distributed.pipelining, plain loops, and what a schedule allows.

    python -m benchmarks.against_torch [overhead_bound] [demo] [limit] [running]

`overhead_bound` (hidden 128, 4 layers, 32 tokens, 16 microbatches) and `demo` (llama-8m, 256
tokens, 8 microbatches) are sweeps of both runtimes in turns on two CPU ranks, by schedule.

`limit` is a sweep of all schedules and of the unsplit model alone on one core. A schedule allows
the unsplit step times the share that the simulator says where a forward and the halves of a
backward take equally long and nothing else takes time; for 1F1B that is (m + p - 1) / (m p). Two
ranks that compute at once share a cache and the memory, which no schedule can change.

`running` compares the step that a sweep says, the period of steps with spans, with as many steps by
the clock on the wall, in turns: a loop of torch.distributed.pipelining as its users write it, with
nothing of ppbench in it, and the loop of `python -m engine.train`.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from benchmarks.loop import in_turns, sides, swept, within
from benchmarks.ranks import on_ranks
from benchmarks.rows import Row, run
from engine.configuration import TrainerConfig
from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.plan.action import Op
from engine.plan.predict import predict, uniform
from engine.plan.schedules.registry import SCHEDULES, build_program
from engine.plan.spans import COLUMNS, Span
from engine.run.optimizer import build_optimizer
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, agree
from ppbench.analysis.metrics import step_figures, windows
from ppbench.comparison.rounds import shared_rounds, starts_in
from ppbench.config.feasibility import TORCH_SCHEDULES
from ppbench.judge.evidence import Rounds

WORLD_SIZE = 2
SWEEP = """\
name = "{name}"
device = "cpu"
seq_len = {seq_len}
num_microbatches = {num_microbatches}
model.preset = "{model}"
measure = {{warmup_steps = 2, max_warmup_steps = 2, steps = {steps}, launches = {launches}}}
"""
RUNTIMES = """\
world_size = 2
schedule = "{schedule}"
[grid]
runtime = ["torch", "engine"]
"""
ALONE = """\
exclude = [
    {{ runtime = "engine", world_size = 1 }},
    {{ runtime = "single", world_size = 2 }},
    {{ runtime = "single", schedule = {others} }},
]
[grid]
runtime = ["single", "engine"]
world_size = [1, 2]
schedule = {schedules}
"""
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
SMALL, LARGE = (128, 4, 4, 384), (512, 4, 8, 1408)


def write_model(folder: Path, sizes: tuple[int, ...]) -> str:
    """Write the configuration of a small Llama, and return its folder's name."""
    from transformers import LlamaConfig

    named = dict(zip(SIZES, sizes, strict=True), vocab_size=256)
    config = LlamaConfig.from_dict({**named, "num_key_value_heads": named["num_attention_heads"]})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def overhead_bound(asked: argparse.Namespace) -> Iterator[Row]:
    """Compare both runtimes where the work beside computing is most of a step."""
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"model": write_model(Path(folder) / "model", SMALL), "steps": 40}
        yield from _runtimes(asked.seconds, {**sizes, "seq_len": 32, "num_microbatches": 16})


def demo(asked: argparse.Namespace) -> Iterator[Row]:
    """Compare both runtimes on the model of the demo."""
    sizes = {"model": "llama-8m", "steps": 10}
    yield from _runtimes(asked.seconds, {**sizes, "seq_len": 256, "num_microbatches": 8})


def _runtimes(seconds: float, sizes: dict[str, object]) -> Iterator[Row]:
    """The mean over all schedules that torch has, and the ratio of each."""
    launches: dict[str, tuple[Rounds, ...]] = {}
    sizes |= {"name": "runtimes", "launches": 3}
    if not seconds:
        sizes |= {"steps": 4, "launches": 1}
    for schedule in within(seconds, TORCH_SCHEDULES):
        with tempfile.TemporaryDirectory() as folder:
            runs = swept(Path(folder), (SWEEP + RUNTIMES).format(schedule=schedule, **sizes))
        torchs, ours = (runs[runs["runtime"] == name] for name in ("torch", "engine"))
        launches[schedule] = shared_rounds(torchs, ours, "tokens_per_s")
    note = f"{len(launches)} of {len(TORCH_SCHEDULES)} schedules"
    yield Row.mean_ratio("engine over torch", list(launches.values()), note=note)
    for schedule, rounds in launches.items():
        yield Row.ratio(f"{schedule}: engine over torch", rounds)


def limit(asked: argparse.Namespace) -> Iterator[Row]:
    """Compare each schedule with what it allows, and split backwards with 1F1B."""
    schedules = list(SCHEDULES) if asked.seconds else ["1f1b", "zb_h1"]
    others = [name for name in schedules if name != "1f1b"]
    sizes: dict[str, object] = {"seq_len": 512, "steps": 6, "launches": 3}
    if not asked.seconds:
        sizes |= {"seq_len": 32, "steps": 2, "launches": 1}
    sizes |= {"name": "limit", "num_microbatches": 8, "schedules": schedules, "others": others}
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder) / "model", LARGE if asked.seconds else SMALL)
        text = (SWEEP + ALONE).format(model=model, **sizes)
        runs = swept(Path(folder), text.replace("'", '"'))
    single = runs[runs["runtime"] == "single"]
    of = {
        name: runs[(runs["runtime"] == "engine") & (runs["schedule"] == name)] for name in schedules
    }
    starts, over = starts_in(runs), dict[str, list[Rounds]]()
    for name, own in of.items():
        share = _share_of_unsplit(name, 8)
        over[name] = [
            Rounds(tuple(speed / share for speed in rounds.base), rounds.head)
            for rounds in shared_rounds(single, own, "tokens_per_s")
        ]
    yield Row.mean_ratio("schedules over their limits", list(over.values()), starts=starts)
    for name, rounds in over.items():
        yield Row.ratio(f"{name} over its limit", rounds, starts=starts)
    for name in others:
        if any(action.op is Op.I for row in build_program(name, 2, 8).actions for action in row):
            said = _share_of_unsplit("1f1b", 8) / _share_of_unsplit(name, 8)
            pairs = shared_rounds(of["1f1b"], of[name], "tokens_per_s")
            yield Row.ratio(f"{name} over 1f1b", pairs, starts=starts, note=f"simulated {said:.3f}")


def _share_of_unsplit(schedule: str, num_microbatches: int) -> float:
    """The smallest share of an unsplit step that two ranks can take with a schedule."""
    program = build_program(schedule, WORLD_SIZE, num_microbatches)
    each_ns = 1000 * program.num_stages  # divisible by every number of stages per rank
    step_ns = predict(program, uniform(program.placement, *[each_ns] * 3)).makespan_ns
    return step_ns / (3 * each_ns * WORLD_SIZE * num_microbatches)


# Steps as a training runs

CASES = ("torch:1f1b", "engine:1f1b", "torch:zbv", "engine:zbv", "engine:zb_h2")
SWEPT, LOOPED = "sweep", "loop"
Turn = Callable[[], float]
"""Runs a turn, and returns the seconds of a step."""


def running(asked: argparse.Namespace) -> Iterator[Row]:
    """Compare the step of a sweep with that of a loop, on both runtimes."""
    num_steps, num_rounds = (10, 6) if asked.seconds else (2, 4)
    launches: dict[str, list[Rounds]] = {}
    turns_of_all = itertools.cycle(CASES if asked.seconds else CASES[:2])
    fewest = 3 * len(CASES) if asked.seconds else 1
    for case in within(asked.seconds, turns_of_all, fewest):
        runtime, _, schedule = case.partition(":")
        sizes = (runtime, schedule, num_steps, num_rounds)
        turns = on_ranks(WORLD_SIZE, "cpu", both_loops, *sizes, is_shared=False)[0]
        launches.setdefault(case, []).append(sides(turns, LOOPED, SWEPT))
    yield Row.mean_ratio("sweep over loop", list(launches.values()))
    for case, rounds in launches.items():
        yield Row.ratio(f"{case}: sweep over loop", rounds)


def both_loops(
    fabric: Fabric, runtime: str, schedule: str, num_steps: int, num_rounds: int
) -> dict[str, list[float]]:
    """Seconds of a step as a sweep measures it, and in a loop, round by round."""
    from ppbench.run.runtimes.torch_pipelining import TorchPipeline

    model, data = ModelSpec("llama-8m", weights="random"), DataSpec(seq_len=64, num_microbatches=4)
    config = TrainerConfig(model, data, schedule, WORLD_SIZE)
    build = TorchPipeline if runtime == "torch" else None
    trainers = [Trainer(agree(config, fabric), fabric, build=build) for _ in range(2)]
    loop = _plain_loop if runtime == "torch" else _training_loop
    arms = {SWEPT: _as_a_sweep(trainers[0], num_steps), LOOPED: loop(trainers[1], num_steps)}
    gc.freeze()
    turns = in_turns(arms, range(num_rounds))
    for trainer in trainers:
        trainer.close()
    return turns


def _as_a_sweep(trainer: Trainer, num_steps: int) -> Turn:
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
    num_stages, num_tokens = trainer.agreement.lowered.num_stages, 1
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


PARTS = {"overhead_bound": overhead_bound, "demo": demo, "limit": limit, "running": running}

if __name__ == "__main__":
    run("against_torch", __doc__, PARTS)
