"""Whether splitting the backward pays: zb_h1 against 1f1b, on real ranks.

    python benchmarks/zero_bubble.py [--ranks 2] [--microbatches 4] [--seq-len 256] [--pairs 40]

Two CPU ranks with one thread each train the same model on the same batches, a step of one schedule
and a step of the other in turn. A pair of neighbouring steps is one observation of the ratio of
tokens per second (optimizer included), so that a machine that slows down slows both. Printed are
the median ratio and the 95 % bootstrap interval of the median, beside the ratio of the simulated
steps with F = I = W, in which nothing but the schedule counts.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import socket
import statistics
import time

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.plan.schedules.registry import build_program
from engine.plan.simulate import simulate, uniform
from engine.run.clock import HostClock
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, TrainerConfig, connect

WARMUP_PAIRS = 3


def main() -> None:
    settings = _arguments()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    os.environ.update(environment)
    spawn(_rank, (settings,), nprocs=settings.ranks)  # type: ignore[no-untyped-call]  # torch types it not


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--preset", default="llama-8m")
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--against", default="1f1b")
    parser.add_argument("--schedule", default="zb_h1")
    return parser.parse_args()


def _rank(rank: int, settings: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=settings.ranks)
    fabric = Fabric(torch.device("cpu"), HostClock(), is_device_shared=False)
    data = DataSpec(seq_len=settings.seq_len, num_microbatches=settings.microbatches)
    base = TrainerConfig(ModelSpec(settings.preset), data, world_size=settings.ranks)
    names = (settings.schedule, settings.against)
    trainers = {}
    for name in names:
        config = connect(dataclasses.replace(base, schedule=name), fabric)
        trainers[name] = Trainer(config, fabric)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for pair in range(WARMUP_PAIRS + settings.pairs):
        for name in names if pair % 2 else names[::-1]:  # neither always comes first
            seconds[name].append(_timed(trainers[name], pair))
    if rank == 0:
        _report(settings, {name: taken[WARMUP_PAIRS:] for name, taken in seconds.items()})
    for trainer in trainers.values():
        trainer.close()
    dist.barrier()
    dist.destroy_process_group()


def _timed(trainer: Trainer, step: int) -> float:
    """Seconds of one step, from when all ranks are ready to when all are done."""
    dist.barrier()
    start = time.perf_counter()
    trainer.step(step)
    dist.barrier()
    return time.perf_counter() - start


def _report(settings: argparse.Namespace, seconds: dict[str, list[float]]) -> None:
    ours, theirs = seconds[settings.schedule], seconds[settings.against]
    ratios = [their / our for our, their in zip(ours, theirs, strict=True)]
    low, high = _interval(ratios)
    shape = f"{settings.ranks} ranks, {settings.microbatches} microbatches"
    print(f"{settings.preset}, {shape}, {settings.seq_len} tokens, {len(ratios)} pairs of steps")
    for name, taken in seconds.items():
        print(f"  {name}: {statistics.median(taken) * 1e3:.1f} ms per step, median")
    print(
        f"  tokens/s of {settings.schedule} over {settings.against}: "
        f"{statistics.median(ratios):.3f} [{low:.3f}, {high:.3f}]; "
        f"simulated with F = I = W: {_simulated(settings):.3f}"
    )


def _interval(ratios: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(2000))
    return medians[50], medians[1949]


def _simulated(settings: argparse.Namespace) -> float:
    spans = {}
    for name in (settings.schedule, settings.against):
        program = build_program(name, settings.ranks, settings.microbatches)
        durations = uniform(program.placement, 1000, 1000, 1000)
        spans[name] = simulate(program, durations).makespan_ns
    return spans[settings.against] / spans[settings.schedule]


if __name__ == "__main__":
    main()
