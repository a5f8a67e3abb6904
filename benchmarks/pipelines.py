"""Times steps of real pipelines: several schedules and runtimes in turn on the same two ranks.

Two CPU ranks with one thread each hold a trainer for every arm, all with the same model, data and
optimizer. A step is timed from the moment when both ranks are ready until both are done, optimizer
included, and nothing is recorded.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import socket
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.outcome import Figure
from benchmarks.turns import Rounds, Turns, in_turns, seconds_of
from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.plan.predict import predict, uniform
from engine.plan.program import Program
from engine.plan.schedules.registry import build_program
from engine.rank_store import store_of_ranks
from engine.run.clock import HostClock
from engine.run.heap import keep_freed_memory
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.trainer import Build, Trainer, TrainerConfig, agree
from ppbench.run.runtimes.single import Unsplit
from ppbench.run.runtimes.torch_pipelining import TorchPipeline

WORLD_SIZE = 2
SINGLE = "1f1b"
"""Schedule of the unsplit model: each microbatch forward and backward."""


class Arm(NamedTuple):
    """A runtime with a schedule, whose steps are timed.

    `single` is the unsplit model on one rank while the other does nothing, `both` is the unsplit
    model on each of the two at the same time. `layers` are counts by stage, () an even spread.
    """

    runtime: str
    schedule: str
    microbatch_size: int = 1
    layers: tuple[int, ...] = ()
    recompute: tuple[bool, ...] = ()

    def __str__(self) -> str:
        if self.runtime in _NAMES:
            return _NAMES[self.runtime]
        _, _, schedule = self.schedule.rpartition("/")  # without the folder of a file
        parts = [f"{schedule} on {self.runtime}"]
        parts += [f"microbatches of {self.microbatch_size}"] * (self.microbatch_size > 1)
        parts += [f"layers {'-'.join(map(str, self.layers))}"] * bool(self.layers)
        parts += ["recomputing"] * any(self.recompute)
        return ", ".join(parts)


UNSPLIT = Arm("single", SINGLE)
TWO_UNSPLIT = Arm("both", SINGLE)
_NAMES = {"single": "unsplit", "both": "two unsplit"}
_BUILDS: dict[str, Build | None] = {
    "engine": None,
    "torch": TorchPipeline,
    "single": Unsplit,
    "both": Unsplit,
}


@dataclass(frozen=True)
class Regime:
    """A model and its data. `model` is a preset, or the arguments of a LlamaConfig.

    A step has `num_microbatches` sequences, each a microbatch unless an arm has larger ones.
    """

    name: str
    model: str | tuple[tuple[str, int], ...]
    seq_len: int
    num_microbatches: int
    num_warmup: int  # rounds that do not count, in which most memory is first used

    def config(self, arm: Arm, folder: Path) -> TrainerConfig:
        name = self.model if isinstance(self.model, str) else str(folder)
        size = arm.microbatch_size
        return TrainerConfig(
            ModelSpec(name, weights="random", partition=arm.layers or "uniform"),
            DataSpec(
                seq_len=self.seq_len,
                microbatch_size=size,
                num_microbatches=self.num_microbatches // size,
            ),
            arm.schedule,
            1 if arm.runtime in _NAMES else WORLD_SIZE,
            recompute=arm.recompute or False,
        )

    def limit(self, schedule: str) -> float:
        """The smallest share of an unsplit step that two ranks can take with this schedule.

        For 1f1b it is `(m + p - 1) / (m p)`, for others the simulated share with F = I = W.
        """
        program = self._program(schedule)
        each_ns = 1000 * program.num_stages  # divisible by every number of stages per rank
        step_ns = predict(program, uniform(program.placement, *[each_ns] * 3)).makespan_ns
        return step_ns / (3 * each_ns * WORLD_SIZE * self.num_microbatches)

    def num_actions(self, schedule: str) -> int:
        """The number of computations of one rank in a step."""
        return len(self._program(schedule).actions[0])

    def _program(self, schedule: str) -> Program:
        return build_program(schedule, WORLD_SIZE, self.num_microbatches)


def _llama(hidden: int, layers: int, heads: int, intermediate: int) -> tuple[tuple[str, int], ...]:
    return (
        ("hidden_size", hidden),
        ("num_hidden_layers", layers),
        ("num_attention_heads", heads),
        ("intermediate_size", intermediate),
        ("vocab_size", 256),
    )


OVERHEAD_BOUND = Regime("overhead-bound", _llama(128, 4, 4, 384), 32, 16, num_warmup=5)
DEMO = Regime("demo model", "llama-8m", 256, 8, num_warmup=2)
COMPUTE_BOUND = Regime("compute-bound", _llama(512, 4, 8, 1408), 512, 8, num_warmup=2)


def measure(regime: Regime, arms: Sequence[Arm], rounds: int | Rounds) -> Turns:
    """Seconds of a step of each arm, by its printed name, round by round."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(regime, Path(folder))
        return on_two_ranks(_measured, regime, tuple(arms), rounds, Path(folder))


