"""Steps of this work tree and of another commit in turns: the cost of a change per action.

    python -m benchmarks.commit_steps COMMIT [--rounds 40] [--steps 10]

Each side has two CPU ranks with one thread each, which live as long as the benchmark. While one
side steps, the other's ranks wait for a line on their standard input. The cost of an action besides
computing is visible in both pipelines: the overhead-bound one of `benchmarks.pipelines`, and one
whose stages take no time at all.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.outcome import Goal, parser, write
from benchmarks.pipelines import OVERHEAD_BOUND, free_port, write_model
from benchmarks.surroundings import ROOT, read_surroundings
from benchmarks.turns import Turns, in_turns

MOST = Goal(at_most=1.005)
RANK = """\
import gc, inspect, os, sys, time
import torch
import torch.distributed as dist
from engine.connection import agree
from engine.emulated import EmulatedTrainer
from engine.model.data import DataSpec
from engine.model.spec import ModelSpec
from engine.run.clock import HostClock
from engine.run.emulation import Emulation
from engine.run.heap import keep_freed_memory
from engine.run.p2p.fabric import Fabric
from engine.trainer import Trainer, TrainerConfig
from engine.configuration import lowered_of

try:
    from engine.plan.predict import uniform
except ImportError:  # a commit that called it so
    from engine.plan.simulate import uniform
try:
    from engine.run.recording import Recording
    NO_SPANS = Recording.flight_only
except ImportError:  # a commit that called it so
    from engine.run.watch import NOTHING as NO_SPANS

torch.set_num_threads(1)
keep_freed_memory()
dist.init_process_group("gloo")
fabric = Fabric(torch.device("cpu"), HostClock(), is_device_shared=False)
model = ModelSpec(sys.argv[1], weights="random")
data = DataSpec(seq_len=int(sys.argv[2]), num_microbatches=int(sys.argv[3]))
config = TrainerConfig(model, data, "1f1b", 2)
no_time = Emulation(uniform(lowered_of(config).placement, 0, 0, 0))
agreement = agree(config, fabric)
takes_agreement = "agreement" in inspect.signature(Trainer).parameters  # not at older commits
trainers = {
    "computing": Trainer(agreement if takes_agreement else agreement.config, fabric),
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
        trainers[name].step(step, NO_SPANS)
        step += 1
    dist.barrier()
    print((time.perf_counter() - began) / int(count), flush=True)
for trainer in trainers.values():
    trainer.close()
dist.destroy_process_group()
"""


class Side:
    """Two ranks of one work tree, which step on request."""

    def __init__(self, tree: Path, model: Path, script: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": str(tree),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "1",
        }
        sizes = [str(OVERHEAD_BOUND.seq_len), str(OVERHEAD_BOUND.num_microbatches)]
        self._ranks = [
            subprocess.Popen(
                [sys.executable, str(script), str(model), *sizes],
                env={**environment, "RANK": str(rank)},
                cwd=tree,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        for rank in self._ranks:
            self._read(rank)

    def seconds(self, pipeline: str, count: int) -> float:
        """Seconds of a step on the slower rank, mean over `count` steps."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{pipeline} {count}\n")
            rank.stdin.flush()
        return max(float(self._read(rank)) for rank in self._ranks)

    @staticmethod
    def _read(rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            raise RuntimeError(f"a rank ended with exit code {rank.wait()}")
        return line

    def close(self) -> None:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self._ranks:
            rank.wait()


@contextlib.contextmanager
def work_tree(commit: str) -> Iterator[Path]:
    """Yield a folder with the files of a commit; it is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), commit], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("commit", help="the commit that this work tree is compared with")
    options.add_argument("--rounds", type=int, default=40)
    options.add_argument("--steps", type=int, default=10, help="steps of a side in a round")
    settings = options.parse_args()
    surroundings = read_surroundings()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_model(OVERHEAD_BOUND, folder)
        script = folder / "rank.py"
        script.write_text(RANK, encoding="utf-8")
        old_tree = stack.enter_context(work_tree(settings.commit))
        sides = {
            name: stack.enter_context(contextlib.closing(Side(tree, folder, script)))
            for name, tree in (("new", ROOT), ("old", old_tree))
        }
        ratios, figures = [], []
        for pipeline in ("computing", "no time"):
            turns = _measure(sides, pipeline, settings)
            ratios.append(turns.ratio(f"{pipeline}: new over old step", "new", "old", MOST))
            figures += turns.figures()
    write("commit_steps", settings, surroundings, ratios, figures)


def _measure(sides: dict[str, Side], pipeline: str, settings: argparse.Namespace) -> Turns:
    def arm(side: Side) -> Callable[[], float]:
        return lambda: side.seconds(pipeline, settings.steps)

    return in_turns({name: arm(side) for name, side in sides.items()}, settings.rounds, 5)


if __name__ == "__main__":
    main()
