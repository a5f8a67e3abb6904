"""The reference beside each launch: its cost, whether it disturbs steps, and what it recognises.

    python -m benchmarks.controls [--rounds 60] [--launches 40] [--seed 0] [--only trained]

First, two CPU ranks train the demo model, and take steps right after the reference and without it
in turn. Then a sweep of the size of `sweeps/quick.toml` and one of emulated ranks are launched many
times, while a process that burns a core starts and stops at random. A launch was slowed if its step
took at least 10 % longer than is usual among the launches, and was not if it took less than 3 %
longer; it is recognised if the reference beside it or the counters of the machine say that it was
slower than usual, by more than 5 % and the usual variation. On a machine that does other work as
well, that work slows launches too, and counts like the burning process.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import pandas as pd
import torch
import torch.distributed as dist

from benchmarks.outcome import Figure, Goal, Ratio, parser, write
from benchmarks.pipelines import DEMO, WORLD_SIZE, Arm, free_port
from benchmarks.surroundings import ROOT, read_surroundings
from benchmarks.turns import Turns, in_turns
from engine.rank_store import store_of_ranks
from engine.run.clock import HostClock
from engine.run.heap import keep_freed_memory
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.trainer import Trainer, agree
from ppbench.comparison.evidence import slowdowns_by_run
from ppbench.config.case import Case
from ppbench.judge.slowdowns import Control, is_disturbed, slowdowns
from ppbench.run.worker.fixed_work import Reference
from ppbench.store import Store

MOST_COST = 0.03
SLOWED, NOT_SLOWED = 0.10, 0.03
BURNS_S, RESTS_S = 8.0, 16.0
"""Mean times for which a core is burnt, and is not."""
SWEEPS = {
    "trained": """\
name = "controls"
device = "cpu"
schedule = "1f1b"
world_size = 2
num_microbatches = 8
seq_len = 128

[model]
preset = "llama-8m"

[measure]
warmup_steps = 1
steps = 5
""",
    "emulated": """\
name = "controls"
device = "emulated"
schedule = "1f1b"
world_size = 4
num_microbatches = 8
seq_len = 128

[model]
preset = "llama-8m"

[measure]
warmup_steps = 1
steps = 10

[emulated]
F_ms = 5
I_ms = 5
W_ms = 5
""",
}
_BURN = """\
import os, sys, time
share, urgent_core = float(sys.argv[1]), int(sys.argv[2])
if urgent_core >= 0:
    os.sched_setaffinity(0, {urgent_core})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
while True:
    began_s = time.perf_counter()
    sum(range(200_000))
    time.sleep((time.perf_counter() - began_s) * (1 / share - 1))
"""
"""Takes this share of a core's time; before all others, if a core is named."""


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rounds", type=int, default=60)
    options.add_argument("--launches", type=int, default=40)
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--only", choices=sorted(SWEEPS), help="launch this sweep only")
    settings, surroundings = options.parse_args(), read_surroundings()
    ratios, figures = [], []
    turns = steps_in_turns(settings.rounds)
    name = "step right after the reference over one without"
    ratios.append(turns.ratio(name, "after the reference", "bare", Goal(at_most=1.01)))
    for kind in [settings.only] if settings.only else SWEEPS:
        with tempfile.TemporaryDirectory(prefix="ppbench-controls-") as folder:
            runs, wall_s = launched(Path(folder), SWEEPS[kind], settings.launches, settings.seed)
        ratios += list(_ratios(kind, runs))
        figures += list(_figures(kind, runs, wall_s))
    write("controls", settings, surroundings, ratios, figures)


