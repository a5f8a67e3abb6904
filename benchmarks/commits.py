"""This work tree and another commit in turns: what a change costs whoever trains or runs commands.

    python -m benchmarks.commits COMMIT [--parts steps commands] [--rounds 12] [--runs 20000]

`steps`: each side has two CPU ranks with one thread each, which live as long as this; while one
side steps, the other's ranks wait for a line. The cost of an action beside computing shows in the
small model of `benchmarks.against_torch`, and in a pipeline whose stages take no time at all.

`commands`: both sides have a store of their own with the same runs, run the same sweep and draw the
same runs, as whole processes. The sweep is emulated and its actions take a millisecond, so that the
cost of a case beside its steps is compared.

These ratios belong to a commit, not to the page, and are printed only.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

from benchmarks.against_torch import SMALL, write_model
from benchmarks.claims import Goal
from benchmarks.loop import in_turns, run_python, seconds_of, sides, work_tree
from benchmarks.rows import NO_STARTS, ROOT, Row

NEW, OLD = "new", "old"
STEPS, COMMANDS = Goal(at_most=1.005), Goal(at_most=1.02)
RANK = """\
import gc, sys, time
import torch
import torch.distributed as dist
from engine.configuration import lowered_of
from engine.connection import agree
from engine.emulated import EmulatedTrainer
from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.plan.predict import uniform
from engine.run.clock import HostClock
from engine.run.emulation import Emulation
from engine.run.heap import keep_freed_memory
from engine.run.p2p.fabric import Fabric
from engine.run.recording import Recording
from engine.trainer import Trainer, TrainerConfig

torch.set_num_threads(1)
keep_freed_memory()
dist.init_process_group("gloo")
fabric = Fabric(torch.device("cpu"), HostClock(), is_device_shared=False)
model, data = ModelSpec(sys.argv[1], weights="random"), DataSpec(seq_len=32, num_microbatches=16)
config = TrainerConfig(model, data, "1f1b", 2)
no_time = Emulation(uniform(lowered_of(config).placement, 0, 0, 0))
agreement = agree(config, fabric)
trainers = {
    "computing": Trainer(agreement, fabric),
    "no time": EmulatedTrainer(agreement, no_time, fabric),
}
gc.freeze()
step = 0
print("ready", flush=True)
for line in sys.stdin:
    name, count = line.rsplit(maxsplit=1)
    gc.collect()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(int(count)):
        trainers[name].step(step, Recording.flight_only)
        step += 1
    dist.barrier()
    print((time.perf_counter() - began) / int(count), flush=True)
for trainer in trainers.values():
    trainer.close()
dist.destroy_process_group()
"""
PPBENCH = "from ppbench.cli import main; main()"
LARGE = "import sys; from pathlib import Path; from benchmarks.commands import make_compacted; "
LARGE += "make_compacted(Path(sys.argv[1]), int(sys.argv[2]))"
SHORT = """\
name = "short"
device = "emulated"
world_size = 2
seq_len = 8
model.preset = "llama-tiny"
emulated = {F_ms = 1, I_ms = 1, W_ms = 1}
measure = {warmup_steps = 1, max_warmup_steps = 1, steps = 3}
[grid]
schedule = ["afab", "1f1b"]
num_microbatches = [2, 4]
"""
WORDS = (
    ("--help",),
    ("ls",),
    ("ls", "--results", "large", "--limit", "20"),
    ("ls", "--results", "large", "--where", "world_size=2"),
    ("explain", "last"),
    ("report",),
    ("timeline", "last"),
    ("sweep", "short.toml", "--rerun", "--no-report"),
)


class Side:
    """Two ranks of one work tree, which step on request."""

    def __init__(self, tree: Path, model: str, script: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        variables = {"PYTHONPATH": str(tree), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        variables |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(script), model],
                env={**os.environ, **variables, "RANK": str(rank)},
                cwd=tree,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in self._ranks:
            self._read(rank)

    def seconds(self, pipeline: str, num_steps: int = 10) -> float:
        """Seconds of a step on the slower rank, mean over some steps."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{pipeline} {num_steps}\n")
            rank.stdin.flush()
        return max(float(self._read(rank)) for rank in self._ranks)

    @staticmethod
    def _read(rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            sys.exit(f"a rank ended with exit code {rank.wait()}")
        return line

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait()


def steps(trees: Mapping[str, Path], asked: argparse.Namespace) -> Iterator[Row]:
    """Compare steps, by three launches of ranks on each side."""
    launches: dict[str, list[dict[str, list[float]]]] = {"computing": [], "no time": []}
    for _ in range(3):
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            (folder / "rank.py").write_text(RANK, encoding="utf-8")
            model = write_model(folder / "model", **SMALL)
            both = {
                name: stack.enter_context(contextlib.closing(Side(tree, model, folder / "rank.py")))
                for name, tree in trees.items()
            }
            for pipeline, found in launches.items():
                arms = {name: partial(side.seconds, pipeline) for name, side in both.items()}
                found.append(in_turns(arms, range(asked.rounds), num_warmup=3))
    for pipeline, found in launches.items():
        rounds = [sides(turns, OLD, NEW) for turns in found]
        yield Row.ratio(f"step, {pipeline}: new over old", rounds, STEPS)


def commands(trees: Mapping[str, Path], asked: argparse.Namespace) -> Iterator[Row]:
    """Compare whole commands."""
    with tempfile.TemporaryDirectory() as name:
        folders = {side: Path(name) / side for side in trees}
        for side, folder in folders.items():
            folder.mkdir()
            (folder / "short.toml").write_text(SHORT, encoding="utf-8")
            run_python("-c", LARGE, "large", asked.runs, folder=folder)  # this tree's, on both
            run_python("-c", PPBENCH, *WORDS[-1], folder=folder, tree=trees[side])
        for words in WORDS:
            arms: dict[str, Callable[[], float]] = {
                side: partial(
                    seconds_of,
                    partial(run_python, "-c", PPBENCH, *words, folder=folders[side], tree=tree),
                )
                for side, tree in trees.items()
            }
            turns = in_turns(arms, range(asked.rounds))
            rounds = [sides(turns, OLD, NEW)]
            yield Row.ratio(f"{' '.join(words)}: new over old", rounds, COMMANDS, starts=NO_STARTS)


def main() -> None:
    parts = {"steps": steps, "commands": commands}
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("commit", help="the commit that this work tree is compared with")
    options.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    options.add_argument("--rounds", type=int, default=12)
    options.add_argument("--runs", type=int, default=20_000, help="runs of the large store")
    asked = options.parse_args()
    with work_tree(asked.commit) as old:
        for part in asked.parts:
            for row in parts[part]({NEW: ROOT, OLD: old}, asked):
                print(row, flush=True)


if __name__ == "__main__":
    main()