def on_two_ranks(work: Callable[..., Turns], *given: object) -> Turns:
    """What `work(fabric, *given)` returns on the first of two CPU ranks, each a new process.

    It must be a function of a module.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        context.Process(target=_rank, args=(rank, environment, theirs, work, given))
        for rank in range(WORLD_SIZE)
    ]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        values: dict[str, list[float]] = ours.recv()
    finally:
        for rank in ranks:
            rank.join()
    return Turns(values)


def lost_per_action(turns: Turns, regime: Regime, arm: Arm) -> Figure:
    """The time of a step above its limit, over the number of computations of a rank, in µs."""
    limit, count = regime.limit(arm.schedule), regime.num_actions(arm.schedule)
    pairs = zip(turns.values[str(arm)], turns.values[str(UNSPLIT)], strict=True)
    lost = tuple((step - limit * unsplit) / count * 1e6 for step, unsplit in pairs)
    return Figure(f"{regime.name}, {arm}: lost per action", lost, "µs")


def steps(turns: Turns, regime: Regime) -> list[Figure]:
    """The step of each arm in ms; that of the unsplit model also names the first arm."""
    first = next(iter(turns.values))
    return [
        Figure(
            f"{regime.name}, {arm}{f' beside {first}' if arm in _NAMES.values() else ''}: step",
            tuple(s * 1e3 for s in taken),
            "ms",
        )
        for arm, taken in turns.values.items()
    ]


def write_model(regime: Regime, folder: Path) -> None:
    """Write the configuration of a regime's model, unless the model is a preset."""
    from transformers import LlamaConfig

    if isinstance(regime.model, str):
        return
    sizes = dict(regime.model)
    config = LlamaConfig.from_dict({**sizes, "num_key_value_heads": sizes["num_attention_heads"]})
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _rank(
    rank: int,
    environment: Mapping[str, str],
    pipe: Connection,
    work: Callable[..., Turns],
    given: tuple[object, ...],
) -> None:
    os.environ.update({**environment, "RANK": str(rank)})
    torch.set_num_threads(1)
    keep_freed_memory()  # as every rank of a sweep does
    store = store_of_ranks(timedelta(minutes=5))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    turns = work(Fabric(torch.device("cpu"), HostClock(), is_device_shared=False), *given)
    if rank == 0:
        pipe.send(turns.values)
    dist.barrier()
    dist.destroy_process_group()


def _measured(
    fabric: Fabric, regime: Regime, arms: tuple[Arm, ...], rounds: int | Rounds, folder: Path
) -> Turns:
    trainers = {arm: _trainer(regime.config(arm, folder), arm, fabric) for arm in arms}
    work = {str(arm): _timed(trainer) for arm, trainer in trainers.items()}
    gc.freeze()  # garbage is collected before each step: without torch's own objects
    turns = in_turns(work, rounds, num_warmup=regime.num_warmup, agree=_of_rank_0)
    for trainer in trainers.values():
        if trainer is not None:
            trainer.close()
    return turns


def _of_rank_0(answer: bool) -> bool:  # a question's answer
    """The first rank's answer, on every rank."""
    answers = [answer]
    dist.broadcast_object_list(answers, src=0)
    return answers[0]


def _trainer(config: TrainerConfig, arm: Arm, fabric: Fabric) -> Trainer | None:
    """The trainer of an arm on this rank; None if the rank has no part in it."""
    agreement = agree(config, fabric)
    if arm == UNSPLIT and dist.get_rank() > 0:
        return None
    return Trainer(agreement, fabric, build=_BUILDS[arm.runtime])


def _timed(trainer: Trainer | None) -> Callable[[], float]:
    """A function that times the next step, from all ranks being ready until all are done."""
    steps = iter(range(10**9))

    def work() -> None:
        if trainer is not None:
            trainer.step(next(steps), Recording.off)
        dist.barrier()

    def timed() -> float:
        dist.barrier()
        return seconds_of(work)

    return timed