def launched(folder: Path, text: str, num_launches: int, seed: int) -> tuple[pd.DataFrame, float]:
    """The runs of so many launches of a sweep beside a burning process, and their wall time."""
    file = folder / "controls.toml"
    file.write_text(text)
    command = [sys.executable, "-c", "from ppbench.cli import main; main()", "sweep", file.name]
    command += ["--set", f"measure.launches={num_launches}", "--no-report", "--results", "results"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    began_s = time.perf_counter()
    with burning(seed):
        subprocess.run(command, cwd=folder, env=environment, check=True, capture_output=True)
    wall_s = time.perf_counter() - began_s
    runs = Store(folder / "results").runs()
    by_run = slowdowns_by_run(runs)
    slowed = slowdowns([Control(reference_ns=ns) for ns in runs["step_ns"]])
    runs = runs.assign(
        slowed=[one.fraction for one in slowed],
        shown=[by_run[str(run_id)].fraction for run_id in runs["run_id"]],
        recognised=[is_disturbed(by_run[str(run_id)]) for run_id in runs["run_id"]],
    )
    return runs, wall_s


@contextmanager
def burning(
    seed: int,
    num_processes: int = 1,
    burns_s: float = BURNS_S,
    rests_s: float = RESTS_S,
    shares: tuple[float, float] = (1.0, 1.0),
    *,
    is_urgent: bool = False,
) -> Iterator[None]:
    """Burn so many cores now and then, at random, until the block ends.

    Each time they burn a share of the cores' time between these two. What is urgent comes before
    all other processes, which takes the rights of root.
    """
    over, draw = threading.Event(), random.Random(seed)

    def burn() -> None:
        while not over.wait(draw.expovariate(1 / rests_s)):
            command = [sys.executable, "-c", _BURN, str(draw.uniform(*shares))]
            processes = [
                subprocess.Popen([*command, str(place if is_urgent else -1)])
                for place in range(num_processes)
            ]
            over.wait(draw.expovariate(1 / burns_s))
            for process in processes:
                process.kill()
            for process in processes:
                process.wait()

    thread = threading.Thread(target=burn)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _ratios(kind: str, runs: pd.DataFrame) -> Iterator[Ratio]:
    """The cost of the reference, and the shares of launches that were recognised."""
    cost = Goal(at_most=MOST_COST)
    yield Ratio(f"{kind}: reference over measured steps", tuple(runs["reference_share"]), goal=cost)
    for name, chosen in (
        (f"slowed by {SLOWED:.0%} or more", runs["slowed"] >= SLOWED),
        (f"slowed by less than {NOT_SLOWED:.0%}", runs["slowed"] < NOT_SLOWED),
    ):
        if num := int(chosen.sum()):
            share = float(runs.loc[chosen, "recognised"].mean())
            yield Ratio(f"{kind}: recognised as disturbed, of {num} launches {name}", (share,))


def _figures(kind: str, runs: pd.DataFrame, wall_s: float) -> Iterator[Figure]:
    cost_s = float((runs["reference_share"] * runs["step_ns"] * runs["measure_steps"]).sum() / 1e9)
    yield Figure(f"{kind}: reference over the whole time of the launches", (cost_s / wall_s,))
    yield Figure(f"{kind}: slowdown of the step", tuple(100 * runs["slowed"]), "%")
    yield Figure(f"{kind}: slowdown by the reference and counters", tuple(100 * runs["shown"]), "%")
    alike = float(runs["slowed"].corr(runs["shown"], method="spearman"))
    yield Figure(f"{kind}: rank correlation of the two", (alike,))


def steps_in_turns(num_rounds: int) -> Turns:
    """Seconds of a step of two ranks, right after the reference and without it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    environment = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(WORLD_SIZE),
        "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
        "OMP_NUM_THREADS": "1",
    }
    given = (environment, theirs, num_rounds)
    ranks = [context.Process(target=_rank, args=(rank, *given)) for rank in range(WORLD_SIZE)]
    for rank in ranks:
        rank.start()
    theirs.close()
    try:
        values: dict[str, Sequence[float]] = ours.recv()
    finally:
        for rank in ranks:
            rank.join()
    return Turns({name: list(taken) for name, taken in values.items()})


def _rank(rank: int, environment: Mapping[str, str], pipe: Connection, num_rounds: int) -> None:
    os.environ.update({**environment, "RANK": str(rank)})
    torch.set_num_threads(1)
    keep_freed_memory()  # as every rank of a sweep does
    store = store_of_ranks(timedelta(minutes=5))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
    fabric = Fabric(torch.device("cpu"), HostClock(), is_device_shared=False)
    agreement = agree(DEMO.config(Arm("engine", "1f1b"), Path()), fabric)
    trainer, numbers = Trainer(agreement, fabric), iter(range(10**9))
    case, group = Case(device="cpu", world_size=WORLD_SIZE), dist.new_group()

    def step() -> float:
        dist.barrier()
        began_s = time.perf_counter()
        trainer.step(next(numbers), Recording.spans)
        dist.barrier()
        return time.perf_counter() - began_s

    def after_reference() -> float:
        Reference(case, fabric.device, group).run(steps_ns=5e9)
        return step()

    turns = in_turns(
        {"after the reference": after_reference, "bare": step}, num_rounds, DEMO.num_warmup
    )
    trainer.close()
    if rank == 0:
        pipe.send(turns.values)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
